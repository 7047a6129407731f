"""One optimizer's step in its other implementations: foreach, fused, for-loop.

Each torch optimizer can compute the same step with one list operation after another (needs copies of everything),
with one kernel, or parameter by parameter. On tensors without data all can be tried one after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.core.errors import HoldfastError

# What an implementation raises that does not suit these parameters or settings.
REFUSALS = (AssertionError, HoldfastError, RuntimeError, TypeError, ValueError)


def find_alternatives(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of all implementations that it offers; empty if there is no choice or it cannot be tried.

    It can be tried on tensors without data only: trying changes the parameters.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(group.get("differentiable") or "foreach" not in group for group in groups):
        return ()
    if not hasattr(type(optimizer).step, "hooked") or not all(isinstance(one, FakeTensor) for one in parameters):
        return ()
    if any(one.grad is not None and one.grad.is_sparse for one in parameters if one.is_leaf):
        return ()  # both flags are ignored then
    return ("foreach", "fused", "for-loop") if "fused" in groups[0] else ("foreach", "for-loop")


def implementation_of(optimizer: torch.optim.Optimizer, operations: Iterable[str]) -> str:
    """Return the name of the implementation that ran."""
    if any("foreach" not in group for group in optimizer.param_groups):
        return "as written"
    names = set(operations)
    if any(name.startswith("aten._fused_") for name in names):
        return "fused"
    return "foreach" if any(name.startswith("aten._foreach_") for name in names) else "for-loop"


@contextlib.contextmanager
def arranged(optimizer: torch.optim.Optimizer, implementation: str) -> Iterator[None]:
    """Let the optimizer use another implementation while the context lasts, as if it had been built so.

    The fused one has its step counters on the device, the others on the host unless they are `capturable`.
    """
    with contextlib.ExitStack() as stack:
        if implementation != "fused":  # what a gradient scaler leaves on an optimizer that unscales by itself
            attributes = vars(optimizer)
            left: dict[str, Any] = {
                name: attributes.pop(name) for name in ("grad_scale", "found_inf") if name in attributes
            }
            stack.callback(lambda: attributes.update(left))
        for group in optimizer.param_groups:
            _replace(stack, group, "foreach", implementation == "foreach")
            if "fused" in group:
                _replace(stack, group, "fused", implementation == "fused")
            on_device = implementation == "fused" or bool(group.get("capturable"))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(counter := state.get("step"), torch.Tensor):
                    device = parameter.device if on_device else torch.device("cpu")
                    if counter.device != device:
                        _replace(stack, state, "step", counter.to(device))
        yield


def _replace(stack: contextlib.ExitStack, values: dict[str, Any], key: str, other: Any) -> None:
    stack.callback(values.__setitem__, key, values[key])
    values[key] = other


def step_again(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's step once more, without its hooks; raises one of `REFUSALS` if that does not suit it."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
