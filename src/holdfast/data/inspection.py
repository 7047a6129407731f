"""Look into samples and batches of any nesting: where a value is not finite, where two of them differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested containers with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def find_nonfinite(sample: Any) -> str | None:
    """Return where in a sample there is a NaN or Inf, or None."""
    for path, leaf in leaves(sample, "sample"):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            count = int((~torch.isfinite(leaf)).sum())
        elif isinstance(leaf, (np.ndarray, np.floating, float)) and np.asarray(leaf).dtype.kind in "fc":
            count = int(np.size(leaf) - np.isfinite(leaf).sum())
        else:
            continue
        if count:
            return f"{path} holds {count} NaN or Inf"
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # NaN is equal to itself here


def first_difference(one: Any, other: Any) -> str | None:
    """Return where two reads of the same batch differ, or None."""
    for (path, a), (_, b) in itertools.zip_longest(
        leaves(one, "batch"), leaves(other, "batch"), fillvalue=("", None)
    ):
        if isinstance(a, (torch.Tensor, np.ndarray)) and isinstance(b, (torch.Tensor, np.ndarray)):
            left, right = torch.as_tensor(a), torch.as_tensor(b)
            if left.shape != right.shape or left.dtype != right.dtype:
                return f"{path} has shape {tuple(left.shape)} and then {tuple(right.shape)}"
            if not left.numel() or torch.equal(_bytes(left), _bytes(right)):
                continue
            return f"{path} has other values"
        if type(a) is not type(b):
            return f"{path} is a {type(a).__name__} and then a {type(b).__name__}"
        if isinstance(a, (bool, int, float, str, bytes)) and a != b and not (a != a and b != b):
            return f"{path} is {a!r} and then {b!r}"
    return None
