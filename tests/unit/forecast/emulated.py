"""What emulated kernels keep and need on the fake device, which must be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.unit.forecast.allocations import FakeAllocations


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A forward and a backward pass: the last node, bytes kept between them, sizes of all storages, the result."""

    node: str
    kept: int
    forward: list[int]
    backward: list[int]
    dtype: torch.dtype
    shape: tuple[int, ...]


def seen(run: Callable[[], torch.Tensor]) -> Seen:
    """Run forward and backward."""
    watch = FakeAllocations("privateuse1")
    with watch:
        out = run()
        kept, forward = watch.live, list(watch.sizes)
        node = out.grad_fn.name() if out.grad_fn is not None else ""
        out.backward(torch.empty_like(out))
    backward = watch.sizes[len(forward) :]
    return Seen(node=node, kept=kept, forward=forward, backward=backward, dtype=out.dtype, shape=tuple(out.shape))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor on the device that wants a gradient."""
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)
