"""Find the tensors in nested containers, and detect in-place changes to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from holdfast.core.containers import children_of

_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a value, including those in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in (children_of(value) or {}).values():
        yield from tensors_of(child)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return autograd's count of in-place changes for each tensor (``tensor._version``).

    Autograd uses this counter to check that a saved tensor was not changed. Inference tensors have
    no counter; the result for them is -1.
    """
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a single storage of its own.

    The result is False for sparse tensors, for most tensor subclasses, and for tensors wrapped by
    `torch.func`.
    """
    if tensor.layout != torch.strided or type(tensor) not in _PLAIN_CLASSES:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
