"""`Training`: save a script from its first optimizer step on, and prove that a resume is exact."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.core.events import run_events
from holdfast.guard.unchanged.frames import frames_of_script
from holdfast.guard.unchanged.loops.bytecode import targets_of_loop
from holdfast.guard.unchanged.loops.loop import Loop
from holdfast.guard.unchanged.loops.places import is_in_generator
from holdfast.guard.unchanged.loops.wrappers import EnumerateCounter
from holdfast.guard.unchanged.proof import BoundaryLog, describe_boundary
from holdfast.guard.unchanged.refusal import cannot_be_saved, resume_differs
from holdfast.guard.unchanged.saved_script import (
    LEAST_REPEATED_STEPS,
    STATE_NAME,
    CurrentLoop,
    FinishedLoop,
    SavedScript,
)
from holdfast.guard.unchanged.script_guard import ScriptGuard
from holdfast.guard.unchanged.trained_objects import TrainedObjects
from holdfast.guard.unchanged.variables.large_data import LargeData
from holdfast.guard.unchanged.variables.writer import VariableWriter
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
    # The counters of the `enumerate` objects around the loop that is running, or that has just
    # ended inside a generator of the script. None if the script cannot be resumed from here.
    enumerate_counters: list[EnumerateCounter] | None
    # The last batch of the loop.
    batch: Any


class Training:
    """The models and optimizers of a script, and the guard that saves them.

    Args:
        run_dir: The run directory of the guard.
        objects: The models and optimizers of the script.
        frames: The frames of the script on the stack, from the innermost one outward.
        finished_loops: The finished loops. The list grows while the script runs.
        resume_step: The global step of the checkpoint from which the script resumes, or None.

    Raises:
        HoldfastError: The same errors as `Guard`.
    """

    def __init__(
        self,
        run_dir: Path,
        objects: TrainedObjects,
        frames: list[FrameType],
        finished_loops: list[FinishedLoop],
        resume_step: int | None,
    ) -> None:
        state: dict[str, Any] = {STATE_NAME: self}
        if objects.scaler is not None:
            state["scaler"] = objects.scaler
        # The boundary that the script is passing. `state_dict` saves the state at this place.
        self._boundary: Boundary | None = None
        self.guard = ScriptGuard(
            run_dir,
            models=objects.models,
            optimizers=objects.optimizers,
            state=state,
            resume_step=resume_step,
        )
        self.objects = objects
        self.guarded_ids = self.guard.guarded_ids
        self._finished_loops = finished_loops
        self._large_data = LargeData()
        self._log = BoundaryLog(run_dir, resume_step)
        # The number of steps before the boundary that was compared last.
        self._compared_step: int | None = None
        # Whether the script was resumed, and not all recorded steps have been repeated yet.
        self._is_proof_open = resume_step is not None
        # Whether an optimizer has stepped since the last boundary.
        self._has_stepped = False
        # Why the script can no longer be saved. None if it can.
        self._unsaveable: str | None = None
        # Whether an event has reported that a loop is not saved in its middle.
        self._saves_only_between_loops = False
        self._record_large_data(frames)

    def _record_large_data(self, frames: list[FrameType]) -> None:
        """Remember large data as it is now. Whatever does not change need not be saved."""
        self._large_data.is_recording = True
        self.writer().write(frames)
        self._large_data.is_recording = False

    def writer(self, *, only_small: bool = False) -> VariableWriter:
        """Return a writer for the script's variables, without those that the guard saves."""
        return VariableWriter(self.guarded_ids, self._large_data, only_small=only_small)

    @property
    def devices(self) -> list[torch.device]:
        """Return the accelerators of the models."""
        return self.guard.devices

    # --- steps

    def before_step(self, optimizer: Optimizer) -> None:
        """Begin to count an optimizer step.

        Raises:
            BatchError: H212 if the step would change guarded parameters, but cannot be counted.
        """
        if any(optimizer is guarded for guarded in self.guard.optimizers.values()):
            self.guard.before_step(optimizer)
        else:
            self.stop_saving(
                f"the script steps an optimizer ({type(optimizer).__name__}) that did not exist at"
                " its first step, and no checkpoint would hold its state"
            )
        self._has_stepped = True

    def stop_saving(self, why: str) -> None:
        """Save nothing from now on, and record the reason once.

        Args:
            why: The reason, as a clause.
        """
        if self._unsaveable is None:
            self._unsaveable = why
            self.guard.emit(
                run_events.ResumeMayDiffer(
                    why="bit-exact from the newest checkpoint, but nothing is saved from here on,"
                    f" because {why}"
                )
            )

    # --- boundaries

    def pass_boundary_in(self, loop: Loop, frame: FrameType, *, has_inner_loop: bool) -> None:
        """Pass the boundary in the middle of a loop, before its next batch.

        Args:
            loop: The outermost loop.
            frame: The frame that requests the batch.
            has_inner_loop: Whether a loop inside this one is running, whose position no checkpoint
                holds.

        Raises:
            HoldfastError: H738 or H739 if a resume is not exact.
        """
        may_save = False
        if self._has_stepped and not has_inner_loop and self.guard.needs_boundary():
            # The search takes some milliseconds, so it waits for the first save that is due.
            if not loop.has_searched_wrappers:
                self._search_wrappers(loop, frame)
            may_save = loop.enumerate_counters is not None
        boundary = Boundary(
            frame=frame,
            loop=loop,
            enumerate_counters=loop.enumerate_counters,
            batch=loop.last_batch,
        )
        self._pass_boundary(boundary, may_save=may_save)

    def pass_boundary_after(
        self, loop: Loop, last_batch: Any, frame: FrameType, *, may_exit: bool
    ) -> None:
        """Pass the boundary after a loop that has finished.

        Args:
            loop: The loop.
            last_batch: Its last batch.
            frame: The frame that has requested the batches.
            may_exit: Whether the process may exit here.

        Raises:
            UnchangedScriptError: H739 if the script does not repeat what its earlier attempt did.
        """
        # If a generator passes the batches on, the script's own loop over it continues.
        counters = loop.enumerate_counters if is_in_generator(frame) else []
        boundary = Boundary(frame=frame, loop=None, enumerate_counters=counters, batch=last_batch)
        may_save = self._has_stepped and counters is not None
        self._pass_boundary(boundary, may_save=may_save, may_exit=may_exit)

    def _search_wrappers(self, loop: Loop, frame: FrameType) -> None:
        """Find out whether a loop can be resumed in its middle."""
        assert loop.place is not None
        loop.has_searched_wrappers = True
        loop.enumerate_counters = loop.find_enumerate_counters(frame)
        if loop.enumerate_counters is not None:
            return
        why = f"the loop at {loop.place.name} takes its batches through a wrapper such as islice"
        if is_in_generator(frame):
            raise cannot_be_saved(why, "iterate the generator itself, and leave it with `break`.")
        if not self._saves_only_between_loops:
            self._saves_only_between_loops = True
            self.guard.emit(
                run_events.SavePostponed(why=f"{why}, so it is saved only when the loop has ended")
            )

    def _pass_boundary(self, boundary: Boundary, *, may_save: bool, may_exit: bool = True) -> None:
        """Compare a boundary with that of the earlier attempt, and save if a save is due.

        Args:
            boundary: The boundary.
            may_save: Whether the script can be resumed from this boundary.
            may_exit: Whether the process may exit here.
        """
        if self._has_stepped:
            self._has_stepped = False
            self._compare(boundary)
        self._boundary = boundary
        try:
            self.guard.pass_boundary(
                may_save=may_save and self._unsaveable is None, may_exit=may_exit
            )
        finally:
            self._boundary = None

    # --- the proof that a resume is exact

    def _compare(self, boundary: Boundary) -> None:
        """Record a boundary, and check that it is equal to that of the earlier attempt."""
        # A step of an optimizer that did not exist at first is not counted.
        if self.guard.global_step == self._compared_step:
            return
        self._compared_step = self.guard.global_step
        frames = frames_of_script(boundary.frame)
        description = describe_boundary(
            boundary.batch,
            capture(self.devices),
            self.guard.optimizers,
            variables=frames[0].f_locals if frames else {},
        )
        difference = self._log.note(self.guard.global_step, description)
        failed = self.guard.failed_repetition
        if failed is not None:
            difference = str(failed)
        if difference is not None:
            raise resume_differs(difference)
        self.report_proof()

    def report_proof(self) -> None:
        """Record what the comparison with the earlier attempt has found, once it is complete."""
        if self._is_proof_open and self._log.is_complete:
            self._is_proof_open = False
            changed = sorted(self._log.changed_variables)
            if changed:
                self.guard.emit(run_events.VariablesChanged(names=tuple(changed)))
            if self._log.equal_boundaries < LEAST_REPEATED_STEPS:
                self.guard.emit(run_events.ResumeNotProven(steps=self._log.equal_boundaries))

    # --- the state in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script at the boundary that is being saved."""
        boundary = self._boundary
        if boundary is None:
            # The guard asks for the state when it is created, but saves nothing then.
            return {}
        frames = frames_of_script(boundary.frame)
        saved = SavedScript(
            argv=sys.orig_argv,
            finished_loops=list(self._finished_loops),
            current_loop=_position_in(boundary.loop),
            enumerate_counters=[counter.value for counter in boundary.enumerate_counters or []],
            variables=self.writer().write(frames, _targets_about_to_be_assigned(boundary, frames)),
            random_state=capture(self.devices),
        )
        return saved.to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. `Replay` has read the state before the first loop, and restores it."""


def _position_in(loop: Loop | None) -> CurrentLoop | None:
    if loop is None or loop.place is None:
        return None
    return CurrentLoop(
        place_name=loop.place.name,
        function=loop.place.function,
        enclosing_targets=loop.enclosing_targets,
        start=loop.start,
        batch_count=loop.batch_count,
        state_before_last_batch=loop.state_before_last_batch,
    )


def _targets_about_to_be_assigned(boundary: Boundary, frames: list[FrameType]) -> frozenset[str]:
    """Return the targets of the loop that still refer to the last batch, and get the next one."""
    loop = boundary.loop
    if loop is None or loop.place is None:
        return frozenset()
    has_more = loop.length is not None and loop.batch_count < loop.length
    if has_more and frames and frames[0].f_code is loop.place.code:
        return targets_of_loop(loop.place.code, loop.place.offset)
    return frozenset()
