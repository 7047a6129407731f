"""Look into samples and batches of any nesting: where a value is not finite, where two of them differ."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_CHECKED = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested containers and dataclasses with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{path}.{field.name}")
    else:
        yield path, value


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors that hold the values of a tensor of any layout; none for one without values."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:  # its raw bytes may not be looked at: torch ends the process
        return [tensor.int_repr()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [(tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()]


def _not_finite(leaf: Any) -> int:
    """Return how many NaN and Inf a leaf holds."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is torch.strided and leaf.dtype in _CHECKED and not leaf.is_meta and not leaf.is_nested:
            return int((~torch.isfinite(leaf)).sum())
        parts = [part for part in _dense(leaf) if part.is_floating_point() or part.is_complex()]
        # Floats of 8 bits are not looked at as they are.
        return sum(int((~torch.isfinite(part if part.itemsize > 1 else part.float())).sum()) for part in parts)
    if isinstance(leaf, (np.ndarray, np.floating, np.complexfloating, float, complex)):
        array = np.asarray(leaf)
        return int(array.size - np.isfinite(array).sum()) if array.dtype.kind in "fc" else 0
    return 0


def find_nonfinite(sample: Any) -> str | None:
    """Return where in a sample there is a NaN or Inf, or None."""
    for path, leaf in leaves(sample, "sample"):
        try:
            count = _not_finite(leaf)
        except (RuntimeError, TypeError):  # a kind of tensor that cannot be looked into: no fault of the sample
            continue
        if count:
            return f"{path} holds {count} NaN or Inf"
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # NaN is equal to itself here


def _shape(value: Any) -> tuple[Any, ...]:
    nested = isinstance(value, torch.Tensor) and value.is_nested  # which has no shape as a whole
    return tuple(tuple(part.shape) for part in value.unbind()) if nested else tuple(value.shape)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = list(itertools.zip_longest(_dense(one), _dense(other), fillvalue=torch.empty(0)))
    same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return same and all(not a.numel() or torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _same_array(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.dtype.names:  # between fields may be bytes that mean nothing
        return all(_same_array(one[name], other[name]) for name in one.dtype.names)
    if one.dtype.hasobject:
        return first_difference(one.tolist(), other.tolist()) is None
    if one.dtype.kind in "fc":  # also within a long double
        return bool(np.array_equal(one, other, equal_nan=True))
    return one.tobytes() == other.tobytes()


def first_difference(one: Any, other: Any) -> str | None:
    """Return where two reads of the same batch differ, or None; what cannot be compared does not count."""
    for (path, a), (_, b) in itertools.zip_longest(
        leaves(one, "batch"), leaves(other, "batch"), fillvalue=("", None)
    ):
        if type(a) is not type(b):
            return f"{path} is a {type(a).__name__} and then a {type(b).__name__}"
        try:
            found = _difference(a, b)
        except Exception:  # noqa: BLE001, S112 - an object of the user's, or a kind of tensor that cannot be read
            continue
        if found is not None:
            return f"{path} {found}"
    return None


def _difference(a: Any, b: Any) -> str | None:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        first, second = _shape(a), _shape(b)
        if first != second:
            return f"has shape {first} and then {second}"
        if a.dtype != b.dtype:
            return f"has {a.dtype} and then {b.dtype}"
        same = _same_tensor(a, b) if isinstance(a, torch.Tensor) else _same_array(a, b)
        return None if same else "has other values"
    if isinstance(a, (bool, int, float, complex, str, bytes)) and a != b and not (a != a and b != b):
        return f"is {a!r} and then {b!r}"
    return None
