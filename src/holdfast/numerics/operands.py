"""Facts about one tensor: whether it is finite, its range, where it is bad. Every look is a read by the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_PLAIN = torch._C._disabled_torch_dispatch_impl

_MOST_PLACES = 512  # elements that are told apart inside one storage; beyond, the region counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What is known about the values of a tensor.

    Args:
        dtype: Such as ``"float32"``.
        shape: As the tensor's.
        least: Smallest finite value (of complex numbers: of their magnitudes); None if no value is finite.
        most: Largest finite value.
        nan: Elements that are NaN.
        inf: Elements that are Inf of either sign.
        negative_inf: Of these, elements that are -Inf.
        zeros: Elements that are 0.
    """

    dtype: str
    shape: tuple[int, ...]
    least: float | None
    most: float | None
    nan: int
    inf: int
    negative_inf: int
    zeros: int

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
        parts = [f"{self.dtype}[{size}]"]
        if self.least is not None and self.most is not None:
            parts.append(f"{self.least:.4g} to {self.most:.4g}" if self.least != self.most else f"{self.least:.4g}")
        parts += [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        return f"{parts[0]} ({', '.join(parts[1:])})" if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class Places:
    """Where in its storage a tensor is bad: exact if few, otherwise the region."""

    exact: frozenset[int] | None
    first: int
    last: int

    def meet(self, other: Places) -> bool:
        """Return whether both can mean the same element."""
        if self.exact is not None and other.exact is not None:
            return not self.exact.isdisjoint(other.exact)
        return self.first <= other.last and other.first <= self.last


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the floating-point or complex values of a tensor that can be looked at, or None.

    Passed over: integers, meta tensors, subclasses that dispatch themselves, nested and quantized tensors.
    """
    if getattr(type(tensor), "__torch_dispatch__", _PLAIN) is not _PLAIN or tensor.is_meta:
        return None
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    return tensor if tensor.is_floating_point() or tensor.is_complex() else None


def is_whole_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers that can be looked at."""
    plain = getattr(type(tensor), "__torch_dispatch__", _PLAIN) is _PLAIN and tensor.layout == torch.strided
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return plain and whole and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def nonfinite(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is NaN or Inf (bool, shape as `values_of` the tensor), or None if it is nowhere.

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
    """Return the facts about a tensor.

    Args:
        values: Real or complex, any shape.
    """
    seen = values.detach()
    real = seen.abs() if seen.is_complex() else seen.float() if seen.dtype.itemsize < 4 else seen
    nan, inf = torch.isnan(real), torch.isinf(real)
    finite = real[~(nan | inf)]
    counts = torch.stack([nan.sum(), inf.sum(), (real == -math.inf).sum(), (real == 0).sum()]).tolist()
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
    """Return where a tensor is bad along its batch axis, empty if it has none or is bad all along it.

    Args:
        bad: Bool, any shape. The batch axis is the first one of this length; a first axis that is a multiple of
            it (positions flattened into the batch) counts too.
        batch_size: Length of the batch axis.
    """
    if batch_size is None or batch_size < 2 or not bad.dim():
        return ()
    if batch_size in bad.shape:
        rows = bad.movedim(bad.shape.index(batch_size), 0).reshape(batch_size, -1).any(1)
    elif bad.shape[0] and bad.shape[0] % batch_size == 0:
        rows = bad.reshape(batch_size, -1).any(1)
    else:
        return ()
    return () if bool(rows.all()) else tuple(rows.nonzero().flatten().tolist())


def find_places(values: torch.Tensor, bad: torch.Tensor) -> Places:
    """Return where in its storage a tensor is bad.

    Args:
        values: Strided.
        bad: Bool, shape as `values`.
    """
    first = int(values.storage_offset())
    last = first + sum(
        (int(size) - 1) * int(stride) for size, stride in zip(values.shape, values.stride(), strict=True)
    )
    if int(bad.sum()) > _MOST_PLACES:
        return Places(None, first, last)
    strides = torch.tensor(values.stride(), dtype=torch.int64, device=bad.device)
    return Places(frozenset((bad.nonzero() * strides).sum(1).add(first).tolist()), first, last)
