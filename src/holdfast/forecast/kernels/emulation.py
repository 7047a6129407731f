"""Everything that makes the fake device behave as the real one.

Attention, recurrent layers, norms, losses, packing.

The rules are registered with torch.library on the device's autograd key, so every caller meets
them: Python, C++ composites, and a checkpoint's recomputation in the backward pass. On the route
``"cpu"`` torch's own choices are the real CPU's already; only what fake kernels forget is put
right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.forecast.kernels import scratch_cpu
from holdfast.forecast.kernels.attention import install_attention
from holdfast.forecast.kernels.recurrent import install_recurrent
from holdfast.forecast.kernels.scratch import Uncalibrated
from holdfast.forecast.kernels.sequences import Assume, Known, install_sequences

aten = torch.ops.aten
FakeKernel = Callable[..., Any]
_NOT_REDUCED = 0  # at::Reduction::None


@contextlib.contextmanager
def emulated_kernels(
    route: str, *, value_of: Known, assume: Assume, uncalibrated: Uncalibrated
) -> Iterator[Mapping[Any, FakeKernel]]:
    """Let the fake device run what the real one would.

    Yields:
        Fake kernels that the fake mode is to prefer to torch's own, called as ``kernel(mode,
        overload, *args)``. They cannot be put into torch's table: its cache of results forgets the
        size of a storage.
    """
    key = "AutogradPrivateUse1" if route == "privateuse1" else "AutogradCPU"
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    try:
        install_sequences(library, value_of, assume)
        if route == "privateuse1":
            install_attention(library)
            library.impl("_fused_rms_norm", _fused_rms_norm)  # type: ignore[no-untyped-call]
            install_recurrent(library, uncalibrated.note_kept)
            yield _LOSSES
        else:
            yield {**_LOSSES, aten.mkldnn_rnn_layer.default: scratch_cpu.lstm}
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _reduced_loss(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss that is averaged or summed in the kernel is written into the tensor of the single
    losses.

    That is resized then: the scalar keeps its storage, on the CPU and on CUDA
        (aten/src/ATen/native/Loss.cpp and
    cuda/Loss.cu; torch 2.13.0+cpu: 4000 bytes for the mean of 1000 values). torch's fake kernel has
    it too small.
    """
    arguments = func._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given.update(zip((one.name for one in arguments), args, strict=False), **kwargs)
    data, target = given["self"], given["target"]
    shape = torch.broadcast_shapes(data.shape, target.shape)  # type: ignore[no-untyped-call]
    with mode:
        whole = data.new_empty(shape)
        return whole if given["reduction"] == _NOT_REDUCED else whole.as_strided((), ())


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
    """RMS norm as CUDA's fused kernel runs it: it keeps its input and one number for each row.

    A device that torch does not know gets the composition of single operations, which keeps three
    tensors of the input's size in fp32. As in aten/src/ATen/native/cuda/layer_norm_kernel.cu and
    derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor | None, dimensions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = data.contiguous()
        rows = (*data.shape[: data.dim() - dimensions], *(1,) * dimensions)
        single = data.dtype if data.dtype is torch.float64 else torch.float32
        scales = data.new_empty(rows, dtype=single)
        ctx.save_for_backward(data, weight, scales)
        ctx.mark_non_differentiable(scales)
        return torch.empty_like(x), scales

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _scales: Any) -> tuple[torch.Tensor | None, ...]:
        data, weight, _ = ctx.saved_tensors
        dy, x = gradient.contiguous(), data.contiguous()
        dx = torch.empty_like(x)
        del dy, x
        return dx, None if weight is None else torch.empty_like(weight), None


def _fused_rms_norm(
    data: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    _eps: float | None,
) -> Any:
    return _FusedRmsNorm.apply(data, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
