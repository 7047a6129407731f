"""The phase of a run, and the transitions between phases.

    closed → at boundary → in step → committing → after step → at boundary
                              ↓           ↓
             (taken back: as before)   rolling back → after step, or rewound → at boundary

The state may be saved only at a boundary and after a step. The engine, its callers and the session
call the transitions. Nothing checks that only the transitions drawn here happen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum


class Phase(Enum):
    """The moment in a run to which the weights, buffers and moments in memory belong."""

    # At a boundary, and the run directory is not locked.
    CLOSED = "closed"
    # The loop body has finished with the last batch.
    AT_BOUNDARY = "at boundary"
    # The step is being attempted, and can still be taken back.
    IN_STEP = "in step"
    # Optimizers are changing the weights. If that fails, the run must return to an earlier state.
    COMMITTING = "committing"
    # A step was committed or skipped, and the rest of the loop body has yet to run.
    AFTER_STEP = "after step"
    # An earlier state is being restored.
    ROLLING_BACK = "rolling back"
    # An earlier state was restored, and the loop must return to an earlier position in the data
    # before it continues.
    REWOUND = "rewound"
    # The state is inconsistent. It is never saved, and only a return to an earlier state repairs
    # it.
    BROKEN = "broken"


_MAY_BE_SAVED = (Phase.CLOSED, Phase.AT_BOUNDARY, Phase.AFTER_STEP)
# Phases that persist through steps and boundaries until an earlier state is restored.
_LASTING = (Phase.REWOUND, Phase.BROKEN)


class RunState:
    """The phase of one run.

    Example:
        >>> state = RunState()
        >>> state.open(); state.begin(); state.commit(); state.committed()
        >>> state.phase, state.may_be_saved
        (<Phase.AFTER_STEP: 'after step'>, True)
    """

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        # Whether the script iterates `Guard.batches`, which marks the boundaries.
        self.in_loop = False
        # Whether the models hold averaged weights instead of the trained ones.
        self.averaged = False
        self._before_step = Phase.CLOSED

    @property
    def may_be_saved(self) -> bool:
        """Return whether the state is consistent, so that a run can resume from a checkpoint."""
        return self.phase in _MAY_BE_SAVED and not self.averaged

    @property
    def batch_is_used(self) -> bool:
        """Return whether a step was committed or skipped since the last boundary."""
        return self.phase is Phase.AFTER_STEP

    def open(self) -> None:
        """Note that the run directory was locked."""
        if self.phase is Phase.CLOSED:
            self.phase = Phase.AT_BOUNDARY

    def close(self) -> None:
        """Note that the run directory was unlocked. An inconsistent state stays inconsistent."""
        if self.phase in (Phase.AT_BOUNDARY, Phase.AFTER_STEP):
            self.phase = Phase.CLOSED

    def begin(self) -> None:
        """Note that a step begins."""
        self._before_step = self.phase
        self.phase = Phase.IN_STEP

    def take_back(self) -> None:
        """Note that a step was taken back, and return to the phase before it."""
        self.phase = self._before_step

    def commit(self) -> None:
        """Note that the optimizers begin to change the weights."""
        self.phase = Phase.COMMITTING

    def committed(self) -> None:
        """Note that a committed step is complete, including counters and schedulers."""
        if self._before_step in _LASTING:
            self.phase = self._before_step
        else:
            self.phase = Phase.AFTER_STEP

    def skipped(self) -> None:
        """Note that a step was taken back and its batch is skipped."""
        if self.phase not in _LASTING:
            self.phase = Phase.AFTER_STEP

    def step_failed(self) -> None:
        """Note that a step ended with an error.

        The state stays valid if the step was taken back and the batch has had no other step.
        Otherwise the batch has been processed only in part.
        """
        if self.phase in (Phase.IN_STEP, Phase.COMMITTING) and self._before_step is Phase.REWOUND:
            # The loop will restore the earlier state once more.
            self.phase = Phase.REWOUND
        elif self.phase not in (Phase.AT_BOUNDARY, Phase.REWOUND, Phase.CLOSED):
            self.phase = Phase.BROKEN

    def boundary(self) -> None:
        """Note that the loop body has finished with a batch."""
        if self.phase is Phase.AFTER_STEP:
            self.phase = Phase.AT_BOUNDARY

    @contextlib.contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Surround the restoration of an earlier state; an error leaves the phase `BROKEN`."""
        before = self.phase
        self.phase = Phase.ROLLING_BACK
        try:
            yield
        except BaseException:
            self.phase = Phase.BROKEN
            raise
        if before in (Phase.CLOSED, Phase.AT_BOUNDARY):
            self.phase = before
        elif before is Phase.REWOUND:
            self.phase = Phase.AT_BOUNDARY
        else:
            self.phase = Phase.AFTER_STEP

    def rewound(self) -> None:
        """Note that the loop must return to an earlier position in the data."""
        self.phase = Phase.REWOUND

    def spoil(self) -> None:
        """Note that the state in memory is wrong and could not be restored."""
        self.phase = Phase.BROKEN
