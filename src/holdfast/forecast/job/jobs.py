"""A user's training job on the fake device.

Its models, its optimizers, and one step of any size, as Guard makes it.

A loss function is called under autocast and its loss is run backward, scaled for fp16; gradients
are emptied before, and every optimizer is stepped. Clipping, which takes no memory to speak of, is
left out. A function that calls
backward itself makes its own step: one call of it has to step every optimizer.

Tensors lie where the user's code puts them. If the step does not run so, since it names no device,
the batch is put where the model is, and if that is not enough, all that the step makes.
"""

from __future__ import annotations

import contextlib
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
from holdfast.forecast.job.building import Built, Function
from holdfast.forecast.job.sample_batch import Leaf, SampleBatch, Values, cut, leaves_of
from holdfast.forecast.job.user_functions import (
    GuardStandIn,
    Watch,
    called_with_batch,
    is_hooked,
    own_autocasts,
)
from holdfast.forecast.trace.attribution import line_of
from holdfast.forecast.trace.events import Assumption
from holdfast.memory.blocks import find_repeated_blocks
from holdfast.memory.oom import clear_exception_frames
from holdfast.memory.recompute import recomputing
from holdfast.numerics.loss import read_loss

_AS_BUILT = "its tensors where they were built"
_BATCH = "the batch on the device"
_ALL = "the batch, and what it makes without naming a device, on the device"
_PLACEMENTS = (_AS_BUILT, _BATCH, _ALL)


class Job:
    """One training job on the fake device, whose mode must be active.

    Models are brought there (H413, H426, H427).

    `gradient_accumulation_steps` are micro-batches of a step, where a loss function is given;
    `recompute` names modules of `blocks`.
    """

    def __init__(
        self,
        built: Built,
        device: ForecastDevice,
        *,
        gradient_accumulation_steps: int = 1,
        recompute: Sequence[str] = (),
    ) -> None:
        if any(
            hasattr(p, "device_mesh") for model in built.models.values() for p in model.parameters()
        ):
            raise several_devices(
                "a model that build() returned has parameters spread over a device mesh"
            )
        device.place(*built.models.values())
        self.models = {
            "" if name == "model" else name: model for name, model in built.models.items()
        }
        self.optimizers = built.optimizers
        self.blocks = find_blocks(self.models)
        self.claim: Callable[[Any], object] = lambda _: None  # called with each batch that is made
        self.assumptions: list[Assumption] = []
        self.casts = False  # whether it has an autocast of its own; known after `settle`
        self._device = device
        self._count = gradient_accumulation_steps
        self._placement = _AS_BUILT
        self.sample: SampleBatch | None = None  # none if the step makes its own
        if built.has_batch:
            reading: dict[str, Any] = {"read": self._read, "make": self._make}
            self.sample = SampleBatch(
                built.batch, size=built.batch_size, split=built.split, **reading
            )
        self._recomputed = [module for name, module in self.blocks if name in recompute]
        self._place_of_function = building.place_of(built.function)
        self._guard = GuardStandIn(list(self.optimizers), self._step_of_guard)
        self._uses_guard = building.positional_parameters(built.function)[:1] == ["guard"]
        self._function = called_with_batch(built, self._guard)
        self._acts = built.is_step  # runs backward or steps optimizers by itself
        self._has_own_step = self._acts and not self._uses_guard
        self._begun = False  # whether it has done either
        self._stepped: set[str] = set()
        self._scaler = torch.amp.GradScaler(device.device.type, enabled=device.precision == "fp16")

    @property
    def accumulates(self) -> bool:
        """Whether its batch can be cut into micro-batches: known after the first step."""
        return self.sample is not None and not self._acts

    def settle(self, size: int) -> None:
        """Make the first step, and find out what the function does and where tensors must lie (H412
        to H414).

        A loss that `Guard` does not take is refused as there (H201 to H203).
        """
        for placement in _PLACEMENTS:
            self._placement = placement
            try:
                with own_autocasts(AddedAutocast) as own:
                    self._step_past_checks(size)
                break
            except PolicyError as error:
                # Tensors on two devices fail in many ways: autocast, for one, passes over those on
                # the host.
                if (
                    error.rule != "H414"
                    or self._device.route == "cpu"
                    or placement is _PLACEMENTS[-1]
                ):
                    raise
                failed = error
            # Torch 2.11: a checkpoint's hooks in them would see the next step
            clear_exception_frames(failed)
        if missed := self.optimizers.keys() - self._stepped:
            raise _untrained(
                f"one call of the step{self._place_of_function} did not step {sorted(missed)}"
            )
        self.casts = bool(own)
        self.assumptions.extend(Assumption(what=what) for what in self._found_out())
        if self.sample is not None:
            self.assumptions.extend(self.sample.assumptions())
        gc.collect()  # what a failed step has left

    def _found_out(self) -> Iterator[str]:
        """Yield what has to be said of the first step."""
        precision = self._device.precision
        if self._acts and not self._has_own_step:
            yield "the function runs backward and steps no optimizer: all were stepped after it"
        every = (
            p for model in self.models.values() for p in model.parameters() if p.is_floating_point()
        )
        own = [
            f"parameters in {name}"
            for name in sorted({str(p.dtype)[6:] for p in every if p.itemsize < 4})
        ]
        own += ["an autocast of its own"] if self.casts else []
        if own and precision == "fp32":
            yield (
                f"no autocast was added: the job has {' and '.join(own)}, and is forecast as its"
                " code has it"
            )
        if self._has_own_step and precision != "fp32":
            yield (
                f"autocast to {precision} was put around what the step does before backward: it has"
                " to do so itself, since it steps itself"
            )
        if self._placement != _AS_BUILT:
            yield f"the step ran only with {self._placement}, where the model is"
        if not self.accumulates and self._count > 1:
            yield "the step accumulates gradients by itself or not at all"

    def _step_past_checks(self, size: int) -> None:
        """Make a step; one that fails after it has asked a tensor is made with the other answer to
        the last question.

        Most of what raises after a question is a check, which is to pass.
        """
        guesses, first = self._device.guesses, None
        while True:
            guesses.asked.clear()
            try:
                return self.step(size)
            except PolicyError as error:
                first = first or error
                may_turn = [line for line in guesses.asked if line not in guesses.turned]
                if error.rule not in ("H414", "H424") or not may_turn:
                    guesses.turned.clear()
                    raise first from first.__cause__
                guesses.turn(may_turn[-1])
                failed = error
            clear_exception_frames(failed)

    def step(self, size: int) -> None:
        """Make one training step of `size` samples a micro-batch (H412, H413, H414)."""
        self._stepped = set()
        self._device.guesses.begin_step()
        with contextlib.ExitStack() as stack:
            if self._placement == _ALL:
                stack.enter_context(torch.device(self._device.device))
            if self._recomputed:
                stack.enter_context(recomputing(self._recomputed, lambda: None, lambda _: None))
            try:
                parts = self._batches(size)
                if self._uses_guard:
                    self._step_with_guard(parts[0])
                else:
                    self.make_step(parts, self._function, list(self.optimizers))
            except HoldfastError:
                raise
            except Exception as error:  # whatever the user's step does
                raise self._failed(error, size) from error

    def _step_with_guard(self, batch: Any) -> None:
        """Call a ``step(guard, batch)``."""
        with Watch(self._device.autocast) as seen:
            self._function(batch)
        self._stepped |= self._names_of(seen.optimizers)

    def _step_of_guard(
        self, batch: Any, function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        return self.make_step(
            [batch] if self._count == 1 else cut(batch, self._count), function, names
        )

    def make_step(
        self, parts: Sequence[Any], function: Function, names: Sequence[str]
    ) -> torch.Tensor | None:
        """Make one step from micro-batches.

        Return the last loss, or None if the function ran backward itself.
        """
        groups = [group for name in names for group in self.optimizers[name].param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not self._has_own_step:
            for parameter in parameters:
                parameter.grad = None
        loss = None
        with Watch(self._device.autocast) as seen:
            for part in parts:
                with seen.autocast():
                    returned = function(part)
                if not (seen.acted or self._begun):
                    self._has_own_step = False  # a loss function, whatever it was called
                    loss = read_loss(returned, None).total()
                    share = loss if len(parts) == 1 else loss * (1 / len(parts))
                    self._scaler.scale(share).backward(inputs=self._inputs(parameters))  # type: ignore[no-untyped-call]
        if (
            loss is not None
            and not seen.optimizers
            and all(p.grad is None and not is_hooked(p) for p in parameters)
        ):
            raise _untrained(
                f"the loss{self._place_of_function} gives no gradient to what {sorted(names)} steps"
            )
        self._acts = self._begun = loss is None
        self._has_own_step |= seen.acted and bool(seen.optimizers)
        self._stepped |= self._names_of(seen.optimizers)
        if not self._has_own_step:
            self._finish(names, unscales=loss is not None)
            self._stepped |= set(names)
        return None if loss is None else loss.detach()

    def _names_of(self, optimizers: Sequence[Optimizer]) -> set[str]:
        """Return which of the job's optimizers were stepped, if only by one that is within them."""
        done = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        return {
            name
            for name, one in self.optimizers.items()
            if any(id(p) in done for group in one.param_groups for p in group["params"])
        }

    def _inputs(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return where gradients may go, as Guard does.

        None if backward reaches nothing else anyway.

        What is trained by a hook of its own gets its gradient, whichever optimizers were returned.
        """
        mine = {id(parameter) for parameter in parameters}
        every = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        hooked = [p for p in every if id(p) not in mine and is_hooked(p)]
        if len(hooked) < sum(id(p) not in mine for p in every):
            return [p for p in (*parameters, *hooked) if p.requires_grad]
        return None

    def _finish(self, names: Sequence[str], *, unscales: bool) -> None:
        optimizers = [self.optimizers[name] for name in names]
        unscales = unscales and self._scaler.is_enabled()
        if unscales:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        for optimizer in optimizers:
            optimizer.step()
        if unscales:
            self._scaler.update()

    def _batches(self, size: int) -> list[Any]:
        sample = self.sample
        if sample is None:
            return [size]
        count = self._count if self.accumulates else 1
        batch = sample.resized(size * count)
        self.claim(leaves_of(batch))
        return [batch] if self._uses_guard or count == 1 else sample.parts(batch, count)

    def _read(self, tensor: torch.Tensor) -> Values | None:
        known_values = self._device.mode.known_values
        with unset_fake_temporarily():  # a value is real; under the mode a copy of it would not be
            value = (
                known_values.of(tensor).value if isinstance(tensor, FakeTensor) else tensor.detach()
            )
            return None if value is None or not worth_knowing(value) else value.cpu().numpy()

    def _make(self, leaf: Leaf) -> torch.Tensor:
        device = leaf.device if self._placement == _AS_BUILT else self._device.device
        made = torch.empty(
            leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad
        )
        if leaf.values is not None:
            with unset_fake_temporarily():
                self._device.mode.known_values.learn(
                    made, torch.from_numpy(np.ascontiguousarray(leaf.values))
                )
        return made

    def _failed(self, error: Exception, size: int) -> PolicyError:
        line = line_of(error)
        sample = self.sample
        taken = "" if sample is None else f"; {next(sample.assumptions()).what}"
        return PolicyError(
            f"the step raised {building.first_line(error)}"
            + (f", at {line}" if line else self._place_of_function),
            limit=(
                f"a step of {size} samples must run through, on tensors that have shapes and no"
                f" values{taken}"
            ),
            fix=(
                f"run such a step on real tensors, with {size} samples, since any number is planned"
                " for; if it works there, keep what reads values of tensors out of it."
            ),
            rule="H414",
        )


def _untrained(what: str) -> PolicyError:
    return PolicyError(
        what,
        limit=(
            "what an optimizer keeps for its parameters, and a step that trains them, would not be"
            " counted"
        ),
        fix=(
            "return only optimizers that are stepped, those that hooks step too, in a dict by name;"
            " let one call of a step accumulate its gradients and take every turn, or return a"
            " loss_fn, which is cut into micro-batches."
        ),
        rule="H412",
    )


def find_blocks(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be recomputed.

    Repeated blocks, or else the children that have parameters.
    """
    found: list[tuple[str, nn.Module]] = []
    for prefix, model in models.items():
        children = [
            (name, child)
            for name, child in model.named_children()
            if any(True for _ in child.parameters())
        ]
        blocks = find_repeated_blocks(model) or children
        found += [(".".join(filter(None, (prefix, name))), block) for name, block in blocks]
    return found
