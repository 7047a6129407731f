"""Read step counts and settings from the script's optimizers, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.supervise.observe.values import ValueReader

# Above this, a float cannot represent every integer.
_MAX_STEPS = 2**53


def steps_before_this(optimizer: Any, read: Callable[[Any], Any]) -> int:
    """Return how many steps an optimizer had completed before the current one.

    Adam and some other optimizers keep this count in their state, so it survives a resume. The
    result is 0 for an optimizer without such a count.

    Args:
        optimizer: The optimizer that has just stepped.
        read: Returns the number in a one-element tensor.
    """
    states = getattr(optimizer, "state", None)
    state = next(iter(states.values()), None) if isinstance(states, dict) else None
    count = state.get("step") if isinstance(state, dict) else None
    if getattr(count, "is_cpu", False):
        count = read(count)
    # The count already includes the current step.
    if isinstance(count, (int, float)) and 1 < count < _MAX_STEPS:
        return int(count) - 1
    return 0


def settings_of(optimizer: Any, name: str) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter groups.

    The keys consist of `name`, the index of the group and the setting, such as ``"SGD 1.0.lr"``.
    """
    settings = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                settings[f"{name}.{index}.{key}"] = value
    return settings


def only_creates_state(optimizer: Any, reader: ValueReader, *, is_before_training: bool) -> bool:
    """Return whether an optimizer step without a backward call only created the optimizer's state.

    Such steps are not training steps. torch.distributed.checkpoint makes one with a learning rate
    of 0, and other libraries make one with zero gradients before training starts. A script that
    computes its gradients without calling backward has nonzero gradients, so its steps count.

    Args:
        optimizer: The optimizer that has just stepped.
        reader: Reads values from tensors.
        is_before_training: Whether there has been no backward call and no step yet.
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
        # Without gradients, torch's own optimizers do nothing. Other optimizers may compute
        # gradients themselves.
        return type(optimizer).__module__.startswith("torch.optim.")
    return is_before_training and reader.all_zero(gradients)


def _is_zero(rate: Any, reader: ValueReader) -> bool:
    if getattr(rate, "is_cpu", False):
        return reader.read(rate) == 0
    return bool(rate == 0.0)
