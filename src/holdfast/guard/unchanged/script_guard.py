"""`ScriptGuard`: the guard of an unchanged script, which calls ``optimizer.step()`` itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.core.events import run_events
from holdfast.guard.guard import Guard
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.restoration import is_deterministic
from holdfast.guard.unchanged.saved_script import LEAST_REPEATED_STEPS
from holdfast.guard.unchanged.variables.kinds import storage_address


class _NoRecovery(Recovery):
    """Undoes no steps, because the training of an unchanged script must not be altered."""

    def after_refused_save(self, why: str) -> None:
        """Do nothing. An event has already reported that the state contains NaN or Inf."""


class ScriptGuard(Guard):
    """A guard to which `Script` reports the steps and boundaries of an unchanged script.

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
        # The global step after which the process exits. None while no stop is requested.
        self._exit_step: int | None = None
        super().__init__(run_dir, model=models, optimizer=optimizers, state=state)
        # The accelerators of the models. They are needed at each batch, and finding them takes a
        # look at every parameter.
        self.devices = self._parts.devices()
        # `Script` restores the position in the data, so the guard must not warn that it is unknown.
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
        # `Script` has already fetched the newest checkpoint of the mirror, and has restored itself.
        self._session.mirroring.start(may_pull=False)
        # The code between the finished loops has run again, so the script may already have changed
        # settings such as the learning rate. A comparison with the checkpoint would report them.
        resumed_from = self._session.restoration.resume(self._resume_step, reports_settings=False)
        self._session.mirroring.offer_newest()
        return resumed_from

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers by name."""
        return self._parts.optimizers

    @property
    def guarded_ids(self) -> frozenset[int]:
        """Return the `id` of each object that this guard saves itself, and of its storage.

        The `id` of a tensor and the address of its contents differ, so one set can hold both.
        """
        ids = {id(optimizer) for optimizer in self._parts.optimizers.values()}
        for model in self._parts.models.values():
            ids.update(map(id, model.modules()))
            tensors = [*model.parameters(), *model.buffers()]
            ids.update(map(id, tensors))
            addresses = map(storage_address, tensors)
            ids.update(address for address in addresses if address is not None)
        return frozenset(ids)

    @property
    def failed_repetition(self) -> run_events.RepeatedStepDiffers | None:
        """Return the event for the repeated step that differs, or None if there is none."""
        return self._record.failed_repetition

    def before_step(self, optimizer: Optimizer) -> None:
        """Begin to count a step of the script.

        Raises:
            BatchError: H212 if the step would change guarded parameters, but cannot be counted.
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
            SystemExit: `LEAST_REPEATED_STEPS` steps after a signal or ``Policy.max_time`` has
                requested a stop.
        """
        self._own_steps.end_batch()
        if self._exit_step is None:
            if may_save:
                self._boundaries.boundary_outside()
                if self._stop.ends_process:
                    self._begin_stop()
        elif may_exit and self.global_step >= self._exit_step:
            self._own_steps.flush()
            self._release_and_exit()
        self._own_steps.begin_batch()

    def _begin_stop(self) -> None:
        """Save because of a stop request, and let the script take a few more steps.

        The resumed script repeats these steps, which proves that the resume is exact. If the
        process is killed before it has taken them, only this proof is lost.
        """
        self._own_steps.flush()
        self._record_stop()
        self._session.save_unsaved(self._open)
        self._session.save()
        self._session.requests.expect_steps_after_last_save()
        self._exit_step = self.global_step + LEAST_REPEATED_STEPS

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
