"""What a convolution needs on the CPU while it runs: oneDNN's blocked copies of its tensors.

Measured on torch 2.13.0+cpu (AVX-512, one thread) with kineto's allocator events over a grid of 84 shapes: channels
1 to 512, kernels 1 to 128, strides, padding, dilation, groups, one to three dimensions, transposed, channels last;
fp32, bf16 and fp64. Every tensor is copied into blocks of 16 channels, the kernel runs, and the result is copied
back; the formulas here are the sequences that were seen.

Does not: know other instruction sets, whose blocks differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.forecast.kernels.scratch_cuda import NOTHING, Arguments, Need

_BLOCK = 16  # channels in a block; the input may come in blocks of 8, and up to 4 channels are not blocked
_UNBLOCKED_CHANNELS = 4
_LONGEST_KERNEL = 14  # oneDNN's blocked kernels take no longer ones: im2col and a product instead
_LONGEST_DEPTHWISE = 3  # the same for the weights' gradient of depthwise convolutions
_COPIES_OF_WEIGHTS = 4  # ... which sums into four copies of the weights
_HALF_PRECISION_SUMS = 170_000  # bytes, beside the weights in fp32
# use_mkldnn in Convolution.cpp: a single small sample runs without oneDNN, and on one thread small batches with a
# kernel of size 1, which then need no copy at all.
_SMALL_SAMPLE = 20480
_SMALL_BATCH = 16


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a convolution's tensors as they are, and in blocks."""

    x: int
    w: int
    o: int
    x_blocked: int
    w_blocked: int
    o_blocked: int
    column: int  # im2col of one sample
    batch: int
    strided: bool
    depthwise: bool
    long_kernel: bool
    rows: int  # padded gradient of one sample, in blocks of 64 channels, for strided kernels
    picked: int  # the input of one sample that a strided kernel of size 1 reads
    pointwise: bool
    direct: bool  # a product without any copy
    few_channels: bool  # the input is read as it is
    few_outputs: bool


def forward(given: Arguments, out: Any) -> Need:
    """`aten.convolution`."""
    x, w = given["input"], given["weight"]
    sizes = _sizes(x, w, out, given)
    extra = _copies(x)
    if _without_onednn(x, w, given):
        return _need(sizes.batch * sizes.column + extra)
    if _is_channels_last(x, w):
        return _need(0 if sizes.pointwise and not sizes.strided else sizes.w)
    if sizes.direct:
        return _need(extra)
    long_kernel = sizes.long_kernel and not (sizes.few_channels or sizes.strided or given["transposed"])
    if long_kernel or _grouped_oddly(x, w, given):
        return _need(max(sizes.column, sizes.o) + extra)
    if given["transposed"] and sizes.strided:
        plain = sizes.x_blocked + sizes.w_blocked + sizes.rows
        return _need(max(plain, 2 * sizes.o) + extra)
    first = 0 if sizes.few_channels else sizes.x_blocked
    weights = sizes.w_blocked if not sizes.few_channels else _blocked(w, w.shape[0], 1, w.shape[1], 1)
    if sizes.pointwise and sizes.strided:
        first += sizes.picked
    return _need(max(first + weights + sizes.o_blocked - sizes.o, sizes.o_blocked) + extra)


def backward(given: Arguments, _out: Any) -> Need:
    """`aten.convolution_backward`: the input's gradient, then the weights'."""
    x, w, gradient = given["input"], given["weight"], given["grad_output"]
    wants_input, wants_weight, wants_bias = given["output_mask"]
    sizes = _sizes(x, w, gradient, given)
    bias = given["bias_sizes"][0] * x.element_size() if wants_bias and given["bias_sizes"] else 0
    kept_x = sizes.x if wants_input else 0
    kept = kept_x + (sizes.w if wants_weight else 0) + bias
    extra = _copies(x) + _copies(gradient)
    if _without_onednn(x, w, given):
        return _need(sizes.batch * sizes.column + extra)
    if _is_channels_last(x, w):
        return _need(0 if sizes.pointwise and not sizes.strided else 2 * sizes.w)
    if sizes.direct:
        return _need(extra)
    peaks = [kept]
    if wants_input:
        peaks += _of_input(sizes, transposed=given["transposed"])
    if wants_weight:
        weights, buffers = _of_weights(sizes, x, w, given)
        peaks += [kept_x + buffers + weights + bias, kept_x + weights + sizes.w + 2 * bias]
    return _need(max(peaks) - kept + extra)


def _of_input(sizes: _Sizes, *, transposed: bool) -> list[int]:
    if transposed:
        read = 0 if sizes.few_outputs else sizes.o_blocked
        return [read + sizes.w_blocked + sizes.x_blocked, sizes.x_blocked + sizes.x]
    if sizes.long_kernel and not sizes.strided:
        return [sizes.x + sizes.column, 2 * sizes.x]
    if sizes.strided and not sizes.depthwise:
        return [sizes.o_blocked + sizes.w_blocked + sizes.x + sizes.rows, 3 * sizes.x]
    return [sizes.o_blocked + sizes.w_blocked + sizes.x_blocked, sizes.x_blocked + sizes.x]


def _of_weights(sizes: _Sizes, x: torch.Tensor, w: torch.Tensor, given: Arguments) -> tuple[int, int]:
    """Bytes of the weights' gradient in blocks, and of what is copied for it."""
    longest = _LONGEST_DEPTHWISE if sizes.depthwise else _LONGEST_KERNEL
    if max(w.shape[2:]) > longest or _grouped_oddly(x, w, given):
        return sizes.w, _COPIES_OF_WEIGHTS * sizes.w + sizes.column
    single = 2 * sizes.w + _HALF_PRECISION_SUMS if x.element_size() < 4 else 0
    if given["transposed"]:
        return sizes.w_blocked, sizes.x_blocked + (0 if sizes.few_outputs else sizes.o_blocked) + single
    channels = x.shape[1]
    if channels <= _UNBLOCKED_CHANNELS and not sizes.pointwise:
        return _blocked(w, w.shape[0], 1, w.shape[1], 1), sizes.o_blocked + single
    if channels <= _BLOCK // 2 and not sizes.pointwise:
        half = _up(channels, 8)
        copied = sizes.x // channels * half + sizes.o_blocked
        return sizes.w // channels // w.shape[0] * half * _up(w.shape[0], _BLOCK), copied + single
    picked = sizes.picked if sizes.pointwise and sizes.strided else 0
    return sizes.w_blocked, sizes.x_blocked + sizes.o_blocked + single + picked


def _sizes(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, given: Arguments) -> _Sizes:
    element = x.element_size()
    kernel = tuple(w.shape[2:])
    transposed, groups = given["transposed"], given["groups"]
    small = x if transposed else out  # the side with fewer positions
    positions = math.prod(small.shape[2:])
    rows = positions // small.shape[-1] * (small.shape[-1] + kernel[-1] + 1)
    pointwise = math.prod(kernel) == 1 and not any(given["padding"]) and groups == 1
    few = x.shape[0] < _SMALL_BATCH and torch.get_num_threads() == 1
    depthwise = groups == x.shape[1] == out.shape[1]
    blocks = (w.shape[0], _BLOCK, 1, 1) if depthwise else (w.shape[0], _BLOCK, w.shape[1], _BLOCK)
    return _Sizes(
        x=x.numel() * element,
        w=w.numel() * element,
        o=out.numel() * element,
        x_blocked=x.numel() // x.shape[1] * _up(x.shape[1], _BLOCK) * element,
        w_blocked=w.numel() * element if groups > 1 and not depthwise else _blocked(w, *blocks),
        o_blocked=out.numel() // out.shape[1] * _up(out.shape[1], _BLOCK) * element,
        column=math.prod(kernel) * w.shape[1] * positions * element,
        batch=x.shape[0],
        strided=max(given["stride"]) > 1,
        depthwise=depthwise,
        rows=rows * _up(small.shape[1], 64) * element,
        picked=x.shape[1] * positions * element,
        long_kernel=max(kernel) > _LONGEST_KERNEL,
        pointwise=pointwise,
        direct=pointwise and few and max(given["stride"]) == 1 and element == 4,
        few_channels=x.shape[1] < _BLOCK and not transposed,
        few_outputs=out.shape[1] < _BLOCK,
    )


def _blocked(w: torch.Tensor, first: int, first_block: int, second: int, second_block: int) -> int:
    return math.prod(w.shape[2:]) * _up(first, first_block) * _up(second, second_block) * w.element_size()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copies(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _is_channels_last(x: torch.Tensor, w: torch.Tensor) -> bool:
    if x.dim() == 4:
        last = torch.channels_last
    elif x.dim() == 5:
        last = torch.channels_last_3d
    else:
        return False
    tensors = (x, w)
    return any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors)


def _without_onednn(x: torch.Tensor, w: torch.Tensor, given: Arguments) -> bool:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return True
    large_kernel = w.dim() > 3 and min(w.shape[-2:]) > 3
    return x.shape[0] == 1 and x.numel() <= _SMALL_SAMPLE and given["groups"] == 1 and not large_kernel


def _grouped_oddly(x: torch.Tensor, w: torch.Tensor, given: Arguments) -> bool:
    """Whether no blocked kernel takes the groups: their channels do not fill blocks of 8, and it is not depthwise."""
    groups = given["groups"]
    if groups == 1 or groups == x.shape[1] == w.shape[0]:
        return False
    return bool((x.shape[1] // groups) % 8 or (w.shape[0] // groups) % 8)


def _need(size: int) -> Need:
    return Need(size, size) if size else NOTHING
