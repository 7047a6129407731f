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
# the signal of ``sbatch --signal``. After SIGINT, it is not, because a user sends it.
_REASONS = frozenset({"max_time", "SIGUSR1", "SIGUSR2"})
# `scancel` sends this signal, and so does a preemption, at the beginning of the grace time of the
# partition. Slurm requeues a preempted job itself only if it still runs at the end of that time.
_REASON_OF_PREEMPTION = "SIGTERM"


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
        environment: The environment of this process, which must belong to a job. If the job has
            several tasks, only the first one asks.
    """
    if environment.get("SLURM_PROCID", "0") != "0":
        return False
    if stopped_by == _REASON_OF_PREEMPTION:
        return _is_being_preempted(job_to_requeue(environment))
    return stopped_by in _REASONS


def requeue(job: str) -> str | None:
    """Ask Slurm to requeue a job. Return why it did not, or None if it did."""
    command = ["scontrol", "requeue", job]
    try:
        result = _run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    return result.stderr.strip() or f"{' '.join(command)} exited with {result.returncode}"


def _is_being_preempted(job: str) -> bool:
    """Return whether Slurm has begun to preempt a job, which still runs; False if that is unknown.

    Slurm prints ``PreemptTime=None`` for a job that it has not begun to preempt, and no such field
    for one that waits. A job that was cancelled no longer runs.
    """
    try:
        fields = _run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return False
    preempted = any(
        field.startswith("PreemptTime=") and field != "PreemptTime=None" for field in fields
    )
    return preempted and "JobState=RUNNING" in fields


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm, and return its exit code and output.

    Raises:
        OSError: If it cannot be started.
        subprocess.TimeoutExpired: If it does not exit in time.
    """
    return subprocess.run(  # noqa: S603 - Slurm's own program and job id
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SCONTROL_SECONDS,
    )
