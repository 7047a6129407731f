"""Run steps of the user's training job on the fake device, with any number of samples.

If the job has a loss function, a step clears the gradients, calls the function under autocast, runs
backward (with a scaled loss in fp16), and steps every optimizer. Gradients are not clipped, because
clipping needs hardly any memory. If the job has a step function, a step is one call of it, which
must do all of this.

Tensors are created on the devices that the user's code chooses. Code that names no device creates
tensors on the host, so the step may fail. In that case, the step is retried with the batch on the
fake device, and finally with the batch and all tensors that the step creates on the fake device.
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
    """On which devices a step's tensors are placed. The placements are tried in this order.

    The values appear in messages, followed by "of the model".
    """

    AS_BUILT = "its tensors where they were built"
    BATCH_ON_DEVICE = "the batch on the device"
    ALL_ON_DEVICE = "the batch, and tensors created without naming a device, on the device"


class _FunctionKind(enum.Enum):
    """Which parts of a training step the user's function performs itself."""

    RETURNS_LOSS = enum.auto()
    # The function runs backward, but neither clears gradients nor steps optimizers.
    RUNS_BACKWARD = enum.auto()
    MAKES_WHOLE_STEP = enum.auto()
    # The function evaluates a batch, and the job trains nothing.
    EVALUATES = enum.auto()


class TrainingJob:
    """A training job whose steps run on the fake device.

    Args:
        built: The result of the user's factory. Its models are moved to the fake device.
        device: The fake device, which must be active.
        claim_batch: Called with each new batch.
        gradient_accumulation_steps: The number of micro-batches per step, if the job has a loss
            function.
        recompute: Names of the `blocks` whose activations are recomputed.

    Raises:
        BatchError: H413 if the sample batch cannot be resized.
        PolicyError: H426 if user code holds autograd nodes of moved parameters, H427 if a model is
            spread over several devices.
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
        # Whether the job's own code uses autocast. Set by `settle`.
        self.casts = False
        self._device = device
        self._claim_batch = claim_batch
        self._accumulation_steps = gradient_accumulation_steps
        self._recomputed = [module for name, module in self.blocks if name in recompute]
        self._placement = _TensorPlacement.AS_BUILT
        # None if the step creates its own batches.
        self.sample: SampleBatch | None = None
        if built.has_batch:
            self.sample = self.sample_of(built.batch, built.batch_size)
        self._place_of_function = building.place_of(built.function)
        self._uses_guard = takes_guard(built.function)
        guard = GuardStandIn(list(self.optimizers), self._make_guarded_step)
        self._function = called_with_batch(built, guard)
        # Before the first call of the function, this is the kind that the factory declared;
        # afterwards, it is the kind that was observed.
        self._kind = _FunctionKind.RETURNS_LOSS
        if built.is_step:
            self._kind = _FunctionKind.MAKES_WHOLE_STEP
        if built.only_evaluates:
            self._kind = _FunctionKind.EVALUATES
            self._function = torch.no_grad()(self._function)
            for model in built.models.values():
                model.eval()
        self._kind_is_observed = False
        # Names of the optimizers that were stepped during the last training step.
        self._stepped: set[str] = set()
        self._scaler = torch.amp.GradScaler(device.device.type, enabled=device.precision == "fp16")

    @property
    def accumulates(self) -> bool:
        """Whether a batch can be split into micro-batches. Valid after the first step."""
        returns_loss = self._kind is _FunctionKind.RETURNS_LOSS
        return self.sample is not None and returns_loss

    @property
    def only_evaluates(self) -> bool:
        """Whether the job trains nothing, so that a step is an evaluation of one batch."""
        return self._kind is _FunctionKind.EVALUATES

    # The first step.

    def settle(self, size: int) -> None:
        """Run the first step, to find out what the function does and where its tensors must be.

        Args:
            size: The number of samples per micro-batch.

        Raises:
            PolicyError: H412 if an optimizer is not stepped, H414 if the step raises with every
                placement of its tensors.
            HoldfastError: H201 to H203 if `Guard` does not support the loss.
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
            # In torch 2.11, the error's stack frames keep the hooks of activation checkpointing
            # alive, which would then still be active in the next step.
            clear_exception_frames(failed)
        missed = self.optimizers.keys() - self._stepped
        if missed:
            raise _untrained_optimizer(
                f"one call of the step{self._place_of_function} did not step {sorted(missed)}"
            )
        self.casts = bool(autocasts)
        self.assumptions += [Assumption(what=what) for what in self._assumed_in_first_step()]
        if self.sample is not None:
            self.assumptions += self.sample.assumptions()
        # Free the tensors of failed attempts.
        gc.collect()

    def _may_try_next_placement(self, error: PolicyError) -> bool:
        """Return whether the step may succeed if more of its tensors are on the fake device.

        Any error that the step raises (H414) qualifies, because mixed devices cause many different
        errors. For example, autocast ignores tensors on the host, so dtypes may not match.
        """
        if error.rule != "H414" or self._device.route == "cpu":
            return False
        return self._placement is not _TensorPlacement.ALL_ON_DEVICE

    def _step_past_checks(self, size: int) -> None:
        """Run a step, guessing the values of tensors so that the user's own checks pass.

        For each ``if tensor:``, an unknown value is assumed to be True (see `Guesses`). If the step
        then raises, the last line with such a condition is most likely a check such as
        ``if bad: raise``. The step is therefore retried with the value False at that line, and so
        on, until the step succeeds or every such line has been tried.

        Raises:
            PolicyError: The first error, if the step fails with all of these guesses.
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
        """Yield the assumptions about how the user's function was run."""
        precision = self._device.precision
        if self._kind is _FunctionKind.RUNS_BACKWARD:
            yield (
                "the function runs backward but steps no optimizer, so the forecast stepped all"
                " optimizers after it"
            )
        own_precision = self._own_precision()
        if own_precision and precision == "fp32":
            yield (
                f"no autocast was added, because the job sets its own precision with"
                f" {' and '.join(own_precision)}"
            )
        if self._kind is _FunctionKind.MAKES_WHOLE_STEP and precision != "fp32":
            yield (
                f"the part of the step before backward ran under {precision} autocast; in training,"
                " the step must enter autocast itself"
            )
        if self._placement is not _TensorPlacement.AS_BUILT:
            yield f"the step ran only with {self._placement.value} of the model"
        if not self.accumulates and self._accumulation_steps > 1:
            yield (
                "the step was not split into micro-batches, because it runs backward itself or has"
                " no sample batch"
            )

    def _own_precision(self) -> list[str]:
        """Describe how the job itself sets a precision below fp32, for a message.

        Returns:
            Phrases such as ``"parameters in bfloat16"``; empty if the job sets no precision.
        """
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
            size: The number of samples per micro-batch.

        Raises:
            PolicyError: H412 if the loss produces no gradient for any parameter, H414 if the user's
                code raises.
            BatchError: H413 if the batch cannot be created.
        """
        self._stepped = set()
        self._device.guesses.begin_step()
        with self.placing_tensors(), contextlib.ExitStack() as stack:
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
                # The user's step may raise any exception.
                raise self._failed(error, size) from error

    def placing_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that makes the step create its tensors on the right device."""
        if self._placement is _TensorPlacement.ALL_ON_DEVICE:
            return torch.device(self._device.device)
        return contextlib.nullcontext()

    def _make_batches(self, size: int) -> list[Any]:
        """Return the argument of each call of the user's function in a step.

        These are the micro-batches, or the batch size if the step creates its own batch.
        """
        if self.sample is None:
            return [size]
        count = self._accumulation_steps if self.accumulates else 1
        batch = self.sample.resized(size * count)
        self._claim_batch(batch)
        if self._uses_guard or count == 1:
            return [batch]
        return self.sample.parts(batch, count)

    def _make_guarded_step(
        self, batch: Any, function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        """Run a step for user code that has called ``guard.step(batch, loss_fn)``.

        Args:
            batch: The batch passed to the guard.
            function: The loss function passed to the guard.
            names: The names of the optimizers to step.
        """
        if self._accumulation_steps == 1:
            return self._make_step([batch], function, names)
        return self._make_step(cut(batch, self._accumulation_steps), function, names)

    def _make_step(
        self, micro_batches: Sequence[Any], function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        """Run one step of the named optimizers.

        Clear the gradients, run backward and step the optimizers, except for the parts that the
        user's function performs itself. Those parts (see `_FunctionKind`) are known only after the
        function's first call.

        Args:
            micro_batches: The argument of each call of the function.
            function: The user's function.
            names: Names of the optimizers to step.

        Returns:
            The loss of the last micro-batch, or None if the function runs backward itself.
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
        """Update `_kind` after a call of the function, and return it.

        The kind never changes back to `RETURNS_LOSS`: a function that has run backward before may
        skip backward in some calls, and need not return a loss in those calls. `EVALUATES` never
        changes.
        """
        if self._kind is _FunctionKind.EVALUATES:
            return self._kind
        has_run_backward = self._kind_is_observed and self._kind is not _FunctionKind.RETURNS_LOSS
        if observer.acted and observer.stepped:
            self._kind = _FunctionKind.MAKES_WHOLE_STEP
        elif not observer.acted and not has_run_backward:
            self._kind = _FunctionKind.RETURNS_LOSS
        elif self._kind is _FunctionKind.RETURNS_LOSS:
            self._kind = _FunctionKind.RUNS_BACKWARD
        self._kind_is_observed = True
        return self._kind

    def _check_trained(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Refuse a loss that produces no gradient for any of the parameters (H412).

        A loss passes if any parameter has a gradient or a hook, because the hook may have consumed
        the gradient.
        """
        if not any(p.grad is not None or is_hooked(p) for p in parameters):
            raise _untrained_optimizer(
                f"the loss{self._place_of_function} gives no gradient to the parameters of"
                f" {sorted(names)}"
            )

    def _step_optimizers(self, names: Sequence[str], *, unscale: bool) -> None:
        """Step the named optimizers.

        Args:
            names: The names of the optimizers.
            unscale: Whether the loss was passed through the gradient scaler. If so, and if the
                scaler is enabled, the gradients are unscaled first.
        """
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
        """Return the names of the job's optimizers that were stepped, directly or through another.

        An optimizer counts as stepped if any optimizer that shares parameters with it was stepped,
        such as the inner optimizer of a wrapper.
        """
        groups = [group for optimizer in stepped for group in optimizer.param_groups]
        stepped_ids = {id(parameter) for group in groups for parameter in group["params"]}
        return {
            name
            for name in self.optimizers
            if any(id(parameter) in stepped_ids for parameter in self._optimized_parameters([name]))
        }

    def _inputs(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the ``inputs`` argument for ``backward``, as `Guard` chooses it.

        Gradients are computed for the given parameters and for parameters with a hook, because the
        hook may train them. If these are all trainable parameters, the result is None.
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

    def sample_of(self, batch: Any, size: int | None = None) -> SampleBatch:
        """Return a sample batch whose tensors are created on the device that the step needs.

        Args:
            batch: The user's batch.
            size: The number of samples in the batch, or None to infer it.
        """
        return SampleBatch(batch, size=size, read=self._values_of, make=self._make_tensor)

    def _values_of(self, tensor: torch.Tensor) -> Values | None:
        """Return the values of a tensor in the sample batch, or None if they are not tracked."""
        known_values = self._device.mode.known_values
        # Leave the fake mode, because it would turn the real tensors that hold the values into fake
        # tensors.
        with unset_fake_temporarily():
            if isinstance(tensor, FakeTensor):
                value = known_values.of(tensor).value
            else:
                value = tensor.detach()
            if value is None or not worth_knowing(value):
                return None
            return value.cpu().numpy()

    def _make_tensor(self, spec: ArraySpec) -> torch.Tensor:
        """Create a fake tensor for a batch, and record its values if the spec includes them."""
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
        """Return the error for a step in which the user's code raised an exception (H414)."""
        line = line_of(error)
        where = f", at {line}" if line else self._place_of_function
        assumed = ""
        if self.sample is not None:
            assumed = f"; {next(self.sample.assumptions()).what}"
        return PolicyError(
            f"the step raised {building.first_line(error)}{where}",
            limit=(
                f"a forecast runs the step with {size} samples, on tensors that have a shape but no"
                f" values{assumed}"
            ),
            fix=(
                f"run the step on real tensors with {size} samples. If that fails too, make the"
                " step work with any number of samples; otherwise, move code that reads the values"
                " of tensors out of the step."
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
    """Return the error for an optimizer that the training step does not use (H412)."""
    return PolicyError(
        what,
        limit=(
            "an optimizer that is never stepped has no state, so the forecast would miss this state"
            " and the memory for training the parameters"
        ),
        fix=(
            "return only optimizers that the step uses, directly or in hooks. One call of step()"
            " must accumulate all gradients and step every optimizer. If yours does not, return a"
            " loss_fn instead; its batch can be split into micro-batches."
        ),
        rule="H412",
    )


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the paths and modules of the blocks whose activations could be recomputed.

    The blocks of a model are its repeated blocks, such as transformer layers. If it has none, they
    are its direct children that have parameters.
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
