"""What can be read from an optimizer of the script, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.supervise.observe.values import ValueReader

# Larger counts are no exact floats.
_MAX_STEPS = 2**53


def steps_before_this(optimizer: Any, read: Callable[[Any], Any]) -> int:
    """Return how many steps an optimizer had made before the one that it has just made.

    That is what a resumed optimizer brings along. Adam's state, for example, counts its steps.

    Args:
        optimizer: The optimizer.
        read: Reads the number in a tensor.

    Returns:
        The number of steps; 0 if the state does not say.
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
    """Return whether a step without a backward before it was made only to create the state.

    torch.distributed.checkpoint makes such a step with a learning rate of 0; others make one with
    gradients of 0, before the training begins. Gradients that come by another way than backward are
    not 0.

    Args:
        optimizer: The optimizer that has stepped.
        reader: Reads tensors.
        is_before_training: Whether there was no backward and no step yet.
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
        # torch's own optimizers do nothing then; another one may create its own gradients.
        return type(optimizer).__module__.startswith("torch.optim.")
    return is_before_training and reader.all_zero(gradients)


def _is_zero(rate: Any, reader: ValueReader) -> bool:
    if getattr(rate, "is_cpu", False):
        return reader.read(rate) == 0
    return bool(rate == 0.0)
