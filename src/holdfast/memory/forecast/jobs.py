"""A user's training job on the fake device: its models, its optimizers, and one step of any size, as Guard makes it.

A loss function is called under autocast and its loss is run backward, scaled for fp16; gradients are emptied before,
clipped if asked, and every optimizer is stepped. A function that calls backward itself makes its own step. Tensors
lie where the user's code puts them. If the step does not run so, since it names no device, the batch is put where the
model is, and if that is not enough, all that the step makes.

Does not: record (``tracer``), start a process (``tracing``), or read what a factory returns (``building``).
"""

from __future__ import annotations

import contextlib
import difflib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.memory.forecast import building
from holdfast.memory.forecast.building import Built, Function
from holdfast.memory.forecast.facts import worth_knowing
from holdfast.memory.forecast.fake_device import ForecastDevice
from holdfast.memory.forecast.sample_batch import Leaf, SampleBatch, Values
from holdfast.memory.forecast.trace import Assumption
from holdfast.memory.forecast.user_functions import Watch, find_loss
from holdfast.memory.recompute import find_repeated_blocks, recomputing

_AS_BUILT = "its tensors where they were built"
_BATCH = "the batch on the device"
_ALL = "the batch, and what it makes without naming a device, on the device"
_PLACEMENTS = (_AS_BUILT, _BATCH, _ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is made.

    Args:
        gradient_accumulation_steps: Micro-batches in it, if a loss function is given.
        max_grad_norm: Norm to which gradients are clipped; None: they are not.
        recompute: Names of modules whose activations are recomputed.
    """

    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    recompute: tuple[str, ...] = ()


class Job:
    """One training job on the fake device, whose mode must be active.

    Args:
        built: What the factory returned; its models are brought to the device.
        batches: Sample batches by length; empty if the step makes its own.
        device: The fake one.
        options: How its step is made.

    Raises:
        PolicyError: H412 for a name in ``recompute`` that is no module's.
        BatchError: H413.
    """

    def __init__(
        self, built: Built, batches: Mapping[int | None, Any], device: ForecastDevice, options: StepOptions
    ) -> None:
        device.place(*built.models.values())
        self.models = {"" if name == "model" else name: model for name, model in built.models.items()}
        self.optimizers = built.optimizers
        self.blocks = find_blocks(self.models)
        self.claim: Callable[[Any], object] = lambda _: None  # told about each batch that is made
        self.assumptions: list[Assumption] = []
        self._device = device
        self._options = options
        self._placement = _AS_BUILT
        self._samples = {
            length: SampleBatch(batch, read=self._read, make=self._make, size=built.batch_size, split=built.split)
            for length, batch in batches.items()
        }
        self._recomputed = _modules_named(options.recompute, self.models)
        self._place_of_function = building.place_of(built.function)
        self._uses_guard = building.positional_parameters(built.function)[:1] == ["guard"]
        self._function = self._called(built)
        self._has_own_backward = self._has_own_step = built.is_step is True
        self._scaler = torch.amp.GradScaler(device.device.type, enabled=device.precision == "fp16")

    @property
    def accumulates(self) -> bool:
        """Whether its batch can be cut into micro-batches: known after the first step."""
        return self.sample is not None and not self._has_own_backward

    @property
    def sample(self) -> SampleBatch | None:
        """The sample batch, the first if there are several; None if the step makes its own."""
        return next(iter(self._samples.values()), None)

    def settle(self, size: int, length: int | None) -> None:
        """Make the first step, and find out what its function does and where its tensors must lie.

        Args:
            size: As of `step`.
            length: As of `step`.

        Raises:
            PolicyError: H412 or H414.
            BatchError: H413.
        """
        for placement in _PLACEMENTS:
            self._placement = placement
            try:
                self.step(size, length)
                break
            except PolicyError as error:
                # Tensors on two devices fail in many ways: autocast, for one, passes over those on the host.
                if error.rule != "H414" or self._device.route == "cpu" or placement is _PLACEMENTS[-1]:
                    raise
        if self._placement != _AS_BUILT:
            self.assumptions.append(Assumption(what=f"the step ran only with {self._placement}, where the model is"))
        if not self.accumulates and self._options.gradient_accumulation_steps > 1:
            self.assumptions.append(Assumption(what="the step accumulates gradients by itself or not at all"))
        if self.sample is not None:
            self.assumptions.extend(self.sample.assumptions(with_length=length is not None))
        gc.collect()  # what a failed step has left

    def step(self, size: int, length: int | None = None) -> None:
        """Make one training step.

        Args:
            size: Samples of each micro-batch.
            length: Of each sample; None: as in the sample batch.

        Raises:
            PolicyError: H412 for a function that returns no loss, H414 if it raises.
            BatchError: H413 for a batch that cannot be made.
        """
        with contextlib.ExitStack() as stack:
            if self._placement == _ALL:
                stack.enter_context(torch.device(self._device.device))
            if self._recomputed:
                stack.enter_context(recomputing(self._recomputed, lambda: None, lambda _: None))
            parts = self._batches(size, length)
            try:
                if self._uses_guard:
                    self._function(parts[0])
                else:
                    self.make_step(parts, self._function, list(self.optimizers))
            except HoldfastError:
                raise
            except Exception as error:  # whatever the user's step does
                raise self._failed(error, size) from error

    def make_step(self, parts: Sequence[Any], function: Function, names: Sequence[str]) -> torch.Tensor | None:
        """Make one step from micro-batches.

        Args:
            parts: Batches, each given to the function.
            function: Loss function of a batch, or a step.
            names: Optimizers that are stepped.

        Returns:
            The loss of the last one, detached; None if the function ran backward itself.

        Raises:
            PolicyError: H412 for a function that returns no loss.
        """
        parameters = [p for name in names for group in self.optimizers[name].param_groups for p in group["params"]]
        if not self._has_own_step:
            for parameter in parameters:
                parameter.grad = None
        loss = None
        with Watch(self._device.autocast) as seen:
            for part in parts:
                with seen.autocast():
                    returned = function(part)
                if not seen.backward:
                    loss = self._loss(returned)
                    share = loss if len(parts) == 1 else loss * (1 / len(parts))
                    self._scaler.scale(share).backward(inputs=self._inputs(parameters))  # type: ignore[no-untyped-call]
        self._has_own_backward, self._has_own_step = seen.backward, seen.steps > 0
        if not self._has_own_step:
            self._finish(parameters, [self.optimizers[name] for name in names], unscales=loss is not None)
        return None if loss is None else loss.detach()

    def cut(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a batch that a step gives to a guard."""
        count = self._options.gradient_accumulation_steps
        if count == 1:
            return [batch]
        return SampleBatch(batch, read=self._read, make=self._make).parts(batch, count)

    def _inputs(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return where gradients may go, as Guard does: None if backward reaches nothing else anyway."""
        mine = {id(parameter) for parameter in parameters}
        every = (p for model in self.models.values() for p in model.parameters())
        if any(p.requires_grad and id(p) not in mine for p in every):
            return [p for p in parameters if p.requires_grad]
        return None

    def _finish(self, parameters: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], *, unscales: bool) -> None:
        unscales = unscales and self._scaler.is_enabled()
        if unscales:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        if self._options.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._options.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        if unscales:
            self._scaler.update()

    def _called(self, built: Built) -> Function:
        """Return a function of a batch, or of size and length where the step makes its own."""
        function, names = built.function, building.positional_parameters(built.function)
        single = len(built.models) == 1 and "model" in built.models
        model: Any = built.models["model"] if single else built.models
        if function is None:
            return lambda batch: model(**batch)
        if not built.has_batch:
            if "length" in building.keyword_parameters(function):
                return lambda asked: function(asked[0], length=asked[1])
            return lambda asked: function(asked[0])
        if self._uses_guard:
            guard = GuardStandIn(self)
            return lambda batch: function(guard, batch)
        if len(names) == len(("input", "target")) and isinstance(function, nn.Module) and single:
            return lambda batch: function(model(batch[0]), batch[1])
        if len(names) == len(("model", "batch")):
            return lambda batch: function(model, batch)
        return function

    def _batches(self, size: int, length: int | None) -> list[Any]:
        sample = self._samples.get(length) or self.sample
        if sample is None:
            return [(size, length)]
        count = self._options.gradient_accumulation_steps if self.accumulates else 1
        batch = sample.resized(size * count, None if length in self._samples else length)
        self.claim(batch)
        return [batch] if self._uses_guard or count == 1 else sample.parts(batch, count)

    def _read(self, tensor: torch.Tensor) -> Values | None:
        facts = self._device.mode.facts
        value = facts.of(tensor).value if isinstance(tensor, FakeTensor) else tensor.detach()
        return None if value is None or not worth_knowing(value) else value.cpu().numpy()

    def _make(self, leaf: Leaf) -> torch.Tensor:
        device = leaf.device if self._placement == _AS_BUILT else self._device.device
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)
        if leaf.values is not None:
            self._device.mode.facts.know(made, torch.from_numpy(np.ascontiguousarray(leaf.values)))
        return made

    def _loss(self, returned: Any) -> torch.Tensor:
        loss = find_loss(returned)
        if loss is not None and loss.numel() == 1 and loss.requires_grad:
            return loss.reshape(())
        what = f"a {type(returned).__name__}"
        if loss is not None:
            what = f"a tensor of shape {tuple(loss.shape)}" if loss.requires_grad else "a loss without a graph"
        raise PolicyError(
            f"the loss function{self._defined_at()} returned {what} and did not call backward",
            limit="a forecast needs a scalar loss to run backward, or a step that does so itself",
            fix="return the mean loss, a tensor of one element that depends on the model's parameters.",
            rule="H412",
        )

    def _defined_at(self) -> str:
        return f" ({self._place_of_function})" if self._place_of_function else ""

    def _failed(self, error: Exception, size: int) -> PolicyError:
        line = building.line_of(error)
        return PolicyError(
            f"the step raised {building.first_line(error)}" + (f", at {line}" if line else self._defined_at()),
            limit=f"a step of {size} samples must run through, on tensors that have shapes and no values",
            fix="run one such step on real tensors; if it works there, keep what reads values of tensors out of it.",
            rule="H414",
        )


class GuardStandIn:
    """What a ``step(guard, batch)`` is given for a guard: its `step` makes the same step, and reports nothing.

    Args:
        job: Whose models and optimizers are meant.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def step(self, batch: Any, loss_fn: Function, *, optimizer: Any = None, split: Any = None) -> Any:  # noqa: ARG002
        """Make one step of one or several optimizers; see ``Guard.step``."""
        chosen = list(self._job.optimizers) if optimizer is None else optimizer
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        loss = self._job.make_step(self._job.cut(batch), loss_fn, names)
        facts = {"items": 1, "grad_norm": {}, "micro_batch_size": None, "attempts": 1, "dropped_samples": ()}
        return SimpleNamespace(loss=loss, skipped=False, reason=None, **facts)


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be recomputed: repeated blocks, or else the children that have parameters.

    Args:
        models: By the name that their modules' begin with; the empty one adds nothing.

    Returns:
        Names, as `Policy.recompute` takes them, and modules.
    """
    found: list[tuple[str, nn.Module]] = []
    for prefix, model in models.items():
        children = [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
        blocks = find_repeated_blocks(model) or children
        found += [(".".join(filter(None, (prefix, name))), block) for name, block in blocks]
    return found


def _modules_named(names: Sequence[str], models: Mapping[str, nn.Module]) -> list[nn.Module]:
    known = {
        ".".join(filter(None, (prefix, name))): module
        for prefix, model in models.items()
        for name, module in model.named_modules()
    }
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise PolicyError(
                f"recompute={name!r}",
                limit="the models have no module of that name",
                fix=f"did you mean {nearest[0]!r}?" if nearest else "name a module of the model.",
                rule="H412",
            )
    return [known[name] for name in names]
