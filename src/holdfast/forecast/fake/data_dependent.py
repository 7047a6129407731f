"""Operators whose answer or shape depends on values: known values first, then `Guesses`.

And those without shapes.

A result whose number of elements is unknown gets all that it could have: a plan that holds for the
    worst case holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.core.errors import PolicyError
from holdfast.forecast.trace.attribution import running_line

aten = torch.ops.aten


def answer(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator that asks for values, fake if it is a tensor.

    NotImplemented for others.
    """
    if func in (aten._local_scalar_dense.default, aten.item.default):
        return _scalar(mode, args[0])
    if torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor:
        if kwargs.get("output_size") is not None or (
            func is aten.repeat_interleave.Tensor and len(args) > 1
        ):
            return NotImplemented  # torch has a rule for a size that is said
        known = mode.facts.evaluate(func, args, kwargs)
        if known is not NotImplemented:
            return pytree.tree_map_only(
                torch.Tensor, lambda value: _stand_for(mode, value, args[0]), known
            )
        if func in _WORST:
            with mode:
                return _WORST[func](mode, *args, **kwargs)
    if torch.Tag.data_dependent_output in func.tags and [
        str(r.type) for r in func._schema.returns
    ] == ["bool"]:
        known = mode.facts.evaluate(func, args, kwargs)
        return mode.guesses.decide() if known is NotImplemented else known
    return NotImplemented


def _scalar(mode: Any, tensor: torch.Tensor) -> bool | int | float | complex:
    fact = mode.facts.of(tensor)
    if fact.value is not None:
        value: bool | int | float = fact.value.reshape(()).item()
        return value
    if tensor.dtype is torch.bool:
        decided: bool = mode.guesses.decide(expected=fact.expected, why=fact.why)
        return decided
    if tensor.dtype.is_complex:
        return complex(mode.guesses.number())
    number: int | float = (
        mode.guesses.number(typical=fact.typical)
        if tensor.dtype.is_floating_point
        else mode.guesses.count(at_most=fact.at_most)
    )
    return number


def _stand_for(mode: Any, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=like.device)
    mode.facts.know(fake, value)
    return fake


def _all_rows(mode: Any, x: torch.Tensor) -> torch.Tensor:
    mode.guesses.rows("aten.nonzero")
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _selected(mode: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    value = mode.facts.of(mask).value
    if value is None:
        mode.guesses.rows("aten.masked_select")
        return x.new_empty(math.prod(shape))
    return x.new_empty(int(value.sum()) * math.prod(shape) // max(1, value.numel()))


_WORST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _all_rows,
    aten.masked_select.default: _selected,
}


def undecidable(func: Any) -> PolicyError:
    """Return the error for an operator whose result depends on values in a way that no rule here
    knows.
    """
    return PolicyError(
        f"the result of {func.name()} depends on values{_at(running_line())}",
        limit="a forecast has shapes only, and holdfast has no worst case for it",
        fix=(
            "compute it from host tensors of integers (their values are known), or use a form with"
            " a fixed size"
        ),
        rule="H424",
    )


def missing_rule(func: Any) -> PolicyError:
    """Return the error for an operator of whose results nobody has said the shapes."""
    name = func.name().rsplit(".default", 1)[0]
    return PolicyError(
        f"operator {name} has no rule for the shapes of its results{_at(running_line())}",
        limit="without one its memory cannot be known unless it is run",
        fix=(
            "register a rule where the operator is defined, one that returns empty tensors of the"
            " right shapes: "
            f'torch.library.register_fake("{name}")(lambda x: torch.empty_like(x))'
        ),
        rule="H422",
    )


def _at(line: str) -> str:
    return f", at {line}" if line else ""
