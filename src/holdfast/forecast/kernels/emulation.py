"""Install all rules that make kernels on the fake device allocate like real ones.

The rules are registered with torch.library on the device's autograd key, so that they apply to
every caller: Python, C++ composites, and a recomputation in the backward pass. On the route
``"cpu"`` torch already makes the choices of the real CPU; only errors of torch's fake kernels are
corrected. The rules for attention, recurrent layers and sequences are in separate modules; those
for RMS norm and losses are here.
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
# at::Reduction::None.
_NOT_REDUCED = 0


@contextlib.contextmanager
def emulated_kernels(
    route: str, *, value_of: ValueOf, assume: Assume, uncalibrated: Uncalibrated
) -> Iterator[Mapping[Any, FakeKernel]]:
    """Make the fake device allocate like the real one within the context.

    Args:
        route: ``"privateuse1"`` or ``"cpu"``.
        value_of: Returns the values of a fake tensor, or None.
        assume: Called with each assumption.
        uncalibrated: Collects by how much figures may be too low.

    Yields:
        Fake kernels that the fake mode must prefer to torch's own, called as ``kernel(mode,
        overload, *args)``. They cannot be added to torch's table, because its result cache forgets
        the size of a storage.
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
    """Return the result of a loss whose kernel averages or sums the losses of the elements.

    These losses are written into a tensor that is then resized to a scalar but keeps its storage,
    on the CPU and on CUDA (aten/src/ATen/native/Loss.cpp and cuda/Loss.cu; we measured
    4000 bytes for the mean of 1000 values with torch 2.13.0+cpu). torch's fake kernel makes the
    storage too small.
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
    """RMS norm as CUDA's fused kernel runs it: it keeps its input and one number per row.

    A device unknown to torch gets a composition of single operations, which keeps three fp32
    tensors of the input's size. It follows aten/src/ATen/native/cuda/layer_norm_kernel.cu and
    derivatives.yaml.
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
        # The kernel needs these copies only while it runs.
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
