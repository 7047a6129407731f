"""Write into expanded tensors.

Several elements lie at one place in memory, so torch refuses a copy into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether a dimension of a tensor repeats one element, as ``expand`` makes them."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that holds each place of an expanded one, `like`, once.

    All of it for any other.
    """
    if is_expanded(like):
        for dimension, (stride, size) in enumerate(zip(like.stride(), like.shape, strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@contextlib.contextmanager
def made_dense(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let expanded tensors have memory for each element inside, so that they can be loaded like any
    other.

    Afterwards they are expanded again and hold what was loaded, as does whatever shares their
    memory. One whose loaded elements are not equal along an expanded dimension stays dense.
    """
    views = [(tensor, tensor.data) for tensor in tensors if is_expanded(tensor)]
    try:
        for tensor, view in views:
            tensor.data = view.contiguous()
        yield
    finally:
        for tensor, view in views:
            loaded = tensor.data
            part = once(loaded, view)
            if torch.equal(part.expand_as(loaded), loaded):
                once(view, view).copy_(part)
                tensor.data = view
