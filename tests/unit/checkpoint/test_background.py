"""Jobs beside the training, and the search for NaN and Inf in what is saved."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.background import BackgroundJob, nonfinite_copies
from holdfast.checkpoint.health import nonfinite_tensors


@pytest.mark.parametrize("size", [1, 32_767, 32_768, 200_000])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_copies_are_found_wherever_they_are(size: int, value: float) -> None:
    """NaN and Inf are found in the last element of tensors of any size, by name and once each."""
    good, bad = torch.ones(size), torch.ones(size)
    bad[-1] = value
    named = [
        ("good", good),
        ("bad", bad),
        ("whole numbers", torch.ones(3, dtype=torch.int64)),
        ("empty", good[:0]),
    ]
    assert nonfinite_copies(iter(named)) == (["bad"], 1)
    assert nonfinite_copies([]) == ([], 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
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


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(tmp_path: Path) -> None:
    """In a child that was forked meanwhile a job is over, without a result."""
    gate = threading.Event()
    job = BackgroundJob(lambda: gate.wait(60), tmp_path)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if not job.is_running and job.result() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    assert job.result() is True
