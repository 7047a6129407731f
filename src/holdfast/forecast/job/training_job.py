"""A user's training job on the fake device: its models, its optimizers, and one step of any size.

A loss function is called under autocast, and its loss is run backward, scaled for fp16. Gradients
are set to None before it, and every optimizer steps after it. Clipping is left out because it needs
hardly any memory. A function that calls backward itself performs its own step, and one call must
step every optimizer.

Tensors stay where the user's code puts them. If the step fails that way because it names no device,
the batch is moved to the model's device; if that is not enough, so is everything that the step
creates.
"""

from __future__ import annotations

import contextlib
import enum
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim import Optimizer

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.fake.device import AddedAutocast, ForecastDevice
from holdfast.forecast.fake.known_values import worth_knowing
from holdfast.forecast.fake.stand_ins import several_devices
from holdfast.forecast.job import building
from holdfast.forecast.job.building import BuiltJob, Function
from holdfast.forecast.job.sample_batch import ArraySpec, SampleBatch, Values, cut
from holdfast.forecast.job.user_functions import (
    CallObserver,
    GuardStandIn,
    called_with_batch,
    is_hooked,
    own_autocasts,
    takes_guard,
)
from holdfast.forecast.trace.attribution import line_of
from holdfast.forecast.trace.events import Assumption
from holdfast.memory.blocks import find_repeated_blocks
from holdfast.memory.oom import clear_exception_frames
from holdfast.memory.recompute import recomputing
from holdfast.numerics.loss import read_loss


class _TensorPlacement(enum.Enum):
    """Where the tensors of a step are placed, in the order in which this is tried."""

    AS_BUILT = "its tensors where they were built"
    BATCH_ON_DEVICE = "the batch on the device"
    ALL_ON_DEVICE = "the batch, and tensors created without naming a device, on the device"


class _FunctionKind(enum.Enum):
    """How much of a training step the user's function performs."""

    RETURNS_LOSS = enum.auto()
    # It clears no gradients and steps no optimizer.
    RUNS_BACKWARD = enum.auto()
    MAKES_WHOLE_STEP = enum.auto()


class TrainingJob:
    """One training job on the fake device, whose mode must be active.

    Args:
        built: The result of the user's factory. Its models are moved to the device.
        device: The fake device.
        claim_batch: Called with the tensors of each new batch.
        gradient_accumulation_steps: Micro-batches per step, if the job has a loss function.
        recompute: Names of the `blocks` whose activations are recomputed.

    Raises:
        PolicyError: H413 for a sample batch that cannot be resized, H426 for hooks on
            nodes of moved parameters, H427 for a model on several devices.
    """

    def __init__(
        self,
        built: BuiltJob,
        device: ForecastDevice,
        *,
        claim_batch: Callable[[Any], object],
        gradient_accumulation_steps: int,
        recompute: Sequence[str],
    ) -> None:
        _check_single_device(built)
        device.place(*built.models.values())
        self.models = {
            "" if name == "model" else name: model for name, model in built.models.items()
        }
        self.optimizers = built.optimizers
        self.blocks = find_blocks(self.models)
        self.assumptions: list[Assumption] = []
        # Whether the job has its own autocast. Known after `settle`.
        self.casts = False
        self._device = device
        self._claim_batch = claim_batch
        self._accumulation_steps = gradient_accumulation_steps
        self._recomputed = [module for name, module in self.blocks if name in recompute]
        self._placement = _TensorPlacement.AS_BUILT
        # None if the step creates its own batches.
        self._sample: SampleBatch | None = None
        if built.has_batch:
            self._sample = SampleBatch(
                built.batch,
                size=built.batch_size,
                read=self._values_of,
                make=self._make_tensor,
            )
        self._place_of_function = building.place_of(built.function)
        self._uses_guard = takes_guard(built.function)
        guard = GuardStandIn(list(self.optimizers), self._make_guarded_step)
        self._function = called_with_batch(built, guard)
        # What the factory declared. After the first call it is what was observed.
        self._kind = _FunctionKind.RETURNS_LOSS
        if built.is_step:
            self._kind = _FunctionKind.MAKES_WHOLE_STEP
        self._kind_is_observed = False
        # Names of the optimizers that were stepped in the last step.
        self._stepped: set[str] = set()
        self._scaler = torch.amp.GradScaler(device.device.type, enabled=device.precision == "fp16")

    @property
    def accumulates(self) -> bool:
        """Whether its batch can be split into micro-batches. Known after the first step."""
        returns_loss = self._kind is _FunctionKind.RETURNS_LOSS
        return self._sample is not None and returns_loss

    # The first step.

    def settle(self, size: int) -> None:
        """Run the first step, to find out what the function does and where its tensors must be.

        Args:
            size: Samples of a micro-batch.

        Raises:
            PolicyError: H412 if an optimizer is not stepped, H414 if the step raises.
            HoldfastError: H201 to H203 for a loss that `Guard` does not take.
        """
        autocasts: list[torch.autocast] = []
        for placement in _TensorPlacement:
            self._placement = placement
            try:
                with own_autocasts(AddedAutocast) as autocasts:
                    self._step_past_checks(size)
                break
            except PolicyError as error:
                if not self._may_try_next_placement(error):
                    raise
                failed = error
            # In torch 2.11 the frames of the error keep the hooks of activation checkpointing
            # alive, which would then also act on the next step.
            clear_exception_frames(failed)
        missed = self.optimizers.keys() - self._stepped
        if missed:
            raise _untrained_optimizer(
                f"one call of the step{self._place_of_function} did not step {sorted(missed)}"
            )
        self.casts = bool(autocasts)
        self.assumptions += [Assumption(what=what) for what in self._assumed_in_first_step()]
        if self._sample is not None:
            self.assumptions += self._sample.assumptions()
        # Free the memory of failed attempts.
        gc.collect()

    def _may_try_next_placement(self, error: PolicyError) -> bool:
        """Return whether the step may succeed with more of its tensors on the device.

        Tensors on two devices fail in many ways, so any error of the step counts: autocast, for
        example, ignores tensors on the host.
        """
        if error.rule != "H414" or self._device.route == "cpu":
            return False
        return self._placement is not _TensorPlacement.ALL_ON_DEVICE

    def _step_past_checks(self, size: int) -> None:
        """Run a step so that the user's checks of values pass.

        The values are guessed (see `Guesses`). If the step raises after ``if tensor:`` was
        answered, that line is most likely a check. So the step is repeated with the other answer
        to the newest such line, until the step runs or every line has been tried.

        Raises:
            PolicyError: The first error, if no combination of answers makes the step run.
        """
        guesses = self._device.guesses
        first_error: PolicyError | None = None
        while True:
            guesses.asked.clear()
            try:
                return self.step(size)
            except PolicyError as error:
                first_error = first_error or error
                untried = [line for line in guesses.asked if line not in guesses.answered_false]
                if error.rule not in ("H414", "H424") or not untried:
                    guesses.answered_false.clear()
                    raise first_error from first_error.__cause__
                guesses.answer_false(untried[-1])
                failed = error
            clear_exception_frames(failed)

    def _assumed_in_first_step(self) -> Iterator[str]:
        """Yield the assumptions about how the user's function is run."""
        precision = self._device.precision
        if self._kind is _FunctionKind.RUNS_BACKWARD:
            yield "the function runs backward but steps no optimizer: all were stepped after it"
        own_precision = self._own_precision()
        if own_precision and precision == "fp32":
            yield (
                f"no autocast was added: the job has {' and '.join(own_precision)}, which the"
                " forecast leaves as they are"
            )
        if self._kind is _FunctionKind.MAKES_WHOLE_STEP and precision != "fp32":
            yield (
                f"the part of the step before backward ran under autocast to {precision}; in"
                " training, the step must enter autocast itself"
            )
        if self._placement is not _TensorPlacement.AS_BUILT:
            yield f"the step ran only with {self._placement.value} of the model"
        if not self.accumulates and self._accumulation_steps > 1:
            yield "the step accumulates gradients itself or not at all"

    def _own_precision(self) -> list[str]:
        """Return the ways in which the job sets a precision other than fp32."""
        dtypes = {
            str(parameter.dtype).removeprefix("torch.")
            for parameter in self._parameters()
            if parameter.is_floating_point() and parameter.itemsize < 4
        }
        means = [f"parameters in {name}" for name in sorted(dtypes)]
        if self.casts:
            means.append("its own autocast")
        return means

    # One step.

    def step(self, size: int) -> None:
        """Run one training step.

        Args:
            size: Samples of a micro-batch.

        Raises:
            PolicyError: H412 if the loss trains no parameter, H413 for a batch that cannot be
                created, H414 if the user's code raises.
        """
        self._stepped = set()
        self._device.guesses.begin_step()
        with contextlib.ExitStack() as stack:
            if self._placement is _TensorPlacement.ALL_ON_DEVICE:
                stack.enter_context(torch.device(self._device.device))
            if self._recomputed:
                stack.enter_context(recomputing(self._recomputed, lambda: None, lambda _: None))
            try:
                micro_batches = self._make_batches(size)
                if self._uses_guard:
                    with CallObserver(self._device.autocast) as observer:
                        self._function(micro_batches[0])
                    self._stepped |= self._names_of(observer.stepped)
                else:
                    self._make_step(micro_batches, self._function, list(self.optimizers))
            except HoldfastError:
                raise
            except Exception as error:
                # The user's step may raise anything.
                raise self._failed(error, size) from error

    def _make_batches(self, size: int) -> list[Any]:
        """Return the micro-batches of a step, or the size if the step creates its own batch."""
        if self._sample is None:
            return [size]
        count = self._accumulation_steps if self.accumulates else 1
        batch = self._sample.resized(size * count)
        self._claim_batch(batch)
        if self._uses_guard or count == 1:
            return [batch]
        return self._sample.parts(batch, count)

    def _make_guarded_step(
        self, batch: Any, function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        """Run the step that a ``step(guard, batch)`` requests from its guard."""
        if self._accumulation_steps == 1:
            return self._make_step([batch], function, names)
        return self._make_step(cut(batch, self._accumulation_steps), function, names)

    def _make_step(
        self, micro_batches: Sequence[Any], function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        """Run one step of the named optimizers.

        Everything that the user's function does not do itself is done here (see `_FunctionKind`):
        clearing the gradients, backward, and stepping the optimizers. What the function does is
        known only once it has been called.

        Returns:
            The last loss, or None if the function runs backward itself.
        """
        parameters = self._optimized_parameters(names)
        if self._kind is not _FunctionKind.MAKES_WHOLE_STEP:
            for parameter in parameters:
                parameter.grad = None
        loss = None
        with CallObserver(self._device.autocast) as observer:
            for micro_batch in micro_batches:
                with observer.calling():
                    returned = function(micro_batch)
                if self._note_kind(observer) is _FunctionKind.RETURNS_LOSS:
                    loss = read_loss(returned, None).total()
                    share = loss
                    if len(micro_batches) > 1:
                        share = loss * (1 / len(micro_batches))
                    self._scaler.scale(share).backward(inputs=self._inputs(parameters))  # type: ignore[no-untyped-call]
        if loss is not None and not observer.stepped:
            self._check_trained(parameters, names)
        self._stepped |= self._names_of(observer.stepped)
        if self._kind is not _FunctionKind.MAKES_WHOLE_STEP:
            self._step_optimizers(names, unscale=loss is not None)
            self._stepped |= set(names)
        return None if loss is None else loss.detach()

    def _note_kind(self, observer: CallObserver) -> _FunctionKind:
        """Update `_kind` from the newest call of the function, and return it.

        The kind never goes back to `RETURNS_LOSS`: a function that has run backward before may skip
        it in some calls, and need not return a loss then.
        """
        ran_before = self._kind_is_observed and self._kind is not _FunctionKind.RETURNS_LOSS
        if observer.acted and observer.stepped:
            self._kind = _FunctionKind.MAKES_WHOLE_STEP
        elif not observer.acted and not ran_before:
            self._kind = _FunctionKind.RETURNS_LOSS
        elif self._kind is _FunctionKind.RETURNS_LOSS:
            self._kind = _FunctionKind.RUNS_BACKWARD
        self._kind_is_observed = True
        return self._kind

    def _check_trained(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Refuse a loss that gives no parameter a gradient (H412).

        A hook may have consumed a gradient.
        """
        if not any(p.grad is not None or is_hooked(p) for p in parameters):
            raise _untrained_optimizer(
                f"the loss{self._place_of_function} gives no gradient to the parameters of"
                f" {sorted(names)}"
            )

    def _step_optimizers(self, names: Sequence[str], *, unscale: bool) -> None:
        """Step the named optimizers, through the gradient scaler if `unscale` is set."""
        optimizers = [self.optimizers[name] for name in names]
        if not unscale or not self._scaler.is_enabled():
            for optimizer in optimizers:
                optimizer.step()
            return
        for optimizer in optimizers:
            self._scaler.unscale_(optimizer)
        for optimizer in optimizers:
            optimizer.step()
        self._scaler.update()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for model in self.models.values():
            yield from model.parameters()

    def _optimized_parameters(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the parameters of the named optimizers."""
        groups = [group for name in names for group in self.optimizers[name].param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _names_of(self, stepped: Sequence[Optimizer]) -> set[str]:
        """Return the job's optimizers that were stepped, directly or through an inner optimizer."""
        groups = [group for optimizer in stepped for group in optimizer.param_groups]
        stepped_ids = {id(parameter) for group in groups for parameter in group["params"]}
        return {
            name
            for name in self.optimizers
            if any(id(parameter) in stepped_ids for parameter in self._optimized_parameters([name]))
        }

    def _inputs(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the tensors that receive gradients, as in `Guard`.

        These are the parameters of the chosen optimizers, and those with a hook, which may train
        them. None if backward reaches no other tensors anyway.
        """
        chosen = {id(parameter) for parameter in parameters}
        others = [
            parameter
            for parameter in self._parameters()
            if parameter.requires_grad and id(parameter) not in chosen
        ]
        hooked = [parameter for parameter in others if is_hooked(parameter)]
        if len(hooked) == len(others):
            return None
        return [parameter for parameter in (*parameters, *hooked) if parameter.requires_grad]

    # Tensors of the batch.

    def _values_of(self, tensor: torch.Tensor) -> Values | None:
        """Return the known values of a tensor of the sample batch."""
        known_values = self._device.mode.known_values
        # Values are real tensors, which the fake mode would copy into fake ones.
        with unset_fake_temporarily():
            if isinstance(tensor, FakeTensor):
                value = known_values.of(tensor).value
            else:
                value = tensor.detach()
            if value is None or not worth_knowing(value):
                return None
            return value.cpu().numpy()

    def _make_tensor(self, spec: ArraySpec) -> torch.Tensor:
        """Return a tensor of a batch. Its values are known if those in the sample batch were."""
        is_as_built = self._placement is _TensorPlacement.AS_BUILT
        device = spec.device if is_as_built else self._device.device
        tensor = torch.empty(
            spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad
        )
        if spec.values is not None:
            with unset_fake_temporarily():
                value = torch.from_numpy(np.ascontiguousarray(spec.values))
                self._device.mode.known_values.learn(tensor, value)
        return tensor

    def _failed(self, error: Exception, size: int) -> PolicyError:
        """Return the error for a step in which the user's code has raised."""
        line = line_of(error)
        where = f", at {line}" if line else self._place_of_function
        assumed = ""
        if self._sample is not None:
            assumed = f"; {next(self._sample.assumptions()).what}"
        return PolicyError(
            f"the step raised {building.first_line(error)}{where}",
            limit=(
                f"a forecast runs the step with {size} samples, on tensors that have a shape but no"
                f" values{assumed}"
            ),
            fix=(
                f"run the step on real tensors with {size} samples, because a forecast needs a step"
                " that works with any number; if it runs, move code that reads the values of"
                " tensors out of the step."
            ),
            rule="H414",
        )


def _check_single_device(built: BuiltJob) -> None:
    for model in built.models.values():
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise several_devices(
                "a model that build() returned has parameters spread over a device mesh"
            )


def _untrained_optimizer(what: str) -> PolicyError:
    """Return the error for an optimizer that the step does not train with (H412)."""
    return PolicyError(
        what,
        limit="the forecast would miss its state, and the memory for training its parameters",
        fix=(
            "return only optimizers that the step steps, in a dict by name; optimizers stepped by"
            " hooks count too. One call of step() must accumulate all gradients and step every"
            " optimizer; if yours does not, return a loss_fn instead, whose batch can be split into"
            " micro-batches."
        ),
        rule="H412",
    )


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be recomputed, with their paths.

    These are the repeated blocks, or if there are none, the children of a model that have
    parameters.
    """
    blocks: list[tuple[str, nn.Module]] = []
    for prefix, model in models.items():
        candidates = find_repeated_blocks(model)
        if not candidates:
            candidates = [
                (name, child)
                for name, child in model.named_children()
                if next(child.parameters(), None) is not None
            ]
        for name, block in candidates:
            path = ".".join(part for part in (prefix, name) if part)
            blocks.append((path, block))
    return blocks
