"""What emulated kernels keep and need on the fake device, which must be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.forecast.fake.device import DEVICE_NAME
from holdfast.forecast.trace.events import PHASES
from holdfast.forecast.trace.tracer import Tracer


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A forward and a backward pass.

    The last node, bytes kept between them, sizes of all storages, the result.
    """

    node: str
    kept: int
    forward: list[int]
    backward: list[int]
    dtype: torch.dtype
    shape: tuple[int, ...]


def seen(run: Callable[[], torch.Tensor]) -> Seen:
    """Run forward and backward."""
    with Tracer(torch.device(DEVICE_NAME, 0)) as tracer:
        with tracer.recording():
            out = run()
            node = out.grad_fn.name() if out.grad_fn is not None else ""
            out.backward(torch.empty_like(out))
        trace = tracer.trace(micro_batch_size=1)
    changes = np.sign(trace.events) * trace.size_bytes[np.abs(trace.events) - 1]
    in_forward = trace.event_phase == PHASES.index("forward")
    # There the gradient of the result is made
    until = np.flatnonzero(in_forward & (changes > 0))[-1]
    forward, backward = changes[:until], changes[~in_forward]
    return Seen(
        node=node,
        kept=int(forward.sum()),
        forward=forward[forward > 0].tolist(),
        backward=backward[backward > 0].tolist(),
        dtype=out.dtype,
        shape=tuple(out.shape),
    )


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor on the device that wants a gradient."""
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)
