"""Gradients: norms without overflow, one finite check, and clipping that is torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.numerics.gradients import Group, clip, inspect, nonfinite_gradients

_LOSS = torch.tensor(1.5)


def _parameter(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def _group(*gradients: torch.Tensor, name: str = "0", optimizer: str = "optimizer") -> Group:
    return Group(name, optimizer, [_parameter(gradient) for gradient in gradients])


def _gradients(groups: list[Group]) -> list[torch.Tensor]:
    return [
        parameter.grad
        for group in groups
        for parameter in group.parameters
        if parameter.grad is not None
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_found_with_good_gradients(loss: float) -> None:
    """The loss is part of the check, and it is reported as it is."""
    facts, _ = inspect([_group(torch.ones(3))], torch.tensor(loss))
    assert facts.nonfinite
    assert math.isfinite(facts.total)
    assert facts.loss == loss or math.isnan(loss)


def test_a_group_without_gradients_is_zero() -> None:
    """A frozen group beside others has norm 0 and is passed over by clipping."""
    groups = [_group(torch.tensor([3.0, 4.0])), Group("frozen", "optimizer", [])]
    facts, each = inspect(groups, _LOSS)
    assert facts.norms == {"0": 5.0, "frozen": 0.0}
    clip(groups, each, 1.0, "group")
    torch.testing.assert_close(_gradients(groups)[0], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_sparse_gradients_count_each_index_once() -> None:
    """Repeated indices of an embedding's gradient are added before the norm is taken."""
    # As an argument, torch 2.11 warns that they are unchecked
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (3,))
    group = Group("0", "optimizer", [nn.Parameter(torch.zeros(3))])
    group.parameters[0].grad = sparse
    facts, each = inspect([group], _LOSS)
    assert facts.total == 5.0
    clip([group], each, 1.0, "global")
    torch.testing.assert_close(
        _gradients([group])[0].to_dense(), torch.tensor([0.6, 0, 0.8]), rtol=1e-5, atol=0
    )


def test_the_culprits_are_named() -> None:
    """The parameters with bad gradients are listed in order, up to a limit, and all are counted."""
    good, bad, without = (
        _parameter(torch.ones(2)),
        _parameter(torch.tensor([1.0, math.nan])),
        nn.Parameter(_LOSS),
    )
    named = [("good", good), ("without", without), *((f"bad{number}", bad) for number in range(4))]
    assert nonfinite_gradients(named, most=3) == (["bad0", "bad1", "bad2"], 4)
    assert nonfinite_gradients([("good", good)]) == ([], 0)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([torch.tensor([3e200, 4e200], dtype=torch.float64)], 5e200),
        ([torch.tensor([3 + 4j])], 5.0),
        (
            [torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.bfloat16)],
            5.0,
        ),
        ([torch.tensor([3 + 0j]), torch.tensor([4.0], dtype=torch.float16)], 5.0),
    ],
)
def test_gradients_of_any_type_are_measured(gradients: list[torch.Tensor], norm: float) -> None:
    """Complex, mixed and very large fp64 gradients have the norm that they have."""
    facts, _ = inspect([_group(*gradients)], _LOSS)
    assert facts.total == pytest.approx(norm)
    assert not facts.nonfinite
    gradients[0].view(-1)[0] = torch.nan
    assert inspect([_group(*gradients)], _LOSS)[0].nonfinite


_HALF = torch.float16
_OVERFLOWS = {
    "fp32, one element of 2e19": ([torch.tensor([2e19, 0.0])], 2e19),
    "fp32, 1e20 beside ones": ([torch.tensor([1e20]), torch.ones(100)], 1e20),
    "fp16, 200 elements of 5000": ([torch.full((200,), 5000.0, dtype=_HALF)], 5000 * 200**0.5),
    "fp16, four tensors of norm 4e4": ([torch.full((4,), 2e4, dtype=_HALF)] * 4, 8e4),
    "bf16, 1e20 beside ones": (
        [torch.tensor([1e20], dtype=torch.bfloat16), torch.ones(100, dtype=torch.bfloat16)],
        1e20,
    ),
}


@pytest.mark.parametrize(("gradients", "norm"), _OVERFLOWS.values(), ids=list(_OVERFLOWS))
def test_finite_gradients_that_torch_turns_into_zeros_have_the_norm_asked_for(
    gradients: list[torch.Tensor], norm: float
) -> None:
    """In each known case of an overflow torch clips everything to 0, and here the norm is 1
    within 1 %.
    """
    ordinary = [_parameter(gradient.clone()) for gradient in gradients]
    nn.utils.clip_grad_norm_(ordinary, 1.0)
    assert not any(parameter.grad.any() for parameter in ordinary if parameter.grad is not None)
    groups = [_group(*(gradient.clone() for gradient in gradients))]
    facts, each = inspect(groups, _LOSS)
    assert facts.total == pytest.approx(norm, rel=0.01)
    assert not facts.nonfinite
    clip(groups, each, 1.0, "global")
    clipped = math.hypot(*(float(gradient.double().norm()) for gradient in _gradients(groups)))
    assert clipped == pytest.approx(1.0, rel=0.01)


def test_items_are_read_together_with_the_norms():
    """Items on a device come back with the facts, also where the norm overflows."""
    for value in (1.0, 1e30):
        facts, _ = inspect([_group(torch.full((3,), value))], _LOSS, torch.tensor(7))
        assert facts.items == 7.0
        assert facts.loss == float(_LOSS)
        assert not facts.nonfinite
