"""Install kernels that make operators allocate on the fake device as on a real device.

The kernels are registered with torch.library under the device's autograd key. They therefore apply
to every caller: Python code, C++ composite operators, and recomputation in the backward pass.

On the route ``"cpu"``, torch already makes the same choices as on a real CPU, so only mistakes in
torch's fake kernels are corrected. The kernels for attention, recurrent layers and sequences are in
separate modules. This module defines the kernels for RMS norm and losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.forecast.kernels import scratch_cpu
from holdfast.forecast.kernels.attention import install_attention
from holdfast.forecast.kernels.recurrent import install_recurrent
from holdfast.forecast.kernels.scratch import Uncalibrated, named_arguments
from holdfast.forecast.kernels.sequences import Assume, ValueOf, install_sequences

aten = torch.ops.aten
FakeKernel = Callable[..., Any]
# The value of at::Reduction::None.
_NOT_REDUCED = 0


@contextlib.contextmanager
def emulated_kernels(
    route: str, *, value_of: ValueOf, assume: Assume, uncalibrated: Uncalibrated
) -> Iterator[Mapping[Any, FakeKernel]]:
    """Make operators allocate on the fake device as on a real device during the ``with`` block.

    Args:
        route: ``"privateuse1"`` or ``"cpu"``; see `forecast_device`.
        value_of: A function that returns the values of a fake tensor, or None if they are unknown.
        assume: Called with the text of each assumption.
        uncalibrated: Collects by how much kernels may exceed the forecast of their memory.

    Yields:
        Fake kernels, keyed by operator overload. The fake mode must use them instead of torch's
        own, and call them as ``kernel(mode, overload, *args)``. They cannot be added to torch's own
        table of fake kernels, because torch caches results without the sizes of their storages.
    """
    stands_for_gpu = route == "privateuse1"
    key = "AutogradPrivateUse1" if stands_for_gpu else "AutogradCPU"
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    try:
        install_sequences(library, value_of, assume)
        if stands_for_gpu:
            install_attention(library)
            install_recurrent(library, uncalibrated.note_kept)
            library.impl("_fused_rms_norm", _fused_rms_norm)  # type: ignore[no-untyped-call]
            yield _LOSSES
        else:
            yield {**_LOSSES, aten.mkldnn_rnn_layer.default: scratch_cpu.lstm}
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _reduced_loss(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the fake result of a loss operator, with a storage as large as on a real device.

    Both on the CPU and on CUDA, the kernel writes the loss of each element into the result tensor.
    It then resizes this tensor to a scalar, but the storage keeps its size (see
    aten/src/ATen/native/Loss.cpp and cuda/Loss.cu). With torch 2.13.0+cpu, the mean loss over 1000
    fp32 values has a storage of 4000 bytes. torch's own fake kernel creates a storage for a single
    number.
    """
    arguments = named_arguments(func, args, kwargs)
    data = arguments["self"]
    shape = torch.broadcast_shapes(data.shape, arguments["target"].shape)  # type: ignore[no-untyped-call]
    with mode:
        losses = data.new_empty(shape)
        if arguments["reduction"] == _NOT_REDUCED:
            return losses
        return losses.as_strided((), ())


_LOSSES: Mapping[Any, FakeKernel] = dict.fromkeys(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
    ),
    _reduced_loss,
)


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm with the allocations of CUDA's fused kernel.

    The fused kernel saves the input, the weight and one number per row for the backward pass. On a
    device that torch does not know, torch runs a sequence of separate operations instead, which
    save three fp32 tensors of the input's size. The allocations follow
    aten/src/ATen/native/cuda/layer_norm_kernel.cu and derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor | None, dimensions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = data.contiguous()
        rows = (*data.shape[: data.dim() - dimensions], *(1,) * dimensions)
        scale_dtype = torch.float64 if data.dtype is torch.float64 else torch.float32
        scales = data.new_empty(rows, dtype=scale_dtype)
        ctx.save_for_backward(data, weight, scales)
        ctx.mark_non_differentiable(scales)
        return torch.empty_like(x), scales

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _scales: Any) -> tuple[torch.Tensor | None, ...]:
        data, weight, _ = ctx.saved_tensors
        dy = gradient.contiguous()
        x = data.contiguous()
        dx = torch.empty_like(x)
        # The real kernel needs these contiguous copies only while it runs.
        del dy, x
        weight_gradient = None if weight is None else torch.empty_like(weight)
        return dx, weight_gradient, None


def _fused_rms_norm(
    data: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    _eps: float | None,
) -> Any:
    return _FusedRmsNorm.apply(data, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
