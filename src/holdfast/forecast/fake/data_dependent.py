"""Run operators whose results or result shapes depend on the values of tensors.

Known values are used where they exist (`known_values`), and guesses otherwise (`guesses`). If the
number of elements in a result is unknown, it gets the largest possible number, so that the plan
holds in the worst case. For an operator without a rule, the fake mode raises one of the errors at
the end of this module.
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
    """Return the result of an operator whose result depends on the values of its inputs.

    Args:
        mode: The active `ForecastMode`.
        func: The operator's overload.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.

    Returns:
        A number, a fake tensor or several fake tensors. NotImplemented if the result does not
        depend on values, or if this module has no rule for the operator.
    """
    if func in (aten._local_scalar_dense.default, aten.item.default):
        return _scalar(mode, args[0])
    if torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor:
        result = _dynamic_shape(mode, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if torch.Tag.data_dependent_output in func.tags:
        return_types = [str(result.type) for result in func._schema.returns]
        if return_types == ["bool"]:
            value = mode.known_values.evaluate(func, args, kwargs)
            return mode.guesses.decide() if value is NotImplemented else value
    return NotImplemented


def _scalar(mode: Any, tensor: torch.Tensor) -> bool | int | float | complex:
    knowledge = mode.known_values.of(tensor)
    number: bool | int | float | complex
    if knowledge.value is not None:
        number = knowledge.value.reshape(()).item()
    elif tensor.dtype is torch.bool:
        number = mode.guesses.decide(expected=knowledge.expected, why=knowledge.why)
    elif tensor.dtype.is_complex:
        number = complex(mode.guesses.number())
    elif tensor.dtype.is_floating_point:
        number = mode.guesses.number(typical=knowledge.typical)
    else:
        number = mode.guesses.count(at_most=knowledge.at_most)
    return number


def _dynamic_shape(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator whose result shape depends on values.

    Returns:
        NotImplemented if torch's own fake kernel can compute the shape, or if there is no rule.
    """
    if _output_size_is_given(func, args, kwargs):
        # The arguments include the output size, so torch's own fake kernel can compute the shape.
        return NotImplemented
    values = mode.known_values.evaluate(func, args, kwargs)
    if values is not NotImplemented:
        return pytree.tree_map_only(
            torch.Tensor, lambda value: _fake_with_value(mode, value, args[0]), values
        )
    worst_case = _WORST_CASES.get(func)
    if worst_case is None:
        return NotImplemented
    with mode:
        return worst_case(mode, *args, **kwargs)


def _output_size_is_given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("output_size") is not None:
        return True
    return func is aten.repeat_interleave.Tensor and len(args) > 1


def _fake_with_value(mode: Any, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=like.device)
    mode.known_values.learn(fake, value)
    return fake


def _all_rows(mode: Any, x: torch.Tensor) -> torch.Tensor:
    mode.guesses.rows("aten.nonzero")
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _selected(mode: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    value = mode.known_values.of(mask).value
    if value is None:
        mode.guesses.rows("aten.masked_select")
        return x.new_empty(math.prod(shape))
    # The mask may be broadcast, so each True element in it may select several elements of `x`.
    return x.new_empty(int(value.sum()) * math.prod(shape) // max(1, value.numel()))


_WORST_CASES: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _all_rows,
    aten.masked_select.default: _selected,
}


# --- errors ---------------------------------------------------------------------------------------


def undecidable(func: Any) -> PolicyError:
    """Return the error for an operator that depends on values but has no rule (H424)."""
    return PolicyError(
        f"the result of {func.name()} depends on the values of its inputs{_at_running_line()}",
        limit=(
            "a forecast knows only the shapes of tensors, and has no rule for the worst case of"
            " this operator"
        ),
        fix=(
            "compute the result from integer tensors on the CPU, whose values are known, or use an"
            " operator whose result has a fixed size."
        ),
        rule="H424",
    )


def missing_rule(func: Any) -> PolicyError:
    """Return the error for an operator without a fake kernel (H422)."""
    name = func.name().rsplit(".default", 1)[0]
    return PolicyError(
        f"operator {name} has no fake kernel{_at_running_line()}",
        limit=(
            "a forecast runs no real kernels, so each operator needs a fake one that returns empty"
            " tensors of the right shapes"
        ),
        fix=(
            "where the operator is defined, register a fake kernel, for example"
            f' torch.library.register_fake("{name}")(lambda x: torch.empty_like(x))'
        ),
        rule="H422",
    )


def _at_running_line() -> str:
    line = running_line()
    return f", at {line}" if line else ""
