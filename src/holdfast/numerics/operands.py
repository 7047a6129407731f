"""Facts about one tensor: whether it is finite, its range, where it is bad.

Every look is a read by the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_PLAIN = torch._C._disabled_torch_dispatch_impl


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What is known about the values of a tensor; of complex numbers the magnitudes count."""

    dtype: str  # such as "float32"
    shape: tuple[int, ...]
    least: float | None  # smallest finite value; None if no value is finite
    most: float | None  # largest finite value
    nan: int  # elements that are NaN
    inf: int  # elements that are Inf of either sign
    negative_inf: int  # of these, elements that are -Inf
    zeros: int  # elements that are 0

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return max(abs(self.least or 0.0), abs(self.most or 0.0))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_mask(self) -> bool:
        """Whether nothing but 0 and -Inf occurs: an additive mask, Inf on purpose."""
        only_zeros = self.least is None or self.least == self.most == 0.0
        return 0 < self.negative_inf == self.inf < self.count and self.nan == 0 and only_zeros

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        parts = []
        if self.least is not None and self.most is not None:
            parts.append(
                f"{self.least:.4g} to {self.most:.4g}"
                if self.least != self.most
                else f"{self.least:.4g}"
            )
        parts += [
            f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count
        ]
        return f"{self.dtype}[{size}]" + (f" ({', '.join(parts)})" if parts else "")


def values_of(tensor: torch.Tensor, *, whole_numbers: bool = False) -> torch.Tensor | None:
    """Return the floating-point or complex values (or the integers) of a tensor that can be looked
    at, or None.

    Passed over: meta tensors, subclasses that dispatch themselves, nested and quantized tensors.
    """
    dispatches = getattr(type(tensor), "__torch_dispatch__", _PLAIN) is not _PLAIN
    if dispatches or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return None
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    is_real = values.is_floating_point() or values.is_complex()
    wanted = not (is_real or values.dtype == torch.bool) if whole_numbers else is_real
    return values if wanted and values.layout == torch.strided else None


def nonfinite(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is NaN or Inf (bool, shape as `values_of` the tensor), or None if it is
    nowhere.

    A sum is finite only if every element is, so the exact look follows only a sum that is not.
    """
    values = values_of(tensor)
    if values is None or values.numel() == 0:
        return None
    values = values.detach()
    narrow = values.dtype.itemsize < 4 and not values.is_complex()
    if narrow and values.dtype not in (torch.float16, torch.bfloat16):  # fp8 has few kernels
        values = values.float()
    total = values.sum(dtype=torch.float32 if narrow else None)
    if bool(torch.isfinite(total)):
        return None
    bad = ~torch.isfinite(values)
    return bad if bool(bad.any()) else None


def measure(values: torch.Tensor) -> Operand:
    """Return the facts about a tensor, real or complex, of any shape."""
    seen = values.detach()
    real = seen.abs() if seen.is_complex() else seen.float() if seen.dtype.itemsize < 4 else seen
    nan, inf = torch.isnan(real), torch.isinf(real)
    finite = real[~(nan | inf)]
    counts = torch.stack(
        [nan.sum(), inf.sum(), (real == -math.inf).sum(), (real == 0).sum()]
    ).tolist()
    least, most = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
    return Operand(
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        least=least,
        most=most,
        nan=counts[0],
        inf=counts[1],
        negative_inf=counts[2],
        zeros=counts[3],
    )


def bad_rows(bad: torch.Tensor, batch_size: int | None) -> tuple[int, ...]:
    """Return where a tensor is bad along its batch axis, empty if it has none or is bad all along
    it.

    The batch axis is the first one of this length; a first axis that is a multiple of it (positions
    flattened into the batch) counts too.
    """
    if batch_size is None or batch_size < 2 or not bad.dim():
        return ()
    if batch_size in bad.shape:
        bad = bad.movedim(bad.shape.index(batch_size), 0)
    elif not bad.shape[0] or bad.shape[0] % batch_size:
        return ()
    rows = bad.reshape(batch_size, -1).any(1)
    return () if bool(rows.all()) else tuple(rows.nonzero().flatten().tolist())
