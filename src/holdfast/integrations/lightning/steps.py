"""The steps of one ``fit`` of Lightning's, as transactions: between its hooks and a guard.

automatic optimization  the closure that Lightning gives to the optimizer is the loss function of
                        the guard's step: it runs ``training_step`` on the batch, or on a part of
                        it, with its hooks, and no backward
accumulation            the batches before the last one have a closure without an optimizer: their
                        part of the step is made inside its ``training_step``
manual optimization     `TrainerSteps.manual`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.core.events import run_events
from holdfast.guard.accumulation import Accumulation, divided
from holdfast.guard.hosted import HostedGuard
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.protocol import excluded, load
from holdfast.loader.splitting import Split, batch_size

load("lightning.pytorch")
from lightning.pytorch.loops.optimization.closure import AbstractClosure  # noqa: E402
from lightning.pytorch.trainer import call  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402
from torchmetrics import Metric  # noqa: E402

# Of a metric
_KEPT = ("_computed", "_forward_cache", "_update_count", "_update_called", "has_reset")


class TrainerSteps:
    """Makes the steps of one trainer.

    `forward` runs ``training_step`` as Lightning's own strategy does.
    """

    def __init__(
        self,
        module: Any,
        guard: HostedGuard,
        optimizers: Sequence[torch.optim.Optimizer],
        split: Split,
        forward: Callable[..., Any],
    ) -> None:
        self._module = module
        self._trainer = module.trainer
        self._guard = guard
        self._split = split
        self._forward = forward
        self._optimizers = optimizers
        self.accumulation = Accumulation(guard, self._attempt_begins)
        self._logs = StepLogs(module, self._trainer)
        self._hooks = [each.register_step_pre_hook(self._before_optimizer) for each in optimizers]
        self._takes_index = is_param_in_hook_signature(
            module.training_step, "batch_idx", min_args=2
        )
        self._batch: Any = None
        self._rest: tuple[Any, ...] = ()
        self._closure: Callable[[], Any] | None = None  # of the optimizer step that is being made
        self.passing = False
        """Whether ``training_step`` is called by the guard."""
        self._part: Any = None
        self._loss: torch.Tensor | None = None
        self._result: Any = None
        # Whether manual optimization is guarded; None: nobody looked
        self._manual: bool | None = None
        self.skipped = False
        """Whether the last step has left the weights as they were."""

    @property
    def automatic(self) -> bool:
        """Return whether Lightning optimizes.

        Not the module itself, nor a callback that only looks at batches.

        StochasticWeightAveraging has batches run through the averaged weights, for BatchNorm, and
        no backward pass.
        """
        return (
            bool(self._module.automatic_optimization) and not self._trainer.fit_loop._skip_backward
        )

    @property
    def _divisor(self) -> int:
        """Return the batches of a step.

        GradientAccumulationScheduler changes them between epochs.
        """
        return int(self._trainer.accumulate_grad_batches)

    def close(self) -> None:
        """Leave the optimizers alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Keep the batch: a step may need it several times."""
        self._batch, self._rest = batch, (batch_idx,) if self._takes_index else ()
        if batch_idx % self._divisor == 0:
            # As Lightning empties gradients; a module's own optimizer_step may leave some
            self.accumulation.forget()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step``, with the backward pass of a batch that only adds to a step.

        Free the graph.
        """
        if self.passing:
            found = self._forward(self._part, *args[1:], **kwargs)
            self._loss = found.get("loss") if isinstance(found, Mapping) else found
            return _without_graph(found)
        result, kept = self._make(self.accumulation.add)
        return {**kept, "loss": result.loss} if isinstance(kept, Mapping) else result.loss

    def optimizer_step(self, closure: Callable[[], Any]) -> Any:
        """Make the step that ends with this batch.

        The closure runs ``training_step`` and hooks, and no backward.
        """
        self._closure = closure
        try:
            result, kept = self._make(self.accumulation.step)
        finally:
            self._closure = None
        if not isinstance(closure, AbstractClosure):  # wrapped by the module's own optimizer_step
            return result.loss
        if self._logs.parts > 1:
            kept.loss = result.loss / self._divisor
        closure._result = kept
        return kept.loss

    def _make(self, make: Callable[[Any, LossFunction], StepResult]) -> tuple[StepResult, Any]:
        """Make a step or a part of one, and return also what ``training_step`` returned last."""
        self._logs.keep()
        self.skipped = True
        try:
            result = make(self._batch, self._pass)
        finally:
            self._logs.whole(self._batch)
        self.skipped = result.skipped
        kept, self._result = self._result, None
        return result, kept

    def _attempt_begins(self) -> None:
        self._result = None
        self._logs.put_back()

    def _pass(self, part: Any) -> torch.Tensor:
        """Return the loss of a part of the batch, with its graph."""
        self._part, self._loss, self.passing = part, None, True
        try:
            with self._logged(part) as attempting:
                if attempting and self._closure is not None:
                    self._call_closure(self._closure)
                else:
                    with self._as_training_step():
                        found = self.training_step(part, *self._rest)
                    if attempting:
                        self._result = found
                        self._call_hooks("on_before_backward", self._loss)
            return self._returned()
        finally:
            self._loss, self._part, self.passing = None, None, False

    def _returned(self) -> torch.Tensor:
        if self._loss is None:
            raise excluded(
                "training_step returned None",
                "a guarded step needs a loss",
                "return one, and leave batches out in the loader; steps with NaN are skipped by"
                " themselves.",
            )
        return divided(self._loss, self._divisor)

    @contextlib.contextmanager
    def _logged(self, part: Any) -> Iterator[bool]:
        """Count what is logged of a part; what a trial or a replay logs is taken back."""
        if self.accumulation.attempting:
            self._logs.begin_part(part, self._batch)
            yield True
            self._logs.end_part(self._samples(part))
        else:
            with self._logs.unseen():
                yield False

    def _call_closure(self, closure: Callable[[], Any]) -> None:
        """Call the closure, but keep the gradients of earlier parts.

        It empties them, as before any backward pass.
        """
        parameters: list[torch.Tensor] = []
        if self._logs.parts:
            parameters = [
                p
                for each in self._optimizers
                for group in each.param_groups
                for p in group["params"]
            ]
        kept = [p.grad for p in parameters]
        closure()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        if isinstance(closure, AbstractClosure):
            self._result = closure.consume_result()

    def _samples(self, part: Any) -> int:
        return 1 if part is self._batch or callable(self._split) else batch_size(part, self._split)

    @contextlib.contextmanager
    def _as_training_step(self) -> Iterator[None]:
        """Let ``self.log`` see that it is called in ``training_step``."""
        before, self._module._current_fx_name = self._module._current_fx_name, "training_step"
        try:
            yield
        finally:
            self._module._current_fx_name = before

    def backward_is_called(self) -> None:
        """Call the hooks around a backward pass; it is made by the guard."""
        if self.passing:
            self._call_hooks("on_before_backward", self._loss)
        else:
            self.accumulation.show()
            self._call_hooks("on_after_backward")

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._closure is None:
            return
        self._call_hooks("on_after_backward")
        self._call_hooks("on_before_optimizer_step", optimizer)
        if clips_itself(self._module):
            self._trainer.precision_plugin._clip_gradients(
                self._module,
                optimizer,
                self._trainer.gradient_clip_val,
                gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
            )

    def _call_hooks(self, name: str, *args: Any) -> None:
        call._call_callback_hooks(self._trainer, name, *args)
        call._call_lightning_module_hook(self._trainer, name, *args)

    def manual(
        self, batch: Any, loss_fn: LossFunction, optimizer: Any, split: Split | None
    ) -> StepResult:
        """Make one step; see `HoldfastStrategy.guarded_step`."""
        wrappers = self._trainer.strategy._lightning_optimizers
        wanted = (
            wrappers
            if optimizer is None
            else [optimizer]
            if not isinstance(optimizer, Sequence)
            else optimizer
        )
        raw = [getattr(each, "optimizer", each) for each in wanted]
        chosen = [i for i, each in enumerate(self._optimizers) if any(each is one for one in raw)]
        names = names_of(self._optimizers)
        before, self._batch, self._manual = self._batch, batch, True
        self._logs.keep()
        for i in chosen:
            wrappers[i]._on_before_step()
        try:
            result = self._guard.step(
                batch, _Watched(self, loss_fn), optimizer=[names[i] for i in chosen], split=split
            )
        finally:
            self._logs.whole(before)
            self._batch = before
        for i in chosen:
            wrappers[i]._on_after_step()
        return result

    def note_own_steps(self) -> None:
        """Record once that the first batch of manual optimization went past the guard."""
        if not self._module.automatic_optimization and self._manual is None:
            self._manual = False
            self._guard.emit(
                run_events.OwnSteps(
                    why=(
                        "training_step optimizes by itself, and its first batch called no"
                        " guarded_step; such steps are not guarded. Fix:"
                        " self.trainer.strategy.guarded_step(batch, loss_fn, optimizer=...)"
                    )
                )
            )

    def watched(self, part: Any, loss_fn: LossFunction) -> Any:
        """Call a loss function of manual optimization, and keep what it logs right."""
        with self._logged(part), self._as_training_step():
            return loss_fn(part)


class _Watched:
    """A loss function of manual optimization; the guard knows it again by the one that it holds."""

    def __init__(self, steps: TrainerSteps, loss_fn: LossFunction) -> None:
        self._steps = steps
        self.loss_fn = loss_fn

    def __call__(self, part: Any) -> Any:
        return self._steps.watched(part, self.loss_fn)


def _without_graph(found: Any) -> Any:
    """Return what ``training_step`` returned, with a loss that holds no graph.

    The guard frees it when it must.
    """
    if isinstance(found, Mapping):
        return (
            {**found, "loss": found["loss"].detach()}
            if isinstance(found.get("loss"), torch.Tensor)
            else found
        )
    return found.detach() if isinstance(found, torch.Tensor) else found


def names_of(optimizers: Sequence[Any]) -> list[str]:
    """Return what the guard calls these optimizers."""
    return (
        ["optimizer"]
        if len(optimizers) == 1
        else [f"optimizer_{i}" for i in range(len(optimizers))]
    )


def clips_itself(module: Any) -> bool:
    """Return whether the clipping is left to Lightning: by value, or as the module says."""
    by_value = module.trainer.gradient_clip_algorithm == "value"
    return by_value or is_overridden("configure_gradient_clipping", module)


class StepLogs:
    """What ``self.log`` and torchmetrics hold during a step, so that a step is logged once, as a
    whole.

    An attempt that is taken back leaves nothing in them. Of a batch that was cut, the values logged
    for each step are the mean over its parts, weighted by their samples; those that Lightning
    gathers over an epoch weigh each part by its own samples, as Lightning does with whole batches.
    """

    def __init__(self, module: nn.Module, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._before: list[tuple[str | None, Metric, dict[str, Any]]] = []
        self._parts: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._touched = False

    @property
    def parts(self) -> int:
        """Return in how many parts the batch has gone through the model, in this attempt."""
        return len(self._parts)

    def keep(self) -> None:
        """Note what is logged before a step."""
        self._before, self._parts, self._touched = self._now(), [], False

    def put_back(self) -> None:
        """Return to what was noted."""
        if self._touched:
            self._return_to(self._before)
        self._parts, self._touched = [], False

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Take back what is logged inside."""
        now = self._now()
        try:
            yield
        finally:
            self._return_to(now)

    def _now(self) -> list[tuple[str | None, Metric, dict[str, Any]]]:
        logged = self._trainer._results or {}
        metrics = [*logged.items(), *((None, each) for each in self._metrics)]
        return [(key, metric, _state_of(metric)) for key, metric in metrics]

    def _return_to(self, noted: list[tuple[str | None, Metric, dict[str, Any]]]) -> None:
        logged, keys = self._trainer._results, {key for key, _, _ in noted}
        for key in set(logged or ()) - keys:
            del logged[key]
        for _, metric, state in noted:
            vars(metric).update({name: _copied(value) for name, value in state.items()})

    def begin_part(self, part: Any, batch: Any) -> None:
        """Let the values to come count by the samples of this part of the batch."""
        self._touched = True
        logged = self._trainer._results
        if logged is not None and (part is not batch or self._parts):
            logged.batch, logged.batch_size = part, None

    def end_part(self, samples: int) -> None:
        """Take in what was logged of a part of so many samples."""
        logged = self._trainer._results or {}
        seen = {
            key: value for key, item in logged.items() if (value := _step_value(item)) is not None
        }
        self._parts.append((samples, seen))

    def whole(self, batch: Any) -> None:
        """Replace the values of the last part by those of the whole batch."""
        logged = self._trainer._results
        if logged is None:
            return
        logged.batch, logged.batch_size = batch, None
        if len(self._parts) > 1:
            for key, item in logged.items():
                values = [(samples, seen[key]) for samples, seen in self._parts if key in seen]
                if values and _step_value(item) is not None:
                    total = sum(samples for samples, _ in values)
                    item._forward_cache = sum(
                        value * (samples / total) for samples, value in values
                    )


def _step_value(item: Any) -> torch.Tensor | None:
    """Return what is logged for this step, if a mean of it says something."""
    value = (
        item._forward_cache
        if item.meta.on_step and item.is_tensor and item.meta.is_mean_reduction
        else None
    )
    return value if isinstance(value, torch.Tensor) else None


def _state_of(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, *(name for name in _KEPT if name in vars(metric))]
    found = {name: _copied(getattr(metric, name)) for name in names}
    if "value" in vars(metric) and "value" not in found:
        found["value"] = vars(metric)["value"]  # of a logged metric: the metric itself
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
