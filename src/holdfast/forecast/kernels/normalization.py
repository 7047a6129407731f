"""RMS norm on the fake device as CUDA's fused kernel runs it: it keeps its input and one number for each row.

A device that torch does not know gets the composition of single operations, which keeps three tensors of the input's
size in fp32. As in aten/src/ATen/native/cuda/layer_norm_kernel.cu and derivatives.yaml.

Does not: decide when the fused kernel is taken; torch's own ``rms_norm`` does (types of input and weight alike).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_OPERATOR = "_fused_rms_norm"


class _FusedRmsNorm(torch.autograd.Function):
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


def install_normalization(library: torch.library.Library) -> None:
    """Have RMS norm on the fake device run as CUDA's fused kernel does.

    Args:
        library: Of namespace ``aten``, kind ``IMPL``, dispatch key ``AutogradPrivateUse1``. It must be kept alive.
    """

    def fused(
        data: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, _eps: float | None
    ) -> Any:
        return _FusedRmsNorm.apply(data, weight, len(normalized_shape))  # type: ignore[no-untyped-call]

    if hasattr(torch.ops.aten, _OPERATOR):
        library.impl(_OPERATOR, fused)  # type: ignore[no-untyped-call]
