"""The step at which a guard of this process has left its run, for the next one, as when a cell is run again.

A loop that is left by ``break`` or an error writes no checkpoint, and its last steps are in memory only. The next
guard of the run goes back to the newest checkpoint, which has to be said: nobody was killed.
"""

from __future__ import annotations

_steps: dict[str, int] = {}


def note_left(run_id: str, global_step: int) -> None:
    """Note the step at which a guard of this process has left a run."""
    _steps[run_id] = global_step


def step_left(run_id: str) -> int:
    """Return the step at which the last guard of this process has left a run; 0 if there was none."""
    return _steps.get(run_id, 0)
