"""Read facts from the script's optimizers, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.supervise.observe.values import ValueReader

# Larger counts are not exact as floats.
_MAX_STEPS = 2**53


def steps_before_this(optimizer: Any, read: Callable[[Any], Any]) -> int:
    """Return how many steps an optimizer had made before its newest one.

    A resumed optimizer carries this count in its state, as Adam does; 0 if it does not. `read`
    returns the number in a one-element tensor.
    """
    states = getattr(optimizer, "state", None)
    state = next(iter(states.values()), None) if isinstance(states, dict) else None
    count = state.get("step") if isinstance(state, dict) else None
    if getattr(count, "is_cpu", False):
        count = read(count)
    if isinstance(count, (int, float)) and 1 < count < _MAX_STEPS:
        return int(count) - 1
    return 0


def settings_of(optimizer: Any, name: str) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter groups, by names such as ``"SGD 1.0.lr"``."""
    settings = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                settings[f"{name}.{index}.{key}"] = value
    return settings


def only_creates_state(optimizer: Any, reader: ValueReader, *, is_before_training: bool) -> bool:
    """Return whether a step that no backward preceded was made only to create the state.

    torch.distributed.checkpoint makes such a step with a learning rate of 0; other libraries make
    one with zero gradients before training begins. If a script computes its gradients without
    calling backward, they are not zero, so its steps are real.

    Args:
        optimizer: The optimizer that has just stepped.
        reader: Reads values from tensors.
        is_before_training: Whether there has been no backward and no step yet.
    """
    groups = optimizer.param_groups
    if all(_is_zero(group.get("lr"), reader) for group in groups):
        return True
    gradients = [
        parameter.grad
        for group in groups
        for parameter in group.get("params", ())
        if parameter.grad is not None
    ]
    if not gradients:
        # Without gradients, torch's own optimizers do nothing; others may compute gradients
        # themselves.
        return type(optimizer).__module__.startswith("torch.optim.")
    return is_before_training and reader.all_zero(gradients)


def _is_zero(rate: Any, reader: ValueReader) -> bool:
    if getattr(rate, "is_cpu", False):
        return reader.read(rate) == 0
    return bool(rate == 0.0)
