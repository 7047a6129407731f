"""`Script`: watch the loops and steps of an unchanged script, save it and resume it."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import HoldfastError
from holdfast.core.events.data import EventData
from holdfast.core.policy.policy import Policy
from holdfast.guard.saving.mirroring import pull_before_opening
from holdfast.guard.unchanged.frames import frames_of_script
from holdfast.guard.unchanged.loops.ends import continues_as_after_exhaustion
from holdfast.guard.unchanged.loops.loop import Loop, LoopIterator, StartIterator
from holdfast.guard.unchanged.loops.places import (
    find_place,
    is_in_generator,
    loop_frame,
    values_of_enclosing_targets,
)
from holdfast.guard.unchanged.refusal import cannot_be_saved, end_process, resume_differs
from holdfast.guard.unchanged.replaying.gap_weights import GapWeights
from holdfast.guard.unchanged.replaying.replay import Replay
from holdfast.guard.unchanged.requirements import check_process, place_of_training_loop
from holdfast.guard.unchanged.saved_script import FinishedLoop, LoaderStart, load_saved_script
from holdfast.guard.unchanged.trained_objects import find_trained_objects
from holdfast.guard.unchanged.training import Training
from holdfast.guard.unchanged.variables.large_data import LargeData
from holdfast.guard.unchanged.variables.random_sources import states_of_sources
from holdfast.guard.unchanged.variables.writer import VariableWriter
from holdfast.loader.foreign.torch_workers import has_workers, keeps_workers
from holdfast.loader.random_state import capture

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _handling_errors(
    method: Callable[Concatenate[Script, _Arguments], _Result],
) -> Callable[Concatenate[Script, _Arguments], _Result | None]:
    """Decorate a method of `Script` that the script must not see fail.

    The process ends if the script cannot be resumed exactly. Any other error is a defect of
    holdfast: the method returns None, and the script trains on without being saved.
    """

    @wraps(method)
    def handling(
        self: Script, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result | None:
        try:
            return method(self, *args, **kwargs)
        except HoldfastError as error:
            self._end_process(error)
        except SystemExit:
            # The guard was asked to stop. This exception leaves loops that are not finished, and
            # they must not be recorded as finished loops.
            self._is_active = False
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self._give_up(error)
        return None

    return handling


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
        self._process_id = os.getpid()
        self._thread_id = get_ident()
        # The loops that are running, outermost first.
        self._running_loops: list[Loop] = []
        self._finished_loops: list[FinishedLoop] = []
        # Brings the script to the place where its checkpoint was saved. None before the first loop,
        # in a run without a checkpoint, and once the script has arrived there.
        self._replay: Replay | None = None
        # Whether a checkpoint has been searched for.
        self._has_searched_checkpoint = False
        # None before the first optimizer step, and until the script is resumed.
        self._training: Training | None = None
        self._gap_weights = GapWeights(run_dir, self._give_up)
        # False once the script has ended or was asked to stop, and if another command was saved.
        self._is_active = True

    def _is_watched_here(self) -> bool:
        """Return whether loops and steps count here: not in workers, and not in other threads."""
        is_own_process = os.getpid() == self._process_id
        return self._is_active and is_own_process and get_ident() == self._thread_id

    # --- a loop begins

    def begin_loop(self, loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        """Return the iterator of a loop that begins.

        Args:
            loader: The loader.
            frame: The frame that requests the iterator.
        """
        loop = self._new_loop(loader, frame) if self._is_watched_here() else None
        if loop is None:
            return self._start_iterator(loader)
        # The replay decides at the first request for a batch whether the loop needs torch's
        # iterator.
        is_replayed = self._replay is not None and not self._running_loops
        if not is_replayed:
            loop.torch_iterator = self._start_iterator(loader)
        self._running_loops.append(loop)
        return LoopIterator(self, loop)

    @_handling_errors
    def _new_loop(self, loader: DataLoader[Any], frame: FrameType) -> Loop | None:
        """Return a new loop, or None if this script is not watched."""
        self._search_checkpoint_once()
        if not self._is_active:
            return None
        return Loop(
            loader=loader,
            start=self._start_of(loader),
            torch_iterator=None,
            length=_length_of(loader),
            created_at=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        )

    def _search_checkpoint_once(self) -> None:
        """Begin a replay at the first loop, if there is a checkpoint."""
        if self._has_searched_checkpoint:
            return
        self._has_searched_checkpoint = True
        pull_before_opening(self._run_dir, Policy(), self._emit)
        saved = load_saved_script(self._run_dir)
        if saved is not None:
            # The command may start other processes, for example one that evaluates. Only the one
            # that was saved is resumed.
            self._is_active = saved.argv == sys.orig_argv
            self._replay = Replay(saved, self._start_iterator, self._gap_weights)

    def _start_of(self, loader: DataLoader[Any]) -> LoaderStart:
        """Return the state from which a loop over a loader begins."""
        return LoaderStart(
            random_state=capture(self._devices()),
            generators=states_of_sources(loader),
            samplers=self._writer().saved_samplers(loader),
            had_workers=has_workers(loader) if keeps_workers(loader) else None,
        )

    def _devices(self) -> list[torch.device]:
        if self._training is not None:
            return self._training.devices
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return [torch.device("cuda", torch.cuda.current_device())]
        return []

    def _writer(self, *, only_small: bool = False) -> VariableWriter:
        if self._training is not None:
            return self._training.writer(only_small=only_small)
        return VariableWriter(frozenset(), LargeData(), only_small=only_small)

    # --- a loop requests a batch

    def next_batch(self, loop: Loop, frame: FrameType) -> Any:
        """Return the next batch of a loop, or raise StopIteration.

        Args:
            loop: The loop.
            frame: The frame that requests the batch.
        """
        if self._is_outermost(loop) and self._is_active:
            if self._before_batch(loop, frame):
                raise StopIteration
            loop.state_before_last_batch = capture(self._devices())
        elif loop.place is None:
            loop.place = find_place(frame)
        try:
            assert loop.torch_iterator is not None
            batch = next(loop.torch_iterator)
        except StopIteration:
            self._note_end(loop, frame, is_exhausted=True)
            raise
        except BaseException:
            loop.has_failed = True
            raise
        loop.batch_count += 1
        loop.last_batch = batch
        return batch

    def _is_outermost(self, loop: Loop) -> bool:
        return bool(self._running_loops) and self._running_loops[0] is loop

    @_handling_errors
    def _before_batch(self, loop: Loop, frame: FrameType) -> bool:
        """Handle a request for a batch of the outermost loop.

        Returns:
            Whether the loop must end at once, because an earlier attempt had finished it.
        """
        if loop.place is None:
            return self._before_first_batch(loop, frame)
        # At its end, the loop assigns no further values to its targets, which the code after it may
        # use. So that boundary belongs to the end, where the targets are saved.
        is_at_end = loop.batch_count == loop.length and not is_in_generator(frame)
        if self._training is not None and not is_at_end:
            has_inner_loop = len(self._running_loops) > 1
            self._training.pass_boundary_in(loop, frame, has_inner_loop=has_inner_loop)
        return False

    def _before_first_batch(self, loop: Loop, frame: FrameType) -> bool:
        """Handle the first request. Return whether the loop must end at once."""
        loop.place = find_place(frame)
        loop.enclosing_targets = values_of_enclosing_targets(frames_of_script(frame))
        if self._replay is not None:
            return self._replay_loop(self._replay, loop, frame)
        if self._training is not None:
            self._gap_weights.stop()
            if loop.place.problem is not None:
                # A loop without a `for` statement is run again after a resume. It needs the weights
                # that the models have now.
                self._gap_weights.save(len(self._finished_loops), self._training.objects.models)
        return False

    # --- a loop ends

    def note_left(self, loop: Loop, frame: FrameType | None) -> None:
        """Record that the script has left a loop before its iterator was exhausted.

        Args:
            loop: The loop.
            frame: The frame in which Python has freed the iterator, or None if it shuts down.
        """
        if self._is_watched_here():
            self._note_end(loop, frame, is_exhausted=False)

    @_handling_errors
    def _note_end(self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool) -> None:
        """Record that a loop has ended.

        Args:
            loop: The loop.
            frame: The frame that has requested its last batch, or has left it.
            is_exhausted: Whether the loader had no more batches.
        """
        loop.is_finished = True
        last_batch = loop.last_batch
        loop.last_batch = None
        is_outermost = self._is_outermost(loop)
        self._running_loops = [other for other in self._running_loops if other is not loop]
        if not is_outermost or loop.place is None:
            # An inner loop is part of the outer loop's body, and a loop that has never requested a
            # batch has changed nothing. Neither is recorded.
            return
        if self._replay is not None:
            self._replay.note_end_of_repeated_loop()
            return
        may_be_skipped = self._record_finished(loop, frame, is_exhausted=is_exhausted)
        if may_be_skipped and self._training is not None and frame is not None:
            # The other ends are noticed in a finalizer, in which Python ignores SystemExit.
            self._training.pass_boundary_after(loop, last_batch, frame, may_exit=is_exhausted)

    def _record_finished(self, loop: Loop, frame: FrameType | None, *, is_exhausted: bool) -> bool:
        """Record a finished loop. Return whether a resumed script may skip it."""
        assert loop.place is not None
        may_be_skipped = loop.place.problem is None and continues_as_after_exhaustion(
            loop, frame, is_exhausted=is_exhausted
        )
        variables = None
        if may_be_skipped:
            variables = self._writer(only_small=True).write(frames_of_script(frame))
        elif loop.has_steps:
            self._stop_saving(
                f"the loop at {loop.place.name} was left by `return` or by an exception, or has an"
                " `else` clause"
            )
        self._finished_loops.append(
            FinishedLoop(
                place_name=loop.place.name,
                function=loop.place.function,
                enclosing_targets=loop.enclosing_targets,
                variables=variables,
                random_state=capture(self._devices()),
            )
        )
        if self._training is not None and loop.has_steps:
            self._gap_weights.watch(len(self._finished_loops), self._training.objects.models)
        return may_be_skipped

    # --- steps

    def before_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Begin to count an optimizer step, and begin to save the script at the first one.

        Args:
            optimizer: The optimizer that is about to step.
            frame: The frame in which torch calls the hook.
        """
        if self._is_watched_here():
            self._note_step(optimizer, frame)
            for loop in self._running_loops:
                loop.has_steps = True

    @_handling_errors
    def _note_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        if self._training is None:
            self._training = self._new_training(optimizer, frame)
        self._training.before_step(optimizer)
        if not self._running_loops:
            self._stop_saving("the script steps an optimizer outside of its loops over loaders")

    def after_step(self, optimizer: Optimizer) -> None:
        """Count an optimizer step."""
        if self._training is not None and self._is_watched_here():
            self._count_step(self._training, optimizer)

    @_handling_errors
    def _count_step(self, training: Training, optimizer: Optimizer) -> None:
        training.guard.after_step(optimizer)

    def _new_training(self, optimizer: Optimizer, frame: FrameType) -> Training:
        """Check at the first step that the script can be resumed, and begin to save it.

        Raises:
            HoldfastError: If the script cannot be resumed exactly.
        """
        if self._replay is not None:
            raise resume_differs(
                "an optimizer steps outside of the loops in which it stepped before"
            )
        place = place_of_training_loop(self._running_loops)
        frame_of_loop = loop_frame(frame, place)
        if frame_of_loop is None:
            raise cannot_be_saved(
                "an optimizer steps outside of the loop that fetches the batches",
                "call optimizer.step() in the loop, or in a function that it calls.",
            )
        check_process()
        frames = frames_of_script(frame_of_loop)
        try:
            objects = find_trained_objects(frames, optimizer)
            return Training(self._run_dir, objects, frames, self._finished_loops, resume_step=None)
        except HoldfastError:
            raise
        except Exception as error:
            # Nothing was saved yet. The script must not train in the belief that it is.
            self._note_error(error)
            raise cannot_be_saved(_failure(error), "use a Guard in the script.") from error

    # --- resuming

    def _replay_loop(self, replay: Replay, loop: Loop, frame: FrameType) -> bool:
        """Handle the first request for a batch of a loop that an earlier attempt has recorded.

        Returns:
            Whether the loop must end at once, because the earlier attempt had finished it.

        Raises:
            UnchangedScriptError: H739 if the script has reached another loop than before.
        """
        decision = replay.enter(loop, frame)
        if decision.ends_loop:
            loop.is_finished = True
            self._running_loops.remove(loop)
        if decision.ends_replay:
            self._resume(replay, frame)
        return decision.ends_loop

    def _resume(self, replay: Replay, frame: FrameType) -> None:
        """Restore the state of the checkpoint, and let the script continue."""
        replay.end_silence()
        self._finished_loops = list(replay.saved.finished_loops)
        frames = frames_of_script(frame)
        training = Training(
            self._run_dir,
            find_trained_objects(frames),
            frames,
            self._finished_loops,
            resume_step=replay.saved.global_step,
        )
        replay.restore_variables(frame, training.guarded_ids, training.objects.models.values())
        training.report_proof()
        for optimizer in training.guard.optimizers.values():
            # Otherwise torch would warn at the next scheduler step that no optimizer step came
            # first, because the steps were made in the earlier attempt.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._training = training
        # From here on, the state is complete. An error before this line ends the process.
        self._replay = None

    # --- the end

    def end(self, error: BaseException | None) -> None:
        """Close the run, because the script has ended.

        Args:
            error: The error that has ended the script, or None.
        """
        if not self._is_active or os.getpid() != self._process_id:
            return
        self._is_active = False
        self.end_silence()
        self._gap_weights.stop()
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
        if self._training is not None:
            self._training.guard.end(error)

    def end_silence(self) -> None:
        """Stop discarding the script's output, for example because an error will be printed."""
        if self._replay is not None:
            self._replay.end_silence()

    def _stop_saving(self, why: str) -> None:
        if self._training is not None:
            self._training.stop_saving(why)

    def _give_up(self, error: BaseException) -> None:
        """Handle an unexpected error of holdfast.

        A script that trains continues without being saved. A script that is being resumed cannot
        continue, because its state is incomplete.
        """
        self._note_error(error)
        if self._replay is not None:
            self._end_process(resume_differs(_failure(error)))
        self._stop_saving(_failure(error))

    def _end_process(self, error: HoldfastError) -> NoReturn:
        self.end_silence()
        end_process(error, self._emit)


def _failure(error: BaseException) -> str:
    return f"holdfast has failed with {type(error).__name__}: {error}"


def _length_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches of a loader, or None if it is known only at the end."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 - the script need not ever ask for the length of its sampler
        return None
