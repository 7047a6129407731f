"""Which kernel CUDA takes for `scaled_dot_product_attention`.

The order and the conditions are torch's own: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
sdp_utils_cpp.h as of torch 2.11 to 2.14; the comments name its functions.

Does not: run anything (`attention`), or know ROCm.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

HALF_PRECISION = (torch.float16, torch.bfloat16)
# cuDNN of the CUDA 13 wheels of torch 2.11 and later; all that matters is that it is newer than 9.15.1.
_CUDNN_VERSION = 91900
# From torch 2.14 on the efficient kernel takes fewer heads of keys than of queries (`supports_gqa` in sdp_utils.cpp).
_EFFICIENT_TAKES_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


class Backend(enum.Enum):
    """The kernels that torch has for attention on CUDA."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


DEFAULT_ORDER = (Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the choice depends on beside the tensors.

    Args:
        capability: CUDA compute capability, such as ``(8, 0)`` for an A100.
        cudnn_version: As ``torch.backends.cudnn.version()`` says it, such as 91900.
    """

    capability: tuple[int, int] = (8, 0)
    cudnn_version: int = _CUDNN_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one call of `scaled_dot_product_attention` looks like to the choice of the kernel.

    Args:
        dtypes: Of query, key and value.
        query: Shape of the query, ``(batch, heads, length, head size)``.
        key: Shape of the key.
        value: Shape of the value.
        mask: Shape of the mask; None if there is none.
        mask_requires_grad: Whether a gradient is wanted for it (a learned bias).
        unit_strides: Whether the last dimension of query, key, value and mask is contiguous.
        dropout: Probability.
        causal: The flag ``is_causal``.
        grouped: The flag ``enable_gqa``.
        nested: Whether any of the three is a nested tensor.
        training: Whether a gradient is wanted for any of the three.
    """

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    mask_requires_grad: bool = False
    unit_strides: bool = True
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    nested: bool = False
    training: bool = True


def choose_backend(
    call: AttentionCall,
    hardware: Hardware,
    *,
    enabled: frozenset[Backend] = frozenset(Backend),
    order: Sequence[Backend] = DEFAULT_ORDER,
    deterministic: bool = False,
) -> Backend:
    """Say which kernel CUDA takes.

    Args:
        call: The call.
        hardware: The device.
        enabled: What ``torch.nn.attention.sdpa_kernel`` or the flags in ``torch.backends.cuda`` allow.
        order: The order in which they are tried, if the user set one.
        deterministic: Whether ``torch.use_deterministic_algorithms(True)`` holds.

    Returns:
        The first kernel in the order that is allowed and takes the call.

    Raises:
        RuntimeError: No kernel that is allowed takes it, as on the device itself.
    """
    order = tuple(order)
    if order == DEFAULT_ORDER and prefers_cudnn(hardware):
        order = (Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH)
    for backend in order:
        if backend not in enabled:
            continue
        if backend is Backend.CUDNN and deterministic:
            continue  # check_cudnn_deterministic
        if _ACCEPTS[backend](call, hardware):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def prefers_cudnn(hardware: Hardware) -> bool:
    """Say whether torch tries cuDNN's kernel first: on compute capability 9 and 10 (check_prefer_cudnn_attention)."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return hardware.cudnn_version > 91500 and hardware.capability[0] in (9, 10)


def describe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
) -> AttentionCall:
    """Read off the tensors what the choice depends on."""
    tensors = (query, key, value)
    nested = any(tensor.is_nested for tensor in tensors)
    return AttentionCall(
        dtypes=(query.dtype, key.dtype, value.dtype),
        query=() if nested else tuple(query.shape),
        key=() if nested else tuple(key.shape),
        value=() if nested else tuple(value.shape),
        mask=None if mask is None else tuple(mask.shape),
        mask_requires_grad=mask is not None and mask.requires_grad,
        unit_strides=nested or all(t.dim() > 0 and t.stride(-1) == 1 for t in (*tensors, mask) if t is not None),
        dropout=dropout,
        causal=causal,
        grouped=grouped,
        nested=nested,
        training=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
    )


def _accepts_math(_call: AttentionCall, _hardware: Hardware) -> bool:
    return True


def _accepts_flash(call: AttentionCall, hardware: Hardware) -> bool:
    if (
        not (8, 0) <= hardware.capability <= (12, 1)
        or call.mask is not None
        or not _same_half_precision(call, hardware)
    ):
        return False
    if call.nested:
        return True
    head = call.query[-1]
    if not _four_dimensions(call) or not head == call.key[-1] == call.value[-1] or head > 256:
        return False
    if call.causal and call.query[-2] != call.key[-2]:
        return False
    limited = (8, 6) <= hardware.capability <= (8, 9) or (12, 0) <= hardware.capability <= (12, 1)
    if call.training and limited and not (head <= 192 or (call.dropout == 0.0 and head > 224)):
        return False
    return _heads_match(call, groups=True) and _lengths_and_strides(call)


def _accepts_efficient(call: AttentionCall, hardware: Hardware) -> bool:
    dtype = call.dtypes[0]
    allowed = (torch.float16, torch.float32) + ((torch.bfloat16,) if hardware.capability >= (8, 0) else ())
    if not (5, 0) <= hardware.capability <= (12, 1) or dtype not in allowed or len(set(call.dtypes)) > 1:
        return False
    if call.nested:
        return not call.training  # check_requires_grad_and_nested
    if not _four_dimensions(call):
        return False
    alignment = _gemm_alignment(dtype, hardware)
    head, value_head = call.query[-1], call.value[-1]
    if head != call.key[-1] or head % alignment or value_head % alignment or not head or not value_head:
        return False
    return _heads_match(call, groups=_EFFICIENT_TAKES_GROUPS) and _lengths_and_strides(call)


def _accepts_cudnn(call: AttentionCall, hardware: Hardware) -> bool:
    if call.nested or not (8, 0) <= hardware.capability <= (12, 1) or hardware.cudnn_version < 90000:
        return False  # nested only behind an environment variable
    if not _four_dimensions(call) or not _same_half_precision(call, hardware) or not _cudnn_takes_mask(call):
        return False
    if (call.dropout * 16) % 1 or (call.dropout and 91100 < hardware.cudnn_version < 91400):
        return False
    batch, heads, length, head = call.query
    value_head, key_length = call.value[-1], call.key[-2]
    wide = 192 if hardware.capability in ((9, 0), (10, 0), (10, 3)) and (head, value_head) == (192, 128) else 128
    if max(head, value_head) > wide or head % 8 or value_head % 8 or max(batch, heads) > 65535:
        return False
    if key_length == 1 or (call.dropout and length == 1):
        return False
    return _heads_match(call, groups=True) and _lengths_and_strides(call)


_ACCEPTS: dict[Backend, Callable[[AttentionCall, Hardware], bool]] = {
    Backend.FLASH: _accepts_flash,
    Backend.EFFICIENT: _accepts_efficient,
    Backend.CUDNN: _accepts_cudnn,
    Backend.MATH: _accepts_math,
}


def _same_half_precision(call: AttentionCall, hardware: Hardware) -> bool:
    allowed = HALF_PRECISION if hardware.capability >= (8, 0) else (torch.float16,)
    return call.dtypes[0] in allowed and len(set(call.dtypes)) == 1


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


def _cudnn_takes_mask(call: AttentionCall) -> bool:
    """check_attn_mask_shape."""
    if call.mask is None:
        return True
    if call.mask_requires_grad or len(call.mask) not in (2, 4):
        return False
    wanted = (call.query[0], call.query[1], call.query[2], call.key[2])[-len(call.mask) :]
    return all(size in (1, full) for size, full in zip(call.mask, wanted, strict=True))


def _gemm_alignment(dtype: torch.dtype, hardware: Hardware) -> int:
    """minimum_gemm_alignment, in elements."""
    half = dtype in HALF_PRECISION
    tensor_cores = hardware.capability >= (8, 0) or (hardware.capability >= (7, 0) and half)
    alignment = 4 if hardware.capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment
