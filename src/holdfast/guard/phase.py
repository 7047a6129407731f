"""Track the phase of a run, and whether the state in memory is sound.

`Phase` states what the run is doing. `Soundness` states whether the weights, buffers and moments in
memory belong to the same point in the data, and persists across phases. `TRANSITIONS` and
`PHASE_AFTER_ROLLBACK` contain the allowed changes of phase, and `RunState` raises an AssertionError
for any other change:

    closed → at boundary → in step → committing → after step → at boundary → ... → closed
                              ↓          ↓            ↓
                          taken back   failed    rolling back → after step, or at boundary

The engine, its callers and the session trigger the transitions. State may be saved only between two
steps, and only while it is sound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum


class Phase(StrEnum):
    """What a run is doing."""

    # The run directory is not locked.
    CLOSED = "closed"
    # The loop body has finished with the last batch.
    AT_BOUNDARY = "at boundary"
    # A step is being attempted, and can still be taken back.
    IN_STEP = "in step"
    # Like `IN_STEP`, but another step, such as that of another optimizer, has used this batch.
    IN_FURTHER_STEP = "in a further step"
    # Optimizers are changing the weights, or counters are being updated after the step.
    COMMITTING = "committing"
    # A step was committed, skipped or failed, and the rest of the loop body has yet to run.
    AFTER_STEP = "after step"
    # An earlier state is being restored.
    ROLLING_BACK = "rolling back"


class Soundness(StrEnum):
    """Whether the weights, buffers and moments in memory belong to the same point in the data.

    Only the restoration of an earlier state makes an unsound state sound again.
    """

    SOUND = "sound"
    # An earlier state was restored. The loop must return to the position of that state in the data
    # before it continues.
    REWOUND = "rewound"
    # The state is inconsistent, for example because a step was committed only in part.
    BROKEN = "broken"


class Transition(StrEnum):
    """An event that changes the phase. The method of `RunState` with the same name triggers it."""

    OPEN = "open"
    CLOSE = "close"
    BEGIN = "begin"
    TAKE_BACK = "take_back"
    COMMIT = "commit"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    STEP_FAILED = "step_failed"
    BOUNDARY = "boundary"
    ROLL_BACK = "roll_back"
    REWOUND = "rewound"
    SPOIL = "spoil"


# Every allowed change of phase. If a transition leads from a phase to the same phase, it may occur
# in that phase but changes nothing.
TRANSITIONS: dict[tuple[Phase, Transition], Phase] = {
    # The directory is locked. If an error interrupted `close`, the phase has not become closed.
    (Phase.CLOSED, Transition.OPEN): Phase.AT_BOUNDARY,
    (Phase.AT_BOUNDARY, Transition.OPEN): Phase.AT_BOUNDARY,
    (Phase.AFTER_STEP, Transition.OPEN): Phase.AFTER_STEP,
    # The directory is unlocked. User code may unlock it at any time, even in a loss function or a
    # signal handler. In that case, a step that has begun still ends as usual.
    (Phase.CLOSED, Transition.CLOSE): Phase.CLOSED,
    (Phase.AT_BOUNDARY, Transition.CLOSE): Phase.CLOSED,
    (Phase.IN_STEP, Transition.CLOSE): Phase.IN_STEP,
    (Phase.IN_FURTHER_STEP, Transition.CLOSE): Phase.IN_FURTHER_STEP,
    (Phase.COMMITTING, Transition.CLOSE): Phase.COMMITTING,
    (Phase.AFTER_STEP, Transition.CLOSE): Phase.CLOSED,
    (Phase.ROLLING_BACK, Transition.CLOSE): Phase.ROLLING_BACK,
    # A step begins. It begins while another step is committing if an optimizer hook runs a step of
    # its own, and while the phase is closed if an error interrupted `Session.open`.
    (Phase.CLOSED, Transition.BEGIN): Phase.IN_STEP,
    (Phase.AT_BOUNDARY, Transition.BEGIN): Phase.IN_STEP,
    (Phase.AFTER_STEP, Transition.BEGIN): Phase.IN_FURTHER_STEP,
    (Phase.COMMITTING, Transition.BEGIN): Phase.IN_FURTHER_STEP,
    # Everything that the step changed has been restored.
    (Phase.IN_STEP, Transition.TAKE_BACK): Phase.AT_BOUNDARY,
    (Phase.IN_FURTHER_STEP, Transition.TAKE_BACK): Phase.AFTER_STEP,
    # The optimizers begin to change the weights.
    (Phase.IN_STEP, Transition.COMMIT): Phase.COMMITTING,
    (Phase.IN_FURTHER_STEP, Transition.COMMIT): Phase.COMMITTING,
    # The committed step is complete. If an optimizer hook ran a step of its own, the inner step has
    # already caused this transition, so the phase no longer changes when the outer step completes.
    (Phase.COMMITTING, Transition.COMMITTED): Phase.AFTER_STEP,
    (Phase.AFTER_STEP, Transition.COMMITTED): Phase.AFTER_STEP,
    # The batch of a step that was taken back is skipped.
    (Phase.CLOSED, Transition.SKIPPED): Phase.AFTER_STEP,
    (Phase.AT_BOUNDARY, Transition.SKIPPED): Phase.AFTER_STEP,
    (Phase.AFTER_STEP, Transition.SKIPPED): Phase.AFTER_STEP,
    # A step ends with an error: before it has begun, while it is in progress, or after it was taken
    # back.
    (Phase.CLOSED, Transition.STEP_FAILED): Phase.CLOSED,
    (Phase.AT_BOUNDARY, Transition.STEP_FAILED): Phase.AT_BOUNDARY,
    (Phase.IN_STEP, Transition.STEP_FAILED): Phase.AFTER_STEP,
    (Phase.IN_FURTHER_STEP, Transition.STEP_FAILED): Phase.AFTER_STEP,
    (Phase.COMMITTING, Transition.STEP_FAILED): Phase.AFTER_STEP,
    (Phase.AFTER_STEP, Transition.STEP_FAILED): Phase.AFTER_STEP,
    # The loop body has finished with a batch, whether or not a step was run with it. Inside a step,
    # this means that the loss function or a hook has requested the next batch.
    (Phase.CLOSED, Transition.BOUNDARY): Phase.CLOSED,
    (Phase.AT_BOUNDARY, Transition.BOUNDARY): Phase.AT_BOUNDARY,
    (Phase.IN_STEP, Transition.BOUNDARY): Phase.IN_STEP,
    (Phase.IN_FURTHER_STEP, Transition.BOUNDARY): Phase.IN_FURTHER_STEP,
    (Phase.COMMITTING, Transition.BOUNDARY): Phase.COMMITTING,
    (Phase.AFTER_STEP, Transition.BOUNDARY): Phase.AT_BOUNDARY,
    # The restoration of an earlier state begins: after a step, when a save was refused, or when an
    # optimizer failed in the middle of its step. A framework may save inside its loss function, so
    # a save may be refused during a step, which then ends as usual.
    (Phase.CLOSED, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    (Phase.AT_BOUNDARY, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    (Phase.IN_STEP, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    (Phase.IN_FURTHER_STEP, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    (Phase.COMMITTING, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    (Phase.AFTER_STEP, Transition.ROLL_BACK): Phase.ROLLING_BACK,
    # The loop must return to an earlier position in the data.
    (Phase.CLOSED, Transition.REWOUND): Phase.CLOSED,
    (Phase.AT_BOUNDARY, Transition.REWOUND): Phase.AT_BOUNDARY,
    (Phase.AFTER_STEP, Transition.REWOUND): Phase.AFTER_STEP,
    # The state in memory is wrong and could not be restored.
    (Phase.CLOSED, Transition.SPOIL): Phase.CLOSED,
    (Phase.AT_BOUNDARY, Transition.SPOIL): Phase.AT_BOUNDARY,
    (Phase.IN_STEP, Transition.SPOIL): Phase.IN_STEP,
    (Phase.IN_FURTHER_STEP, Transition.SPOIL): Phase.IN_FURTHER_STEP,
    (Phase.COMMITTING, Transition.SPOIL): Phase.AFTER_STEP,
    (Phase.AFTER_STEP, Transition.SPOIL): Phase.AFTER_STEP,
}

# The phase after a rollback, keyed by the soundness of the state in memory and the phase before the
# rollback.
PHASE_AFTER_ROLLBACK: dict[tuple[Soundness, Phase], Phase] = {
    (Soundness.SOUND, Phase.CLOSED): Phase.CLOSED,
    (Soundness.SOUND, Phase.AT_BOUNDARY): Phase.AT_BOUNDARY,
    (Soundness.SOUND, Phase.AFTER_STEP): Phase.AFTER_STEP,
    # The loop has returned to the data position of the restored state, which is at a boundary.
    (Soundness.REWOUND, Phase.CLOSED): Phase.AT_BOUNDARY,
    (Soundness.REWOUND, Phase.AT_BOUNDARY): Phase.AT_BOUNDARY,
    (Soundness.REWOUND, Phase.AFTER_STEP): Phase.AT_BOUNDARY,
    # The current batch has broken the state, so it counts as used.
    (Soundness.BROKEN, Phase.CLOSED): Phase.AFTER_STEP,
    (Soundness.BROKEN, Phase.AT_BOUNDARY): Phase.AFTER_STEP,
    (Soundness.BROKEN, Phase.AFTER_STEP): Phase.AFTER_STEP,
    # An attempt that has begun continues.
    (Soundness.SOUND, Phase.IN_STEP): Phase.IN_STEP,
    (Soundness.REWOUND, Phase.IN_STEP): Phase.IN_STEP,
    (Soundness.BROKEN, Phase.IN_STEP): Phase.IN_STEP,
    (Soundness.SOUND, Phase.IN_FURTHER_STEP): Phase.IN_FURTHER_STEP,
    (Soundness.REWOUND, Phase.IN_FURTHER_STEP): Phase.IN_FURTHER_STEP,
    (Soundness.BROKEN, Phase.IN_FURTHER_STEP): Phase.IN_FURTHER_STEP,
    # An optimizer has failed in the middle of its step.
    (Soundness.SOUND, Phase.COMMITTING): Phase.AFTER_STEP,
    (Soundness.REWOUND, Phase.COMMITTING): Phase.AFTER_STEP,
    (Soundness.BROKEN, Phase.COMMITTING): Phase.AFTER_STEP,
}

_BETWEEN_STEPS = (Phase.CLOSED, Phase.AT_BOUNDARY, Phase.AFTER_STEP)
_ATTEMPTING = (Phase.IN_STEP, Phase.IN_FURTHER_STEP)


class RunState:
    """The phase of a run, the soundness of its state, and which weights its models hold.

    Example:
        >>> state = RunState()
        >>> state.open(); state.begin(); state.commit(); state.committed()
        >>> state.phase, state.may_be_saved
        (<Phase.AFTER_STEP: 'after step'>, True)
    """

    def __init__(self) -> None:
        self._phase = Phase.CLOSED
        self._soundness = Soundness.SOUND
        self._in_loop = False
        self._averaged = False
        self._undecided = False

    @property
    def phase(self) -> Phase:
        """Return the phase, which states what the run is doing."""
        return self._phase

    @property
    def soundness(self) -> Soundness:
        """Return the soundness, which states whether the state in memory is consistent."""
        return self._soundness

    @property
    def in_loop(self) -> bool:
        """Return whether a loop over `Guard.batches` is running. If so, it marks the boundaries."""
        return self._in_loop

    @property
    def averaged(self) -> bool:
        """Return whether the models hold averaged weights instead of the trained ones."""
        return self._averaged

    @property
    def undecided(self) -> bool:
        """Return whether the result of the last step is still unknown.

        The weights, buffers and moments already include the step if and only if it was accepted,
        but counters, schedulers and random state may have to change.
        """
        return self._undecided

    @property
    def may_be_saved(self) -> bool:
        """Return whether a run could resume from a checkpoint of the current state."""
        return (
            self._phase in _BETWEEN_STEPS
            and self._soundness is Soundness.SOUND
            and not self._averaged
            and not self._undecided
        )

    @property
    def batch_is_used(self) -> bool:
        """Return whether a step was committed or skipped since the last boundary."""
        return self._phase is Phase.AFTER_STEP and self._soundness is Soundness.SOUND

    @property
    def must_rewind(self) -> bool:
        """Return whether the loop must now return to an earlier position in the data."""
        return self._soundness is Soundness.REWOUND and self._phase in _BETWEEN_STEPS

    @property
    def is_attempting(self) -> bool:
        """Return whether a step is in progress that can still be taken back."""
        return self._phase in _ATTEMPTING

    @property
    def is_changing(self) -> bool:
        """Return whether a step or a rollback is in progress."""
        return self._phase not in _BETWEEN_STEPS

    def _follow(self, transition: Transition) -> None:
        """Enter the phase that a transition leads to, or raise an AssertionError if none exists."""
        following = TRANSITIONS.get((self._phase, transition))
        if following is None:
            raise AssertionError(
                f"phase {self._phase.value!r} has no transition {transition.value!r}"
            )
        self._phase = following

    # --- the run directory

    def open(self) -> None:
        """Record that the run directory was locked."""
        self._follow(Transition.OPEN)

    def close(self) -> None:
        """Record that the run directory was unlocked."""
        self._follow(Transition.CLOSE)

    # --- a step

    def begin(self) -> None:
        """Record that a step begins."""
        self._follow(Transition.BEGIN)

    def take_back(self) -> None:
        """Record that a step was taken back."""
        self._follow(Transition.TAKE_BACK)

    def commit(self) -> None:
        """Record that the optimizers begin to change the weights."""
        self._follow(Transition.COMMIT)

    def committed(self) -> None:
        """Record that a committed step is complete, including counters and schedulers."""
        self._follow(Transition.COMMITTED)

    def skipped(self) -> None:
        """Record that a step was taken back and its batch is skipped."""
        self._follow(Transition.SKIPPED)

    def step_failed(self) -> None:
        """Record that a step ended with an error.

        If the step was taken back and was the only step with this batch, the state stays sound.
        Otherwise, the batch was only partly processed, so the state becomes broken, unless the loop
        is about to return to an earlier position anyway.
        """
        # In these two phases, no step has changed anything since the last boundary.
        is_whole = self._phase in (Phase.CLOSED, Phase.AT_BOUNDARY)
        self._follow(Transition.STEP_FAILED)
        if self._soundness is Soundness.SOUND and not is_whole:
            self._soundness = Soundness.BROKEN

    # --- a step whose result is not known yet

    def leave_undecided(self) -> None:
        """Record that a committed step is complete, except that its result is unknown."""
        assert not self._undecided
        self._undecided = True

    def decide(self) -> None:
        """Record that the result of the undecided step is known."""
        assert self._undecided
        self._undecided = False

    # --- the loop

    def enter_loop(self) -> None:
        """Record that the script iterates `Guard.batches`."""
        self._in_loop = True

    def leave_loop(self) -> None:
        """Record that the loop over `Guard.batches` has ended."""
        self._in_loop = False

    def boundary(self) -> None:
        """Record that the loop body has finished with a batch."""
        self._follow(Transition.BOUNDARY)

    # --- an earlier state

    @contextlib.contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Mark the body of the context as the restoration of an earlier state.

        On exit, the state is sound. If the body raises an error, the state is broken.
        """
        before = (self._soundness, self._phase)
        self._follow(Transition.ROLL_BACK)
        try:
            yield
            self._soundness = Soundness.SOUND
        except BaseException:
            self._soundness = Soundness.BROKEN
            raise
        finally:
            self._phase = PHASE_AFTER_ROLLBACK[before]

    def rewound(self) -> None:
        """Record that the loop must return to an earlier position in the data."""
        self._follow(Transition.REWOUND)
        self._soundness = Soundness.REWOUND

    def spoil(self) -> None:
        """Record that the state in memory is wrong and could not be restored.

        If an attempt has begun, its phase does not change: it must still be taken back or fail.
        """
        self._soundness = Soundness.BROKEN
        self._follow(Transition.SPOIL)

    # --- averaged weights

    def swap_in_averages(self) -> None:
        """Record that averaged weights are about to replace the trained ones in the models."""
        assert not self._averaged
        self._averaged = True

    def swap_out_averages(self) -> None:
        """Record that the trained weights are in the models again."""
        assert self._averaged
        self._averaged = False
