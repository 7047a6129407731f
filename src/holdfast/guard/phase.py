"""Where a run stands: one value, and the ways from one to the next.

    closed → at boundary → in step → committing → after step → at boundary
                              ↓           ↓
             (taken back: as before)   rolling back → after step, or rewound → at boundary

Only at a boundary and after a step may the state be saved. The engine, whoever drives it, and the
session name the transition, and are trusted to name one that is drawn here: nothing checks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum


class Phase(Enum):
    """What the weights, buffers and moments in memory belong to."""

    CLOSED = "closed"
    """A boundary; the run directory is not held."""
    AT_BOUNDARY = "at boundary"
    """All that belongs to a batch is done."""
    IN_STEP = "in step"
    """An attempt may be under way: all of it can be taken back."""
    COMMITTING = "committing"
    """Optimizers move weights: only an earlier state helps."""
    AFTER_STEP = "after step"
    """A step was made or skipped, and the rest of the loop body is still to come."""
    ROLLING_BACK = "rolling back"
    """An earlier state is being loaded."""
    REWOUND = "rewound"
    """An earlier state is back, and the loop must go back in the data too, before anything else
    counts."""
    BROKEN = "broken"
    """To no boundary: never saved, and whole again only after a return to an earlier state."""


_MAY_BE_SAVED = (Phase.CLOSED, Phase.AT_BOUNDARY, Phase.AFTER_STEP)
_LASTING = (Phase.REWOUND, Phase.BROKEN)  # a step or a boundary does not end these


class RunState:
    """The phase of one run, and whether a loop of ours knows its boundaries.

    Example:
        >>> state = RunState()
        >>> state.open(); state.begin(); state.commit(); state.committed()
        >>> state.phase, state.may_be_saved
        (<Phase.AFTER_STEP: 'after step'>, True)
    """

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self.in_loop = False
        self.averaged = False  # averaged weights stand in the place of those of the run
        self._before_step = Phase.CLOSED

    @property
    def may_be_saved(self) -> bool:
        """Return whether the state belongs to a boundary, as far as the run itself has changed
        it.
        """
        return self.phase in _MAY_BE_SAVED and not self.averaged

    @property
    def batch_is_used(self) -> bool:
        """Return whether a step was made or skipped since the last boundary."""
        return self.phase is Phase.AFTER_STEP

    def open(self) -> None:
        """Note that the run directory is held."""
        if self.phase is Phase.CLOSED:
            self.phase = Phase.AT_BOUNDARY

    def close(self) -> None:
        """Note that the run directory was given back; a state that is no boundary's stays one."""
        if self.phase in (Phase.AT_BOUNDARY, Phase.AFTER_STEP):
            self.phase = Phase.CLOSED

    def begin(self) -> None:
        """Begin a step."""
        self._before_step, self.phase = self.phase, Phase.IN_STEP

    def take_back(self) -> None:
        """Note that a step has left no trace: the phase is that from before it."""
        self.phase = self._before_step

    def commit(self) -> None:
        """Note that optimizers begin to move weights."""
        self.phase = Phase.COMMITTING

    def committed(self) -> None:
        """Note that all that belongs to a committed step is done."""
        self.phase = self._before_step if self._before_step in _LASTING else Phase.AFTER_STEP

    def skipped(self) -> None:
        """Note that a step which has left no trace will not be made with this batch."""
        if self.phase not in _LASTING:
            self.phase = Phase.AFTER_STEP

    def step_failed(self) -> None:
        """Note that an error leaves a step.

        Nothing has happened if all was taken back, and no other step was made with the batch: else
        there is only half of what belongs to it.
        """
        if self.phase in (Phase.IN_STEP, Phase.COMMITTING) and self._before_step is Phase.REWOUND:
            self.phase = Phase.REWOUND  # all of it is loaded again
        elif self.phase not in (Phase.AT_BOUNDARY, Phase.REWOUND, Phase.CLOSED):
            self.phase = Phase.BROKEN

    def boundary(self) -> None:
        """Note that all that belongs to a batch is done."""
        if self.phase is Phase.AFTER_STEP:
            self.phase = Phase.AT_BOUNDARY

    @contextlib.contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Load an earlier state inside; an error leaves half of it."""
        before, self.phase = self.phase, Phase.ROLLING_BACK
        try:
            yield
        except BaseException:
            self.phase = Phase.BROKEN
            raise
        if before in (Phase.CLOSED, Phase.AT_BOUNDARY):
            self.phase = before
        else:
            self.phase = Phase.AT_BOUNDARY if before is Phase.REWOUND else Phase.AFTER_STEP

    def rewound(self) -> None:
        """Note that the position in the data went back too, so that the loop must begin there
        again.
        """
        self.phase = Phase.REWOUND

    def spoil(self) -> None:
        """Note that what is in memory is wrong, and that there was no way back."""
        self.phase = Phase.BROKEN
