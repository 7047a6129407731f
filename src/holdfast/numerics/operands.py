"""Measure one tensor: its range, and where it contains NaN or Inf.

`nonfinite`, `measure` and `bad_rows` read values on the host, which costs a sync.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# The value of ``__torch_dispatch__`` in tensor classes that do not define it.
_NO_OWN_DISPATCH = torch._C._disabled_torch_dispatch_impl


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Statistics of the values in a tensor. For a complex tensor, they describe the magnitudes."""

    # The dtype, such as "float32".
    dtype: str
    shape: tuple[int, ...]
    # The smallest finite value, or None if no value is finite.
    least: float | None
    # The largest finite value, or None if no value is finite.
    most: float | None
    # The number of NaN values.
    nan: int
    # The number of infinite values, of either sign.
    inf: int
    # The number of -Inf values.
    negative_inf: int
    # The number of zeros.
    zeros: int

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.least or 0.0), abs(self.most or 0.0))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_mask(self) -> bool:
        """Whether the tensor looks like an additive mask, which contains only 0 and -Inf."""
        has_infinities = self.negative_inf > 0 and self.negative_inf == self.inf
        rest_is_zero = self.least is None or self.least == self.most == 0.0
        return has_infinities and rest_is_zero and self.inf < self.count and self.nan == 0

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        details = []
        if self.least is not None and self.most is not None:
            values = f"{self.least:.4g}"
            if self.least != self.most:
                values += f" to {self.most:.4g}"
            details.append(values)
        if self.nan:
            details.append(f"{self.nan} NaN")
        if self.inf:
            details.append(f"{self.inf} Inf")
        text = f"{self.dtype}[{size}]"
        if details:
            text += f" ({', '.join(details)})"
        return text


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the floating-point or complex values of a tensor, or None if they cannot be read."""
    values = _readable_values(tensor)
    return values if values is not None and _is_real(values) else None


def whole_numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of an integer tensor, or None if they are unreadable or not integers."""
    values = _readable_values(tensor)
    if values is None or _is_real(values) or values.dtype == torch.bool:
        return None
    return values


def _is_real(values: torch.Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _readable_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor as a dense tensor, or None if they cannot be read.

    The values of meta, quantized and nested tensors cannot be read, nor can those of tensor
    subclasses that define ``__torch_dispatch__``.
    """
    dispatch = getattr(type(tensor), "__torch_dispatch__", _NO_OWN_DISPATCH)
    if dispatch is not _NO_OWN_DISPATCH:
        return None
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return None
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    return values if values.layout == torch.strided else None


def nonfinite(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the elements of a tensor that are NaN or Inf.

    If the sum of all elements is finite, so is each element. The elements are therefore examined
    individually only if the sum is not finite.

    Returns:
        A bool tensor with the shape of ``values_of(tensor)``. None if all elements are finite, or
        if they cannot be read.
    """
    values = values_of(tensor)
    if values is None or values.numel() == 0:
        return None
    values = values.detach()
    is_narrow = values.dtype.itemsize < 4 and not values.is_complex()
    if is_narrow and values.dtype not in (torch.float16, torch.bfloat16):
        # Few operations support fp8.
        values = values.float()
    total = values.sum(dtype=torch.float32 if is_narrow else None)
    if bool(torch.isfinite(total)):
        return None
    bad = ~torch.isfinite(values)
    return bad if bool(bad.any()) else None


def measure(values: torch.Tensor) -> Operand:
    """Compute the statistics of a real or complex tensor."""
    real = values.detach()
    if real.is_complex():
        real = real.abs()
    elif real.dtype.itemsize < 4:
        real = real.float()
    nan = torch.isnan(real)
    inf = torch.isinf(real)
    counts = torch.stack([nan.sum(), inf.sum(), (real == -math.inf).sum(), (real == 0).sum()])
    nan_count, inf_count, negative_inf_count, zero_count = counts.tolist()
    least = None
    most = None
    finite = real[~(nan | inf)]
    if finite.numel():
        least = float(finite.min())
        most = float(finite.max())
    return Operand(
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        least=least,
        most=most,
        nan=nan_count,
        inf=inf_count,
        negative_inf=negative_inf_count,
        zeros=zero_count,
    )


def bad_rows(bad: torch.Tensor, batch_size: int | None) -> tuple[int, ...]:
    """Return the indices of the samples for which a tensor contains NaN or Inf.

    The batch axis is the first axis of length `batch_size`. If there is none, axis 0 is used if its
    length is a multiple of `batch_size`, because it may contain several positions per sample.

    Args:
        bad: The result of `nonfinite` for the tensor.
        batch_size: Number of samples in the batch, or None if unknown.

    Returns:
        Indices in ascending order. Empty if the tensor has no batch axis, or if every sample is
        bad.
    """
    if batch_size is None or batch_size < 2 or not bad.dim():
        return ()
    if batch_size in bad.shape:
        bad = bad.movedim(bad.shape.index(batch_size), 0)
    elif not bad.shape[0] or bad.shape[0] % batch_size:
        return ()
    is_bad = bad.reshape(batch_size, -1).any(1)
    if bool(is_bad.all()):
        return ()
    return tuple(is_bad.nonzero().flatten().tolist())
