"""Attention on the fake device, by the kernel that CUDA would take for `scaled_dot_product_attention`.

A device that torch does not know gets the math path, which keeps two matrices of scores for every layer; CUDA mostly
takes a fused kernel, which keeps one number for each row (a third of an encoder's activations). The order and the
conditions of the choice are torch's own: aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp and
sdp_utils_cpp.h as of torch 2.11 to 2.14; the comments name its functions. The kernels' own meta implementations and
autograd formulas do the rest. The device is one of compute capability 8.0, whichever is planned for. cuDNN's kernel,
which torch tries first from 9.0 on, is not known: it keeps as much as the flash kernel.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten
HALF_PRECISION = (torch.float16, torch.bfloat16)
# From torch 2.14 on the efficient kernel takes fewer heads of keys than of queries (`supports_gqa` in sdp_utils.cpp).
_EFFICIENT_TAKES_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


class Backend(enum.Enum):
    """The kernels that are known; the numbers are those of `torch.nn.attention.SDPBackend`."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one call of `scaled_dot_product_attention` looks like to the choice of the kernel.

    Shapes are ``(batch, heads, length, head size)``, that of the mask None if there is none. `unit_strides`: the
    last dimension of all tensors is contiguous; `training`: a gradient is wanted for any of the three.
    """

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    unit_strides: bool = True
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    training: bool = True


def install_attention(library: torch.library.Library) -> None:
    """Have `scaled_dot_product_attention` on the fake device take the kernel that CUDA would."""

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
        tensors = (query, key, value)
        call = describe(*tensors, attn_mask, dropout=dropout_p, causal=is_causal, grouped=enable_gqa)
        backend = Backend.MATH  # torch's own composite, which also says what is wrong with a causal call with a mask
        if not (is_causal and attn_mask is not None):
            backend = choose_backend(call, _enabled())
        if backend is Backend.FLASH:
            return _flash(tensors, dropout_p, scale, causal=is_causal)
        mask = _additive(attn_mask, query.dtype)
        if backend is Backend.MATH:
            rest = {"scale": scale, "enable_gqa": enable_gqa}
            found = aten._scaled_dot_product_attention_math(*tensors, mask, dropout_p, is_causal, None, **rest)
        else:
            mask = None if mask is None else _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
            kernel = aten._scaled_dot_product_efficient_attention
            found = kernel(*tensors, mask, call.training, dropout_p, is_causal, scale=scale)
        out: torch.Tensor = found[0]
        return out

    library.impl("scaled_dot_product_attention", attention)  # type: ignore[no-untyped-call]


def _flash(tensors: Sequence[torch.Tensor], dropout: float, scale: float | None, *, causal: bool) -> torch.Tensor:
    size = tensors[0].shape[-1]
    padded = [functional.pad(t, (0, -size % 8)) if size % 8 else t for t in tensors]
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *padded, dropout, causal, scale=size**-0.5 if scale is None else scale
    )[0]
    return out[..., :size] if size % 8 else out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """convert_boolean_attn_mask: a boolean mask becomes one of the query's type, which the backward pass keeps."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask.logical_not(), float("-inf"), zero)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """aligned_tensor<8>."""
    if bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1]):
        return bias
    last = bias.shape[-1]
    return functional.pad(bias, (0, 8 - last % 8))[..., :last]


def _enabled() -> frozenset[Backend]:
    cuda = torch.backends.cuda
    allowed: dict[Backend, Callable[[], bool]] = {
        Backend.FLASH: cuda.flash_sdp_enabled,
        Backend.EFFICIENT: cuda.mem_efficient_sdp_enabled,
        Backend.MATH: cuda.math_sdp_enabled,
    }
    return frozenset(backend for backend, is_enabled in allowed.items() if is_enabled())


def choose_backend(call: AttentionCall, enabled: frozenset[Backend] = frozenset(Backend)) -> Backend:
    """Return the kernel that CUDA takes: the first in torch's order that is allowed and takes the call.

    The user allows them by ``torch.nn.attention.sdpa_kernel`` or the flags in ``torch.backends.cuda``. RuntimeError
    if none that is allowed takes it, as on the device itself.
    """
    for backend in (Backend.FLASH, Backend.EFFICIENT, Backend.MATH):
        if backend in enabled and _ACCEPTS[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def describe(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, **flags: Any
) -> AttentionCall:
    """Return what the choice depends on; `flags` are ``dropout``, ``causal`` and ``grouped`` of `AttentionCall`."""
    tensors = (query, key, value)
    return AttentionCall(
        dtypes=(query.dtype, key.dtype, value.dtype),
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        mask=None if mask is None else tuple(mask.shape),
        unit_strides=all(t.dim() > 0 and t.stride(-1) == 1 for t in (*tensors, mask) if t is not None),
        training=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        **flags,
    )


def _accepts_flash(call: AttentionCall) -> bool:
    half = call.dtypes[0] in HALF_PRECISION and len(set(call.dtypes)) == 1
    if call.mask is not None or not half or not _four_dimensions(call):
        return False
    head = call.query[-1]
    if not head == call.key[-1] == call.value[-1] or head > 256:
        return False
    if call.causal and call.query[-2] != call.key[-2]:
        return False
    return _heads_match(call, groups=True) and _lengths_and_strides(call)


def _accepts_efficient(call: AttentionCall) -> bool:
    dtype = call.dtypes[0]
    if dtype not in (*HALF_PRECISION, torch.float32) or len(set(call.dtypes)) > 1 or not _four_dimensions(call):
        return False
    alignment = 8 if dtype in HALF_PRECISION else 4  # minimum_gemm_alignment, in elements
    head, value_head = call.query[-1], call.value[-1]
    if head != call.key[-1] or head % alignment or value_head % alignment or not head or not value_head:
        return False
    return _heads_match(call, groups=_EFFICIENT_TAKES_GROUPS) and _lengths_and_strides(call)


_ACCEPTS: dict[Backend, Callable[[AttentionCall], bool]] = {
    Backend.FLASH: _accepts_flash,
    Backend.EFFICIENT: _accepts_efficient,
    Backend.MATH: lambda _: True,
}


def _four_dimensions(call: AttentionCall) -> bool:
    return len(call.query) == len(call.key) == len(call.value) == 4


def _heads_match(call: AttentionCall, *, groups: bool) -> bool:
    """check_batch_size_and_num_heads_dense."""
    if not call.query[0] == call.key[0] == call.value[0] or call.key[-3] != call.value[-3]:
        return False
    if call.grouped and groups:
        return call.query[-3] % call.key[-3] == 0
    return call.query[-3] == call.key[-3]


def _lengths_and_strides(call: AttentionCall) -> bool:
    return call.query[-2] > 0 and call.key[-2] > 0 and call.unit_strides
