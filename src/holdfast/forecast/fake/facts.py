"""What is known of a fake tensor's values: small integers exactly, bounds, and what finite numbers would answer.

Lengths, masks and indices decide shapes, and the sample batch has them. They are small, so they are computed along
with the shapes, wherever every input is known. Of the rest ``expectations`` says between which bounds they are and
how a question about them comes out.

Does not: answer questions (``data_dependent``), or follow floating-point values beyond single ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.forecast.fake.expectations import NOTHING, Fact, bounded_by_dtype, expected_of

aten = torch.ops.aten
_MOST_ELEMENTS = (
    65_536  # token ids of 32 texts of 2048: half a megabyte, some tens of microseconds for each operation
)

_FACTORIES = frozenset(
    {aten.arange, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor, aten.tril_indices}
)
_FILLED = {aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1, aten.zero_: 0}
_FILLED_BY = {aten.full_like: 1, aten.new_full: 2, aten.fill_: 1}  # position of the number


class Facts:
    """The facts of all tensors of a fake mode."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[torch.Tensor], Fact, int]] = {}
        self._of_storage: dict[int, set[int]] = {}

    def of(self, tensor: torch.Tensor) -> Fact:
        """Return what is known of a tensor."""
        entry = self._facts.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return bounded_by_dtype(tensor.dtype)
        return entry[1]

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Take a real tensor as the value of a fake one, if that is worth knowing."""
        if worth_knowing(tensor):
            self._put(tensor, Fact(value=value))

    def evaluate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives for the known values of its inputs, or NotImplemented if one is unknown."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        values: dict[int, torch.Tensor] = {}
        for tensor in tensors_of(args, kwargs):
            value = self.of(tensor).value
            if value is None:
                return NotImplemented
            values[id(tensor)] = value
        cpu = torch.device("cpu")

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return values[id(leaf)]
            return cpu if isinstance(leaf, torch.device) else leaf

        real_args, real_kwargs = pytree.tree_map(real, (tuple(args), dict(kwargs)))
        real_kwargs.pop("pin_memory", None)
        with torch.no_grad():
            return func(*real_args, **real_kwargs)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Work out what is known of an operator's results, which are fake, and what is no longer known."""
        packet = func.overloadpacket
        if (packet in _FACTORIES or self._any_known(args, kwargs)) and self._follow_values(func, args, kwargs, out):
            return
        fact = expected_of(packet, args, out, self.of) if isinstance(out, torch.Tensor) else NOTHING
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        filled = _fill(packet, args)
        if filled is not None and worth_knowing(out):
            self._put(out, Fact(value=torch.full(out.shape, filled, dtype=out.dtype)))
        elif fact is not NOTHING:
            self._put(out, fact)

    def _follow_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
        """Compute an operator's results, in place too, in values that views share; return whether that is done."""
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not all(map(worth_knowing, results)) or not (results or func._schema.is_mutable):
            return False
        values = self.evaluate(func, args, kwargs)
        if values is NotImplemented:
            return False
        for result, value in zip(results, pytree.tree_leaves(values) if results else (), strict=True):
            self.know(result, value)
        return True

    def _any_known(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return any(id(tensor) in self._facts for tensor in tensors_of(args, kwargs))

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(tensor, torch.Tensor):
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
    number = args[_FILLED_BY[packet]] if packet in _FILLED_BY and len(args) > _FILLED_BY[packet] else None
    return number if isinstance(number, (int, float)) else None


def worth_knowing(tensor: torch.Tensor) -> bool:
    """Tell whether a fake tensor holds integers or booleans, and few enough to compute with, or a single number."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_floating_point() or tensor.is_complex():  # such as an optimizer's step count
        return tensor.numel() == 1
    return tensor.numel() <= _MOST_ELEMENTS


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments, and those in lists of them."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (element for element in arg if isinstance(element, torch.Tensor))
