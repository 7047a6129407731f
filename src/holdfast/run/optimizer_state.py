"""Let optimizer state exist before the first step, so that it is never born half-way through one.

Out of memory while Adam allocates its moments leaves an entry that holds only ``step``; every later step then
fails with ``KeyError: 'exp_avg'``. torch's optimizers make their state in one place, which is called here ahead
of time, with gradients of zeros that take no memory. The values are those that the first step would start from.

Not for: SGD's momentum, which torch makes from the first gradient itself, and optimizers without that place. For
these an out-of-memory in the first step returns to the last good state, like any other inside a step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer


def create_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the state of parameters that have none.

    Args:
        optimizer: Any; one that makes its state elsewhere is left alone.
        parameters: Those that are going to be stepped.

    Returns:
        The parameters that have state now and had none before.

    Raises:
        Exception: what the allocator raises when memory is short; entries made in this call are then gone.
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return []
    lists = len(inspect.signature(make).parameters) - 1
    wanted = {id(parameter) for parameter in parameters if not optimizer.state.get(parameter)}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]
    if not missing:
        return []
    try:
        with _only_gradients_of(optimizer, missing):
            for group in optimizer.param_groups:
                make(group, *([] for _ in range(lists)))
    except BaseException:
        drop_state(optimizer, missing)
        raise
    drop_state(optimizer, [p for p in missing if not optimizer.state.get(p)])
    return [p for p in missing if p in optimizer.state]


@contextlib.contextmanager
def _only_gradients_of(optimizer: Optimizer, chosen: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let these parameters have gradients of zero, without memory, and all others none."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in everything]
    try:
        for p in everything:
            p.grad = None
        for p in chosen:
            p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
        yield
    finally:
        for p, gradient in zip(everything, before, strict=True):
            p.grad = gradient


def drop_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Remove the state of these parameters, as if they had never been stepped."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
