"""Small measurements of tensors that several observers make: samples, norms, medians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Types and layouts that torch stores and hardly computes with.
_COMPUTED_WITH = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
_SAMPLE = 4096
"""Elements of a tensor that are copied: 16 KiB a tensor, whatever the model's size."""


def can_be_observed(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be measured.

    Not those of integers, nested or quantized tensors.
    """
    if tensor.is_nested or tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
        return False
    return tensor.dtype in _COMPUTED_WITH


def spread_of(tensor: Tensor, most: int = _SAMPLE) -> Tensor:
    """Return at most so many elements, spread over a tensor, shape ``(n,)``.

    A view where there can be one.

    Those of a float8 type come as float32, since torch knows no arithmetic of float8.
    """
    values = _spread_over(tensor, most)
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _spread_over(tensor: Tensor, most: int) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not tensor.is_contiguous():
        return tensor.flatten()[:most]
    flat = tensor.view(-1)
    size = flat.numel()
    if size <= most:
        return flat
    stride = size // most
    # Or all are of a few columns, such as a pixel that is always 0
    while math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return flat[::stride][:most]


def dense_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient's values, of a sparse one the stored ones."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return gradient.coalesce().values().detach() if gradient.is_sparse else gradient.detach()


def norms_of(tensors: Iterable[Tensor], order: float = 2) -> list[float]:
    """Return the norm of each tensor, computed in at least fp32; one host sync."""
    given = list(tensors)
    if all(t.dtype == torch.float32 for t in given):
        each = list(torch._foreach_norm(given, order)) if given else []
    else:
        wide = [
            None if t.dtype == torch.float64 or t.is_complex() else torch.float32 for t in given
        ]
        each = [
            torch.linalg.vector_norm(t, order, dtype=w).double()
            for t, w in zip(given, wide, strict=True)
        ]
    return torch.stack([norm.cpu() for norm in each]).tolist() if each else []


def median(values: Sequence[float]) -> float | None:
    """Return the middle of the finite values, None if there are none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else None


def append_newest(values: list[Any], value: Any) -> None:
    """Append a value, and drop the oldest beyond 400."""
    values.append(value)
    del values[:-400]
