"""`Replay`: bring a restarted script to the place where its checkpoint was saved.

The script runs from the top. Its finished loops end at once, and its current loop skips the batches
that the earlier attempt had trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType

from torch import nn

from holdfast.guard.unchanged.gap_weights import GapWeights
from holdfast.guard.unchanged.loop_places import is_in_generator
from holdfast.guard.unchanged.loops import Loop, StartIterator
from holdfast.guard.unchanged.objects import find_trained_objects
from holdfast.guard.unchanged.random_sources import restore_sources
from holdfast.guard.unchanged.refusal import resume_differs
from holdfast.guard.unchanged.saved_script import CurrentLoop, FinishedLoop, SavedScript
from holdfast.guard.unchanged.silence import Silence
from holdfast.guard.unchanged.stack import frames_of_script
from holdfast.guard.unchanged.variable_reader import VariableReader
from holdfast.loader.foreign.torch_workers import match_workers
from holdfast.loader.random_state import restore


class Replay:
    """Follows a script through the loops that its earlier attempt has recorded, in their order.

    Args:
        saved: The state of the script in the checkpoint.
        start_iterator: torch's own ``DataLoader.__iter__``.
        weights: Loads the weights with which models were evaluated between two loops.
    """

    def __init__(
        self, saved: SavedScript, start_iterator: StartIterator, weights: GapWeights
    ) -> None:
        self.saved = saved
        # Those recorded loops that have already ended in this attempt.
        self.finished: list[FinishedLoop] = []
        self._start_iterator = start_iterator
        self._weights = weights
        self._silence = Silence()

    @property
    def is_at_the_end(self) -> bool:
        """Return whether the checkpoint was saved between two loops, and this place is reached."""
        return self.saved.current is None and len(self.finished) == len(self.saved.finished)

    def enter(self, loop: Loop, frame: FrameType) -> bool:
        """Handle the first request for a batch of a loop.

        Args:
            loop: The loop.
            frame: The frame that requests the batch.

        Returns:
            Whether the loop must end at once, because it had finished.

        Raises:
            UnchangedScriptError: H739 if the script has reached another loop than before.
        """
        number = len(self.finished)
        if number == len(self.saved.finished):
            # Without a current loop, the replay has ended right after the last finished loop.
            assert self.saved.current is not None
            _check_same_loop(self.saved.current, loop)
            self._skip_batches(self.saved.current, loop)
            self._restore_counters(loop, frame)
            return False
        recorded = self.saved.finished[number]
        _check_same_loop(recorded, loop)
        if recorded.variables is None:
            # The loop is no `for` statement, so it is run again.
            loop.batches = self._start_iterator(loop.loader)
            return False
        self._silence.begin()
        # In the earlier attempt, the loop has started the loader's persistent workers.
        match_workers(loop.loader, started=True)
        self.finished.append(recorded)
        if self.is_at_the_end:
            # `restore_variables` restores the state. In a generator, the loop around it continues.
            if is_in_generator(frame):
                self._restore_counters(loop, frame)
        else:
            frames = frames_of_script(frame)
            VariableReader().restore(recorded.variables, frames)
            restore(recorded.random_state)
            self._weights.load(len(self.finished), find_trained_objects(frames).models)
        return True

    def note_finished(self) -> None:
        """Record that a loop that had to be run again has ended."""
        recorded = self.saved.finished[len(self.finished)]
        self.finished.append(recorded)
        restore(recorded.random_state)

    def _restore_counters(self, loop: Loop, frame: FrameType) -> None:
        """Set the ``enumerate`` objects around a loop to the numbers that they had reached."""
        counters = loop.find_counters(frame)
        if counters is None or len(counters) != len(self.saved.counters):
            raise resume_differs("a loop requests its batches through other wrappers than before")
        for counter, value in zip(counters, self.saved.counters, strict=True):
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
        loop.batches = self._start_iterator(loop.loader)
        for number in range(1, current.batches + 1):
            if number == current.batches > 1 and current.before_last is not None:
                # A loader that draws from the global random generators gets other numbers than
                # before, because the skipped loop body draws none. This does not matter for batches
                # that are dropped. But the next batch may depend on the last one, so that one is
                # made exactly as before.
                restore(current.before_last)
            try:
                next(loop.batches)
            except StopIteration:
                raise resume_differs(
                    f"the loader of the loop at {current.place} has only {number - 1} batches, but"
                    f" the earlier attempt has trained on {current.batches}"
                ) from None
        loop.batch_count = current.batches
        loop.before_last = current.before_last

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
    if not loop.place.is_same_as(recorded.place, recorded.function):
        raise resume_differs(
            f"it has reached the loop at {loop.place.name} in {loop.place.function} instead of the"
            f" one at {recorded.place} in {recorded.function}"
        )
    for name, value in recorded.enclosing.items():
        value_now = loop.enclosing.get(name)
        if value_now != value:
            raise resume_differs(
                f"when the loop at {recorded.place} begins, {name} is {value_now!r} instead of"
                f" {value!r}. If the script loads a checkpoint of its own at the start, turn that"
                " off"
            )
