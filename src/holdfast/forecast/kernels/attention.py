"""Attention on the fake device, by the kernel that CUDA would take for
`scaled_dot_product_attention`.

A device that torch does not know gets the math path, which keeps two matrices of scores for every
layer; CUDA mostly takes a fused kernel, which keeps one number for each row (a third of an
encoder's activations). The order and the conditions of the choice are torch's own:
aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp and sdp_utils_cpp.h as of torch
2.11 to 2.14; the comments name its functions. The kernels' own meta implementations and autograd
formulas do the rest. The device is one of compute capability 8.0, whichever is planned for. cuDNN's
kernel,
which torch tries first from 9.0 on, is not known: it keeps as much as the flash kernel.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
HALF_PRECISION = (torch.float16, torch.bfloat16)
# From torch 2.14 on the efficient kernel takes fewer heads of keys than of queries (`supports_gqa`
# in sdp_utils.cpp).
_EFFICIENT_TAKES_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


class Backend(enum.Enum):
    """The kernels that are known; the numbers are those of `torch.nn.attention.SDPBackend`."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2


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
        # Torch's own composite, which also says what is wrong with a causal call with a mask
        backend = Backend.MATH
        if not (is_causal and attn_mask is not None):
            backend = choose_backend(
                tensors, attn_mask, causal=is_causal, grouped=enable_gqa, enabled=_enabled()
            )
        if backend is Backend.FLASH:
            return _flash(tensors, dropout_p, scale, causal=is_causal)
        mask = _additive(attn_mask, query.dtype)
        if backend is Backend.MATH:
            rest = {"scale": scale, "enable_gqa": enable_gqa}
            found = aten._scaled_dot_product_attention_math(
                *tensors, mask, dropout_p, is_causal, None, **rest
            )
        else:
            mask = None if mask is None else _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
            kernel = aten._scaled_dot_product_efficient_attention
            training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            found = kernel(*tensors, mask, training, dropout_p, is_causal, scale=scale)
        out: torch.Tensor = found[0]
        return out

    library.impl("scaled_dot_product_attention", attention)  # type: ignore[no-untyped-call]


def _flash(
    tensors: Sequence[torch.Tensor], dropout: float, scale: float | None, *, causal: bool
) -> torch.Tensor:
    size = tensors[0].shape[-1]
    padded = [functional.pad(t, (0, -size % 8)) if size % 8 else t for t in tensors]
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *padded, dropout, causal, scale=size**-0.5 if scale is None else scale
    )[0]
    return out[..., :size] if size % 8 else out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """convert_boolean_attn_mask.

    A boolean mask becomes one of the query's type, which the backward pass keeps.
    """
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(
        mask.logical_not(), float("-inf"), torch.zeros((), dtype=dtype, device=mask.device)
    )


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


def choose_backend(
    tensors: Tensors,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    grouped: bool = False,
    enabled: frozenset[Backend] = frozenset(Backend),
) -> Backend:
    """Return the kernel that CUDA takes.

    The first in torch's order that is allowed and takes the call.

    Tensors are query, key and value, ``(batch, heads, length, head size)``. The user allows kernels
    by ``torch.nn.attention.sdpa_kernel`` or the flags in ``torch.backends.cuda``. RuntimeError if
    none that is allowed takes it, as on the device itself.
    """
    fused = _may_be_fused(tensors, mask)
    accepts = {
        Backend.FLASH: (
            fused and mask is None and _flash_takes(tensors, causal=causal, grouped=grouped)
        ),
        Backend.EFFICIENT: fused and _efficient_takes(tensors, grouped=grouped),
        Backend.MATH: True,
    }
    for backend, takes_it in accepts.items():
        if takes_it and backend in enabled:
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _may_be_fused(tensors: Tensors, mask: torch.Tensor | None) -> bool:
    if (
        any(tensor.dim() != 4 for tensor in tensors)
        or len({tensor.dtype for tensor in tensors}) > 1
    ):
        return False
    unit_strides = all(tensor.stride(-1) == 1 for tensor in (*tensors, mask) if tensor is not None)
    return unit_strides and tensors[0].shape[-2] > 0 and tensors[1].shape[-2] > 0


def _flash_takes(tensors: Tensors, *, causal: bool, grouped: bool) -> bool:
    query, key, value = tensors
    head = query.shape[-1]
    if (
        query.dtype not in HALF_PRECISION
        or not head == key.shape[-1] == value.shape[-1]
        or head > 256
    ):
        return False
    if causal and query.shape[-2] != key.shape[-2]:
        return False
    return _heads_match(tensors, grouped=grouped)


def _efficient_takes(tensors: Tensors, *, grouped: bool) -> bool:
    query, key, value = tensors
    if query.dtype not in (*HALF_PRECISION, torch.float32):
        return False
    alignment = 8 if query.dtype in HALF_PRECISION else 4  # minimum_gemm_alignment, in elements
    head, value_head = query.shape[-1], value.shape[-1]
    if (
        head != key.shape[-1]
        or head % alignment
        or value_head % alignment
        or not head
        or not value_head
    ):
        return False
    return _heads_match(tensors, grouped=grouped and _EFFICIENT_TAKES_GROUPS)


def _heads_match(tensors: Tensors, *, grouped: bool) -> bool:
    """check_batch_size_and_num_heads_dense."""
    query, key, value = (tensor.shape for tensor in tensors)
    if not query[0] == key[0] == value[0] or key[1] != value[1]:
        return False
    return query[1] % key[1] == 0 if grouped else query[1] == key[1]
