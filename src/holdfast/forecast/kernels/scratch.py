"""The memory that a CUDA kernel needs only while it runs, besides its arguments and results.

It is invisible to dispatch modes, so it comes from tables. Each rule follows the source that it
names, as of torch 2.11 to 2.13. Where the library is closed (cuDNN, cub), the figure is an
assumption with an upper bound, and its excess counts as uncalibrated. An operator that is in no
table counts as 0 bytes, and widens the margin by the size of its tensors: an operator rarely needs
more than a copy of each.

Memory that outlives the operator is not counted here: the reserve of a recurrent layer is in
`recurrent`, and the workspaces of cuBLAS belong to the device.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.forecast.kernels.operators import LISTS

aten = torch.ops.aten

_FP32_BYTES = 4
# Indices are int64.
_INDEX_BYTES = 8
# Rows of an embedding's gradient that one thread sums (NROWS_PER_THREAD in
# EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10
# Rows of partial sums of layer norm's parameter gradients (layer_norm_kernel.cu).
_LAYER_NORM_PARTIAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """The scratch memory of one call of an operator.

    Args:
        bytes: The bytes counted in the forecast.
        at_most: The upper bound, which the margin covers. It equals `bytes` if the figure comes
            from torch's own source or a measurement.
    """

    bytes: int
    at_most: int


NO_SCRATCH = Scratch(0, 0)
# The arguments of a call by name.
Arguments = dict[str, Any]
# Returns the scratch memory from the arguments and the result of a call.
Rule = Callable[[Arguments, Any], Scratch]


@dataclass(slots=True)
class Uncalibrated:
    """The uncertain figures in a step: calls per operator, and the bytes that they may add.

    Args:
        calls: Number of uncertain calls by operator.
    """

    calls: Counter[str] = field(default_factory=Counter)
    _while_running: int = 0
    _kept: int = 0

    @property
    def excess_bytes(self) -> int:
        """The most by which the peak may exceed the forecast.

        Operators run one at a time, so only the largest of them counts; memory that is kept adds
        up.
        """
        return self._while_running + self._kept

    def note(self, name: str, scratch: Scratch) -> None:
        """Record a call of an operator."""
        excess = scratch.at_most - scratch.bytes
        if excess:
            self.calls[name] += 1
        self._while_running = max(self._while_running, excess)

    def note_kept(self, name: str, excess_bytes: int) -> None:
        """Record memory that is kept until the backward pass and may be larger."""
        self.calls[name] += 1
        self._kept += excess_bytes

    def clear(self) -> None:
        """Forget everything, because a new step begins."""
        self.calls.clear()
        self._while_running = 0
        self._kept = 0


def scratch_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Scratch | None:
    """Return the scratch memory of a call on CUDA.

    Args:
        op: The operator's overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.

    Returns:
        None if the operator is known to need no scratch memory.
    """
    rule = _find_rule(op)
    return None if rule is None else rule(named_arguments(op, args, kwargs), out)


@functools.cache
def _find_rule(op: Any) -> Rule | None:
    """Return the rule for an operator, None if it is known to need no scratch memory."""
    if not isinstance(op, torch._ops.OpOverload):
        return _unknown
    rule = RULES.get(name_of(op)) if op.namespace == "aten" else None
    if rule is None:
        return None if needs_no_scratch(op) else _unknown

    def checked(arguments: Arguments, out: Any) -> Scratch:
        try:
            return rule(arguments, out)
        except (KeyError, AttributeError, TypeError, IndexError, RuntimeError):
            # Another torch version may have a different signature.
            return _unknown(arguments, out)

    return checked


def _unknown(arguments: Arguments, out: Any) -> Scratch:
    """Allow a copy of each tensor for an operator that is in no table."""
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((arguments, out))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    return Scratch(0, sum(tensor.nbytes for tensor in tensors))


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call by name, with defaults."""
    if not isinstance(op, torch._ops.OpOverload):
        # A higher-order operator has no schema.
        return {"args": args, **kwargs}
    schema = op._schema.arguments
    arguments = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }
    arguments.update(zip((argument.name for argument in schema), args, strict=False))
    arguments.update(kwargs)
    return arguments


# --- operators that need none ---------------------------------------------------------------------


def name_of(op: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    return str(op.overloadpacket).rpartition(".")[2]


def needs_no_scratch(op: Any) -> bool:
    """Return whether an operator is known to need no memory besides its results, on any device."""
    if op.namespace in ("prim", "prims", "profiler"):
        return True
    if torch.Tag.pointwise in op.tags or op.is_view:
        return True
    if op.namespace != "aten":
        return False
    name = name_of(op)
    if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")):
        return True
    if name in LISTS["in_place"] or name.rstrip("_") in LISTS["in_place"]:
        return True
    return _is_pointwise_gradient(name)


def _is_pointwise_gradient(name: str) -> bool:
    """Return whether an operator is the gradient of a pointwise function, which has no tag."""
    if not name.endswith("_backward"):
        return False
    packet = getattr(aten, name.removesuffix("_backward"), None)
    if packet is None:
        return False
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


# --- rules ----------------------------------------------------------------------------------------


def _exactly(size_bytes: int) -> Scratch:
    return Scratch(size_bytes, size_bytes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copy_unless_contiguous(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor.contiguous()``."""
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _copy_with_heads_last(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor.transpose(1, 2).contiguous()``."""
    return _copy_unless_contiguous(tensor.transpose(1, 2))


def _flash_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Follow mha_bwd in flash_attn/flash_api.cpp.

    It needs the query's gradient and row sums in fp32, and the gradients of keys and values for
    each head of the query.
    """
    query = arguments["query"]
    key = arguments["key"]
    batch, heads, length, size = query.shape
    rounded_length = _round_up(length, 128)
    rounded_size = _round_up(size, 32 if size <= 128 else 64)
    gradient_and_sums = batch * rounded_length * heads * (rounded_size + 1) * _FP32_BYTES
    if key.shape[1] != heads:
        gradient_and_sums += 2 * batch * key.shape[2] * heads * size * query.element_size()
    copies = _copy_with_heads_last(arguments["grad_out"]) + _copy_with_heads_last(arguments["out"])
    return _exactly(gradient_and_sums + copies)


def _efficient_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Follow workspace_size() in mem_eff_attention/kernel_backward.h, and attention_backward.cu.

    The latter computes the row sums.
    """
    query = arguments["query"]
    value = arguments["value"]
    batch, heads, length, _ = query.shape
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    row_sums = batch * heads * length * _FP32_BYTES
    if not is_half:
        # In fp32 they are a product of two tensors, which is transposed and copied.
        row_sums = 2 * row_sums + batch * heads * length * value.shape[-1] * _FP32_BYTES
    workspace = batch * heads * _efficient_workspace_per_head(query, value, is_half=is_half)
    copies = _copy_with_heads_last(arguments["grad_out_"])
    rows = batch * heads * length * _FP32_BYTES
    return Scratch(
        bytes=copies + max(row_sums, rows + workspace),
        at_most=copies + row_sums + 2 * workspace,
    )


def _efficient_workspace_per_head(
    query: torch.Tensor, value: torch.Tensor, *, is_half: bool
) -> int:
    batch, heads, length, size = query.shape
    keys = value.shape[2]
    value_size = value.shape[-1]
    largest_size = max(size, value_size)
    # cutlassB.h, sm80: tiles of 64 x 64, and of 128 x 64 for half precision with larger heads.
    tile = 128 if is_half and largest_size > 64 else 64
    length_tiles = -(-length // tile)
    size_tiles = -(-size // 64)
    query_gradient = _round_up(length, tile) * _round_up(size, 64) * _FP32_BYTES
    query_gradient += 16 * length_tiles * size_tiles
    if not is_half or largest_size <= tile:
        # The gradients of keys and values are kept in registers.
        return query_gradient
    # kScratchsAccumGradK and kScratchsAccumGradV.
    splits = max(1, min(-(-keys // 64), 200 // (batch * heads)))
    row_size = _round_up(size, tile) + _round_up(value_size, tile)
    return query_gradient + splits * _round_up(keys, 64) * row_size * _FP32_BYTES


def _convolution(arguments: Arguments, out: Any) -> Scratch:
    return _reordered((arguments["input"], arguments["weight"], out), arguments["groups"])


def _convolution_backward(arguments: Arguments, _out: Any) -> Scratch:
    """One gradient is computed after the other; each reads two of three tensors and writes one."""
    weight = arguments["weight"]
    reordered = _reordered(
        (arguments["grad_output"], weight, arguments["input"]), arguments["groups"]
    )
    if weight.element_size() >= _FP32_BYTES:
        return reordered
    # The gradient of the weight is summed in fp32.
    sums = weight.numel() * _FP32_BYTES
    return Scratch(reordered.bytes + sums, reordered.at_most + sums)


def _reordered(tensors: Sequence[torch.Tensor], groups: int) -> Scratch:
    """Return the scratch memory of a convolution in cuDNN, which is closed.

    Its tensor core kernels require channels last, and copy tensors in other layouts
    (nchwToNhwcKernel in profiles). How much more its heuristics use is unknown (pytorch issue 49207
    saw gigabytes); we allow twice the tensors, by choice.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    copies = 0 if _is_channels_last(tensors[0]) or groups > 1 else total
    return Scratch(copies, copies + 2 * total)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _embedding_backward(arguments: Arguments, out: Any) -> Scratch:
    """Follow Embedding.cu and EmbeddingBackwardKernel.cu.

    Indices are sorted, and rows are summed for each piece of a segment of equal indices. Up to 3072
    indices, torch uses a kernel without scratch memory. The sorting kernel is counted nevertheless,
    because forecasts for large batches are extrapolated from traces of small ones.
    """
    indices = arguments["indices"].numel()
    rows, size = out.shape
    segments = min(indices, rows)
    pieces = indices // _ROWS_PER_THREAD + segments
    sorted_indices = 2 * indices * _INDEX_BYTES
    offsets = (indices + 2 * segments + pieces) * _INDEX_BYTES
    sums = pieces * size * max(_FP32_BYTES, out.element_size())
    return _exactly(sorted_indices + max(sorted_indices, offsets + sums))


def _index_put(arguments: Arguments, _out: Any) -> Scratch:
    """Follow index_put_with_sort_kernel in Indexing.cu.

    It needs linear, sorted and original indices, and buffers of cub, which are not public.
    """
    if not arguments.get("accumulate"):
        return NO_SCRATCH
    shapes = [index.shape for index in arguments["indices"] if index is not None]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    count = math.prod(shape) if shapes else 0
    expected = 5 * count * _INDEX_BYTES + _copy_unless_contiguous(arguments["values"])
    return Scratch(expected, 2 * expected)


def _layer_norm_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Count partial sums of both parameters' gradients, in fp32 (layer_norm_kernel.cu)."""
    elements = math.prod(arguments["normalized_shape"])
    return _exactly(2 * _LAYER_NORM_PARTIAL_ROWS * elements * _FP32_BYTES)


def _group_norm_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Count two sums per sample and channel, in fp32 (group_norm_kernel.cu)."""
    return _exactly(2 * arguments["N"] * arguments["C"] * _FP32_BYTES)


def _reduced_loss(arguments: Arguments, _out: Any) -> Scratch:
    """Count the losses of the elements, which are then averaged or summed."""
    is_reduced = arguments["reduction"] != 0
    return _exactly(arguments["self"].nbytes) if is_reduced else NO_SCRATCH


def _logits_loss(arguments: Arguments, out: Any) -> Scratch:
    """Count two temporary tensors, one of which becomes the result if nothing is reduced."""
    is_reduced = arguments["reduction"] != 0
    temporary = 2 * arguments["self"].nbytes
    if not is_reduced:
        temporary -= out.nbytes
    return _exactly(max(0, temporary))


def _logsumexp(arguments: Arguments, out: Any) -> Scratch:
    return _exactly(arguments["self"].nbytes + out.nbytes)


def _safe_softmax(arguments: Arguments, out: Any) -> Scratch:
    """Count boolean masks of the elements that are -Inf, and of rows that are entirely -Inf."""
    row_length = max(1, out.shape[arguments["dim"]])
    return _exactly(out.numel() + out.numel() // row_length)


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    # The rest is composed of other operators inside one dispatch, on every device alike.
    "mse_loss": _reduced_loss,
    "smooth_l1_loss": _reduced_loss,
    "huber_loss": _reduced_loss,
    "binary_cross_entropy_with_logits": _logits_loss,
    "logsumexp": _logsumexp,
    "_safe_softmax": _safe_softmax,
}
