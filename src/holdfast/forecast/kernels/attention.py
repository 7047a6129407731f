"""Attention on the fake device, by the kernel that CUDA would take.

A device that torch does not know gets the math path, which keeps two matrices of scores for every layer; CUDA mostly
takes a fused kernel, which keeps one number for each row (a third of an encoder's activations). The kernels' own
meta implementations and autograd formulas do the rest, as in aten/src/ATen/native/transformers/attention.cpp.

Does not: choose (`attention_choice`), say what a kernel needs while it runs (`scratch`), or touch the fake CPU, which
follows the real CPU's rules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from holdfast.forecast.kernels.attention_choice import (
    DEFAULT_ORDER,
    AttentionCall,
    Backend,
    Hardware,
    choose_backend,
    describe,
)

# at::SDPBackend; the numbers are those of torch.nn.attention.SDPBackend.
_BACKEND_OF_NUMBER = {0: Backend.MATH, 1: Backend.FLASH, 2: Backend.EFFICIENT, 3: Backend.CUDNN}


def install_attention(library: torch.library.Library, hardware: Hardware) -> None:
    """Have `scaled_dot_product_attention` on the fake device take the kernel that CUDA would.

    Args:
        library: Of namespace ``aten``, kind ``IMPL``, dispatch key ``AutogradPrivateUse1``. It must be kept alive.
        hardware: The device to stand in for.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 (the operator's signature)
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = describe(query, key, value, attn_mask, dropout=dropout_p, causal=is_causal, grouped=enable_gqa)
        if call.nested or (is_causal and attn_mask is not None):
            backend = Backend.MATH  # torch's own composite, which also says what is wrong with such a call
        else:
            backend = choose_backend(
                call, hardware, enabled=_enabled(), order=_order(), deterministic=_deterministic()
            )
        if backend is Backend.FLASH:
            return _flash(query, key, value, dropout_p, scale, causal=is_causal)
        if backend is Backend.EFFICIENT:
            return _efficient(query, key, value, attn_mask, dropout_p, scale, causal=is_causal, call=call)
        if backend is Backend.CUDNN:
            return _cudnn(query, key, value, attn_mask, dropout_p, scale, causal=is_causal, call=call)
        return _math(query, key, value, attn_mask, dropout_p, scale, causal=is_causal, grouped=enable_gqa)

    library.impl("scaled_dot_product_attention", attention)  # type: ignore[no-untyped-call]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scale: float | None,
    *,
    causal: bool,
) -> torch.Tensor:
    size = query.shape[-1]
    padded = [functional.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value)]
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, dropout, causal, scale=size**-0.5 if scale is None else scale
    )[0]
    return out[..., :size] if size % 8 else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool,
    call: AttentionCall,
) -> torch.Tensor:
    bias = _additive(mask, query.dtype)
    if bias is not None:
        if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):  # aligned_tensor<8>
            last = bias.shape[-1]
            bias = functional.pad(bias, (0, 8 - last % 8))[..., :last]
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, call.training, dropout, causal, scale=scale
    )[0]
    return out


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool,
    call: AttentionCall,
) -> torch.Tensor:
    bias = _additive(mask, query.dtype)
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, call.training, dropout, causal, scale=scale
    )[0]
    return out


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool,
    grouped: bool,
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, _additive(mask, query.dtype), dropout, causal, None, scale=scale, enable_gqa=grouped
    )[0]
    return out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """convert_boolean_attn_mask: a boolean mask becomes one of the query's type, which the backward pass keeps."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask.logical_not(), float("-inf"), zero)


def _enabled() -> frozenset[Backend]:
    cuda = torch.backends.cuda
    allowed: dict[Backend, Callable[[], bool]] = {
        Backend.FLASH: cuda.flash_sdp_enabled,
        Backend.EFFICIENT: cuda.mem_efficient_sdp_enabled,
        Backend.CUDNN: cuda.cudnn_sdp_enabled,
        Backend.MATH: cuda.math_sdp_enabled,
    }
    return frozenset(backend for backend, is_enabled in allowed.items() if is_enabled())


def _order() -> tuple[Backend, ...]:
    """The order that the user set with ``sdpa_kernel(..., set_priority=True)``, else torch's own."""
    read = getattr(torch._C, "_get_sdp_priority_order", None)
    if read is None:
        return DEFAULT_ORDER
    return tuple(_BACKEND_OF_NUMBER[number] for number in read() if number in _BACKEND_OF_NUMBER)


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
