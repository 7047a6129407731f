"""`Script`: watches the loops and steps of an unchanged script, saves it and resumes it."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import HoldfastError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.policy.policy import Policy
from holdfast.guard.saving.mirroring import pull_before_opening
from holdfast.guard.unchanged.bytecode import leaves_like_an_exhausted_loop, targets_of_loop
from holdfast.guard.unchanged.gap_weights import GapWeights
from holdfast.guard.unchanged.loop_places import (
    Counter,
    enclosing_targets,
    find_counters,
    find_place,
    is_in_generator,
    loop_frame,
)
from holdfast.guard.unchanged.loops import Loop, LoopIterator, StartIterator
from holdfast.guard.unchanged.objects import TrainedObjects, find_trained_objects
from holdfast.guard.unchanged.proof import BoundaryLog, describe_boundary
from holdfast.guard.unchanged.refusal import cannot_be_saved, end_process, resume_differs
from holdfast.guard.unchanged.replay import Replay
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
from holdfast.guard.unchanged.stack import frames_of_script
from holdfast.guard.unchanged.support import check_loops, check_process
from holdfast.guard.unchanged.variables import (
    LargeData,
    VariableWriter,
    states_of_sources,
)
from holdfast.loader.foreign.torch_workers import has_workers, keeps_workers
from holdfast.loader.random_state import capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A place at which the script can be saved.

    An instance must not be kept after the script has passed it. Its frame refers to the iterators
    of the loops, and each must be freed when the script leaves its loop.
    """

    # The innermost frame of the script.
    frame: FrameType
    # The loop in whose middle the boundary is. None between two loops.
    loop: Loop | None
    # The `enumerate` objects around the loop that is running, or that has just ended inside a
    # generator of the script. None if the script cannot be resumed from here.
    counters: list[Counter] | None
    # The last batch of the loop.
    batch: Any


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
        # Brings the script to the place where its checkpoint was saved. None before the first loop,
        # in a run without a checkpoint, and once the script has arrived there.
        self._replay: Replay | None = None
        # Whether a checkpoint has been searched for.
        self._is_loaded = False
        self._guard: ScriptGuard | None = None
        self._objects: TrainedObjects | None = None
        self._guarded_ids: frozenset[int] = frozenset()
        self._large_data = LargeData()
        self._log: BoundaryLog | None = None
        # The number of steps before the boundary that was compared last.
        self._compared_step: int | None = None
        self._weights = GapWeights(run_dir, self._give_up)
        # Why the script can no longer be saved. None if it can.
        self._unsaveable: str | None = None
        # Whether an optimizer has stepped since the last boundary.
        self._has_stepped = False
        # The boundary that the script is passing. `state_dict` saves the state at this place.
        self._boundary: Boundary | None = None
        # Whether an event has reported that a loop is not saved in its middle.
        self._saves_only_between_loops = False
        # False once the script has ended, or watching has failed.
        self._is_active = True
        # Whether the script was resumed, and not all recorded steps have been repeated yet.
        self._is_proof_open = False

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
            self._end_process(error)
        if not self._is_active:
            return self._start_iterator(loader)
        # The replay decides at the first request for a batch whether the loop needs torch's
        # iterator.
        is_replayed = self._replay is not None and not self._loops
        loop = Loop(
            loader=loader,
            start=start,
            batches=None if is_replayed else self._start_iterator(loader),
            length=_length_of(loader),
            created_at=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        )
        self._loops.append(loop)
        return LoopIterator(self, loop)

    def _is_watched_here(self) -> bool:
        """Return whether loops and steps count here: not in workers, and not in other threads."""
        is_own_thread = get_ident() == self._thread and os.getpid() == self._process
        return self._is_active and is_own_thread

    def _load_once(self) -> None:
        if self._is_loaded:
            return
        self._is_loaded = True
        pull_before_opening(self._run_dir, Policy(), self._emit)
        saved = load_saved_script(self._run_dir)
        if saved is not None:
            # The command may start other processes, for example one that evaluates. Only the one
            # that was saved is resumed.
            self._is_active = saved.argv == sys.orig_argv
            self._replay = Replay(saved, self._start_iterator, self._weights)

    def _start_of(self, loader: DataLoader[Any]) -> LoaderStart:
        return LoaderStart(
            random_state=capture(self._devices()),
            generators=states_of_sources(loader),
            samplers=VariableWriter(self._guarded_ids, self._large_data).trees_of_samplers(loader),
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
            except StopIteration:
                # A finished loop ends at once.
                raise
            except HoldfastError as error:
                self._end_process(error)
            except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
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
        except BaseException:
            loop.has_failed = True
            raise
        loop.batch_count += 1
        loop.last_batch = batch
        return batch

    def _before_batch(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> None:
        """Handle the request for a batch of the outermost loop."""
        if loop.place is not None:
            # At its end, the loop assigns no further values to its targets, which the code after it
            # may use. So that boundary belongs to the end, where the targets are saved.
            is_at_end = loop.batch_count == loop.length and not is_in_generator(frame)
            if self._guard is not None and not is_at_end:
                self._pass_boundary_in(loop, iterator, frame)
            return
        loop.place = find_place(frame)
        frames = frames_of_script(frame)
        loop.enclosing = enclosing_targets(frames)
        if self._replay is not None:
            self._enter_recorded(self._replay, loop, iterator, frame)
        elif self._objects is not None:
            self._weights.stop()
            if loop.place.problem is not None:
                # A loop without a `for` statement is run again after a resume. It needs the weights
                # that the models have now.
                self._weights.save(len(self._finished), self._objects.models)

    def _note_exhausted(self, loop: Loop, frame: FrameType) -> None:
        """Record that a loop has received all its batches."""
        try:
            self._finish(loop, frame, is_exhausted=True)
        except HoldfastError as error:
            self._end_process(error)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._give_up(error)

    def note_dropped(self, loop: Loop, frame: FrameType | None) -> None:
        """Record that the script has dropped the iterator of a loop before it was exhausted."""
        if not self._is_watched_here():
            return
        try:
            self._finish(loop, frame, is_exhausted=False)
        except HoldfastError as error:
            self._end_process(error)
        except Exception as error:  # noqa: BLE001 - Python ignores errors in `__del__`
            self._give_up(error)

    def _finish(self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool) -> None:
        loop.is_finished = True
        last_batch = loop.last_batch
        loop.last_batch = None
        is_outermost = self._loops[:1] == [loop]
        self._loops = [other for other in self._loops if other is not loop]
        if not is_outermost or loop.place is None:
            # An inner loop is part of the outer loop's body, and a loop that has never requested a
            # batch has changed nothing. Neither is recorded.
            return
        if self._replay is not None:
            self._replay.note_finished()
            return
        is_resumable = self._record_finished(loop, frame, is_exhausted=is_exhausted)
        if is_resumable and self._guard is not None and frame is not None:
            # If a generator passes the batches on, the script's own loop over it continues.
            counters = loop.counters if is_in_generator(frame) else []
            self._pass_boundary(
                Boundary(frame=frame, loop=None, counters=counters, batch=last_batch),
                may_save=self._has_stepped and counters is not None,
                may_exit=is_exhausted,
            )

    def _record_finished(self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool) -> bool:
        """Record a finished loop. Return whether a resumed script can skip it."""
        assert loop.place is not None
        is_resumable = loop.place.problem is None and self._ends_like_its_for_statement(
            loop, frame, is_exhausted=is_exhausted
        )
        frames = frames_of_script(frame)
        variables = None
        if is_resumable:
            writer = VariableWriter(self._guarded_ids, self._large_data, only_small=True)
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
                random_state=capture(self._devices()),
            )
        )
        if self._objects is not None and loop.has_steps:
            self._weights.watch(len(self._finished), self._objects.models)
        return is_resumable

    def _ends_like_its_for_statement(
        self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool
    ) -> bool:
        """Return whether the code after a loop is the code that follows an exhausted loop."""
        if is_exhausted:
            return True
        assert loop.place is not None
        own_frame = None if frame is None else loop_frame(frame, loop.place)
        if own_frame is None or loop.has_failed:
            return False
        if own_frame is not frame and own_frame.f_lasti == loop.place.offset:
            # A generator around the loader has ended, perhaps with an error.
            return False
        return leaves_like_an_exhausted_loop(loop.place.code, loop.place.offset, own_frame.f_lasti)

    # --- steps

    def before_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Begin to count an optimizer step, and begin to save the script at the first one.

        Args:
            optimizer: The optimizer that is about to step.
            frame: The frame in which torch calls the hook.
        """
        if not self._is_watched_here():
            return
        try:
            if self._guard is None:
                self._begin_saving(optimizer, frame)
            assert self._guard is not None
            if any(optimizer is guarded for guarded in self._guard.optimizers.values()):
                self._guard.before_step(optimizer)
            else:
                self._stop_saving(
                    f"the script steps a {type(optimizer).__name__} that did not exist at its first"
                    " step, and no checkpoint would hold its state"
                )
            if not self._loops:
                self._stop_saving("the script steps an optimizer outside of its loops over loaders")
        except HoldfastError as error:
            self._end_process(error)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            if self._guard is None:
                # Nothing was saved yet. The script must not train in the belief that it is.
                self._note_error(error)
                why = f"holdfast has failed with {type(error).__name__}: {error}"
                self._end_process(cannot_be_saved(why, "use a Guard in the script."))
            self._give_up(error)
        for loop in self._loops:
            loop.has_steps = True
        self._has_stepped = True

    def after_step(self, optimizer: Optimizer) -> None:
        """Count an optimizer step."""
        if self._guard is None or not self._is_watched_here():
            return
        try:
            self._guard.after_step(optimizer)
        except HoldfastError as error:
            self._end_process(error)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self._give_up(error)

    def _begin_saving(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Check that the script can be resumed, and create its guard.

        Raises:
            HoldfastError: If the script cannot be resumed exactly.
        """
        if self._replay is not None:
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
    ) -> ScriptGuard:
        state: dict[str, Any] = {STATE_NAME: self}
        if objects.scaler is not None:
            state["scaler"] = objects.scaler
        guard = ScriptGuard(
            self._run_dir,
            models=objects.models,
            optimizers=objects.optimizers,
            state=state,
            resume_step=resume_step,
        )
        self._guard = guard
        self._objects = objects
        self._guarded_ids = guard.guarded_ids
        self._log = BoundaryLog(self._run_dir, resume_step)
        # Whatever is large and does not change from here on need not be saved.
        self._large_data.is_recording = True
        VariableWriter(self._guarded_ids, self._large_data).write(frames)
        self._large_data.is_recording = False
        return guard

    # --- boundaries

    def _pass_boundary_in(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> None:
        """Pass the boundary in the middle of a loop, before its next batch."""
        assert self._guard is not None
        may_save = False
        if self._has_stepped and len(self._loops) == 1 and self._guard.needs_boundary():
            # The search takes some milliseconds, so it waits for the first save that is due.
            if not loop.has_searched_counters:
                self._search_counters(loop, iterator, frame)
            may_save = loop.counters is not None
        boundary = Boundary(frame=frame, loop=loop, counters=loop.counters, batch=loop.last_batch)
        self._pass_boundary(boundary, may_save=may_save)

    def _search_counters(self, loop: Loop, iterator: LoopIterator, frame: FrameType) -> None:
        """Find out whether a loop can be resumed in its middle."""
        assert self._guard is not None
        assert loop.place is not None
        loop.has_searched_counters = True
        loop.counters = find_counters(iterator, frame)
        if loop.counters is not None:
            return
        why = f"the loop at {loop.place.name} takes its batches through a wrapper such as islice"
        if is_in_generator(frame):
            raise cannot_be_saved(why, "iterate the generator itself, and leave it with `break`.")
        if not self._saves_only_between_loops:
            self._saves_only_between_loops = True
            self._guard.emit(
                run_events.SavePostponed(why=f"{why}, so it is saved only when the loop has ended")
            )

    def _pass_boundary(self, boundary: Boundary, *, may_save: bool, may_exit: bool = True) -> None:
        """Compare a boundary with that of the earlier attempt, and save if a save is due.

        Args:
            boundary: The boundary.
            may_save: Whether the script can be resumed from this boundary.
            may_exit: Whether the process may exit here.
        """
        assert self._guard is not None
        if self._has_stepped:
            self._has_stepped = False
            # A step of an optimizer that did not exist at first is not counted.
            if self._guard.global_step != self._compared_step:
                self._compared_step = self._guard.global_step
                self._compare(self._guard, boundary)
        self._boundary = boundary
        try:
            self._guard.pass_boundary(
                may_save=may_save and self._unsaveable is None, may_exit=may_exit
            )
        except SystemExit:
            # This exception leaves loops that are not finished, and they must not be recorded as
            # finished loops.
            self._is_active = False
            raise
        finally:
            self._boundary = None

    def _compare(self, guard: ScriptGuard, boundary: Boundary) -> None:
        """Record a boundary, and check that it is equal to that of the earlier attempt."""
        if self._log is None:
            return
        description = describe_boundary(
            boundary.batch,
            capture(guard.devices),
            guard.optimizers,
            _loop_variables(boundary.frame),
        )
        difference = self._log.note(guard.global_step, description)
        failed = guard.failed_repetition
        if failed is not None:
            difference = str(failed)
        if difference is not None:
            raise resume_differs(difference)
        self._report_proof(guard, self._log)

    def _report_proof(self, guard: ScriptGuard, log: BoundaryLog) -> None:
        """Record that a resume is not proven, once too few recorded steps were left to repeat."""
        if self._is_proof_open and log.is_complete:
            self._is_proof_open = False
            if log.equal_boundaries < LEAST_REPEATED_STEPS:
                guard.emit(run_events.ResumeNotProven(steps=log.equal_boundaries))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script at the boundary that is being saved."""
        boundary = self._boundary
        if boundary is None:
            # The guard asks for the state when it is created, but saves nothing then.
            return {}
        loop = boundary.loop
        current = None
        # The targets of the loop still refer to the last batch, and are about to get the next one.
        targets: frozenset[str] = frozenset()
        frames = frames_of_script(boundary.frame)
        if loop is not None and loop.place is not None:
            current = CurrentLoop(
                place=loop.place.name,
                function=loop.place.function,
                enclosing=loop.enclosing,
                start=loop.start,
                batches=loop.batch_count,
                before_last=loop.before_last,
            )
            has_more = loop.length is not None and loop.batch_count < loop.length
            if has_more and frames and frames[0].f_code is loop.place.code:
                targets = targets_of_loop(loop.place.code, loop.place.offset)
        saved = SavedScript(
            argv=sys.orig_argv,
            finished=list(self._finished),
            current=current,
            counters=[counter.value for counter in boundary.counters or []],
            variables=VariableWriter(self._guarded_ids, self._large_data).write(frames, targets),
            random_state=capture(self._devices()),
        )
        return saved.to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. The state was read before the first loop, and `_resume` restores it."""

    # --- resuming

    def _enter_recorded(
        self, replay: Replay, loop: Loop, iterator: LoopIterator, frame: FrameType
    ) -> None:
        """Handle the first request for a batch of a loop that an earlier attempt has recorded.

        Raises:
            StopIteration: If the loop had finished, so that it ends at once.
            UnchangedScriptError: H739 if the script has reached another loop than before.
        """
        if not replay.enter(loop, iterator, frame):
            if len(replay.finished) == len(replay.saved.finished):
                # This is the loop in whose middle the checkpoint was saved.
                self._resume(replay, frame)
            return
        loop.is_finished = True
        self._loops.remove(loop)
        if replay.is_at_the_end:
            self._resume(replay, frame)
        raise StopIteration

    def _resume(self, replay: Replay, frame: FrameType) -> None:
        """Restore the state of the checkpoint, and let the script continue."""
        replay.end_silence()
        self._replay = None
        self._finished = list(replay.saved.finished)
        frames = frames_of_script(frame)
        guard = self._create_guard(
            find_trained_objects(frames), frames, resume_step=replay.saved.global_step
        )
        assert self._objects is not None
        replay.restore_variables(frame, guard.guarded_ids, self._objects.models.values())
        self._is_proof_open = True
        assert self._log is not None
        self._report_proof(guard, self._log)
        for optimizer in guard.optimizers.values():
            # Otherwise torch would warn at the next scheduler step that no optimizer step came
            # first, because the steps were made in the earlier attempt.
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
        self.end_silence()
        self._weights.stop()
        if self._replay is not None and error is None:
            self._end_process(
                resume_differs("it has ended before the loops in which its earlier attempt trained")
            )
        if self._replay is not None and isinstance(error, Exception):
            self._end_process(
                resume_differs(
                    f"while its finished loops were skipped, the code between them failed with"
                    f" {type(error).__name__}, for example because a file no longer exists"
                )
            )
        if self._guard is not None:
            self._guard.end(error)

    def end_silence(self) -> None:
        """Stop discarding the script's output, for example because an error will be printed."""
        if self._replay is not None:
            self._replay.end_silence()

    def _stop_saving(self, why: str) -> None:
        """Save nothing from now on, and record the reason once.

        Args:
            why: The reason, as a clause.
        """
        if self._unsaveable is None and self._guard is not None:
            self._unsaveable = why
            self._guard.emit(
                run_events.ResumeMayDiffer(why=f"none for the rest of the run, because {why}")
            )

    def _give_up(self, error: BaseException) -> None:
        """Handle an unexpected error of holdfast.

        A script that trains continues without being saved. A script that is being resumed cannot
        continue, because its state is incomplete.
        """
        self._note_error(error)
        why = f"holdfast has failed with {type(error).__name__}: {error}"
        if self._replay is not None:
            self._end_process(resume_differs(why))
        self._stop_saving(why)

    def _end_process(self, error: HoldfastError) -> NoReturn:
        self.end_silence()
        end_process(error, self._emit)


def _length_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches of a loader, or None if it is known only at the end."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 - the script need not ever ask for the length of its sampler
        return None


def _loop_variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of the innermost function of the script."""
    frames = frames_of_script(frame)
    return frames[0].f_locals if frames else {}
