"""Load values into expanded tensors, into which torch cannot copy directly.

Several elements of an expanded tensor (`torch.Tensor.expand`) share the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether any dimension of a tensor repeats the same memory (stride 0)."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return bool(_repeated_dimensions(tensor))


def _repeated_dimensions(tensor: torch.Tensor) -> list[int]:
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    return [dimension for dimension, (stride, size) in enumerate(sides) if stride == 0 and size > 1]


def once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in which each memory location of `like` occurs exactly once.

    Args:
        tensor: A tensor with the same shape as `like`.
        like: An expanded tensor. If it is not expanded, all of `tensor` is returned.
    """
    if not is_expanded(like):
        return tensor
    for dimension in _repeated_dimensions(like):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@contextlib.contextmanager
def made_dense(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make expanded tensors dense in the ``with`` block, so that values can be loaded into them.

    At the end of the block, each tensor is expanded again, and all tensors that share its memory
    have the loaded values. A tensor stays dense if its loaded values differ along an expanded
    dimension.
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
