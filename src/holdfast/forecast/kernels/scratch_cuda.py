"""What CUDA's kernels need while they run, beside their arguments and results.

Each rule follows the source that it names (torch 2.11 to 2.13). Where the library is closed (cuDNN, cub, cuFFT) the
figure is an assumption with an upper bound, and it counts as uncalibrated.

Does not: count what lives longer than the operator, as the reserve of a recurrent layer (``recurrent_sizes``) or
cuBLAS's workspaces, which belong to the device (``devices``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_INDEX_BYTES = 8
# EmbeddingBackwardKernel.cu: rows that one thread sums.
_ROWS_PER_THREAD = 10
# Sort.cu: up to so many values a slice is sorted in shared memory.
_SMALL_SORT = 4096


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a kernel needs.

    Args:
        expected: What is counted.
        at_most: What the margin has to cover.
        calibrated: Whether the figure follows from torch's own source or from a measurement.
    """

    expected: int
    at_most: int
    calibrated: bool = True


NOTHING = Need(0, 0)
Arguments = dict[str, Any]
Rule = Callable[[Arguments, Any], Need]


def _exactly(size: int) -> Need:
    return Need(size, size)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copy_unless_contiguous(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _heads_swapped(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor.transpose(1, 2).contiguous()``."""
    return _copy_unless_contiguous(tensor.transpose(1, 2))


def _flash_backward(given: Arguments, _out: Any) -> Need:
    """flash_attn/flash_api.cpp, mha_bwd: fp32 sums for the query's gradient, row sums, keys' gradients by head."""
    query, key = given["query"], given["key"]
    batch, heads, length, size = query.shape
    rounded_length, rounded_size = _up(length, 128), _up(size, 32 if size <= 128 else 64)
    sums = batch * rounded_length * heads * (rounded_size + 1) * 4
    if key.shape[1] != heads:
        sums += 2 * batch * key.shape[2] * heads * size * query.element_size()
    copies = _heads_swapped(given["grad_out"]) + _heads_swapped(given["out"])
    return _exactly(sums + copies)


def _efficient_backward(given: Arguments, _out: Any) -> Need:
    """mem_eff_attention/kernel_backward.h: workspace_size(), and the row sums of attention_backward.cu."""
    query, value = given["query"], given["value"]
    batch, heads, length, size = query.shape
    value_size, keys = value.shape[-1], value.shape[2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    # cutlassB.h, sm80: tiles of 64 x 64, of 128 x 64 for half precision beyond a head size of 64.
    tile = 128 if half and max(size, value_size) > 64 else 64
    gradient_of_query = _up(length, tile) * _up(size, 64) * 4 + 16 * (-(-length // tile)) * (-(-size // 64))
    staging = 0
    if half and max(size, value_size) > tile:  # kNeedsAccumGradK and V: not kept in registers
        splits = max(1, min(-(-keys // 64), 200 // (batch * heads)))
        staging = splits * _up(keys, 64) * (_up(size, tile) + _up(value_size, tile)) * 4
    rows = batch * heads * length * 4
    # In fp32 the row sums are made by a product of the two tensors, then transposed and copied.
    sums = rows if half else 2 * rows + batch * heads * length * value_size * 4
    workspace = batch * heads * (gradient_of_query + staging)
    copies = _heads_swapped(given["grad_out_"])
    return Need(copies + max(sums, rows + workspace), copies + sums + 2 * workspace)


def _cudnn_attention_backward(given: Arguments, _out: Any) -> Need:
    """Closed: fp32 sums as in flash attention are assumed, and twice as much at most."""
    query = given["query"]
    batch, heads, length, size = query.shape
    sums = batch * heads * length * (size + 1) * 4
    return Need(sums, 2 * sums, calibrated=False)


def _cudnn_attention(given: Arguments, _out: Any) -> Need:
    query = given["query"]
    return Need(0, query.shape[0] * query.shape[1] * query.shape[2] * 4, calibrated=False)


def _convolution(given: Arguments, out: Any) -> Need:
    tensors = (given["input"], given["weight"], out)
    return _reordered(tensors, given["groups"])


def _convolution_backward(given: Arguments, _out: Any) -> Need:
    """One gradient after the other; each reads two of the three and writes the third."""
    data = _reordered((given["grad_output"], given["weight"], given["input"]), given["groups"])
    single = given["weight"].numel() * 4 if given["weight"].element_size() < 4 else 0  # weights are summed in fp32
    return Need(data.expected + single, data.at_most + single, calibrated=False)


def _reordered(tensors: Sequence[torch.Tensor], groups: int) -> Need:
    """Closed: kernels for tensor cores want channels last and copy what is not (nchwToNhwcKernel in profiles).

    How much more the heuristics take is unknown (pytorch issue 49207 saw gigabytes); twice the tensors are allowed.
    """
    channels_last = all(_is_channels_last(tensor) for tensor in tensors[:1])
    copies = 0 if channels_last or groups > 1 else sum(tensor.nbytes for tensor in tensors)
    return Need(copies, copies + 2 * sum(tensor.nbytes for tensor in tensors), calibrated=False)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _embedding_backward(given: Arguments, out: Any) -> Need:
    """Embedding.cu and EmbeddingBackwardKernel.cu: sorted indices, one row of sums for each piece of a segment.

    Up to 3072 indices a kernel without scratch is taken. The sorting one is counted all the same: forecasts for large
    batches are drawn from traces of small ones, which must not lack what the large ones need.
    """
    indices = given["indices"].numel()
    rows, size = out.shape
    segments = min(indices, rows)
    pieces = indices // _ROWS_PER_THREAD + segments
    sorting = 2 * indices * _INDEX_BYTES
    offsets = (indices + 2 * segments + pieces) * _INDEX_BYTES
    sums = pieces * size * max(4, out.element_size())
    return _exactly(sorting + max(sorting, offsets + sums))


def _index_put(given: Arguments, _out: Any) -> Need:
    """Indexing.cu, index_put_with_sort_kernel: linear, sorted and original indices, and cub's buffers."""
    if not given.get("accumulate"):
        return NOTHING
    values = given["values"]
    shapes = [index.shape for index in given["indices"] if index is not None]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    count = math.prod(shape) if shapes else 0
    expected = 5 * count * _INDEX_BYTES + _copy_unless_contiguous(values)
    return Need(expected, 2 * expected, calibrated=False)


def _sort(given: Arguments, _out: Any) -> Need:
    """Sort.cpp and Sort.cu: nothing for short slices, else keys and indices twice and cub's buffers."""
    values = given["self"]
    dim = given.get("dim", -1)
    if values.dim() == 0 or values.shape[dim] <= _SMALL_SORT:
        return NOTHING
    expected = 2 * values.numel() * (values.element_size() + _INDEX_BYTES)
    return Need(expected, 2 * expected, calibrated=False)


def _topk(given: Arguments, _out: Any) -> Need:
    """TensorTopK.cu: counters only; long slices are searched by several blocks."""
    values = given["self"]
    return Need(0, values.numel() * 4 if values.dim() and values.shape[given.get("dim", -1)] > _SMALL_SORT else 0)


def _layer_norm_backward(given: Arguments, _out: Any) -> Need:
    """layer_norm_kernel.cu: partial sums of the two parameters' gradients, 32 rows of each in fp32."""
    return _exactly(2 * 32 * math.prod(given["normalized_shape"]) * 4)


def _group_norm_backward(given: Arguments, _out: Any) -> Need:
    """group_norm_kernel.cu: two sums in fp32 for each sample and channel."""
    return _exactly(2 * given["N"] * given["C"] * 4)


def _transform(given: Arguments, out: Any) -> Need:
    """CuFFTPlanCache.h: cuFFT's work area, as large as the result for lengths of small factors, more for others."""
    size = out.nbytes if isinstance(out, torch.Tensor) else 0
    return Need(size, 3 * size + given["self"].nbytes, calibrated=False)


def _draw(given: Arguments, _out: Any) -> Need:
    """MultinomialKernel.cu: the normalised and the summed distribution."""
    return _exactly(2 * given["self"].nbytes)


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "sort": _sort,
    "argsort": _sort,
    "topk": _topk,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "_fft_r2c": _transform,
    "_fft_c2r": _transform,
    "_fft_c2c": _transform,
    "multinomial": _draw,
}
