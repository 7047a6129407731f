"""Record the step at which each guard in this process closed its run.

The next guard of the same run uses the recorded step to report lost steps.

A loop that is left by ``break`` or an exception writes no checkpoint, so its last steps exist only
in memory. For example, if a notebook cell is run again, the next guard resumes from the newest
checkpoint. If that checkpoint is older than the recorded step, the guard reports the lost steps,
since users do not expect to lose steps when no process was killed.
"""

from __future__ import annotations

# The last step of each run in this process, keyed by the run's id.
_last_steps: dict[str, int] = {}


def note_last_step(run_id: str, global_step: int) -> None:
    """Record the step at which a guard in this process closed the run with this id."""
    _last_steps[run_id] = global_step


def last_step(run_id: str) -> int:
    """Return the step at which the last guard in this process closed a run.

    Return 0 if no guard in this process has closed the run.
    """
    return _last_steps.get(run_id, 0)
