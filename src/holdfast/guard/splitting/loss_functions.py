"""What is seen of a loss function from outside.

What it may not do, which ones are the same, what one leaves behind.

It returns a loss, and leaves backward and the optimizers to the guard; gradients of anything but
parameters are free.

A lambda in a loop is a new object each time and the same function; two partials of one function
with another ``reduction`` are two. Distinguished are code, and texts and flags that are bound to
it. Numbers are not: a step or a weight that changes would make each step a new function.

What a call leaves in plain attributes of modules and in the function's own variables is in no
checkpoint, and an attempt that is made again changes it once more.
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

from holdfast.core.errors import BatchError
from holdfast.core.text import counted
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.state.trees import same

# --- what it may not do

Called: TypeAlias = Literal["backward", "step", "zero_grad"]
_FIX = {
    "backward": (
        "leave out loss.backward() and return the loss with its graph: guard.step runs backward."
        " For a gradient of something else, such as an input, call torch.autograd.grad(loss, x)."
    ),
    "step": (
        "leave out optimizer.step(), and scaler.step() around it: guard.step does that, after a"
        " look at the gradients. To step one of several optimizers, name it: guard.step(batch,"
        " loss_fn, optimizer=...)."
    ),
    "zero_grad": "leave it out: guard.step empties the gradients itself.",
}


class CalledInsideError(BatchError):
    """H209, and what the loss function called."""

    called: Called = "backward"


def called_inside(called: Called) -> CalledInsideError:
    """Return the error about a loss function that does the guard's work."""
    error = CalledInsideError(
        "loss_fn"
        f" {'ran backward into parameters' if called == 'backward' else f'called {called}()'}",
        limit=(
            "it may only return a loss: it can run several times in a step, which must stay one"
            " step"
        ),
        fix=_FIX[called],
        rule="H209",
    )
    error.called = called
    return error


class ReturningALoss:
    """A context for a loss function, in which optimizers refuse to move and ``.grad`` must stay
    as it is.
    """

    __slots__ = ("_before", "_optimizers", "_own", "_parameters")

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers = optimizers
        self._parameters = parameters

    def __enter__(self) -> None:
        self._before = _marks(self._parameters)
        self._own: list[tuple[dict[str, Any], Any]] = []
        for optimizer in self._optimizers:
            attributes = vars(optimizer)
            # Schedulers put theirs there too
            self._own.append((attributes, attributes.get("step")))
            # Only `step`: zero_grad is found where it empties something, since frameworks call it
            # in between.
            attributes["step"] = _refuse_step

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for attributes, own in self._own:
            if own is None:
                attributes.pop("step", None)
            else:
                attributes["step"] = own
        after = _marks(self._parameters)
        if kind is None and after != self._before:
            raise called_inside("zero_grad" if len(after) < len(self._before) else "backward")


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    raise called_inside("step")


def _marks(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which gradients there are, in order, and how often each was changed in place."""
    return [
        (id(gradient), gradient._version) for p in parameters if (gradient := p.grad) is not None
    ]


@contextlib.contextmanager
def weights_stay(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context for forward and backward in which hooks of parameters may look, and must
    not step.
    """
    hooked = [
        p
        for p in parameters
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    before = [p._version for p in hooked]
    yield
    moved = sum(p._version != version for p, version in zip(hooked, before, strict=True))
    if moved:
        raise BatchError(
            f"hooks have moved {counted(moved, 'parameter')} in backward",
            limit="a step can only be retried, clipped or skipped while its weights have not moved",
            fix=(
                "remove the hooks that call optimizer.step(), give the optimizer to the Guard, and"
                " start again: the weights of this step cannot be taken back."
            ),
            rule="H211",
        )


class FilledOutside:
    """Finds gradients that the caller has filled before the first step, which begins without
    any.
    """

    begun = 0  # steps of all guards in this process

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._empty = [parameter for parameter in parameters if parameter.grad is None]
        self._begun_before = FilledOutside.begun

    def check(self) -> None:
        """Raise H210 the first time, if gradients are there. Cost: if so, host syncs."""
        # Another guard may have stepped the same parameters
        others = FilledOutside.begun != self._begun_before
        FilledOutside.begun += 1
        if not self._empty:
            return
        left, self._empty = [] if others else self._empty, []
        filled = [p for p in left if p.grad is not None and bool(p.grad.to_dense().count_nonzero())]
        if filled:
            raise BatchError(
                f"{counted(len(filled), 'parameter')} had a gradient before the first step",
                limit=(
                    "guard.step empties the gradients first: what backward() outside of it has"
                    " added would be lost"
                ),
                fix=(
                    "return that loss from loss_fn too, as loss_a + loss_b, and leave out"
                    " backward() outside; if the gradients are not wanted, call"
                    " optimizer.zero_grad() before."
                ),
                rule="H210",
            )


# --- which ones are the same

_DEPTH = 3


def description_of(loss_fn: Any, depth: int = _DEPTH) -> str:
    """Return a text that is the same for the same loss function, after every restart of a run.

    At depth 0 it is that of its code alone, without what is bound to it.
    """
    if isinstance(loss_fn, TwoPass):
        return f"{description_of(loss_fn.outputs, depth)} {description_of(loss_fn.loss, depth)}"
    if isinstance(loss_fn, functools.partial):
        bound = [*loss_fn.args, *(loss_fn.keywords[name] for name in sorted(loss_fn.keywords))]
        return _with(description_of(loss_fn.func, depth), bound, depth)
    if isinstance(loss_fn, types.MethodType):
        return _with(description_of(loss_fn.__func__, depth), [loss_fn.__self__], depth)
    code = getattr(loss_fn, "__code__", None)
    if code is not None:
        bound = []
        for cell in loss_fn.__closure__ or ():
            try:  # noqa: SIM105 - in every step
                bound.append(cell.cell_contents)
            except ValueError:
                pass  # it is empty
        bound += [*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values()]
        outside = getattr(loss_fn, "__globals__", {})  # of a script: what a lambda there refers to
        bound += [flag for name in code.co_names if type(flag := outside.get(name)) in (bool, str)]
        return _with(_name_of(code), bound, depth) if bound else _name_of(code)
    bound = [own for key, own in getattr(loss_fn, "__dict__", {}).items() if key not in _OF_TORCH]
    return _with(type(loss_fn).__qualname__, bound, depth)


@functools.lru_cache(maxsize=256)
def _name_of(code: types.CodeType) -> str:
    mark = zlib.crc32(code.co_code + repr(code.co_names).encode())  # of two lambdas in one line
    return f"{code.co_qualname}:{code.co_firstlineno}:{mark:x}"


def _with(name: str, bound: Iterable[Any], depth: int) -> str:
    if depth == 0:
        return name
    texts = [text for value in bound if (text := _plain(value, depth - 1))]
    return f"{name}({', '.join(texts)})" if texts else name


def _plain(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, str)):
        return repr(value)[:80]
    # Of a module only a criterion says something: the models are the guard's own.
    if depth == 0 or not callable(value) or isinstance(value, type) or _has_weights(value):
        return ""
    return description_of(value, depth)


def _has_weights(value: Any) -> bool:
    own = value.__dict__ if isinstance(value, nn.Module) else {}
    return bool(own.get("_parameters")) or any(map(_has_weights, own.get("_modules", {}).values()))


# --- what a call leaves behind

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# To iterate another might do anything
_CONTAINERS = (list, tuple, set, frozenset, deque, np.ndarray)
_LOOKED_AT = 64  # entries of a container; a longer one is known by its length
_WHOLE = 1 << 20  # elements of a tensor that are compared; a larger one is known by its sum
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module


def find_side_effects(
    models: Mapping[str, nn.Module],
    loss_fn: Callable[[Any], Any],
    forward: Callable[[], float],
    *,
    known: Sequence[Any] = (),
    logs_too: bool = False,
) -> tuple[str, ...]:
    """Return what another pass over the same samples changes, such as ``"layer.calls"`` or
    ``"loss_fn: hidden"``.

    What a pass only overwrites (the last attention, a cache that is filled once) is the same after
    the second pass as after the first, and is not named. `forward` runs one, the same each time,
    and returns the loss. Variables that the loss function takes from outside, or has as an
    attribute, may be counters or logs: they are named only if the second loss is another one than
    the first, or if `logs_too`; not those that are `known`, and so put back.
    """
    own = [*known, *(module for model in models.values() for module in model.modules())]
    losses, seen = [], []
    for _ in range(2):
        losses.append(forward())
        seen.append((_attributes(models), _variables(loss_fn, own)))
    (once, before), (twice, after) = seen
    changed = _changed(once, twice)
    differs = losses[0] != losses[1] and not any(map(math.isnan, losses))  # NaN: memory was short
    if differs or logs_too:
        changed |= _changed(before, after)
    if differs and not changed:
        changed = {"loss_fn: its loss changes, not seen why"}
    return tuple(sorted(changed))


def _changed(once: Mapping[str, Any], twice: Mapping[str, Any]) -> set[str]:
    changed = {
        name for name, value in twice.items() if name in once and not same(once[name], value)
    }
    return changed | (set(once) ^ set(twice))


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


def _variables(function: Any, own: Sequence[Any]) -> dict[str, Any]:
    """Return what a function sees outside of itself.

    Free variables, globals, attributes of its object, arguments.
    """
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        found |= {"argument": [*function.args, *function.keywords.values()]}
        function = function.func
    if isinstance(function, TwoPass):
        return {**_variables(function.outputs, own), **_variables(function.loss, own)}
    owner = getattr(function, "__self__", function)
    if not isinstance(
        owner, (nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    ):
        found |= getattr(owner, "__dict__", {})
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        outside = inspect.getclosurevars(function)
        found |= {**outside.globals, **outside.nonlocals}
    return {
        f"loss_fn: {name}": _snapshot(_inside(value), depth=2)
        for name, value in found.items()
        if not isinstance(value, (types.ModuleType, types.FunctionType, type))
        and not any(value is each for each in own)
    }


def _inside(value: Any) -> Any:
    """Return what an object of the caller's holds, such as a criterion with a counter.

    All else as it is.
    """
    if isinstance(value, nn.Module):
        plain = {name: each for name, each in vars(value).items() if name not in _OF_TORCH}
        return {**plain, **dict(value.named_buffers())}
    ours = isinstance(value, (*_PLAIN, *_CONTAINERS, Mapping, torch.Tensor)) or callable(value)
    return vars(value) if not ours and hasattr(value, "__dict__") else value


def _snapshot(value: Any, depth: int) -> Any:
    """Return plain values as they are and small tensors as copies, in containers to some depth.

    All else by type.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return (
            value.detach().clone()
            if value.numel() <= _WHOLE
            else [value.shape, float(value.detach().double().sum())]
        )
    if isinstance(value, Mapping) and depth and len(value) <= _LOOKED_AT:
        return {str(key): _snapshot(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, _CONTAINERS):
        entries = list(value) if depth and len(value) <= _LOOKED_AT else []
        return [len(value), *(_snapshot(entry, depth - 1) for entry in entries)]
    return type(value).__name__
