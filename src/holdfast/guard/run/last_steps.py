"""Record the step at which each guard in this process closed its run.

The next guard of the same run uses this to report lost steps.

A loop that is left by ``break`` or an exception writes no checkpoint, so its last steps exist only
in memory. For example, if a notebook cell is run again, the next guard resumes from the newest
checkpoint. If that checkpoint is older than the recorded step, the guard reports the lost steps,
since users do not expect to lose steps when no process was killed.
"""

from __future__ import annotations

_last_steps: dict[str, int] = {}


def note_last_step(run_id: str, global_step: int) -> None:
    """Record the step at which a guard of this process closed a run."""
    _last_steps[run_id] = global_step


def last_step(run_id: str) -> int:
    """Return the step at which the last guard in this process closed a run, 0 if there was none."""
    return _last_steps.get(run_id, 0)
