"""Weights and moments of one rank for all.

Those of a rank whose optimizer failed half-way are of no use any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.optim import Optimizer

from holdfast.core.errors import OutOfMemoryError
from holdfast.guard.optimizer_state import has_torch_layout
from holdfast.guard.ranks.messages import Messages


def take_state(
    optimizer: Optimizer, source: int, messages: Messages, group: Any, device: torch.device
) -> None:
    """Take what the optimizer of a rank holds and moves, on all ranks.

    H402 if theirs holds other things.
    """
    if not has_torch_layout(optimizer.state_dict()):
        raise without_help(
            "the optimizer keeps state of its own, which no other rank can hand over"
        )
    found = [
        (p, optimizer.state.get(p, {})) for each in optimizer.param_groups for p in each["params"]
    ]
    forms = [
        [[key, list(getattr(state[key], "shape", []))] for key in sorted(state)]
        for _, state in found
    ]
    if any(each != forms for each in messages.exchange("forms of state", forms)):
        raise without_help("the state that the optimizer has on the others has another form")
    hosted: list[tuple[dict[str, Any], str]] = []
    for parameter, state in found:
        distributed.broadcast(parameter.detach(), source, group=group)
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor) and state[key].device.type == device.type:
                distributed.broadcast(state[key], source, group=group)
            else:
                hosted.append((state, key))
    values = messages.exchange("state", [state[key] for state, key in hosted])[source]
    for (state, key), value in zip(hosted, values, strict=True):
        state[key] = value


def healthy(behind: list[bool]) -> int:
    """Return a rank that has made its step whole; H402 if there is none."""
    if all(behind):
        raise without_help("so it was on all ranks")
    return behind.index(False)


def without_help(why: str) -> OutOfMemoryError:
    """Return H402 for a rank whose state nobody can replace."""
    return OutOfMemoryError(
        "an optimizer ran out of memory half-way",
        limit=f"weights and moments are half changed, and {why}",
        fix=(
            "leave the optimizer more memory (fused=True, a smaller model or optimizer) and start"
            " all ranks again: they go on from the newest checkpoint."
        ),
        rule="H402",
    )
