"""Health: a checkpoint with NaN or Inf in it is never a good one."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.checkpoint.health import nonfinite_tensors


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("place", [0, 513, 999])
def test_one_bad_value_is_found(place: int, dtype: torch.dtype, bad: float) -> None:
    """A single NaN or Inf at any place of a tensor of any float type is named."""
    tensor = torch.randn(1000).to(dtype)
    tensor[place] = bad
    named = [("good", torch.randn(5)), ("bad", tensor), ("other", torch.randn(5).double())]
    assert nonfinite_tensors(named) == (["bad"], 1)
    assert nonfinite_tensors([("z", torch.tensor([1 + 1j, complex(0, bad)]))]) == (["z"], 1)
    beyond_fp32 = torch.tensor([1e300, bad], dtype=torch.float64)
    assert nonfinite_tensors([("a", beyond_fp32)]) == (["a"], 1)


def test_the_largest_finite_values_are_healthy() -> None:
    """The limits of every type, and fp64 values beyond fp32's range, are no accident."""
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    named = [(str(kind), torch.full((3,), torch.finfo(kind).max, dtype=kind)) for kind in types]
    named.append(("mixed", torch.tensor([1e300, -1e300], dtype=torch.float64)))
    assert nonfinite_tensors(named) == ([], 0)


def test_what_cannot_be_nonfinite_is_passed_over() -> None:
    """Integers, booleans and empty tensors are no reason to refuse, nor is nothing at all."""
    named = [
        ("i", torch.tensor([2**62])),
        ("b", torch.tensor([True])),
        ("e", torch.zeros(0, 3)),
        ("u", torch.zeros(1)),
    ]
    assert nonfinite_tensors(named) == ([], 0)
    assert nonfinite_tensors([]) == ([], 0)


def test_many_bad_tensors_are_counted_and_some_named() -> None:
    """The first names in order and the whole number are told; a parameter may require gradients."""
    bad = torch.nn.Parameter(torch.tensor([math.nan]))
    named = [(f"layer{number}", bad) for number in range(8)]
    assert nonfinite_tensors(named, most=2) == (["layer0", "layer1"], 8)
