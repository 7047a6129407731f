"""What the CPU's kernels need while they run, beside their arguments and results.

Measured on torch 2.13.0+cpu with kineto's allocator events, operator by operator (118 of them; those not here needed
less than a kilobyte). Convolutions are in ``convolution_cpu``, what does not depend on the device
in ``scratch_composites``.

Does not: serve for CUDA (``scratch_cuda``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from holdfast.forecast.kernels import convolution_cpu, recurrent_cpu
from holdfast.forecast.kernels.scratch_cuda import NOTHING, Arguments, Need, Rule

# FlashAttentionKernel.cpp: rows of queries and keys that a thread takes at a time.
_QUERY_ROWS, _KEY_ROWS = ((768, 256), (192, 64), (0, 32)), 512
# oneDNN's scratchpad of a product in bf16, whatever its size.
_HALF_PRODUCT_BYTES = 99_328


def _exactly(size: int) -> Need:
    return Need(size, size) if size else NOTHING


def _nothing(_given: Arguments, _out: Any) -> Need:
    return NOTHING


def _like_input(given: Arguments, _out: Any) -> Need:
    """One temporary of the input's size."""
    return _exactly(next(value for value in given.values() if isinstance(value, torch.Tensor)).nbytes)


def _batch_norm_backward(given: Arguments, _out: Any) -> Need:
    """A second gradient of the input's size, then the result."""
    return _exactly(given["input"].nbytes)


def _norm_backward(given: Arguments, _out: Any) -> Need:
    """A few sums for each channel."""
    channels = given["C"] * given["N"] if "C" in given else math.prod(given["normalized_shape"])
    return _exactly(2 * channels * 4)


def _upsample(given: Arguments, out: Any) -> Need:
    """UpSampleKernel.cpp works in channels last: both tensors are copied if they are not."""
    x = given["input"] if "input" in given else given["self"]
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return NOTHING
    return _exactly(x.nbytes + out.nbytes)


def _sort(given: Arguments, _out: Any) -> Need:
    """Only a vector is sorted through a copy of its indices."""
    values = given["self"]
    return _exactly(values.numel() * 8) if values.dim() == 1 else NOTHING


def _argsort(given: Arguments, out: Any) -> Need:
    return _exactly(given["self"].nbytes + _sort(given, out).expected)


def _masked_select(given: Arguments, _out: Any) -> Need:
    return _exactly(given["self"].numel() * 8)


def _flash(given: Arguments, _out: Any) -> Need:
    query = given["query"]
    rows, keys = _tile(given)
    values = rows * keys + 2 * rows + rows * query.shape[3]
    half = rows * keys * query.element_size() if query.element_size() < 4 else 0
    return _exactly((values * 4 + half) * torch.get_num_threads())


def _flash_backward(given: Arguments, _out: Any) -> Need:
    """A copy of the gradient unless it is laid out by rows, and a thread's scores and their gradients."""
    gradient = given["grad_out"]
    copies = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    rows, keys = _tile(given)
    return _exactly(copies + (2 * rows * keys + rows) * 4 * torch.get_num_threads())


def _tile(given: Arguments) -> tuple[int, int]:
    length = given["query"].shape[2]
    rows = next(size for least, size in _QUERY_ROWS if length >= least)
    return min(rows, length), min(_KEY_ROWS, given["key"].shape[2])


def _product(given: Arguments, _out: Any) -> Need:
    """A copy of an operand that is contiguous in neither direction; a constant for oneDNN in half precision."""
    operands = [value for name, value in given.items() if name in ("self", "mat1", "mat2", "batch1", "batch2")]
    size = sum(tensor.nbytes for tensor in operands if tensor.dim() > 1 and 1 not in tensor.stride()[-2:])
    if operands[0].dtype in (torch.bfloat16, torch.float16):
        size += _HALF_PRODUCT_BYTES
    return _exactly(size)


def _columns(given: Arguments, _out: Any) -> Need:
    return _exactly(given["self"].nbytes)


def _rms_norm(given: Arguments, _out: Any) -> Need:
    """Two temporaries of the input's size, one of which becomes the result."""
    return _exactly(given["input"].nbytes)


def _slow_distances(given: Arguments, _out: Any) -> Need:
    rows = given["x1"]
    return _exactly(2 * rows.nbytes + 4 * math.prod(rows.shape[:-1]) * rows.element_size())


RULES: dict[str, Rule] = {
    "convolution": convolution_cpu.forward,
    "convolution_backward": convolution_cpu.backward,
    "mkldnn_rnn_layer": recurrent_cpu.forward,
    "mkldnn_rnn_layer_backward": recurrent_cpu.backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _norm_backward,
    "native_group_norm_backward": _norm_backward,
    "embedding_dense_backward": _nothing,
    "native_dropout": _like_input,
    "upsample_nearest2d": _upsample,
    "upsample_bilinear2d": _upsample,
    "sort": _sort,
    "argsort": _argsort,
    "masked_select": _masked_select,
    "multinomial": _like_input,
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "mm": _product,
    "bmm": _product,
    "addmm": _product,
    "baddbmm": _product,
    "im2col": _columns,
    "_fused_rms_norm": _rms_norm,
    "_cdist_forward": _slow_distances,
}
