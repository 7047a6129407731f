"""Read when Slurm will end the job that this process belongs to."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import datetime

from holdfast.core.text import moment

# Slurm 23.02 and later set this variable to the Unix time of the job's end.
_END_TIME = "SLURM_JOB_END_TIME"
_JOB_ID = "SLURM_JOB_ID"
# `squeue` asks the controller, which may be busy or unreachable. Training waits for the answer.
_SQUEUE_SECONDS = 10.0
# Longer answers of `squeue` are truncated in messages.
_MAX_SHOWN_CHARACTERS = 200


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of the Slurm job that an environment belongs to, or None without Slurm."""
    if _END_TIME in environment:
        return environment.get(_JOB_ID, "with unknown id")
    return environment.get(_JOB_ID)


def end_of_job(environment: Mapping[str, str], now: float) -> float:
    """Return the Unix time at which Slurm will end the job that an environment belongs to.

    Args:
        environment: The environment variables, which must belong to a job; see `job_of`.
        now: The current Unix time.

    Raises:
        ValueError: If the time is unknown or has passed. The message says why.
    """
    text = environment.get(_END_TIME)
    if text is None:
        end = _end_from_squeue(environment)
    elif text.isascii() and text.isdecimal():
        end = float(text)
    else:
        raise ValueError(f"{_END_TIME}={text!r} is not a Unix time")
    if end <= now:
        # The job's time was extended, or the environment is that of an earlier job.
        raise ValueError(f"the end is {moment(end)} UTC, which has passed")
    return end


def _end_from_squeue(environment: Mapping[str, str]) -> float:
    """Return the Unix time of the job's end that the command `squeue` prints.

    Raises:
        ValueError: If the time is unknown. The message says why.
    """
    command = ["squeue", "--noheader", "--jobs", environment[_JOB_ID], "--format=%e"]
    try:
        result = subprocess.run(  # noqa: S603 - Slurm's own program and job id
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_SECONDS,
            # The user may have chosen another format for times.
            env={**environment, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{_END_TIME} is not set, and squeue failed: {error}") from error
    answer = result.stdout.strip() or result.stderr.strip()
    try:
        # `squeue` prints local time, without a time zone.
        return datetime.fromisoformat(answer).timestamp()
    except (ValueError, OverflowError):
        shown = answer[:_MAX_SHOWN_CHARACTERS]
        raise ValueError(f"{_END_TIME} is not set, and squeue printed {shown!r}") from None
