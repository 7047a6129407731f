"""Expanded tensors: a copy goes to each place in memory once, and loading leaves them expanded where it can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.checkpoint.expanded import is_expanded, made_dense, once


def test_what_is_expanded() -> None:
    """A dimension that repeats an element makes a tensor so; one of a single element does not, nor an empty one."""
    assert is_expanded(torch.zeros(1, 3).expand(2, 3))
    assert not is_expanded(torch.zeros(3).expand(1, 3))
    assert not is_expanded(torch.zeros(2, 3))
    assert not is_expanded(torch.zeros(()))
    assert not is_expanded(torch.zeros(1).expand(0))
    assert not is_expanded(torch.zeros(2, 3).to_sparse())
    whole = torch.zeros(2, 3)
    assert once(whole, whole) is whole


def test_loading_leaves_a_view_or_makes_it_dense() -> None:
    """Equal elements are written through to what shares the memory; others need memory of their own."""
    base = torch.zeros(1)
    one, two, plain = base.expand(3), torch.zeros(1).expand(3), torch.zeros(3)
    weight = nn.Parameter(base.expand(2), requires_grad=False)
    with made_dense([one, two, plain, weight]):
        for tensor in (one, two, plain, weight):
            tensor.copy_(torch.full_like(tensor, 7.0))
        two.copy_(torch.arange(3.0))
    assert one.tolist() == plain.tolist() == [7, 7, 7]
    assert base.tolist() == [7]
    assert one.stride() == weight.stride() == (0,)
    assert one.data_ptr() == base.data_ptr() == weight.data_ptr()
    assert two.tolist() == [0, 1, 2]
    assert two.stride() == (1,)


def test_a_load_that_fails_leaves_the_view() -> None:
    """The error goes on, and the tensor is what it was."""
    tensor = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="shape"), made_dense([tensor]):
        raise RuntimeError("another shape")
    assert tensor.stride() == (0,)
    assert tensor.tolist() == [1, 1, 1]
