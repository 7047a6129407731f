"""Find state that each forward pass changes: buffers, plain attributes, and variables.

No gradient shows such a change. If a call changes a buffer, a split would change it once for each
micro-batch. If it changes plain attributes of modules or variables of the function, no checkpoint
contains the change, and each retry repeats it.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.guard.splitting.loss_identity import MODULE_ATTRIBUTES
from holdfast.guard.splitting.trial.evaluation import LossEvaluator
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.trees import same

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Only these containers are iterated, because iterating over other objects may have side effects.
_CONTAINERS = (list, tuple, set, frozenset, deque, np.ndarray)
# Containers with more entries than this are compared by length only.
_MAX_ENTRIES = 64
# Tensors with more elements than this are compared by their sum only.
_MAX_ELEMENTS = 1 << 20


def find_changed_buffer(evaluator: LossEvaluator, subset: Any) -> str:
    """Return the name of a buffer that a forward pass changes, or an empty string.

    Running statistics do not count. The change is not undone.
    """
    if not any(True for model in evaluator.models.values() for _ in model.buffers()):
        return ""
    buffers = BufferKeeper(dict(evaluator.models))
    buffers.capture()
    evaluator.loss_from_start(subset)
    buffers.learn()
    return next(iter(buffers.mutable_outside_norms()), "")


def search_side_effects(
    evaluator: LossEvaluator, subset: Any, *, include_logs: bool = False
) -> tuple[str, ...]:
    """Return the names of attributes and variables that each forward pass changes.

    Args:
        evaluator: Calls the loss function.
        subset: The samples to call it with.
        include_logs: Whether to include changes that do not affect the next loss.
    """
    buffers = BufferKeeper(dict(evaluator.models), evaluator.states)
    buffers.capture()

    # Undo each forward pass, so that the next one starts from the same state.
    def forward() -> float:
        loss = evaluator.loss_from_start(subset)
        buffers.restore()
        return loss

    return find_side_effects(
        evaluator.models,
        evaluator.loss_fn,
        forward,
        restored=evaluator.states.objects(),
        include_logs=include_logs,
    )


def find_side_effects(
    models: Mapping[str, nn.Module],
    loss_fn: Callable[[Any], Any],
    forward: Callable[[], float],
    *,
    restored: Sequence[Any] = (),
    include_logs: bool = False,
) -> tuple[str, ...]:
    """Return the names of attributes and variables that a second forward pass changes.

    State that each pass overwrites with the same value, such as the last attention map or a cache
    that is filled once, does not change in the second pass, so it is not returned.

    Attributes of the loss function, and variables outside of it, may be mere counters or logs. They
    are returned only if the second loss differs from the first.

    Args:
        models: The models by name.
        loss_fn: The loss function.
        forward: Function that runs the same forward pass each time and returns the loss, or NaN if
            it ran out of memory.
        restored: Objects to ignore, because the guard restores them.
        include_logs: Whether to return variables and attributes of the loss function even if the
            two losses are equal.

    Returns:
        Names such as ``"layer.calls"`` or ``"loss_fn: hidden"``.
    """
    ignored = [*restored, *(module for model in models.values() for module in model.modules())]
    first_loss = forward()
    first_attributes = _attributes(models)
    first_variables = _variables(loss_fn, ignored)
    second_loss = forward()
    second_attributes = _attributes(models)
    second_variables = _variables(loss_fn, ignored)

    changed = _changed(first_attributes, second_attributes)
    is_nan = math.isnan(first_loss) or math.isnan(second_loss)
    differs = first_loss != second_loss and not is_nan
    if differs or include_logs:
        changed |= _changed(first_variables, second_variables)
    if differs and not changed:
        changed = {"loss_fn: its loss changes for an unknown reason"}
    return tuple(sorted(changed))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    changed = {
        name for name, value in after.items() if name in before and not same(before[name], value)
    }
    return changed | (set(before) ^ set(after))


def _attributes(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {
        ".".join(
            part for part in (name if len(models) > 1 else "", prefix, key) if part
        ): _snapshot(value, depth=2)
        for name, model in models.items()
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in MODULE_ATTRIBUTES
    }


def _variables(function: Any, ignored: Sequence[Any]) -> dict[str, Any]:
    """Return copies of the variables that a function can access but does not define.

    These are its closure variables, globals, bound arguments, and the attributes of its object.
    Variables whose values are in `ignored` are left out.
    """
    variables: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        variables |= {"argument": [*function.args, *function.keywords.values()]}
        function = function.func
    if isinstance(function, TwoPass):
        return {**_variables(function.outputs, ignored), **_variables(function.loss, ignored)}
    owner = getattr(function, "__self__", function)
    if not isinstance(
        owner, (nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    ):
        variables |= getattr(owner, "__dict__", {})
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        outside = inspect.getclosurevars(function)
        variables |= {**outside.globals, **outside.nonlocals}
    return {
        f"loss_fn: {name}": _snapshot(_attributes_of_object(value), depth=2)
        for name, value in variables.items()
        if not isinstance(value, (types.ModuleType, types.FunctionType, type))
        and not any(value is ignored_object for ignored_object in ignored)
    }


def _attributes_of_object(value: Any) -> Any:
    """Return the attributes of a user's object, such as a criterion with a counter.

    Any other value is returned unchanged.
    """
    if isinstance(value, nn.Module):
        attributes = {
            name: attribute
            for name, attribute in vars(value).items()
            if name not in MODULE_ATTRIBUTES
        }
        return {**attributes, **dict(value.named_buffers())}
    if isinstance(value, (*_PLAIN, *_CONTAINERS, Mapping, torch.Tensor)) or callable(value):
        return value
    return vars(value) if hasattr(value, "__dict__") else value


def _snapshot(value: Any, depth: int) -> Any:
    """Return a copy of a value for a later comparison.

    Plain values are returned as they are, small tensors are copied, and containers are copied up to
    `depth` levels deep. Any other value is represented by the name of its type.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() <= _MAX_ELEMENTS:
            return value.detach().clone()
        return [value.shape, float(value.detach().double().sum())]
    if isinstance(value, Mapping) and depth and len(value) <= _MAX_ENTRIES:
        return {str(key): _snapshot(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, _CONTAINERS):
        entries = list(value) if depth and len(value) <= _MAX_ENTRIES else []
        return [len(value), *(_snapshot(entry, depth - 1) for entry in entries)]
    return type(value).__name__
