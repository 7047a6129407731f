"""`Replay`: bring a restarted script to the place where its checkpoint was saved.

The script runs from the top. Its finished loops end at once, and its current loop skips the batches
that the earlier attempt had trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import FrameType

from torch import nn

from holdfast.guard.unchanged.frames import frames_of_script
from holdfast.guard.unchanged.loops.loop import Loop, StartIterator
from holdfast.guard.unchanged.loops.places import is_in_generator
from holdfast.guard.unchanged.refusal import resume_differs
from holdfast.guard.unchanged.replaying.gap_weights import GapWeights
from holdfast.guard.unchanged.replaying.silence import Silence
from holdfast.guard.unchanged.saved_script import CurrentLoop, FinishedLoop, SavedScript
from holdfast.guard.unchanged.trained_objects import find_trained_objects
from holdfast.guard.unchanged.variables.random_sources import restore_sources
from holdfast.guard.unchanged.variables.reader import VariableReader
from holdfast.loader.foreign.torch_workers import match_workers
from holdfast.loader.random_state import restore


class LoopDecision(Enum):
    """What is done with a loop that the script enters during the replay."""

    # The earlier attempt had finished the loop, so it ends at once.
    SKIP = "skip"
    # The earlier attempt had finished the loop, but it cannot be skipped, so it runs again.
    RUN_AGAIN = "run again"
    # The checkpoint was saved in the middle of this loop, which goes to its next batch.
    CONTINUE = "continue"
    # The loop ends at once, and the checkpoint was saved right after it.
    SKIP_LAST = "skip last"

    @property
    def ends_loop(self) -> bool:
        """Return whether the loop ends without a batch."""
        return self in (LoopDecision.SKIP, LoopDecision.SKIP_LAST)

    @property
    def ends_replay(self) -> bool:
        """Return whether the script has arrived where its checkpoint was saved."""
        return self in (LoopDecision.CONTINUE, LoopDecision.SKIP_LAST)


class Replay:
    """Follows a script through the loops that its earlier attempt has recorded, in their order.

    Args:
        saved: The state of the script in the checkpoint.
        start_iterator: torch's own ``DataLoader.__iter__``.
        gap_weights: Loads the weights with which models were evaluated between two loops.
    """

    def __init__(
        self, saved: SavedScript, start_iterator: StartIterator, gap_weights: GapWeights
    ) -> None:
        self.saved = saved
        self._start_iterator = start_iterator
        self._gap_weights = gap_weights
        self._silence = Silence()
        # The number of finished loops of the earlier attempt that this attempt has passed.
        self._passed_count = 0

    def enter(self, loop: Loop, frame: FrameType) -> LoopDecision:
        """Handle the first request for a batch of a loop, and return what is done with it.

        If the decision ends the replay, the caller must create the guard, and then call
        `restore_variables`.

        Args:
            loop: The loop.
            frame: The frame that requests the batch.

        Raises:
            UnchangedScriptError: H739 if the script has reached another loop than before.
        """
        if self._passed_count == len(self.saved.finished_loops):
            # Without a current loop, the replay has ended right after the last finished loop.
            assert self.saved.current_loop is not None
            _check_same_loop(self.saved.current_loop, loop)
            self._skip_batches(self.saved.current_loop, loop)
            self._restore_enumerate_counters(loop, frame)
            return LoopDecision.CONTINUE
        recorded = self.saved.finished_loops[self._passed_count]
        _check_same_loop(recorded, loop)
        if recorded.variables is None:
            loop.torch_iterator = self._start_iterator(loop.loader)
            return LoopDecision.RUN_AGAIN
        self._silence.begin()
        # In the earlier attempt, the loop has started the loader's persistent workers.
        match_workers(loop.loader, started=True)
        self._passed_count += 1
        is_last = self._passed_count == len(self.saved.finished_loops)
        if is_last and self.saved.current_loop is None:
            if is_in_generator(frame):
                # The loop of the script iterates the generator, and continues.
                self._restore_enumerate_counters(loop, frame)
            return LoopDecision.SKIP_LAST
        frames = frames_of_script(frame)
        VariableReader().restore(recorded.variables, frames)
        restore(recorded.random_state)
        self._gap_weights.load(self._passed_count, find_trained_objects(frames).models)
        return LoopDecision.SKIP

    def note_end_of_repeated_loop(self) -> None:
        """Record that a loop has ended for which `enter` has returned `RUN_AGAIN`."""
        recorded = self.saved.finished_loops[self._passed_count]
        self._passed_count += 1
        restore(recorded.random_state)

    def _restore_enumerate_counters(self, loop: Loop, frame: FrameType) -> None:
        """Set the ``enumerate`` objects around a loop to the numbers that they had reached."""
        counters = loop.find_enumerate_counters(frame)
        values = self.saved.enumerate_counters
        if counters is None or len(counters) != len(values):
            raise resume_differs("a loop requests its batches through different wrappers")
        for counter, value in zip(counters, values, strict=True):
            counter.value = value

    def _skip_batches(self, current: CurrentLoop, loop: Loop) -> None:
        """Begin the current loop as the earlier attempt did, and fetch and drop its batches."""
        start = current.start
        if start.had_workers is not None:
            match_workers(loop.loader, started=start.had_workers)
        restore(start.random_state)
        restore_sources(loop.loader, start.generators)
        VariableReader().restore_samplers(loop.loader, start.samplers)
        loop.start = start
        loop.torch_iterator = self._start_iterator(loop.loader)
        for number in range(1, current.batch_count + 1):
            is_last = number == current.batch_count
            if is_last and number > 1 and current.state_before_last_batch is not None:
                # A loader that draws from the global random generators gets other numbers than
                # before, because the skipped loop body draws none. This does not matter for batches
                # that are dropped. But the next batch may depend on the last one, so that one is
                # made exactly as before.
                restore(current.state_before_last_batch)
            try:
                next(loop.torch_iterator)
            except StopIteration:
                raise resume_differs(
                    f"the loader of the loop at {current.place_name} has only {number - 1} batches,"
                    f" but the earlier attempt has trained on {current.batch_count}"
                ) from None
        loop.batch_count = current.batch_count
        loop.state_before_last_batch = current.state_before_last_batch

    def restore_variables(
        self, frame: FrameType, guarded_ids: frozenset[int], models: Iterable[nn.Module]
    ) -> None:
        """Restore the variables of the script and the random state.

        Args:
            frame: The frame that requests the batch.
            guarded_ids: The `id` of each object that the guard saves.
            models: Its models.
        """
        self.end_silence()
        VariableReader(guarded_ids, models).restore(self.saved.variables, frames_of_script(frame))
        restore(self.saved.random_state)

    def end_silence(self) -> None:
        """Stop discarding the script's output."""
        self._silence.end()


def _check_same_loop(recorded: FinishedLoop | CurrentLoop, loop: Loop) -> None:
    """Check that the script has reached the same loop as its earlier attempt.

    Raises:
        UnchangedScriptError: H739 if it has reached another one.
    """
    assert loop.place is not None
    if not loop.place.is_same_as(recorded.place_name, recorded.function):
        raise resume_differs(
            f"it has reached the loop at {loop.place.name} in {loop.place.function} instead of the"
            f" one at {recorded.place_name} in {recorded.function}"
        )
    for name, value in recorded.enclosing_targets.items():
        value_now = loop.enclosing_targets.get(name)
        if value_now != value:
            raise resume_differs(
                f"when the loop at {recorded.place_name} begins, {name} is {value_now!r} instead of"
                f" {value!r}. If the script loads its own checkpoint at the start, turn that"
                " off"
            )
