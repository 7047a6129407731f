"""A place to try things in a training process: losses, gradients and steps, all of which are taken back.

What is put back are weights, buffers, gradients, modes and plain attributes of the modules, the state, groups and
attributes of the optimizers, and random state; each in the very objects where it was, bit for bit. The copies lie in
host memory. What a loss function changes outside its modules is not taken back. ``probes`` decides what is tried.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core.errors import BatchError
from holdfast.loader.random_state import capture, restore
from holdfast.loader.splitting import Split, batch_size, copied, micro_batches, tensors_in
from holdfast.numerics.loss import read_loss, without_graph

_SAMPLES = 32


class CannotTry(Exception):  # noqa: N818 - an outcome, not a mistake
    """Nothing can be learnt from this batch, or the time is over; the text says which."""


class Trial:
    """One batch, and everything that is needed to try steps on it; a context manager that puts all back.

    The arguments are those of ``probes.probe``; `is_over` says whether the time is spent.
    """

    def __init__(
        self,
        batch: Any,
        size: int | None,
        split: Split,
        loss_fn: Callable[[Any], Any],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        before_step: Callable[[], object] | None,
        is_over: Callable[[], bool],
    ) -> None:
        self._split = split
        self._loss_fn = loss_fn
        self._modules = list({id(m): m for model in models.values() for m in model.modules()}.values())
        self._optimizers = list(optimizers.values())
        self._before_step = before_step
        self._is_over = is_over
        self.batch, self._size = batch, size
        self.optimizer_names = ", ".join(optimizers)
        moved = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        self.parameters: list[torch.Tensor] = list({id(p): p for p in moved if p.requires_grad}.values())
        named = {id(p): f"{name}.{key}" for name, model in models.items() for key, p in model.named_parameters()}
        single = len(models) == 1
        self._names = {key: name.split(".", 1)[1] if single else name for key, name in named.items()}

    def __enter__(self) -> Self:
        self.batch, self._size = self.first(_SAMPLES)
        owned = [p for module in self._modules for p in module._parameters.values() if p is not None]
        parameters: dict[int, torch.Tensor] = {id(p): p for p in (*owned, *self.parameters)}
        self._gradients = [(p, p.grad) for p in parameters.values()]
        seen: set[int] = set()
        keepers = [*map(vars, self._modules), *map(vars, self._optimizers), [*parameters.values()]]
        self._put_back = [_kept(each, seen) for each in keepers]
        devices = {p.device for p in parameters.values() if p.device.type not in ("cpu", "meta")}
        self._random = capture(sorted(devices, key=str))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for put_back in self._put_back:
            put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        restore(self._random)

    def begin(self) -> None:
        """Go back to the weights and states from which training will go on, without gradients."""
        self._restore()
        for parameter, _ in self._gradients:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer._optimizer_step_pre_hooks = OrderedDict()
            optimizer._optimizer_step_post_hooks = OrderedDict()

    def loss(self, part: Any, *, backward: bool = False) -> float:
        """Return the loss of a batch; with `backward`, leave its gradient alone in ``.grad``."""
        self._begin_evaluation()
        with torch.set_grad_enabled(backward):
            total = read_loss(self._loss_fn(copied(part)), None, needs_graph=backward).total()
        if backward:
            for parameter in self.parameters:
                parameter.grad = None
            total.backward(inputs=self.parameters)  # type: ignore[no-untyped-call]
        return float(total.detach())

    def _begin_evaluation(self) -> None:
        if self._is_over():
            raise CannotTry("the time for it is over")
        restore(self._random)

    def finite_loss(self, part: Any, *, backward: bool = False) -> float:
        """Return the loss of a batch; raise `CannotTry` if it is NaN or Inf."""
        loss = self.loss(part, backward=backward)
        if not math.isfinite(loss):
            raise CannotTry(f"its loss is {loss:g}")
        return loss

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters that have a gradient with a dense copy of it, by name."""
        return {
            self._names.get(id(p), f"parameter {number}"): (p, p.grad.detach().to_dense().clone())
            for number, p in enumerate(self.parameters)
            if p.grad is not None
        }

    def densify(self) -> None:
        """Make sparse gradients dense, for an optimizer that needs that."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()

    def slopes(self, moved: Sequence[tuple[torch.Tensor, torch.Tensor]], loss: float) -> list[float]:
        """Return the measured by the predicted change of the loss along gradients, for two small steps.

        About 1 for a right gradient, -1 for a reversed one; steps whose effect rounding hides are left out.
        """
        square = sum(float(gradient.double().square().sum()) for _, gradient in moved)
        weights = math.sqrt(sum(float(p.detach().double().square().sum()) for p, _ in moved)) or 1.0
        # 0.1 % of the loss, but within 1e-5 to 1e-2 of the weights: a loss near 0 says nothing about a step.
        longest, shortest = 1e-2 * weights / math.sqrt(square), 1e-5 * weights / math.sqrt(square)
        length = min(max(1e-3 * abs(loss) / square, shortest), longest)
        eps = max(torch.finfo(p.dtype).eps for p, _ in moved)
        found = []
        for step in (length, length / 5):
            behind, ahead = (self._loss_at(moved, sign * step) for sign in (1.0, -1.0))
            noise = 8 * eps * abs(loss)
            if behind < ahead:  # a suspicion: then see what a step does that is too small to matter
                noise = max(noise, abs(self._loss_at(moved, -step / 1000) - loss))
            if 2 * step * square > 20 * noise:
                found.append((behind - ahead) / (2 * step * square))
        return found

    def _loss_at(self, moved: Sequence[tuple[torch.Tensor, torch.Tensor]], step: float) -> float:
        before = [parameter.detach().clone() for parameter, _ in moved]
        try:
            for parameter, gradient in moved:
                parameter.data.add_(gradient, alpha=step)
            return self.loss(self.batch)
        finally:
            for (parameter, _), value in zip(moved, before, strict=True):
                parameter.data.copy_(value)

    def own_steps(self, factor: float, steps: int) -> list[float]:
        """Make the run's own steps with its learning rates multiplied; return the loss before and after each of them.

        It ends with the first that is not finite.
        """
        self.begin()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        losses = [self.loss(self.batch, backward=True)]
        while len(losses) <= steps and abs(losses[-1]) < float("inf"):
            if self._before_step is not None:
                self._before_step()
            for optimizer in self._optimizers:
                optimizer.step()
            losses.append(self.loss(self.batch, backward=True))
        return losses

    # --- the batch ----------------------------------------------------------------------------------------------

    def first(self, samples: int) -> tuple[Any, int | None]:
        """Return at most so many samples from the beginning of the batch, and their number if it is known."""
        if self._size is None or self._size <= samples:
            return self.batch, self._size
        try:
            part = micro_batches(self.batch, self._size, samples, self._split)[0][0]
        except BatchError:
            return self.batch, None
        try:
            return part, batch_size(part, self._split)
        except BatchError:
            return part, None

    def tensor(self, number: int) -> torch.Tensor:
        """Return one tensor of the batch."""
        return tensors_in(self.batch)[number]

    def varying(self, part: Any) -> list[int]:
        """Return the numbers of the tensors that have one entry per sample, and not the same one."""
        found = []
        for number, tensor in enumerate(tensors_in(part)):
            axis = self._axis(number)
            if axis is not None and not bool((tensor == tensor.narrow(axis, 0, 1)).all()):
                found.append(number)
        return found

    def _axis(self, number: int) -> int | None:
        """Return the batch dimension of a tensor as far as it is known: a number, or the same size as the batch."""
        tensor = tensors_in(self.batch)[number]
        if self._size is None or self._size < 2 or tensor.layout != torch.strided or tensor.ndim == 0:
            return None
        if isinstance(self._split, int):
            return self._split if -tensor.ndim <= self._split < tensor.ndim else None
        return next((axis for axis, length in enumerate(tensor.shape) if length == self._size), None)

    def mixed(self, part: Any, number: int) -> Iterator[Any]:
        """Yield copies of a batch, one tensor given to other samples: two rotations, then the first one to all."""
        axis = self._axis(number)
        assert axis is not None
        length = tensors_in(part)[number].shape[axis]
        for shift in (1, length // 2, None):
            changed = copied(part)
            tensor = tensors_in(changed)[number]
            other = tensor.narrow(axis, 0, 1).expand_as(tensor) if shift is None else tensor.roll(shift, axis)
            tensor.copy_(other.clone())
            yield changed

    def read_by_loss(self) -> set[int]:
        """Return the numbers of the tensors with which the loss function computes something."""
        given = copied(self.batch)
        reads = _Reads(tensors_in(given))
        self._begin_evaluation()
        with reads:
            without_graph(lambda: self._loss_fn(given))
        return reads.read


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors are arguments of an operation that computes: views and copies are followed instead."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self._alive = list(tensors)  # or another tensor could get the memory of a copy that is gone
        self._numbers = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(tensors)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and see what it was given."""
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        met = [number for leaf in given if (number := self._number(leaf)) is not None]
        if met and func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone):
            self._alive.append(result)
            self._numbers[result.untyped_storage().data_ptr()] = met[0]
        elif not func.is_view:
            self.read.update(met)
        return result

    def _number(self, leaf: torch.Tensor) -> int | None:
        return self._numbers.get(leaf.untyped_storage().data_ptr()) if leaf.layout == torch.strided else None


def _kept(value: Any, seen: set[int]) -> Callable[[], Any]:
    """Copy a tree of dicts, lists, tuples and tensors; the result puts all back into the same objects, repeatedly."""
    if not isinstance(value, (dict, list, tuple, torch.Tensor)) or id(value) in seen:
        return lambda: value
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        is_opaque = value.is_meta or value.layout != torch.strided
        copy = None if is_opaque else value.detach().to("cpu", copy=True)
        return lambda: value if copy is None else _copied_back(value, copy)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    parts = [_kept(value[key], seen) for key in keys]

    def put_back() -> Any:
        now = [part() for part in parts]
        if isinstance(value, dict):
            value.clear()
            value.update(zip(keys, now, strict=True))
        elif isinstance(value, list):
            value[:] = now
        return value

    return put_back


def _copied_back(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    tensor.data.copy_(copy)
    return tensor
