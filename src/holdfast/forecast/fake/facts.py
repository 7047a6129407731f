"""What is known of a fake tensor's values.

Small integers exactly, and how finite numbers answer a check.

Lengths, masks and indices decide shapes, and the sample batch has them. They are small, so they are
computed along
with the shapes, wherever every input is known. Most other questions in training code are checks: is
    the loss finite,
is a random number below a probability. Numbers are taken as finite, and a random one as the middle
of its range.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.memory.tensors import tensors_of

aten = torch.ops.aten


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


# Token ids of 32 texts of 2048: half a megabyte, some tens of microseconds for each operation.
_MOST_ELEMENTS = 65_536
_FINITE = "all numbers were taken as finite"
_MIDDLE = "a random number was taken as the middle of its range"

# Operators, by what is known of their results.
_FACTORIES = _packets("arange zeros ones full eye scalar_tensor tril_indices")
_FILLED = {
    aten.zeros_like: 0,
    aten.ones_like: 1,
    aten.new_zeros: 0,
    aten.new_ones: 1,
    aten.zero_: 0,
}
_FILLED_BY = {aten.full_like: 1, aten.new_full: 2, aten.fill_: 1}  # position of the number
_OF_FINITENESS = _packets("isnan isinf isposinf isneginf")
_PASSED_ON = _packets(  # their results answer as their first argument does
    "view _unsafe_view clone detach alias _to_copy expand select slice unsqueeze squeeze reshape"
    " permute transpose t index contiguous lift_fresh any all _is_all_true _is_any_true max min"
    " amax amin"
)
_NOT = _packets("logical_not bitwise_not")
_AND, _OR = _packets("logical_and bitwise_and mul"), _packets("logical_or bitwise_or add")
_COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.lt: operator.lt,
    aten.le: operator.le,
    aten.gt: operator.gt,
    aten.ge: operator.ge,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is known of one tensor: all of its `value`, on the CPU.

    Else how it comes out as a question and why.

    `at_most` bounds an integer; `typical` is what a random number is taken for.
    """

    value: torch.Tensor | None = None
    expected: bool | None = None
    why: str = ""
    at_most: int | None = None
    typical: float | None = None


NOTHING = Fact()


class Facts:
    """The facts of all tensors of a fake mode."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[torch.Tensor], Fact, int]] = {}
        self._of_storage: dict[int, set[int]] = {}

    def of(self, tensor: torch.Tensor) -> Fact:
        """Return what is known of a tensor."""
        entry = self._facts.get(id(tensor))
        return NOTHING if entry is None or entry[0]() is not tensor else entry[1]

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Take a real tensor as the value of a fake one, if that is worth knowing."""
        if worth_knowing(tensor):
            self._put(tensor, Fact(value=value))

    def evaluate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives for the known values of its inputs, or NotImplemented if
        one is unknown.
        """
        if torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        values = {id(tensor): self.of(tensor).value for tensor in tensors_of((args, kwargs))}
        if any(value is None for value in values.values()):
            return NotImplemented
        real_args, real_kwargs = on_host(args, kwargs, lambda tensor: values[id(tensor)])
        real_kwargs.pop("pin_memory", None)
        with torch.no_grad():
            return func(*real_args, **real_kwargs)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Work out what is known of an operator's results, which are fake, and what is no longer
        known.
        """
        packet = func.overloadpacket
        known = packet in _FACTORIES or any(
            id(tensor) in self._facts for tensor in tensors_of((args, kwargs))
        )
        if known and self._follow_values(func, args, kwargs, out):
            return
        fact = self._expected(packet, args, out) if isinstance(out, torch.Tensor) else NOTHING
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        filled = _fill(packet, args)
        if filled is not None and worth_knowing(out):
            self._put(out, Fact(value=torch.full(out.shape, filled, dtype=out.dtype)))
        elif fact is not NOTHING:
            self._put(out, fact)

    def _follow_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> bool:
        """Compute an operator's results, in place too, in values that views share.

        Return whether that is done.
        """
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not all(map(worth_knowing, results)) or not (results or func._schema.is_mutable):
            return False
        values = self.evaluate(func, args, kwargs)
        if values is NotImplemented:
            return False
        for result, value in zip(
            results, pytree.tree_leaves(values) if results else (), strict=True
        ):
            self.know(result, value)
        return True

    def _expected(self, packet: Any, args: Sequence[Any], out: torch.Tensor) -> Fact:
        """Return what can be said of an operator's result without values."""
        if packet in _RANDOM:
            return NOTHING if out.is_floating_point() and out.numel() > 1 else _RANDOM[packet](args)
        if not args or not isinstance(args[0], torch.Tensor):
            return NOTHING
        if packet in _OF_FINITENESS:
            return Fact(expected=False, why=_FINITE)
        if packet in _PASSED_ON:
            before = self.of(args[0])
            return NOTHING if before is NOTHING else replace(before, value=None)
        if packet in (aten.sum, aten.count_nonzero) and args[0].dtype is torch.bool:
            return Fact(at_most=args[0].numel() // max(1, out.numel()))
        return self._answered(packet, args) if out.dtype is torch.bool else NOTHING

    def _answered(self, packet: Any, args: Sequence[Any]) -> Fact:
        before, other = self.of(args[0]), args[1] if len(args) > 1 else None
        if packet in (aten.eq, aten.ne):
            if other is args[0]:  # not a NaN
                return Fact(expected=packet is aten.eq, why=_FINITE)
            if isinstance(other, float) and math.isinf(other):
                return Fact(expected=packet is aten.ne, why=_FINITE)
        if (
            packet in _COMPARISONS
            and before.typical is not None
            and isinstance(other, (int, float))
        ):
            return Fact(expected=bool(_COMPARISONS[packet](before.typical, other)), why=_MIDDLE)
        if packet in _NOT and before.expected is not None:
            return Fact(expected=not before.expected, why=before.why)
        if packet in _AND or packet in _OR:
            facts = [self.of(arg) for arg in args if isinstance(arg, torch.Tensor)]
            if all(fact.expected is not None for fact in facts):
                whole = (all if packet in _AND else any)(fact.expected for fact in facts)
                return Fact(expected=whole, why=facts[0].why)
        return NOTHING

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tensors_of(given):
                for key in self._of_storage.pop(tensor.untyped_storage()._cdata, ()):
                    self._facts.pop(key, None)

    def _put(self, tensor: torch.Tensor, fact: Fact) -> None:
        key, storage = id(tensor), tensor.untyped_storage()._cdata

        def drop(_: object) -> None:
            entry = self._facts.get(key)
            if entry is not None and entry[0]() is None:
                del self._facts[key]
                keys = self._of_storage.get(entry[2], set())
                keys.discard(key)
                if not keys:
                    self._of_storage.pop(entry[2], None)

        self._facts[key] = (weakref.ref(tensor, drop), fact, storage)
        self._of_storage.setdefault(storage, set()).add(key)


def _fill(packet: Any, args: Sequence[Any]) -> bool | int | float | None:
    """Return what an operator fills its result with, whatever its inputs are."""
    if packet in _FILLED:
        return _FILLED[packet]
    number = (
        args[_FILLED_BY[packet]]
        if packet in _FILLED_BY and len(args) > _FILLED_BY[packet]
        else None
    )
    return number if isinstance(number, (int, float)) else None


def _uniform(args: Sequence[Any]) -> Fact:
    low, high = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
    return Fact(typical=(low + high) / 2)


_RANDOM: dict[Any, Callable[[Sequence[Any]], Fact]] = {
    aten.rand: lambda _: Fact(typical=0.5),
    aten.rand_like: lambda _: Fact(typical=0.5),
    aten.uniform_: _uniform,
    aten.randint: lambda args: Fact(
        at_most=[arg for arg in args[:2] if isinstance(arg, int)][-1] - 1
    ),
    aten.randperm: lambda args: Fact(at_most=max(0, args[0] - 1)),
}


def worth_knowing(tensor: torch.Tensor) -> bool:
    """Return whether a fake tensor holds integers or booleans, and few enough to compute with,
    or a single number.
    """
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_floating_point() or tensor.is_complex():  # such as an optimizer's step count
        return tensor.numel() == 1
    return tensor.numel() <= _MOST_ELEMENTS


def on_host(
    args: Sequence[Any], kwargs: Mapping[str, Any], real: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with real tensors in place of fake ones, and the CPU in place of devices."""
    cpu = torch.device("cpu")

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return real(leaf)
        return cpu if isinstance(leaf, torch.device) else leaf

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        replaced, (tuple(args), dict(kwargs))
    )
    return found
