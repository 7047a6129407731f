"""`Replay`: bring a script that starts again to the place where its checkpoint was saved.

The script runs from the top. Its finished loops end at once, and in the current one, the batches
that the earlier attempt has finished with are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType

from torch import nn

from holdfast.guard.unchanged.gap_weights import GapWeights
from holdfast.guard.unchanged.loop_places import find_counters, is_in_generator
from holdfast.guard.unchanged.loops import Loop, LoopIterator, StartIterator
from holdfast.guard.unchanged.objects import find_trained_objects
from holdfast.guard.unchanged.refusal import resume_differs
from holdfast.guard.unchanged.saved_script import CurrentLoop, FinishedLoop, SavedScript
from holdfast.guard.unchanged.silence import Silence
from holdfast.guard.unchanged.stack import frames_of_script
from holdfast.guard.unchanged.variables import VariableReader, restore_sources
from holdfast.loader.foreign.torch_workers import match_workers
from holdfast.loader.random_state import restore


class Replay:
    """Goes through the recorded loops of a script, in their order.

    Args:
        saved: The state of the script in the checkpoint.
        start_iterator: torch's own ``DataLoader.__iter__``.
        weights: The weights with which models were evaluated between two loops.
    """

    def __init__(
        self, saved: SavedScript, start_iterator: StartIterator, weights: GapWeights
    ) -> None:
        self.saved = saved
        # The recorded loops that have ended in this attempt too.
        self.finished: list[FinishedLoop] = []
        self._start_iterator = start_iterator
        self._weights = weights
        self._silence = Silence()

    @property
    def is_at_the_end(self) -> bool:
        """Return whether the checkpoint was saved right after the loop that has ended last."""
        return self.saved.current is None and len(self.finished) == len(self.saved.finished)

    def enter(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> bool:
        """Handle the first request for a batch of a loop.

        Args:
            loop: The loop.
            iterator: The iterator of the loop.
            frame: The frame that requests the batch.

        Returns:
            Whether the loop ends at once, because it had finished.

        Raises:
            UnchangedScriptError: H739 if the script has come to another loop than before.
        """
        number = len(self.finished)
        if number == len(self.saved.finished):
            assert self.saved.current is not None
            _check_same_loop(self.saved.current, loop)
            self._skip_batches(self.saved.current, loop)
            self._restore_counters(iterator, frame)
            return False
        recorded = self.saved.finished[number]
        _check_same_loop(recorded, loop)
        if recorded.variables is None:
            # The loop has to be run again.
            loop.batches = self._start_iterator(loop.loader)
            return False
        self._silence.begin()
        self.finished.append(recorded)
        if self.is_at_the_end:
            if is_in_generator(frame):
                self._restore_counters(iterator, frame)
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

    def _restore_counters(self, iterator: LoopIterator, frame: FrameType) -> None:
        """Let the ``enumerate`` objects around a loop continue with the next number."""
        counters = find_counters(iterator, frame)
        if counters is None or len(counters) != len(self.saved.counters):
            raise resume_differs("a loop requests its batches through other wrappers than before")
        for counter, value in zip(counters, self.saved.counters, strict=True):
            counter.value = value

    def _skip_batches(self, current: CurrentLoop, loop: Loop) -> None:
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
                # The next batch may depend on how this one was made.
                restore(current.before_last)
            try:
                next(loop.batches)
            except StopIteration:
                raise resume_differs(
                    f"the loader of the loop at {current.place} has only {number - 1} batches, of"
                    f" which {current.batches} were trained"
                ) from None
        loop.handed_out = current.batches
        loop.before_last = current.before_last

    def restore_variables(
        self, frame: FrameType, held: frozenset[int], models: Iterable[nn.Module]
    ) -> None:
        """Restore the variables of the script and the random state, and end the silence.

        Args:
            frame: The innermost frame of the script.
            held: The objects that the guard saves.
            models: Its models.
        """
        self.end_silence()
        VariableReader(held, models).restore(self.saved.variables, frames_of_script(frame))
        restore(self.saved.random_state)

    def end_silence(self) -> None:
        """Let output through again."""
        self._silence.end()


def _check_same_loop(recorded: FinishedLoop | CurrentLoop, loop: Loop) -> None:
    """Check that the script has come to the loop that its earlier attempt came to."""
    assert loop.place is not None
    if not loop.place.is_same_as(recorded.place, recorded.function):
        raise resume_differs(
            f"it has come to the loop at {loop.place.name} in {loop.place.function} instead of the"
            f" one at {recorded.place} in {recorded.function}"
        )
    for name, value in recorded.enclosing.items():
        if loop.enclosing.get(name) != value:
            raise resume_differs(
                f"at the loop at {recorded.place}, {name} was {value!r} and is"
                f" {loop.enclosing.get(name)!r}. If the script loads a checkpoint of its own at the"
                " start, turn that off"
            )
