"""Run `scaled_dot_product_attention` on the fake device with the kernel that CUDA would choose.

On a device that torch does not know, torch uses the math kernel, which saves two score matrices per
layer for the backward pass. On CUDA, torch usually chooses a fused kernel, which saves one number
per row. The difference amounts to a third of an encoder's activations.

The kernel is chosen by the same conditions, in the same order, as in torch 2.11 to 2.14. See
aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp and sdp_utils_cpp.h; docstrings
in this module name the C++ functions. The chosen operator then runs with torch's own meta kernel
and autograd formula.

Compute capability 8.0 is assumed for every device. From 9.0 on, torch tries a cuDNN kernel first.
That kernel is not emulated, because it saves as much memory as the flash kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

# The query, the key and the value.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# From torch 2.14 on, the efficient kernel supports fewer key heads than query heads (`supports_gqa`
# in sdp_utils.cpp).
_TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_EFFICIENT_TAKES_GROUPS = _TORCH_VERSION >= (2, 14)
# The dtypes that the efficient kernel supports. For each of them, the head size must be a multiple
# of the given number (minimum_gemm_alignment).
_EFFICIENT_ALIGNMENTS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
# The largest head size of the flash kernel (check_head_dim_size_flash).
_MOST_FLASH_HEAD_SIZE = 256


# The kernels that this module can emulate.
EMULATED = frozenset({SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH})


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """The arguments of `scaled_dot_product_attention`, in the order of the operator's schema."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> Tensors:
        return (self.query, self.key, self.value)


def install_attention(library: torch.library.Library) -> None:
    """Make `scaled_dot_product_attention` use the kernel that CUDA would choose.

    Args:
        library: The library in which the replacement is registered.
    """
    library.impl("scaled_dot_product_attention", _attend)  # type: ignore[no-untyped-call]


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _AttentionCall(*args, **kwargs)
    if call.is_causal and call.attn_mask is not None:
        # torch's math kernel raises a clear error for this combination of arguments.
        return _math(call)
    cuda: Any = torch.backends.cuda
    allowed = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    backend = choose_backend(
        call.tensors,
        call.attn_mask,
        causal=call.is_causal,
        grouped=call.enable_gqa,
        enabled=frozenset(backend for backend, is_allowed in allowed.items() if is_allowed),
    )
    if backend is SDPBackend.FLASH_ATTENTION:
        return _flash(call)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        return _efficient(call)
    return _math(call)


def _math(call: _AttentionCall) -> torch.Tensor:
    out: torch.Tensor = aten._scaled_dot_product_attention_math(
        *call.tensors,
        _additive_mask(call),
        call.dropout_p,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]
    return out


def _flash(call: _AttentionCall) -> torch.Tensor:
    """Run the flash kernel, with the head size padded to a multiple of 8 as in pad_last_dim."""
    size = call.query.shape[-1]
    padding = -size % 8
    tensors: Sequence[torch.Tensor] = call.tensors
    if padding:
        tensors = [functional.pad(tensor, (0, padding)) for tensor in tensors]
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *tensors,
        call.dropout_p,
        call.is_causal,
        scale=size**-0.5 if call.scale is None else call.scale,
    )[0]
    return out[..., :size] if padding else out


def _efficient(call: _AttentionCall) -> torch.Tensor:
    """Run the efficient kernel, which saves one number per row if gradients are needed."""
    mask = _additive_mask(call)
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:-1], call.key.shape[-2])
    keeps_row_sums = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in call.tensors
    )
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        *call.tensors, mask, keeps_row_sums, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return out


def _additive_mask(call: _AttentionCall) -> torch.Tensor | None:
    """Return the mask in additive form (convert_boolean_attn_mask).

    A boolean mask is converted to a mask in the query's dtype, which autograd saves for the
    backward pass. Other masks are returned unchanged.
    """
    mask = call.attn_mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    is_masked = mask.logical_not()
    zero = torch.zeros((), dtype=call.query.dtype, device=mask.device)
    return torch.where(is_masked, float("-inf"), zero)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows are aligned to 8 elements (aligned_tensor<8>)."""
    if bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1]):
        return bias
    last = bias.shape[-1]
    return functional.pad(bias, (0, 8 - last % 8))[..., :last]


# --- choosing the kernel --------------------------------------------------------------------------


def choose_backend(
    tensors: Tensors,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    grouped: bool = False,
    enabled: frozenset[SDPBackend] = EMULATED,
) -> SDPBackend:
    """Return the kernel that CUDA would use, which is the first suitable one in torch's order.

    Args:
        tensors: Query, key and value, each of shape ``(batch, heads, length, head size)``.
        mask: The attention mask.
        causal: Whether each query ignores later keys.
        grouped: Whether there may be fewer key heads than query heads.
        enabled: The kernels that the user allows through ``torch.nn.attention.sdpa_kernel`` or the
            flags in ``torch.backends.cuda``.

    Raises:
        RuntimeError: If no allowed kernel is suitable. CUDA raises the same error.
    """
    if _may_be_fused(tensors, mask):
        may_be_flash = mask is None and SDPBackend.FLASH_ATTENTION in enabled
        if may_be_flash and _flash_suits(tensors, causal=causal, grouped=grouped):
            return SDPBackend.FLASH_ATTENTION
        may_be_efficient = SDPBackend.EFFICIENT_ATTENTION in enabled
        if may_be_efficient and _efficient_suits(tensors, grouped=grouped):
            return SDPBackend.EFFICIENT_ATTENTION
    if SDPBackend.MATH in enabled:
        return SDPBackend.MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def _may_be_fused(tensors: Tensors, mask: torch.Tensor | None) -> bool:
    """Return whether a call meets the conditions that all fused kernels share."""
    query, key, _ = tensors
    if any(tensor.dim() != 4 for tensor in tensors):
        return False
    if len({tensor.dtype for tensor in tensors}) > 1:
        return False
    strided = tensors if mask is None else (*tensors, mask)
    if any(tensor.stride(-1) != 1 for tensor in strided):
        return False
    return query.shape[-2] > 0 and key.shape[-2] > 0


def _flash_suits(tensors: Tensors, *, causal: bool, grouped: bool) -> bool:
    """Return whether the flash kernel supports a call (can_use_flash_attention)."""
    query, key, value = tensors
    head = query.shape[-1]
    if query.dtype not in _FLASH_DTYPES:
        return False
    if head > _MOST_FLASH_HEAD_SIZE or key.shape[-1] != head or value.shape[-1] != head:
        return False
    if causal and query.shape[-2] != key.shape[-2]:
        return False
    return _heads_match(tensors, grouped=grouped)


def _efficient_suits(tensors: Tensors, *, grouped: bool) -> bool:
    """Return whether the efficient kernel supports a call (can_use_mem_efficient_attention)."""
    query, key, value = tensors
    alignment = _EFFICIENT_ALIGNMENTS.get(query.dtype)
    if alignment is None:
        return False
    head = query.shape[-1]
    value_head = value.shape[-1]
    if head != key.shape[-1] or head == 0 or value_head == 0:
        return False
    if head % alignment or value_head % alignment:
        return False
    return _heads_match(tensors, grouped=grouped and _EFFICIENT_TAKES_GROUPS)


def _heads_match(tensors: Tensors, *, grouped: bool) -> bool:
    """Return whether the batch sizes and the numbers of heads match.

    The matching C++ function is check_batch_size_and_num_heads_dense.
    """
    query, key, value = (tensor.shape for tensor in tensors)
    if not query[0] == key[0] == value[0] or key[1] != value[1]:
        return False
    if grouped:
        return query[1] % key[1] == 0
    return query[1] == key[1]
