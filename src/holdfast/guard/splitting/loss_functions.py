"""Examine loss functions: forbidden calls, identity, and side effects.

**Forbidden calls.** A loss function must only return a loss. The guard itself runs backward and
steps the optimizers. The function may compute gradients, but not with respect to parameters.

**Identity.** A lambda in a loop is a new object in each iteration, but always the same function. On
the other hand, two partials of a function with different values of ``reduction`` are different
functions. Functions are therefore identified by their code, and by the strings and flags that are
bound to them. Numbers are ignored, since otherwise a step number or a changing weight would make a
new function in every step.

**Side effects.** If a call changes plain attributes of modules or variables of the function, no
checkpoint contains the change, and each retry repeats it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.errors import BatchError
from holdfast.core.text import counted
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.state.trees import same

# --- forbidden calls

Called: TypeAlias = Literal["backward", "step", "zero_grad"]
_FIX = {
    "backward": (
        "remove loss.backward() and return the loss with its graph: guard.step runs backward. For"
        " any other gradient, such as that of an input, use torch.autograd.grad(loss, x)."
    ),
    "step": (
        "remove optimizer.step(), and scaler.step() around it: guard.step runs it after checking"
        " the gradients. To step one of several optimizers, name it: guard.step(batch, loss_fn,"
        " optimizer=...)."
    ),
    "zero_grad": "remove it: guard.step clears the gradients itself.",
}


class CalledInsideError(BatchError):
    """H209: the loss function called a function that only the guard may call."""

    called: Called = "backward"


def called_inside(called: Called) -> CalledInsideError:
    """Return an H209 error for a loss function that made a forbidden call."""
    action = f"called {called}()"
    if called == "backward":
        action = "ran backward into parameters"
    error = CalledInsideError(
        f"loss_fn {action}",
        limit="it must only return a loss, because it may be called several times per step",
        fix=_FIX[called],
        rule="H209",
    )
    error.called = called
    return error


class ReturningALoss:
    """A context in which to call a loss function.

    Inside the context, optimizers refuse to step. On exit, H209 is raised if the ``.grad`` of a
    parameter has changed.

    Args:
        optimizers: The guard's optimizers.
        parameters: The guard's parameters.
    """

    __slots__ = ("_before", "_optimizers", "_own", "_parameters")

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers = optimizers
        self._parameters = parameters

    def __enter__(self) -> None:
        self._before = _gradient_versions(self._parameters)
        self._own: list[tuple[dict[str, Any], Any]] = []
        for optimizer in self._optimizers:
            attributes = vars(optimizer)
            # A scheduler may already have replaced `step` on the instance in the same way, so keep
            # that attribute.
            self._own.append((attributes, attributes.get("step")))
            # `zero_grad` is not replaced, because frameworks may call it when there are no
            # gradients. If a call clears existing gradients, this is detected on exit.
            attributes["step"] = _refuse_step

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for attributes, original_step in self._own:
            if original_step is None:
                attributes.pop("step", None)
            else:
                attributes["step"] = original_step
        after = _gradient_versions(self._parameters)
        if kind is None and after != self._before:
            raise called_inside("zero_grad" if len(after) < len(self._before) else "backward")


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    raise called_inside("step")


def _gradient_versions(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the identity and version counter of each gradient."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]


@contextlib.contextmanager
def weights_stay(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context for backward that raises H211 if parameter hooks change weights."""
    hooked = [
        p
        for p in parameters
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if not hooked:
        yield
        return
    before = [p._version for p in hooked]
    # A fused optimizer changes parameters without changing their version counters.
    stepped: set[int] = set()

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        stepped.update(id(p) for group in groups for p in group["params"] if p.grad is not None)

    handle = register_optimizer_step_pre_hook(note_step)
    try:
        yield
    finally:
        handle.remove()
    moved = sum(
        p._version != version or id(p) in stepped for p, version in zip(hooked, before, strict=True)
    )
    if moved:
        raise BatchError(
            f"hooks have changed {counted(moved, 'parameter')} in backward",
            limit="a step can only be retried, clipped or skipped while the weights are unchanged",
            fix=(
                "remove the hooks that call optimizer.step(), pass the optimizer to Guard, and"
                " restart the run: the weights of this step cannot be restored."
            ),
            rule="H211",
        )


class FilledOutside:
    """Detects gradients that the script computed between creating the guard and the first step.

    Args:
        parameters: The guard's parameters.
    """

    # The number of steps started so far by all guards in this process.
    begun = 0

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._empty = [parameter for parameter in parameters if parameter.grad is None]
        self._begun_before = FilledOutside.begun

    def check(self) -> None:
        """In the first step, raise H210 if the script has already computed gradients.

        If there are gradients, this synchronizes with the device.
        """
        # If another guard has run a step since this guard was created, the gradients may come from
        # that step.
        others_have_stepped = FilledOutside.begun != self._begun_before
        FilledOutside.begun += 1
        were_empty = self._empty
        self._empty = []
        if others_have_stepped:
            return
        filled = [
            parameter
            for parameter in were_empty
            if parameter.grad is not None and parameter.grad.to_dense().count_nonzero() > 0
        ]
        if filled:
            raise BatchError(
                f"{counted(len(filled), 'parameter')} had a gradient before the first step",
                limit=(
                    "guard.step first clears all gradients, so gradients from a backward() outside"
                    " of it would be lost"
                ),
                fix=(
                    "include that loss in loss_fn, as in loss_a + loss_b, and remove the backward()"
                    " outside of it. If the gradients are not needed, call optimizer.zero_grad()"
                    " before guard.step."
                ),
                rule="H210",
            )


# --- identity

# The number of levels of partials, methods and closures to follow.
_DEPTH = 3


def description_of(loss_fn: Any, depth: int = _DEPTH) -> str:
    """Return a text that identifies a loss function, and stays the same after a restart.

    The text consists of the name, line and checksum of the code, followed by the values that are
    bound to the function: arguments of a partial, the object of a method, closure variables,
    defaults, and attributes of a callable object. Among these values, only None, strings, bools and
    callables without weights (such as a criterion) count. Numbers and tensors never do, since they
    may change in every step. Of the global variables that the code uses, strings and bools count.

    Args:
        loss_fn: The loss function.
        depth: How many levels of callables inside callables to follow. With 0, only the code
            counts.
    """
    if isinstance(loss_fn, TwoPass):
        return f"{description_of(loss_fn.outputs, depth)} {description_of(loss_fn.loss, depth)}"
    if isinstance(loss_fn, functools.partial):
        name = description_of(loss_fn.func, depth)
        bound = _arguments_of(loss_fn)
    elif isinstance(loss_fn, types.MethodType):
        name = description_of(loss_fn.__func__, depth)
        bound = [loss_fn.__self__]
    elif getattr(loss_fn, "__code__", None) is not None:
        name = _name_of(loss_fn.__code__)
        bound = [*_closure_of(loss_fn), *_defaults_of(loss_fn), *_global_flags_of(loss_fn)]
    else:
        name = type(loss_fn).__qualname__
        bound = [
            value for key, value in getattr(loss_fn, "__dict__", {}).items() if key not in _OF_TORCH
        ]
    return _with_bound_values(name, bound, depth)


def _arguments_of(partial: functools.partial[Any]) -> list[Any]:
    """Return the arguments of a partial, with keyword arguments sorted by name."""
    return [*partial.args, *(partial.keywords[name] for name in sorted(partial.keywords))]


def _closure_of(function: Any) -> list[Any]:
    """Return the values of a function's closure variables that have been assigned."""
    values = []
    for cell in function.__closure__ or ():
        try:  # noqa: SIM105 - `suppress` is slower, and this runs in every step
            values.append(cell.cell_contents)
        except ValueError:
            # The variable has not been assigned yet.
            pass
    return values


def _defaults_of(function: Any) -> list[Any]:
    """Return the default values of a function's parameters."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _global_flags_of(function: Any) -> list[Any]:
    """Return the strings and bools in global variables that a function uses.

    A function in a script may use flags that are stored there.
    """
    global_variables = getattr(function, "__globals__", {})
    flags = []
    for name in function.__code__.co_names:
        value = global_variables.get(name)
        if type(value) in (bool, str):
            flags.append(value)
    return flags


@functools.lru_cache(maxsize=256)
def _name_of(code: types.CodeType) -> str:
    # The checksum distinguishes two lambdas on the same line.
    checksum = zlib.crc32(code.co_code + repr(code.co_names).encode())
    return f"{code.co_qualname}:{code.co_firstlineno}:{checksum:x}"


def _with_bound_values(name: str, bound: Iterable[Any], depth: int) -> str:
    """Return a name, followed in parentheses by the descriptions of the bound values that count."""
    if depth == 0:
        return name
    descriptions = []
    for value in bound:
        description = _describe_value(value, depth - 1)
        if description:
            descriptions.append(description)
    return f"{name}({', '.join(descriptions)})" if descriptions else name


def _describe_value(value: Any, depth: int) -> str:
    """Return a text that identifies a bound value, or an empty string for a value to ignore."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)[:80]
    # Modules without weights are criteria, which count. Modules with weights are models.
    if depth == 0 or not callable(value) or isinstance(value, type) or _has_weights(value):
        return ""
    return description_of(value, depth)


def _has_weights(value: Any) -> bool:
    attributes = value.__dict__ if isinstance(value, nn.Module) else {}
    return bool(attributes.get("_parameters")) or any(
        map(_has_weights, attributes.get("_modules", {}).values())
    )


# --- side effects

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Only these containers are iterated, because iterating over other objects may have side effects.
_CONTAINERS = (list, tuple, set, frozenset, deque, np.ndarray)
# Containers with more entries than this are compared by length only.
_MAX_ENTRIES = 64
# Tensors with more elements than this are compared by their sum only.
_MAX_ELEMENTS = 1 << 20
# The attributes that every module has.
_OF_TORCH = frozenset(vars(nn.Module()))


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
        if key not in _OF_TORCH
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
            name: attribute for name, attribute in vars(value).items() if name not in _OF_TORCH
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
