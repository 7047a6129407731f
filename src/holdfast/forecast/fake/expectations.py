"""How a question about values comes out without them: by bounds, for finite numbers, at a random number's middle.

Most decisions in training code are checks: is the loss finite, is a label below the vocabulary, is a random number
below a probability (which is mostly 0). What is certain is told from what is likely.

Does not: know exact values (``facts``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

aten = torch.ops.aten
_FINITE = "all numbers were taken as finite"
_MIDDLE = "a random number was taken as the middle of its range"

_OF_FINITENESS = {aten.isnan: False, aten.isinf: False, aten.isposinf: False, aten.isneginf: False}
_VIEWS = frozenset(
    {
        *(aten.view, aten._unsafe_view, aten.clone, aten.detach, aten.alias, aten._to_copy, aten.expand, aten.select),
        *(aten.slice, aten.unsqueeze, aten.squeeze, aten.reshape, aten.permute, aten.transpose, aten.t, aten.index),
        *(aten.contiguous, aten.lift_fresh),
    }
)
_EXTREMES = frozenset(
    {aten.any, aten.all, aten._is_all_true, aten._is_any_true, aten.max, aten.min, aten.amax, aten.amin}
)
_NOT = frozenset({aten.logical_not, aten.bitwise_not})
_AND = frozenset({aten.logical_and, aten.bitwise_and, aten.mul})
_OR = frozenset({aten.logical_or, aten.bitwise_or, aten.add})
_TOTALS = frozenset({aten.sum, aten.count_nonzero})
_COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.lt: operator.lt,
    aten.le: operator.le,
    aten.gt: operator.gt,
    aten.ge: operator.ge,
}
_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add: operator.add,
    aten.sub: operator.sub,
    aten.mul: operator.mul,
    aten.floor_divide: operator.floordiv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is known of one tensor.

    Args:
        value: All of it, on the CPU; None if unknown.
        expected: How it comes out if it is asked as a question; None if that is open.
        why: What that takes for granted; empty if it is certain.
        at_least: No element is smaller.
        at_most: No element is larger.
        typical: What a random number is taken for; None for anything else.
    """

    value: torch.Tensor | None = None
    expected: bool | None = None
    why: str = ""
    at_least: float | None = None
    at_most: float | None = None
    typical: float | None = None


NOTHING = Fact()
_BOOLEAN = Fact(at_least=0, at_most=1)
Known = Callable[[torch.Tensor], Fact]


def bounded_by_dtype(dtype: torch.dtype) -> Fact:
    """Return what a type alone says."""
    return _BOOLEAN if dtype is torch.bool else NOTHING


def expected_of(packet: Any, args: Sequence[Any], out: torch.Tensor, known: Known) -> Fact:
    """Return what can be said of an operator's result.

    Args:
        packet: The operator, without its overload.
        args: Its arguments.
        out: Its result, fake.
        known: Returns what is known of a tensor.
    """
    if packet in _RANDOM:
        return _RANDOM[packet](args) if not out.is_floating_point() or out.numel() == 1 else NOTHING
    if not args or not isinstance(args[0], torch.Tensor):
        return NOTHING
    if packet in _OF_FINITENESS:
        return Fact(expected=_OF_FINITENESS[packet], why=_FINITE, at_least=0, at_most=1)
    before = known(args[0])
    if out.dtype is torch.bool:
        question = _answered(packet, args, before, known)
        if question is not None:
            return question
    if packet in _VIEWS:
        return replace(before, value=None) if before != NOTHING else NOTHING
    if packet in _EXTREMES:
        return replace(before, value=None, typical=None) if before != NOTHING else NOTHING
    if packet in (aten.argmax, aten.argmin):
        return Fact(at_least=0, at_most=max(0, args[0].numel() // max(1, out.numel()) - 1))
    return NOTHING if args[0].is_floating_point() else _bounds(packet, args, before, out)


def _answered(packet: Any, args: Sequence[Any], before: Fact, known: Known) -> Fact | None:
    other = args[1] if len(args) > 1 else None
    if packet in (aten.eq, aten.ne):
        same = packet is aten.eq
        if isinstance(other, torch.Tensor) and other is args[0]:  # equal to itself: not a NaN
            return Fact(expected=same, why=_FINITE if other.is_floating_point() else "")
        if isinstance(other, float) and math.isinf(other):
            return Fact(expected=not same, why=_FINITE)
        outside = isinstance(other, (int, float)) and not _can_be(other, before)
        return Fact(expected=not same) if outside else None
    if packet in _COMPARISONS and isinstance(other, (int, float)):
        return _compared(_COMPARISONS[packet], before, other)
    if packet in _NOT:
        return None if before.expected is None else replace(before, value=None, expected=not before.expected)
    if packet in _AND or packet in _OR:
        facts = [known(arg) for arg in args if isinstance(arg, torch.Tensor)]
        answers = [fact.expected for fact in facts]
        if None not in answers:
            whole = all(answers) if packet in _AND else any(answers)
            return Fact(expected=whole, why=next((fact.why for fact in facts if fact.why), ""))
    return None


def _compared(compare: Callable[[Any, Any], Any], fact: Fact, other: float) -> Fact | None:
    ends = [compare(end, other) for end in (fact.at_least, fact.at_most) if end is not None]
    if len(ends) == 2 and ends[0] == ends[1]:
        return Fact(expected=bool(ends[0]))
    if fact.typical is not None:
        return Fact(expected=bool(compare(fact.typical, other)), why=_MIDDLE)
    if fact.at_most is not None and fact.at_most < other:
        return Fact(expected=bool(compare(fact.at_most, other)))
    if fact.at_least is not None and fact.at_least > other:
        return Fact(expected=bool(compare(fact.at_least, other)))
    return None


def _can_be(value: float, fact: Fact) -> bool:
    below = fact.at_least is not None and value < fact.at_least
    return not below and not (fact.at_most is not None and value > fact.at_most)


def _bounds(packet: Any, args: Sequence[Any], before: Fact, out: torch.Tensor) -> Fact:
    """Return the bounds of an integer result."""
    if before.at_most is None:
        return NOTHING
    low, high = before.at_least, before.at_most
    if packet in _TOTALS:
        count = args[0].numel() // max(1, out.numel())
        low = 0 if packet is aten.count_nonzero else None if low is None else min(0, low) * count
        return Fact(at_least=low, at_most=max(0, count if packet is aten.count_nonzero else high * count))
    if packet is aten.masked_fill and isinstance(args[2], int):
        return Fact(at_least=None if low is None else min(low, args[2]), at_most=max(high, args[2]))
    number = args[1] if len(args) > 1 else None
    if packet not in _ARITHMETIC or not isinstance(number, int) or out.is_floating_point():
        return NOTHING
    if packet in (aten.mul, aten.floor_divide) and number <= 0:
        return NOTHING
    compute = _ARITHMETIC[packet]
    return Fact(at_least=None if low is None else compute(low, number), at_most=compute(high, number))


def _between(low: float, high: float) -> Fact:
    return Fact(at_least=low, at_most=high, typical=(low + high) / 2)


def _integers(args: Sequence[Any]) -> Fact:
    numbers = [arg for arg in args[:2] if isinstance(arg, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    return Fact(at_least=low, at_most=high - 1)


def _uniform(args: Sequence[Any]) -> Fact:
    low, high = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
    return _between(low, high)


_RANDOM: dict[Any, Callable[[Sequence[Any]], Fact]] = {
    aten.rand: lambda _: _between(0.0, 1.0),
    aten.rand_like: lambda _: _between(0.0, 1.0),
    aten.uniform_: _uniform,
    aten.randint: _integers,
    aten.randperm: lambda args: Fact(at_least=0, at_most=max(0, args[0] - 1)),
}
