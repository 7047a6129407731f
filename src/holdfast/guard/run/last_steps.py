"""Remember the step at which each guard of this process closed its run, for the next guard of the
same run.

A loop that is left by ``break`` or an exception writes no checkpoint, so its last steps are only in
memory. When a notebook cell is run again, the next guard goes back to the newest checkpoint. It
compares this step with its own to report the steps that were lost, which nobody expects where no
process was killed.
"""

from __future__ import annotations

_last_steps: dict[str, int] = {}


def note_last_step(run_id: str, global_step: int) -> None:
    """Note the step at which a guard of this process closed a run."""
    _last_steps[run_id] = global_step


def last_step(run_id: str) -> int:
    """Return the step at which the last guard of this process closed a run, or 0 if there was
    none.
    """
    return _last_steps.get(run_id, 0)
