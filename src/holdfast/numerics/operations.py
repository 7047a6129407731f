"""What a torch operation reads and writes, by its schema and its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdfast.numerics.operands import is_whole_numbers, values_of

_WRITTEN_UNSAID = {"running_mean", "running_var"}  # native_batch_norm's schema does not say that it writes them
_SHARE_UNSAID = ("_unsafe_view", "_reshape_alias", "empty", "new_empty")
_IGNORE_THEIR_TARGET = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}


@dataclass(frozen=True, slots=True)
class Traits:
    """What the schema of an operation says."""

    name: str
    view: bool
    pointwise: bool
    written: frozenset[str]  # arguments that it changes
    only_written: frozenset[str]  # of these, those whose old value does not matter
    arguments: tuple[str, ...]


@dataclass(slots=True)
class Given:
    """A tensor argument: the object, and its values as the operation saw them."""

    tensor: torch.Tensor
    seen: torch.Tensor
    bad: torch.Tensor | None = field(default=None)


def read_traits(func: Any) -> Traits:
    """Return what the schema of an overload says."""
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = schema.name.split("::")[-1]
    only = {a.name for a in written if a.kwarg_only or name in _IGNORE_THEIR_TARGET}
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Traits(
        name=name,
        # What `empty` returns is rubbish until it is written: nothing to look at either.
        view=(shares and not written) or name.startswith(_SHARE_UNSAID),
        pointwise=torch.Tag.pointwise in func.tags,
        written=frozenset(a.name for a in written) | (_WRITTEN_UNSAID if "batch_norm" in name else set()),
        only_written=frozenset(only),
        arguments=tuple(a.name for a in schema.arguments),
    )


def read_arguments(
    traits: Traits, args: Any, kwargs: dict[str, Any]
) -> tuple[list[Given], list[torch.Tensor], tuple[float, ...]]:
    """Return the tensors that an operation reads, those that it will write, and its numbers."""
    given: list[Given] = []
    written: list[torch.Tensor] = []
    scalars: list[float] = []
    for name, argument in [*zip(traits.arguments, args, strict=False), *kwargs.items()]:
        for leaf in tree_leaves(argument) if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                scalars.append(float(leaf))
            if not isinstance(leaf, torch.Tensor):
                continue
            values = values_of(leaf)
            if values is None:
                if is_whole_numbers(leaf):  # never bad, but a count of 0 explains a division
                    given.append(Given(leaf, leaf))
                continue
            changes = name in traits.written
            if changes:
                written.append(values)
            if name not in traits.only_written:
                given.append(Given(values, values.clone() if changes else values))
    return given, written, tuple(scalars)
