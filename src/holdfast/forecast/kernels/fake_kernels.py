"""Fake kernels that say what the real ones keep: torch's own return the right shapes with too small a storage.

A loss that is averaged or summed in the kernel (mean squared error, smooth L1, binary cross entropy, soft margin) is
written into the tensor of the single losses, which is then resized: the scalar keeps that storage as long as it
lives, on the CPU and on CUDA (aten/src/ATen/native/Loss.cpp and cuda/Loss.cu; torch 2.13.0+cpu: 4000 bytes for the
mean of 1000 values).

The fake mode calls them before torch's own, as ``kernel(mode, overload, *args, **kwargs)``. They cannot be put into
torch's table: its cache of results forgets the size of a storage.

Does not: emulate other kernels (``attention``, ``recurrent``, ``sequences``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
FakeKernel = Callable[..., Any]
_NOT_REDUCED = 0  # at::Reduction::None


def _reduced_loss(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = func._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given.update(zip((one.name for one in arguments), args, strict=False), **kwargs)
    data, target = given["self"], given["target"]
    shape = torch.broadcast_shapes(data.shape, target.shape)  # type: ignore[no-untyped-call]
    with mode:
        whole = data.new_empty(shape)
        return whole if given["reduction"] == _NOT_REDUCED else whole.as_strided((), ())


LOSSES: Mapping[Any, FakeKernel] = dict.fromkeys(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
    ),
    _reduced_loss,
)
