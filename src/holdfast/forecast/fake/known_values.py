"""Track which values of fake tensors are known.

Lengths, masks and indices determine shapes, and their values are in the sample batch. These tensors
are small, so if the values of all inputs of an operator are known, the values of its result are
computed as well. Most other values that training code reads are used in checks, such as whether the
loss is finite or whether a random number is below a probability. For these checks, all numbers are
assumed to be finite, and random numbers are assumed to be in the middle of their range.

The `guesses` module provides answers where values are unknown.
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

# Values are computed only for tensors with at most this many elements, such as the token ids of 32
# texts with 2048 tokens each. Such a tensor takes half a megabyte, and an operation on it takes
# tens of microseconds.
_MOST_ELEMENTS = 65_536
_ASSUMED_FINITE = "all numbers were assumed to be finite"
_ASSUMED_MIDDLE = "a random number was assumed to be the middle of its range"


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


# Operators that create tensors with known values and take no tensors as arguments.
_FACTORIES = _packets("arange zeros ones full eye scalar_tensor tril_indices")
# Operators that fill their result with a fixed number, regardless of their inputs.
_FILLS = {
    aten.zeros_like: 0,
    aten.ones_like: 1,
    aten.new_zeros: 0,
    aten.new_ones: 1,
    aten.zero_: 0,
}
# Operators that fill their result with one of their arguments, mapped to that argument's position.
_FILLS_WITH_ARGUMENT = {aten.full_like: 1, aten.new_full: 2, aten.fill_: 1}
_FINITENESS_CHECKS = _packets("isnan isinf isposinf isneginf")
# Operators whose result inherits the expected truth value and the bound of their first argument.
_PASS_ON = _packets(
    "view _unsafe_view clone detach alias _to_copy expand select slice unsqueeze squeeze reshape"
    " permute transpose t index contiguous lift_fresh any all _is_all_true _is_any_true max min"
    " amax amin"
)
_COUNTS = _packets("sum count_nonzero")
_NEGATIONS = _packets("logical_not bitwise_not")
_CONJUNCTIONS = _packets("logical_and bitwise_and mul")
_DISJUNCTIONS = _packets("logical_or bitwise_or add")
_COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.lt: operator.lt,
    aten.le: operator.le,
    aten.gt: operator.gt,
    aten.ge: operator.ge,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What is known about the values of one fake tensor. Every field is optional.

    Args:
        value: All values, as a real tensor on the CPU.
        expected: The likely result of ``bool(tensor)``, if the values are not known.
        why: The assumption behind `expected`.
        at_most: An upper bound on the values of an integer tensor.
        typical: The value to assume for a random number.
    """

    value: torch.Tensor | None = None
    expected: bool | None = None
    why: str = ""
    at_most: int | None = None
    typical: float | None = None


NOTHING_KNOWN = Knowledge()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownTensor:
    """What is known about a live tensor, together with the address of its storage."""

    tensor: weakref.ref[torch.Tensor]
    knowledge: Knowledge
    storage: int


class KnownValues:
    """Tracks what is known about the values of all fake tensors in a fake mode."""

    def __init__(self) -> None:
        # What is known about each tensor, keyed by the tensor's id.
        self._entries: dict[int, _KnownTensor] = {}
        # The ids of the tensors that share a storage, keyed by the storage's address. A write to
        # one of these tensors changes all of them.
        self._tensors_of_storage: dict[int, set[int]] = {}

    def of(self, tensor: torch.Tensor) -> Knowledge:
        """Return what is known about the values of a tensor."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry.tensor() is not tensor:
            return NOTHING_KNOWN
        return entry.knowledge

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Record the values of a fake tensor, unless `worth_knowing` excludes the tensor.

        Args:
            tensor: The fake tensor.
            value: A real tensor with the values.
        """
        if worth_knowing(tensor):
            self._put(tensor, Knowledge(value=value))

    def evaluate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on the known values of its inputs.

        Returns:
            The operator's results as real tensors. NotImplemented if the values of an input are
            unknown, or if the operator draws random numbers.
        """
        if torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        values = {id(tensor): self.of(tensor).value for tensor in tensors_of((args, kwargs))}
        if any(value is None for value in values.values()):
            return NotImplemented
        real_args, real_kwargs = _on_host(args, kwargs, lambda tensor: values[id(tensor)])
        real_kwargs.pop("pin_memory", None)
        with torch.no_grad():
            return func(*real_args, **real_kwargs)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Update what is known after an operator has run on fake tensors.

        Args:
            func: The operator's overload.
            args: The operator's positional arguments.
            kwargs: The operator's keyword arguments.
            out: The operator's fake results.
        """
        packet = func.overloadpacket
        may_be_known = packet in _FACTORIES or any(
            id(tensor) in self._entries for tensor in tensors_of((args, kwargs))
        )
        if may_be_known and self._follow_values(func, args, kwargs, out):
            return
        # Infer what is known about the result before forgetting the values of tensors that the
        # operator has written to, because an in-place operator also reads these tensors.
        knowledge = NOTHING_KNOWN
        if isinstance(out, torch.Tensor):
            knowledge = self._infer(packet, args, out)
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        number = _filled_with(packet, args)
        if number is not None and worth_knowing(out):
            self.learn(out, torch.full(out.shape, number, dtype=out.dtype))
        elif knowledge is not NOTHING_KNOWN:
            self._put(out, knowledge)

    def _follow_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> bool:
        """Compute and record the values of an operator's results, if its inputs are known.

        An in-place operator modifies the known values in place. The known values of views share
        their memory, so they change as well.

        Returns:
            Whether the values could be computed.
        """
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not all(map(worth_knowing, results)):
            return False
        if not results and not func._schema.is_mutable:
            return False
        values = self.evaluate(func, args, kwargs)
        if values is NotImplemented:
            return False
        if results:
            for result, value in zip(results, pytree.tree_leaves(values), strict=True):
                self.learn(result, value)
        return True

    def _infer(self, packet: Any, args: Sequence[Any], out: torch.Tensor) -> Knowledge:
        """Infer what is known about an operator's result without computing its values."""
        if packet in _RANDOM_NUMBERS:
            if out.is_floating_point() and out.numel() > 1:
                return NOTHING_KNOWN
            return _RANDOM_NUMBERS[packet](args)
        if not args or not isinstance(args[0], torch.Tensor):
            return NOTHING_KNOWN
        if packet in _FINITENESS_CHECKS:
            return Knowledge(expected=False, why=_ASSUMED_FINITE)
        if packet in _PASS_ON:
            knowledge = self.of(args[0])
            if knowledge is NOTHING_KNOWN:
                return NOTHING_KNOWN
            return replace(knowledge, value=None)
        if packet in _COUNTS and args[0].dtype is torch.bool:
            return Knowledge(at_most=args[0].numel() // max(1, out.numel()))
        if out.dtype is torch.bool:
            return self._infer_question(packet, args)
        return NOTHING_KNOWN

    def _infer_question(self, packet: Any, args: Sequence[Any]) -> Knowledge:
        """Infer the likely result of a comparison or logical operator.

        The first rule that returns an answer is used.
        """
        for rule in (
            _compared_with_itself_or_infinity,
            self._compared_random_number,
            self._negated,
            self._combined,
        ):
            knowledge = rule(packet, args)
            if knowledge is not None:
                return knowledge
        return NOTHING_KNOWN

    def _compared_random_number(self, packet: Any, args: Sequence[Any]) -> Knowledge | None:
        """Infer the result of comparing a random number, such as ``torch.rand([]) < 0.1``."""
        compare = _COMPARISONS.get(packet)
        typical = self.of(args[0]).typical
        if compare is None or typical is None or len(args) < 2:
            return None
        other = args[1]
        if not isinstance(other, (int, float)):
            return None
        return Knowledge(expected=bool(compare(typical, other)), why=_ASSUMED_MIDDLE)

    def _negated(self, packet: Any, args: Sequence[Any]) -> Knowledge | None:
        """Infer the result of a negation from the expected truth value of its argument."""
        knowledge = self.of(args[0])
        if packet not in _NEGATIONS or knowledge.expected is None:
            return None
        return Knowledge(expected=not knowledge.expected, why=knowledge.why)

    def _combined(self, packet: Any, args: Sequence[Any]) -> Knowledge | None:
        """Infer the result of "and" or "or" from the expected truth values of its arguments."""
        if packet in _CONJUNCTIONS:
            combine = all
        elif packet in _DISJUNCTIONS:
            combine = any
        else:
            return None
        parts = [self.of(arg) for arg in args if isinstance(arg, torch.Tensor)]
        if any(part.expected is None for part in parts):
            return None
        return Knowledge(expected=combine(part.expected for part in parts), why=parts[0].why)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forget what is known about tensors that an operator has written to and their views."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tensors_of(written):
                storage = tensor.untyped_storage()._cdata
                for key in self._tensors_of_storage.pop(storage, ()):
                    self._entries.pop(key, None)

    def _put(self, tensor: torch.Tensor, knowledge: Knowledge) -> None:
        key = id(tensor)
        storage = tensor.untyped_storage()._cdata
        reference = weakref.ref(tensor, lambda _: self._drop(key))
        self._entries[key] = _KnownTensor(tensor=reference, knowledge=knowledge, storage=storage)
        self._tensors_of_storage.setdefault(storage, set()).add(key)

    def _drop(self, key: int) -> None:
        """Drop the entry of a tensor that no longer exists, unless its id has been reused."""
        entry = self._entries.get(key)
        if entry is None or entry.tensor() is not None:
            return
        del self._entries[key]
        keys = self._tensors_of_storage.get(entry.storage, set())
        keys.discard(key)
        if not keys:
            self._tensors_of_storage.pop(entry.storage, None)


def _compared_with_itself_or_infinity(packet: Any, args: Sequence[Any]) -> Knowledge | None:
    """Infer the result of finiteness checks such as ``x != x`` and ``x == float("inf")``."""
    if packet not in (aten.eq, aten.ne) or len(args) < 2:
        return None
    other = args[1]
    if other is args[0]:
        return Knowledge(expected=packet is aten.eq, why=_ASSUMED_FINITE)
    if isinstance(other, float) and math.isinf(other):
        return Knowledge(expected=packet is aten.ne, why=_ASSUMED_FINITE)
    return None


def _filled_with(packet: Any, args: Sequence[Any]) -> bool | int | float | None:
    """Return the number that an operator fills its result with, or None for other operators."""
    if packet in _FILLS:
        return _FILLS[packet]
    position = _FILLS_WITH_ARGUMENT.get(packet)
    if position is None or len(args) <= position:
        return None
    number = args[position]
    return number if isinstance(number, (int, float)) else None


# --- random numbers -------------------------------------------------------------------------------


def _standard_uniform(_: Sequence[Any]) -> Knowledge:
    return Knowledge(typical=0.5)


def _uniform(args: Sequence[Any]) -> Knowledge:
    low = args[1] if len(args) > 1 else 0.0
    high = args[2] if len(args) > 2 else 1.0
    return Knowledge(typical=(low + high) / 2)


def _random_integer(args: Sequence[Any]) -> Knowledge:
    # The arguments are (high, size) or (low, high, size). The upper bound `high` is exclusive.
    bounds = [arg for arg in args[:2] if isinstance(arg, int)]
    return Knowledge(at_most=bounds[-1] - 1)


def _random_permutation(args: Sequence[Any]) -> Knowledge:
    return Knowledge(at_most=max(0, args[0] - 1))


_RANDOM_NUMBERS: dict[Any, Callable[[Sequence[Any]], Knowledge]] = {
    aten.rand: _standard_uniform,
    aten.rand_like: _standard_uniform,
    aten.uniform_: _uniform,
    aten.randint: _random_integer,
    aten.randperm: _random_permutation,
}


def worth_knowing(tensor: torch.Tensor) -> bool:
    """Return whether `KnownValues` tracks the values of a tensor of this size and dtype.

    It tracks small tensors of integers or booleans, and single floating-point numbers such as an
    optimizer's step count.
    """
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.numel() == 1
    return tensor.numel() <= _MOST_ELEMENTS


def _on_host(
    args: Sequence[Any], kwargs: Mapping[str, Any], real: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which fake tensors are replaced by real ones, and devices by the CPU.

    Args:
        args: Positional arguments of an operator.
        kwargs: Keyword arguments of the operator.
        real: A function that returns the real tensor to use in place of a fake one.
    """
    cpu = torch.device("cpu")

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return real(leaf)
        return cpu if isinstance(leaf, torch.device) else leaf

    return (
        pytree.tree_map(replaced, tuple(args)),
        pytree.tree_map(replaced, dict(kwargs)),
    )
