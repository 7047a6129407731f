"""Ask Slurm to run a job again after its training script has saved and stopped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from holdfast.core.errors import PolicyError

# The exit code of `holdfast run` if Slurm does not requeue the job.
REFUSED_STATUS = os.EX_TEMPFAIL
# `scontrol` asks the controller, which may be busy or unreachable.
_SCONTROL_SECONDS = 30.0
# The reasons of a stop for which the job is requeued: its time is nearly over, or Slurm has sent
# the signal of ``sbatch --signal``. After SIGTERM and SIGINT, it is not, because `scancel`, a
# preemption (which Slurm requeues itself) and a user send them.
_REASONS = frozenset({"max_time", "SIGUSR1", "SIGUSR2"})


def job_to_requeue(environment: Mapping[str, str]) -> str:
    """Return the id of the Slurm job to requeue: for a job array, that of the task.

    Raises:
        PolicyError: H735 if the environment belongs to no Slurm job.
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" in environment:
        return environment["SLURM_JOB_ID"]
    raise PolicyError(
        "--requeue without SLURM_JOB_ID",
        limit="only a process in a Slurm job can ask Slurm to requeue the job",
        fix="start the command with sbatch or srun, or omit --requeue.",
        rule="H735",
    )


def should_requeue(stopped_by: str | None, environment: Mapping[str, str]) -> bool:
    """Return whether this process must ask Slurm to requeue the job after a stop.

    Args:
        stopped_by: What made the training script stop; see `AttemptJudgement`.
        environment: The environment of this process. If the job has several tasks, only the first
            one asks.
    """
    return stopped_by in _REASONS and environment.get("SLURM_PROCID", "0") == "0"


def requeue(job: str) -> str | None:
    """Ask Slurm to requeue a job. Return why it did not, or None if it did."""
    command = ["scontrol", "requeue", job]
    try:
        result = subprocess.run(  # noqa: S603 - Slurm's own program and job id
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_SCONTROL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    return result.stderr.strip() or f"{' '.join(command)} exited with {result.returncode}"
