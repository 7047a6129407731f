"""Compute scratch memory: what a CUDA kernel allocates in addition to its arguments and results.

Scratch memory exists only while the kernel runs. Dispatch modes cannot observe it, so a rule for
each operator computes it. A rule that names a source file follows that file, as of torch 2.11 to
2.13. For closed libraries, such as cuDNN, a rule returns an estimate and an upper bound. Their
difference counts as uncalibrated and widens the margin. An operator without a rule is assumed to
need 0 bytes. Its upper bound is one copy of each of its tensors, because operators rarely need
more.

Memory that outlives a kernel is counted elsewhere: `recurrent` counts what recurrent layers save
for the backward pass, and `plan.fit` adds the cuBLAS workspaces.
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
# How many rows of an embedding's gradient one thread sums (NROWS_PER_THREAD in
# EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10
# How many rows of partial sums layer norm keeps for each parameter's gradient
# (layer_norm_kernel.cu).
_LAYER_NORM_PARTIAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """The scratch memory of one call of an operator.

    Args:
        bytes: The estimate, which is included in the forecast.
        at_most: An upper bound, which the margin covers. It equals `bytes` if the estimate comes
            from torch's source code or from a measurement.
    """

    bytes: int
    at_most: int


NO_SCRATCH = Scratch(0, 0)
# The arguments of a call, keyed by name.
Arguments = dict[str, Any]
# A function that computes the scratch memory of a call from its arguments and its result.
Rule = Callable[[Arguments, Any], Scratch]


@dataclass(slots=True)
class Uncalibrated:
    """Collects by how much the scratch memory in a step may exceed the estimates.

    Args:
        calls: The number of calls with an uncertain estimate, keyed by operator.
    """

    calls: Counter[str] = field(default_factory=Counter)
    _while_running: int = 0
    _kept: int = 0

    @property
    def excess_bytes(self) -> int:
        """The largest number of bytes by which the peak may exceed the forecast.

        Operators run one at a time, so only the largest excess of scratch memory counts. For memory
        that outlives its operator, the excesses of all calls add up.
        """
        return self._while_running + self._kept

    def note(self, name: str, scratch: Scratch) -> None:
        """Record a call of an operator, if the scratch memory counted for it is uncertain."""
        excess = scratch.at_most - scratch.bytes
        if excess:
            self.calls[name] += 1
        self._while_running = max(self._while_running, excess)

    def note_kept(self, name: str, excess_bytes: int) -> None:
        """Record an estimate of memory that is kept until the backward pass.

        Args:
            name: The name of the operator.
            excess_bytes: By how many bytes the memory may exceed the estimate.
        """
        self.calls[name] += 1
        self._kept += excess_bytes

    def clear(self) -> None:
        """Reset all records before a new step."""
        self.calls.clear()
        self._while_running = 0
        self._kept = 0


def scratch_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Scratch | None:
    """Return the scratch memory that a call of an operator needs on CUDA.

    Args:
        op: The operator's overload.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        out: The result of the call.

    Returns:
        The scratch memory, or None if the operator is known to need none.
    """
    rule = _find_rule(op)
    return None if rule is None else rule(named_arguments(op, args, kwargs), out)


@functools.cache
def _find_rule(op: Any) -> Rule | None:
    """Return the rule for an operator, or None if it is known to need no scratch memory."""
    if not isinstance(op, torch._ops.OpOverload):
        return _unknown
    rule = RULES.get(name_of(op)) if op.namespace == "aten" else None
    if rule is None:
        return None if needs_no_scratch(op) else _unknown

    def checked(arguments: Arguments, out: Any) -> Scratch:
        try:
            return rule(arguments, out)
        except (KeyError, AttributeError, TypeError, IndexError, RuntimeError):
            # In another version of torch, the operator may have a different signature.
            return _unknown(arguments, out)

    return checked


def _unknown(arguments: Arguments, out: Any) -> Scratch:
    """Return the scratch memory of an operator without a rule.

    The estimate is 0 bytes. The upper bound is one copy of each argument and result.
    """
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((arguments, out))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    return Scratch(0, sum(tensor.nbytes for tensor in tensors))


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call, keyed by name, including default values."""
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


# --- operators that need no scratch memory --------------------------------------------------------


def name_of(op: Any) -> str:
    """Return an operator's name without its namespace and overload, such as ``"convolution"``."""
    return str(op.overloadpacket).rpartition(".")[2]


def needs_no_scratch(op: Any) -> bool:
    """Return whether an operator is known to need no scratch memory on a GPU.

    A few of these operators need scratch memory on a CPU; see ``more_on_cpu`` in
    ``operators.yaml``.
    """
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
    """Return whether an operator computes the gradient of a pointwise operator.

    torch does not tag such operators as pointwise.
    """
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
    """Return the bytes that ``tensor.contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _copy_with_heads_last(tensor: torch.Tensor) -> int:
    """Return the bytes that ``tensor.transpose(1, 2).contiguous()`` allocates."""
    return _copy_unless_contiguous(tensor.transpose(1, 2))


def _flash_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Return the scratch memory of mha_bwd in flash_attn/flash_api.cpp.

    The function allocates the query's gradient and the row sums in fp32. If there are fewer key
    heads than query heads, it also allocates gradients of the keys and values for each query head.
    """
    query = arguments["query"]
    key = arguments["key"]
    batch, heads, length, size = query.shape
    rounded_length = _round_up(length, 128)
    size_multiple = 32 if size <= 128 else 64
    rounded_size = _round_up(size, size_multiple)
    # The query's gradient has `rounded_size` columns. One more column holds the row sums.
    gradient_and_sums = batch * rounded_length * heads * (rounded_size + 1) * _FP32_BYTES
    if key.shape[1] != heads:
        gradient_and_sums += 2 * batch * key.shape[2] * heads * size * query.element_size()
    copies = _copy_with_heads_last(arguments["grad_out"]) + _copy_with_heads_last(arguments["out"])
    return _exactly(gradient_and_sums + copies)


def _efficient_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Return the scratch memory of the efficient kernel's backward pass.

    The workspace follows workspace_size() in mem_eff_attention/kernel_backward.h. The row sums are
    computed in attention_backward.cu.
    """
    query = arguments["query"]
    value = arguments["value"]
    batch, heads, length, _ = query.shape
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    row_sums = batch * heads * length * _FP32_BYTES
    if not is_half:
        # In fp32, the row sums come from an elementwise product of two tensors. They are then
        # transposed and copied.
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
    # Tiles are 64 x 64, or 128 x 64 in half precision with heads larger than 64 (cutlassB.h, sm80).
    tile = 128 if is_half and largest_size > 64 else 64
    length_tiles = -(-length // tile)
    size_tiles = -(-size // 64)
    query_gradient = _round_up(length, tile) * _round_up(size, 64) * _FP32_BYTES
    query_gradient += 16 * length_tiles * size_tiles
    if not is_half or largest_size <= tile:
        # The gradients of the keys and values are kept in registers.
        return query_gradient
    # The gradients of the keys and values are accumulated in memory (kNeedsAccumGradK,
    # kNeedsAccumGradV).
    splits = max(1, min(-(-keys // 64), 200 // (batch * heads)))
    row_size = _round_up(size, tile) + _round_up(value_size, tile)
    return query_gradient + splits * _round_up(keys, 64) * row_size * _FP32_BYTES


def _convolution(arguments: Arguments, out: Any) -> Scratch:
    tensors = (arguments["input"], arguments["weight"], out)
    return _cudnn_call(tensors, groups=arguments["groups"])


def _convolution_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Return the scratch memory of the two cuDNN calls in a convolution's backward pass.

    - The first call reads the output's gradient and the weight, and writes the input's gradient.
    - The second call reads the output's gradient and the input, and writes the weight's gradient.

    A gradient is as large as its tensor, so both calls work on tensors of the same three sizes,
    which are the sizes of the output's gradient, the weight and the input. The second call starts
    after the scratch memory of the first one is freed, so the memory of only one call counts.
    """
    weight = arguments["weight"]
    tensors = (arguments["grad_output"], weight, arguments["input"])
    scratch = _cudnn_call(tensors, groups=arguments["groups"])
    is_half_precision = weight.element_size() < _FP32_BYTES
    if not is_half_precision:
        return scratch
    # The second call sums the weight's gradient in an fp32 buffer.
    fp32_gradient_bytes = weight.numel() * _FP32_BYTES
    return Scratch(
        bytes=scratch.bytes + fp32_gradient_bytes,
        at_most=scratch.at_most + fp32_gradient_bytes,
    )


def _cudnn_call(tensors: Sequence[torch.Tensor], *, groups: int) -> Scratch:
    """Estimate the scratch memory of one cuDNN call that reads or writes the given tensors.

    cuDNN's tensor core kernels require the channels-last layout, so tensors in another layout are
    copied (nchwToNhwcKernel in profiles). The algorithm that cuDNN chooses may need more memory;
    how much is not documented (gigabytes in pytorch issue 49207). The upper bound adds twice the
    size of the tensors to the copies. This factor is a judgment.

    Args:
        tensors: The inputs and the output of the call. The layout of the first tensor decides
            whether all of them are copied.
        groups: The number of groups in the convolution. Grouped convolutions make no copies.
    """
    tensor_bytes = sum(tensor.nbytes for tensor in tensors)
    is_copied = groups == 1 and not _is_channels_last(tensors[0])
    copied_bytes = tensor_bytes if is_copied else 0
    return Scratch(bytes=copied_bytes, at_most=copied_bytes + 2 * tensor_bytes)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _embedding_backward(arguments: Arguments, out: Any) -> Scratch:
    """Return the scratch memory of the kernels in Embedding.cu and EmbeddingBackwardKernel.cu.

    The kernels sort the indices, so that equal indices form a segment. They split each segment into
    pieces, and sum the rows of each piece. For up to 3072 indices, torch uses another kernel, which
    needs no scratch memory. The sorting kernels are counted even then, because forecasts for large
    batches are extrapolated from traces of small batches.
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
    """Return the scratch memory of index_put_with_sort_kernel in Indexing.cu.

    The kernel allocates linear, sorted and original indices. The sort in the cub library allocates
    its own buffers, whose size is not documented, so the result is an estimate.
    """
    if not arguments.get("accumulate"):
        return NO_SCRATCH
    shapes = [index.shape for index in arguments["indices"] if index is not None]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    count = math.prod(shape) if shapes else 0
    expected = 5 * count * _INDEX_BYTES + _copy_unless_contiguous(arguments["values"])
    return Scratch(expected, 2 * expected)


def _layer_norm_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Return the size of the fp32 partial sums for both gradients (layer_norm_kernel.cu)."""
    elements = math.prod(arguments["normalized_shape"])
    return _exactly(2 * _LAYER_NORM_PARTIAL_ROWS * elements * _FP32_BYTES)


def _group_norm_backward(arguments: Arguments, _out: Any) -> Scratch:
    """Return the size of two fp32 sums for each sample and channel (group_norm_kernel.cu)."""
    return _exactly(2 * arguments["N"] * arguments["C"] * _FP32_BYTES)


def _reduced_loss(arguments: Arguments, _out: Any) -> Scratch:
    """Return the size of the elementwise losses, which are temporary if they are then reduced."""
    is_reduced = arguments["reduction"] != 0
    return _exactly(arguments["self"].nbytes) if is_reduced else NO_SCRATCH


def _logits_loss(arguments: Arguments, out: Any) -> Scratch:
    """Return the size of the two tensors that the loss allocates, except for the result itself.

    Without a reduction, the result is one of these two tensors.
    """
    is_reduced = arguments["reduction"] != 0
    temporary = 2 * arguments["self"].nbytes
    if not is_reduced:
        temporary -= out.nbytes
    return _exactly(max(0, temporary))


def _logsumexp(arguments: Arguments, out: Any) -> Scratch:
    return _exactly(arguments["self"].nbytes + out.nbytes)


def _safe_softmax(arguments: Arguments, out: Any) -> Scratch:
    """Return the size of two boolean masks: the elements that are -Inf, and the all -Inf rows."""
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
    # On every device, the operators below call other operators within one dispatch, which hides
    # their temporary tensors from dispatch modes.
    "mse_loss": _reduced_loss,
    "smooth_l1_loss": _reduced_loss,
    "huber_loss": _reduced_loss,
    "binary_cross_entropy_with_logits": _logits_loss,
    "logsumexp": _logsumexp,
    "_safe_softmax": _safe_softmax,
}
