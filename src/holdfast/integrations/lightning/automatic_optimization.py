"""Automatic optimization: turn Lightning's optimizer steps into steps of a guard.

Lightning passes a closure to the optimizer. This module uses the closure as the loss function of
the guard's step: the closure runs ``training_step`` and its hooks on the batch, or on a part of
the batch, without a backward pass.

With accumulation, Lightning calls its closure without an optimizer for all batches of a window
except the last one. For those batches, the strategy's ``training_step`` makes the guard accumulate
the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.guard.accumulation import divided
from holdfast.guard.hosted import HostedGuard
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.lightning.optimization import Optimization
from holdfast.integrations.refusals import load, unsupported
from holdfast.loader.splitting import Split

load("lightning.pytorch")
from lightning.pytorch.loops.optimization.closure import AbstractClosure  # noqa: E402
from lightning.pytorch.trainer import call  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402


class AutomaticOptimization(Optimization):
    """Runs the steps that Lightning requests in automatic optimization.

    It takes the arguments of `Optimization` and one more.

    Args:
        run_training_step: Function that runs ``training_step`` as Lightning's own strategy does.
    """

    def __init__(
        self,
        module: Any,
        guard: HostedGuard,
        optimizers: Sequence[torch.optim.Optimizer],
        split: Split,
        run_training_step: Callable[..., Any],
    ) -> None:
        super().__init__(module, guard, optimizers, split)
        self._run_training_step = run_training_step
        self._optimizer_hooks = [
            optimizer.register_step_pre_hook(self._before_optimizer) for optimizer in optimizers
        ]
        self._takes_batch_index = is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        # The arguments of ``training_step`` after the batch.
        self._further_args: tuple[Any, ...] = ()
        # The closure of the current optimizer step, or None outside an optimizer step.
        self._closure: Callable[[], Any] | None = None
        # The part of the batch whose loss is being computed for the guard, and the loss.
        self._part: Any = None
        self._loss: torch.Tensor | None = None
        # The last output of ``training_step``, or of Lightning's closure, in this attempt.
        self._output: Any = None

    @property
    def makes_steps(self) -> bool:
        """Return whether the guard runs a step on the current batch.

        The guard runs no step while ``StochasticWeightAveraging`` passes batches through the
        averaged model only to update BatchNorm.
        """
        return not self._trainer.fit_loop._skip_backward

    @property
    def _batches_per_step(self) -> int:
        # ``GradientAccumulationScheduler`` may change this value between epochs.
        return int(self._trainer.accumulate_grad_batches)

    def close(self) -> None:
        """Remove this object's hooks from the optimizers."""
        for hook in self._optimizer_hooks:
            hook.remove()

    # --- Steps ---

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Store the batch, because a step may need it several times."""
        super().begin_batch(batch, batch_idx)
        self._further_args = (batch_idx,) if self._takes_batch_index else ()
        if batch_idx % self._batches_per_step == 0:
            # Lightning resets the gradients at the start of a window. If the module overrides
            # ``optimizer_step``, some may be left from the previous window.
            self.accumulation.forget()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` for the guard, or accumulate the gradients of a batch.

        The second case applies if Lightning calls this method, which it does for a batch that does
        not complete a step. The guard then runs the backward pass, so the returned loss has no
        graph.
        """
        if self.is_called_by_guard:
            output = self._run_training_step(self._part, *args[1:], **kwargs)
            self._loss = output.get("loss") if isinstance(output, Mapping) else output
            return _without_graph(output)
        result, output = self._make_step(self.accumulation.add)
        if isinstance(output, Mapping):
            return {**output, "loss": result.loss}
        return result.loss

    def optimizer_step(self, closure: Callable[[], Any]) -> Any:
        """Run the step that ends with this batch, and return its loss.

        Args:
            closure: Lightning's closure, which runs ``training_step`` and hooks. The backward pass
                is run by the guard rather than by the closure.
        """
        self._closure = closure
        try:
            result, output = self._make_step(self.accumulation.step)
        finally:
            self._closure = None
        if not isinstance(closure, AbstractClosure):
            # The module's own ``optimizer_step`` has wrapped Lightning's closure, which therefore
            # cannot receive the output.
            return result.loss
        if self._logs.num_parts > 1:
            output.loss = result.loss / self._batches_per_step
        closure._result = output
        return output.loss

    def _make_step(self, make: Callable[[Any, LossFunction], StepResult]) -> tuple[StepResult, Any]:
        """Run a step, or add the gradients of one batch to it.

        Args:
            make: Function that takes the batch and the loss function, and runs the step or adds the
                gradients, such as `Accumulation.step`.

        Returns:
            The result of the step, and the last output of ``training_step``.
        """
        self._logs.begin_step()
        self.skipped = True
        try:
            result = make(self._batch, self._loss_of_part)
        finally:
            self._logs.end_step(self._batch)
        self.skipped = result.skipped
        output = self._output
        self._output = None
        return result, output

    def _undo_previous_attempt(self) -> None:
        super()._undo_previous_attempt()
        self._output = None

    def _loss_of_part(self, part: Any) -> torch.Tensor:
        """Return the loss of the batch or of a part of it, as the loss function of the guard."""
        self._part = part
        self.is_called_by_guard = True
        try:
            with self._logging_part(part) as is_attempt:
                self._call_training_step(part, is_attempt=is_attempt)
            if self._loss is None:
                raise unsupported(
                    "training_step returned None",
                    reason="a guarded step needs a loss",
                    fix=(
                        "return a loss, and filter out batches in the loader. Steps with NaN are"
                        " skipped automatically."
                    ),
                )
            return divided(self._loss, self._batches_per_step)
        finally:
            self._loss = None
            self._part = None
            self.is_called_by_guard = False

    def _call_training_step(self, part: Any, *, is_attempt: bool) -> None:
        if is_attempt and self._closure is not None:
            self._call_closure(self._closure)
            return
        with self._within_training_step():
            output = self.training_step(part, *self._further_args)
        if is_attempt:
            self._output = output
            self._call_hooks("on_before_backward", self._loss)

    def _call_closure(self, closure: Callable[[], Any]) -> None:
        """Call Lightning's closure, but keep the gradients of the batch's earlier parts.

        The closure itself would reset all gradients.
        """
        parameters: list[torch.Tensor] = []
        if self._logs.num_parts:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    parameters.extend(group["params"])
        gradients = [parameter.grad for parameter in parameters]
        closure()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if isinstance(closure, AbstractClosure):
            self._output = closure.consume_result()

    # --- Hooks ---

    def call_backward_hooks(self) -> None:
        """Call Lightning's hooks before or after the backward pass, which the guard runs itself.

        When the guard computes a loss, the backward pass follows. Otherwise, it is already done.
        """
        if self.is_called_by_guard:
            self._call_hooks("on_before_backward", self._loss)
        else:
            self.accumulation.show()
            self._call_hooks("on_after_backward")

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Call Lightning's hooks between the backward pass and the step of an optimizer."""
        if self._closure is None:
            # Other code is stepping the optimizer outside Lightning's optimizer step.
            return
        self._call_hooks("on_after_backward")
        self._call_hooks("on_before_optimizer_step", optimizer)
        if lightning_clips(self._module):
            self._trainer.precision_plugin._clip_gradients(
                self._module,
                optimizer,
                self._trainer.gradient_clip_val,
                gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
            )

    def _call_hooks(self, name: str, *args: Any) -> None:
        call._call_callback_hooks(self._trainer, name, *args)
        call._call_lightning_module_hook(self._trainer, name, *args)


def _without_graph(output: Any) -> Any:
    """Return the output of ``training_step`` with its loss detached.

    Lightning keeps a reference to the output. If the loss were not detached, the reference would
    keep the autograd graph in memory.
    """
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": output["loss"].detach()}
    return output


def lightning_clips(module: Any) -> bool:
    """Return whether Lightning clips the gradients instead of the guard.

    Lightning does so if gradients are clipped by value, or if the module overrides
    ``configure_gradient_clipping``.
    """
    if module.trainer.gradient_clip_algorithm == "value":
        return True
    return bool(is_overridden("configure_gradient_clipping", module))
