"""`ScriptGuard`: the guard of an unchanged script, which takes its own steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.events import run_events
from holdfast.guard.guard import Guard
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.restoration import is_deterministic
from holdfast.guard.unchanged.saved_script import LEAST_REPEATED_STEPS
from holdfast.guard.unchanged.variables import storage_address


class _NoRecovery(Recovery):
    """Does not undo steps, because an unchanged script must not notice that it is guarded."""

    def after_refused_save(self, why: str) -> None:
        """Do nothing. An event has reported that the state has NaN or Inf and was not saved."""


class ScriptGuard(Guard):
    """A guard whose steps and boundaries are reported by the watcher of an unchanged script.

    Args:
        run_dir: The run directory.
        models: The models by name.
        optimizers: The optimizers by name.
        state: The script's own state and, if it has one, its gradient scaler.
        resume_step: The global step of the checkpoint from which the run resumes. None if the run
            has no checkpoint.

    Raises:
        HoldfastError: The same errors as `Guard`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        resume_step: int | None,
    ) -> None:
        self._resume_step = resume_step
        # The number of steps until the process ends after a stop request. None without a request.
        self._steps_until_stop: int | None = None
        # The global step at the last boundary since then.
        self._last_step = 0
        super().__init__(run_dir, model=models, optimizer=optimizers, state=state)
        # The watcher of the script restores the position in the data.
        self._position_known = True
        if self.resumed_from is not None:
            device_type = self._parts.device_type()
            self._record.compare_repeated_steps(
                is_exact=is_deterministic(device_type), precision=self.policy.precision
            )
        self._own_steps.begin_loop()
        self._own_steps.begin_batch()

    def _new_recovery(self) -> Recovery:
        return _NoRecovery(self._session)

    def _resume(self) -> Path | None:
        # The script may have stepped its schedulers already, while its loops were not run again.
        return self._session.restoration.resume(self._resume_step, reports_settings=False)

    @property
    def devices(self) -> list[torch.device]:
        """Return the accelerators of the models."""
        return list(self._parts.devices())

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers by name."""
        return self._parts.optimizers

    @property
    def held_objects(self) -> frozenset[int]:
        """Return the `id` of each object that this guard saves itself, and of its storage.

        The `id` of a tensor and the address of its contents differ, so one set can hold both.
        """
        held = {id(optimizer) for optimizer in self._parts.optimizers.values()}
        for model in self._parts.models.values():
            held.update(map(id, model.modules()))
            tensors = [*model.parameters(), *model.buffers()]
            held.update(map(id, tensors))
            addresses = map(storage_address, tensors)
            held.update(address for address in addresses if address is not None)
        return frozenset(held)

    @property
    def failed_repetition(self) -> run_events.RepeatedStepDiffers | None:
        """Return the event about a repeated step that differs, or None."""
        return self._record.failed_repetition

    def before_step(self, optimizer: Optimizer) -> None:
        """Begin to count a step of the script.

        Raises:
            BatchError: H212 if the step changes guarded parameters, but cannot be counted.
        """
        self._own_steps.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of the script."""
        self._own_steps.after_step(optimizer)

    def needs_boundary(self) -> bool:
        """Return whether there is a reason to save or to stop."""
        return self._boundaries.boundary_is_needed()

    def pass_boundary(self, *, may_save: bool, may_exit: bool) -> None:
        """Save if a save is due, and end the process soon if a stop was requested.

        Args:
            may_save: Whether the script can be resumed from this boundary. If not, a save or a stop
                that is due waits for the next one.
            may_exit: Whether the process may exit here. A finalizer, in which Python ignores all
                exceptions, must not.

        Raises:
            SystemExit: A few steps after the save for a signal or for ``Policy.max_time``.
        """
        self._own_steps.end_batch()
        if self._steps_until_stop is not None and may_exit:
            self._approach_stop(self._steps_until_stop)
        elif self._steps_until_stop is None and may_save:
            self._boundaries.boundary_outside()
            if self._stop.ends_process:
                self._begin_stop()
        self._own_steps.begin_batch()

    def _begin_stop(self) -> None:
        """Save because of a stop request, and let the script take a few more steps.

        A resume repeats these steps, so that it can be proven to be exact. If the process is killed
        before it has taken them, nothing is lost but this proof.
        """
        self._own_steps.flush()
        self._record_stop()
        self._session.save_unsaved(self._open)
        self._session.save()
        self._last_step = self.global_step
        self._steps_until_stop = LEAST_REPEATED_STEPS

    def _approach_stop(self, steps: int) -> None:
        self._steps_until_stop = steps - (self.global_step - self._last_step)
        self._last_step = self.global_step
        if self._steps_until_stop <= 0:
            self._own_steps.flush()
            self._release_and_exit()

    def end(self, error: BaseException | None) -> None:
        """Close the run without saving, because the script has ended.

        Args:
            error: The error that has ended the script, or None.
        """
        if not self._session.is_open:
            return
        self._own_steps.end_loop()
        if error is not None:
            self._record.left_by(error)
        self._release("finished" if error is None else "failed")
