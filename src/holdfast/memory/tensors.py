"""Find the tensors in arguments and results, and detect whether they were changed in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from holdfast.core.containers import children_of

_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, also inside tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in (children_of(value) or {}).values():
        yield from tensors_of(child)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return autograd's counters of in-place changes, or -1 for inference tensors, which have none.

    A counter is ``tensor._version``, which autograd itself compares before it uses a saved tensor.
    """
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has exactly one storage.

    Sparse tensors, most subclasses, and tensors wrapped by `torch.func` do not.
    """
    if tensor.layout != torch.strided or type(tensor) not in _PLAIN_CLASSES:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
