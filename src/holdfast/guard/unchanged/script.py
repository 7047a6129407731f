"""`Script`: watches the loops and steps of an unchanged script, saves it and resumes it."""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.core.errors import HoldfastError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.guard.unchanged.bytecode import leaves_like_an_exhausted_loop, targets_of_loop
from holdfast.guard.unchanged.gap_weights import GapWeights
from holdfast.guard.unchanged.loop_places import (
    advance_counter,
    enclosing_targets,
    find_counters,
    find_place,
    loop_frame,
)
from holdfast.guard.unchanged.loops import Loop, LoopIterator
from holdfast.guard.unchanged.objects import TrainedObjects, find_trained_objects
from holdfast.guard.unchanged.proof import BoundaryLog, describe_boundary
from holdfast.guard.unchanged.refusal import cannot_be_saved, end_process, resume_differs
from holdfast.guard.unchanged.saved_script import (
    LEAST_REPEATED_STEPS,
    STATE_NAME,
    CurrentLoop,
    FinishedLoop,
    LoaderStart,
    SavedScript,
    load_saved_script,
)
from holdfast.guard.unchanged.script_guard import ScriptGuard
from holdfast.guard.unchanged.silence import Silence
from holdfast.guard.unchanged.stack import frames_of_script
from holdfast.guard.unchanged.support import check_loops, check_process
from holdfast.guard.unchanged.variables import (
    LargeData,
    VariableReader,
    VariableWriter,
    restore_sources,
    states_of_sources,
)
from holdfast.loader.foreign.torch_workers import has_workers, keeps_workers, match_workers
from holdfast.loader.random_state import capture, restore

StartIterator = Callable[[DataLoader[Any]], Iterator[Any]]


class Script:
    """The training script of this process.

    Args:
        run_dir: The run directory of the guard.
        start_iterator: torch's own ``DataLoader.__iter__``.
        emit: Records an event.
        note_error: Records an error of holdfast that must not end the script.
    """

    def __init__(
        self,
        run_dir: Path,
        start_iterator: StartIterator,
        emit: Callable[[EventData], None],
        note_error: Callable[[BaseException], None],
    ) -> None:
        self._run_dir = run_dir
        self._start_iterator = start_iterator
        self._emit = emit
        self._note_error = note_error
        self._process = os.getpid()
        self._thread = get_ident()
        # The loops that are running, outermost first.
        self._loops: list[Loop] = []
        self._finished: list[FinishedLoop] = []
        # The state from which the script resumes. None before the first loop, in a run without a
        # checkpoint, and once the state has been restored.
        self._saved: SavedScript | None = None
        self._is_loaded = False
        self._guard: ScriptGuard | None = None
        self._objects: TrainedObjects | None = None
        self._held: frozenset[int] = frozenset()
        self._large_data = LargeData()
        self._silence = Silence()
        self._log: BoundaryLog | None = None
        self._weights = GapWeights(run_dir)
        # Why the script can no longer be saved. None if it can.
        self._unsaveable: str | None = None
        # Whether an optimizer has stepped since the last boundary.
        self._has_stepped = False
        # The innermost frame of the script at the boundary that is being saved.
        self._boundary_frame: FrameType | None = None
        # The loop to whose middle that boundary belongs. None between two loops.
        self._boundary_loop: Loop | None = None
        # The number of recorded steps that the resumed run will repeat.
        self._steps_to_repeat = 0
        # False once the script has ended, or watching has failed.
        self._is_active = True

    # --- loops

    def begin_loop(self, loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        """Return the iterator of a loop that begins.

        Args:
            loader: The loader.
            frame: The frame that requests the iterator.
        """
        if not self._is_watched_here():
            return self._start_iterator(loader)
        try:
            self._load_once()
            start = self._start_of(loader)
        except HoldfastError as error:
            self._end(error)
        # A loop that has been recorded does not need torch's iterator.
        is_replayed = self._saved is not None and not self._loops
        loop = Loop(
            loader=loader,
            start=start,
            batches=None if is_replayed else self._start_iterator(loader),
            created_at=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        )
        self._loops.append(loop)
        return LoopIterator(self, loop)

    def _is_watched_here(self) -> bool:
        is_own_thread = get_ident() == self._thread and os.getpid() == self._process
        return self._is_active and is_own_thread

    def _load_once(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            self._saved = load_saved_script(self._run_dir)

    def _start_of(self, loader: DataLoader[Any]) -> LoaderStart:
        return LoaderStart(
            random_state=capture(self._devices()),
            generators=states_of_sources(loader),
            had_workers=has_workers(loader) if keeps_workers(loader) else None,
        )

    def _devices(self) -> list[torch.device]:
        if self._guard is not None:
            return self._guard.devices
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return [torch.device("cuda", torch.cuda.current_device())]
        return []

    def next_batch(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> Any:
        """Return the next batch of a loop, or raise StopIteration.

        Args:
            loop: The loop.
            iterator: The iterator of the loop.
            frame: The frame that requests the batch.
        """
        is_outermost = bool(self._loops) and self._loops[0] is loop
        if is_outermost and self._is_active:
            try:
                self._before_batch(loop, iterator, frame)
            except HoldfastError as error:
                self._end(error)
            except Exception as error:
                if isinstance(error, StopIteration):
                    raise
                self._give_up(error)
            loop.before_last = capture(self._devices())
        elif loop.place is None:
            loop.place = find_place(frame)
        try:
            assert loop.batches is not None
            batch = next(loop.batches)
        except StopIteration:
            self._note_exhausted(loop, frame)
            raise
        loop.handed_out += 1
        loop.last_batch = batch
        return batch

    def _before_batch(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> None:
        """Handle the request for a batch of the outermost loop."""
        if loop.place is not None:
            if self._guard is not None:
                self._pass_boundary(loop, iterator, frame)
            return
        loop.place = find_place(frame)
        frames = frames_of_script(frame)
        loop.enclosing = enclosing_targets(frames)
        if self._saved is not None:
            self._replay(self._saved, loop, iterator, frame)
        elif self._objects is not None:
            self._weights.stop()
            if loop.place.problem is not None:
                # This loop will be run again after a resume, and needs the current weights.
                self._weights.save(len(self._finished), self._objects.models)

    def _note_exhausted(self, loop: Loop, frame: FrameType) -> None:
        """Record that a loop has received all its batches."""
        try:
            self._finish(loop, frame, is_exhausted=True)
        except HoldfastError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._give_up(error)

    def note_dropped(self, loop: Loop, frame: FrameType | None) -> None:
        """Record that the script has left a loop before its end, or has dropped its iterator."""
        if not self._is_watched_here():
            return
        try:
            self._finish(loop, frame, is_exhausted=False)
        except Exception as error:  # noqa: BLE001 - Python ignores errors in `__del__`
            self._give_up(error)

    def _finish(self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool) -> None:
        loop.is_finished = True
        loop.last_batch = None
        is_outermost = self._loops[:1] == [loop]
        self._loops = [other for other in self._loops if other is not loop]
        if not is_outermost or loop.place is None:
            # The work of an inner loop belongs to the body of the outer one. A loop that has never
            # requested a batch has done nothing.
            return
        if self._saved is not None:
            # The loop is recorded, but had to be run again.
            self._finished.append(self._saved.finished[len(self._finished)])
            return
        is_resumable = loop.place.problem is None and self._ends_like_its_for_statement(
            loop, frame, is_exhausted=is_exhausted
        )
        frames = frames_of_script(frame)
        variables = None
        if is_resumable:
            writer = VariableWriter(self._held, self._large_data, only_small=True)
            variables = writer.write(frames)
        elif loop.has_steps:
            self._stop_saving(
                f"the loop at {loop.place.name} was left by `return` or by an exception, or has an"
                " `else` clause"
            )
        self._finished.append(
            FinishedLoop(
                place=loop.place.name,
                function=loop.place.function,
                enclosing=loop.enclosing,
                variables=variables,
            )
        )
        if self._objects is not None and loop.has_steps:
            self._weights.watch(len(self._finished), self._objects.models)
        if is_exhausted and is_resumable and self._guard is not None and frame is not None:
            self._save_if_due(None, frame, may_save=self._has_stepped, batch=None)

    def _ends_like_its_for_statement(
        self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool
    ) -> bool:
        """Return whether the code after a loop is the code that follows an exhausted loop."""
        if is_exhausted:
            return True
        assert loop.place is not None
        own_frame = None if frame is None else loop_frame(frame, loop.place)
        if own_frame is None:
            return False
        return leaves_like_an_exhausted_loop(loop.place.code, loop.place.offset, own_frame.f_lasti)

    # --- steps

    def before_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Begin to count an optimizer step, and begin to save the script at the first one.

        Args:
            optimizer: The optimizer that is about to step.
            frame: The frame that has called the hook.
        """
        if not self._is_watched_here():
            return
        try:
            if self._guard is None:
                self._begin_saving(optimizer, frame)
            assert self._guard is not None
            self._guard.before_step(optimizer)
        except HoldfastError as error:
            self._end(error)
        for loop in self._loops:
            loop.has_steps = True
        self._has_stepped = True

    def after_step(self, optimizer: Optimizer) -> None:
        """Count an optimizer step."""
        if self._guard is not None and self._is_watched_here():
            self._guard.after_step(optimizer)

    def _begin_saving(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Check that the script can be resumed, and create its guard.

        Raises:
            HoldfastError: If the script cannot be resumed exactly.
        """
        if self._saved is not None:
            raise resume_differs(
                "an optimizer steps outside of the loops in which it stepped before"
            )
        place = check_loops(self._loops)
        own_frame = loop_frame(frame, place)
        if own_frame is None:
            raise cannot_be_saved(
                "an optimizer steps outside of the loop that fetches the batches",
                "call optimizer.step() in the loop, or in a function that it calls.",
            )
        check_process()
        frames = frames_of_script(own_frame)
        objects = find_trained_objects(frames, optimizer)
        self._create_guard(objects, frames, resume_step=None)

    def _create_guard(
        self, objects: TrainedObjects, frames: list[FrameType], resume_step: int | None
    ) -> None:
        state: dict[str, Any] = {STATE_NAME: self}
        if objects.scaler is not None:
            state["scaler"] = objects.scaler
        self._guard = ScriptGuard(
            self._run_dir,
            models=objects.models,
            optimizers=objects.optimizers,
            state=state,
            resume_step=resume_step,
        )
        self._objects = objects
        self._held = self._guard.held_objects
        self._log = BoundaryLog(self._run_dir, resume_step)
        self._large_data.is_recording = True
        VariableWriter(self._held, self._large_data).write(frames)
        self._large_data.is_recording = False

    # --- boundaries

    def _pass_boundary(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> None:
        """Record and compare a boundary in the middle of a loop, and save if a save is due."""
        may_save = self._has_stepped and len(self._loops) == 1 and loop.place is not None
        if may_save and loop.can_resume_inside is None:
            loop.can_resume_inside = find_counters(iterator, frame) is not None
        may_save = may_save and bool(loop.can_resume_inside)
        self._save_if_due(loop, frame, may_save=may_save, batch=loop.last_batch)

    def _save_if_due(
        self, loop: Loop | None, frame: FrameType, *, may_save: bool, batch: Any
    ) -> None:
        """Compare the boundary with that of an earlier attempt, and save if a save is due.

        Args:
            loop: The loop in whose middle the boundary is. None between two loops.
            frame: The innermost frame of the script.
            may_save: Whether the script can be resumed from this boundary.
            batch: The last batch.
        """
        assert self._guard is not None
        if self._has_stepped:
            self._has_stepped = False
            self._compare(self._guard, frame, batch)
        self._boundary_frame = frame
        self._boundary_loop = loop
        try:
            self._guard.pass_boundary(may_save=may_save and self._unsaveable is None)
        finally:
            # A frame refers to the iterators of its loops, which must be freed when a loop ends.
            self._boundary_frame = None
            self._boundary_loop = None

    def _compare(self, guard: ScriptGuard, frame: FrameType, batch: Any) -> None:
        if self._log is None:
            return
        boundary = describe_boundary(
            batch, capture(guard.devices), guard.optimizers, _loop_variables(frame)
        )
        difference = self._log.note(guard.global_step, boundary)
        failed = guard.failed_repetition
        if failed is not None:
            difference = str(failed)
        if difference is not None:
            raise resume_differs(difference)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script at the boundary that is being saved."""
        frame = self._boundary_frame
        if frame is None:
            # The guard asks for the state when it is created, but saves nothing then.
            return {}
        loop = self._boundary_loop
        current = None
        assigned: frozenset[str] = frozenset()
        frames = frames_of_script(frame)
        if loop is not None and loop.place is not None:
            current = CurrentLoop(
                place=loop.place.name,
                function=loop.place.function,
                enclosing=loop.enclosing,
                start=loop.start,
                batches=loop.handed_out,
                before_last=loop.before_last,
            )
            if frames and frames[0].f_code is loop.place.code:
                assigned = targets_of_loop(loop.place.code, loop.place.offset)
        saved = SavedScript(
            finished=list(self._finished),
            current=current,
            variables=VariableWriter(self._held, self._large_data).write(frames, assigned),
            random_state=capture(self._devices()),
        )
        return saved.to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. The state was read before the first loop, and `_resume` restores it."""

    # --- resuming

    def _replay(
        self, saved: SavedScript, loop: Loop, iterator: LoopIterator, frame: FrameType
    ) -> None:
        """End a recorded loop at once, or continue in the middle of the current one.

        Raises:
            StopIteration: If the loop is recorded as finished.
            UnchangedScriptError: H739 if the script has come to another loop than before.
        """
        number = len(self._finished)
        if number < len(saved.finished):
            self._replay_finished(saved, saved.finished[number], loop, frame)
            return
        assert saved.current is not None
        _check_same_loop(saved.current, loop)
        self._continue_inside(saved, saved.current, loop, iterator, frame)

    def _replay_finished(
        self, saved: SavedScript, recorded: FinishedLoop, loop: Loop, frame: FrameType
    ) -> None:
        _check_same_loop(recorded, loop)
        if recorded.variables is None:
            loop.batches = self._start_iterator(loop.loader)
            return
        self._silence.begin()
        self._finished.append(recorded)
        loop.is_finished = True
        self._loops.remove(loop)
        frames = frames_of_script(frame)
        is_last = len(self._finished) == len(saved.finished)
        if is_last and saved.current is None:
            self._resume(saved, frames)
        else:
            VariableReader().restore(recorded.variables, frames)
            self._weights.load(len(self._finished), find_trained_objects(frames).models)
        raise StopIteration

    def _continue_inside(
        self,
        saved: SavedScript,
        current: CurrentLoop,
        loop: Loop,
        iterator: LoopIterator,
        frame: FrameType,
    ) -> None:
        """Skip the batches that the loop has finished with, and restore the state after them."""
        self._skip_batches(current, loop)
        counters = find_counters(iterator, frame)
        if counters is None:
            raise resume_differs(f"the loop at {current.place} requests its batches differently")
        for counter in counters:
            advance_counter(counter, current.batches)
        loop.can_resume_inside = True
        self._resume(saved, frames_of_script(frame))

    def _skip_batches(self, current: CurrentLoop, loop: Loop) -> None:
        start = current.start
        if start.had_workers is not None:
            match_workers(loop.loader, started=start.had_workers)
        restore(start.random_state)
        restore_sources(loop.loader, start.generators)
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

    def _resume(self, saved: SavedScript, frames: list[FrameType]) -> None:
        """Restore the state of a checkpoint, and let the script continue."""
        self._silence.end()
        self._saved = None
        self._create_guard(find_trained_objects(frames), frames, resume_step=saved.global_step)
        assert self._guard is not None
        VariableReader().restore(saved.variables, frames)
        restore(saved.random_state)
        for optimizer in self._guard.optimizers.values():
            # Otherwise torch would warn that the scheduler steps before the optimizer.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    # --- the end

    def end(self, error: BaseException | None) -> None:
        """Close the run, because the script has ended.

        Args:
            error: The error that has ended the script, or None.
        """
        if not self._is_active or os.getpid() != self._process:
            return
        self._is_active = False
        self._silence.end()
        self._weights.stop()
        if self._saved is not None and error is None:
            self._end(
                resume_differs("it has ended before the loops in which its earlier attempt trained")
            )
        if self._guard is not None:
            self._report_proof()
            self._guard.end(error)

    def _report_proof(self) -> None:
        """Record that a resume was not proven, if too few steps were repeated to be compared."""
        assert self._guard is not None
        if self._guard.resumed_from is None or self._log is None:
            return
        if self._log.equal_boundaries < LEAST_REPEATED_STEPS:
            self._guard.emit(run_events.ResumeNotProven(steps=self._log.equal_boundaries))

    def end_silence(self) -> None:
        """Let output through again, because an error is about to be printed."""
        self._silence.end()

    def _stop_saving(self, why: str) -> None:
        """Record that no further boundary can be saved."""
        if self._unsaveable is None and self._guard is not None:
            self._unsaveable = why
            self._guard.emit(
                run_events.ResumeMayDiffer(why=f"none for the rest of the run, because {why}")
            )

    def _give_up(self, error: BaseException) -> None:
        """Handle an unexpected error of holdfast, which must not end a script that trains."""
        self._note_error(error)
        if self._saved is not None:
            self._end(resume_differs(f"holdfast has failed with {type(error).__name__}: {error}"))
        self._stop_saving(f"holdfast has failed with {type(error).__name__}: {error}")

    def _end(self, error: HoldfastError) -> Any:
        self._silence.end()
        end_process(error, self._emit)


def _loop_variables(frame: FrameType) -> dict[str, Any]:
    frames = frames_of_script(frame)
    return frames[0].f_locals if frames else {}


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
