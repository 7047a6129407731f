"""The tracer: what it sees of operations, their operands, their storage and their place."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from holdfast.numerics.mechanisms import readable
from holdfast.numerics.operands import bad_rows, measure, nonfinite
from holdfast.numerics.tracer import OriginTracer, Suspect


def traced() -> OriginTracer:
    return OriginTracer({}, [], None)


def only(tracer: OriginTracer) -> Suspect:
    assert len(tracer.suspects) == 1
    return tracer.suspects[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_nonfinite_is_exact_in_every_type(dtype: torch.dtype) -> None:
    """One NaN or Inf is found at its place, and a sum that overflows is no false alarm."""
    values = torch.ones(5, dtype=dtype)
    assert nonfinite(values) is None
    for bad in (math.nan, math.inf, -math.inf):
        values[3] = bad
        where = nonfinite(values)
        assert where is not None
        assert where.tolist() == [False, False, False, True, False]
    if not dtype.is_complex:
        assert nonfinite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype)) is None


def test_an_operand_is_described_by_its_finite_range() -> None:
    """Range, NaN, Inf, -Inf and zeros are counted apart."""
    facts = measure(torch.tensor([[0.0, -2.0, math.nan], [math.inf, -math.inf, 7.0]]))
    assert (facts.least, facts.most, facts.nan, facts.inf, facts.negative_inf, facts.zeros) == (-2.0, 7.0, 1, 2, 1, 1)
    assert facts.largest == 7.0
    assert str(facts) == "float32[2x3] (-2 to 7, 1 NaN, 2 Inf)"


def test_rows_are_those_of_the_batch_axis() -> None:
    """The batch axis is found wherever it is, flattened too, and a row of everything says nothing."""
    bad = torch.zeros(4, 3, dtype=torch.bool)
    bad[2, 1] = True
    assert bad_rows(bad, 4) == bad_rows(bad.T, 4) == (2,)
    assert bad_rows(bad.reshape(12), 4) == (2,)
    assert bad_rows(bad, 5) == bad_rows(bad, None) == bad_rows(torch.ones(4, dtype=torch.bool), 4) == ()


def test_pointwise_links_need_the_same_place() -> None:
    """An Inf that a ``where`` throws away is no parent of the NaN that it keeps."""
    with traced() as tracer:
        thrown = torch.tensor([0.0, 1.0]).log()
        kept = torch.tensor([1.0, 5.0]).acos()
        torch.where(torch.tensor([False, False]), thrown, kept)
    last = tracer.suspects[-1]
    assert [link.suspect.name for link in last.links] == ["acos"]


def test_no_tensor_is_kept_alive() -> None:
    """A bad tensor is freed as soon as its owner drops it, although its suspect is remembered."""
    tracer = traced()
    with tracer:
        bad = torch.zeros(1000).log()
        last = weakref.ref(bad)
        del bad
    gc.collect()
    assert last() is None
    assert len(tracer.suspects) == 1


def test_a_freed_storage_is_never_taken_for_another() -> None:
    """Tensors that come and go at one address keep their own suspects."""
    with traced() as tracer:
        for _ in range(50):
            torch.zeros(16).log()
        bad = torch.full((16,), 2.0).acos()
    assert tracer.find(bad).name == "acos"


def test_modules_that_end_by_an_exception_leave_the_stack() -> None:
    """After a caught exception inside a module, what follows is outside it again."""

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise LookupError

    model = nn.ModuleDict({"raises": Raises()})
    tracer = OriginTracer({"model": model}, [], None)
    with tracer:
        with pytest.raises(LookupError):
            model["raises"](torch.ones(1))
        torch.zeros(1).log()
    assert only(tracer).module == "loss function"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("_log_softmax", "log_softmax"),
        ("LogSoftmaxBackward0", "log_softmax"),
        ("add_", "add"),
        ("_to_copy", "to"),
        ("ToCopyBackward0", "to"),
        ("NativeLayerNormBackward0", "layer_norm"),
        ("LinalgVectorNormBackward0", "norm"),
        ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("torch::autograd::CopySlices", "copy_slices"),
    ],
)
def test_operations_and_nodes_have_the_names_that_users_know(name: str, shown: str) -> None:
    """An operation and the node of its derivative get the same readable name."""
    assert readable(name) == shown
