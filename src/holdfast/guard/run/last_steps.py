"""Remember the step at which each guard of this process closed its run, for the next guard of the
same run.

A loop that is left by ``break`` or an exception writes no checkpoint, so its last steps exist only
in memory. When a notebook cell is run again, the next guard resumes from the newest checkpoint. It
compares its step with the remembered one and reports the lost steps, since users do not expect to
lose steps when no process was killed.
"""

from __future__ import annotations

_last_steps: dict[str, int] = {}


def note_last_step(run_id: str, global_step: int) -> None:
    """Record the step at which a guard of this process closed a run."""
    _last_steps[run_id] = global_step


def last_step(run_id: str) -> int:
    """Return the step at which the last guard in this process closed a run, 0 if there was none."""
    return _last_steps.get(run_id, 0)
