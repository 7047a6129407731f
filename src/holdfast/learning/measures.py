"""Functions shared by several observers: samples, norms, medians and bounded histories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Dtypes whose values can be measured. torch supports few operations on other dtypes.
MEASURABLE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)
# Maximum number of elements in a sample (16 KiB of float32).
SAMPLE_ELEMENTS = 4096
# Maximum length of a history in `append_newest`. The oldest entries are dropped.
HISTORY_LENGTH = 400


def can_be_measured(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be measured.

    Integer, quantized, nested and meta tensors cannot be measured.
    """
    if tensor.is_nested or tensor.is_meta:
        return False
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return False
    return tensor.dtype in MEASURABLE_DTYPES


def sample_of(tensor: Tensor, most: int = SAMPLE_ELEMENTS) -> Tensor:
    """Return up to `most` elements of a tensor, spread evenly, as a tensor of shape ``(n,)``.

    The result is a view if possible. Elements of a float8 dtype are converted to float32, because
    torch has no float8 arithmetic.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    elements = _spread_over(values, most)
    if elements.is_floating_point() and elements.element_size() == 1:
        return elements.float()
    return elements


def _spread_over(tensor: Tensor, most: int) -> Tensor:
    """Return up to `most` elements of a dense tensor, spread evenly if it is contiguous."""
    if not tensor.is_contiguous():
        return tensor.flatten()[:most]
    flat = tensor.view(-1)
    if flat.numel() <= most:
        return flat
    stride = flat.numel() // most
    # A stride that has a common factor with the row length would visit only some of the columns,
    # for example only pixels that are always 0.
    while math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return flat[::stride][:most]


def dense_gradient(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient, or the stored values of a sparse one; None if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        return gradient.coalesce().values().detach()
    return gradient.detach()


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, shape ``()``, computed in at least fp32."""
    if not tensors:
        return []
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return list(torch._foreach_norm(list(tensors)))
    return [_wide_norm(tensor) for tensor in tensors]


def _wide_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of a tensor in fp64, computed in at least fp32."""
    wide = tensor.dtype == torch.float64 or tensor.is_complex()
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=None if wide else torch.float32)
    return norm.double()


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median of the finite values, or None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def median(values: Sequence[float]) -> float:
    """Return the median. For an even number of values, this is the upper middle value."""
    return sorted(values)[len(values) // 2]


def streak(length: int, *, continues: bool) -> int:
    """Return the new length of a streak: one more if it continues, and 0 if it has ended."""
    return length + 1 if continues else 0


def append_bounded(history: list[float], value: float, *, first: int, most: int) -> None:
    """Append a value, keeping at most `most` values: the first `first` ones and the newest."""
    history.append(value)
    if len(history) > most:
        del history[first]


def append_newest(history: list[Any], value: Any) -> None:
    """Append a value, keeping only the newest `HISTORY_LENGTH` values."""
    history.append(value)
    del history[:-HISTORY_LENGTH]
