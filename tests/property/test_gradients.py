"""Gradients: for any shapes, groups and values, norms and clipping are torch's, except where
torch overflows.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.numerics.gradients import Group, clip, inspect

_SETTINGS = settings(deadline=None, max_examples=60)
_LOSS = torch.tensor(0.5)


def _parameter(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient.clone()
    return parameter


@st.composite
def _gradients(draw: st.DrawFn, exponents: st.SearchStrategy[int]) -> list[list[torch.Tensor]]:
    """Return groups of finite gradients whose sizes differ by orders of magnitude."""
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    groups = draw(
        st.lists(
            st.lists(st.lists(st.integers(0, 5), max_size=2), max_size=3), min_size=1, max_size=4
        )
    )
    if not any(groups):
        groups[0] = [[3]]
    return [
        [
            torch.randn(shape, generator=chance, dtype=dtype) * 10.0 ** draw(exponents)
            for shape in shapes
        ]
        for shapes in groups
    ]


def _groups(gradients: list[list[torch.Tensor]]) -> list[Group]:
    return [
        Group(
            f"group{number}",
            f"optimizer{number // 2}",
            [_parameter(gradient) for gradient in group],
        )
        for number, group in enumerate(gradients)
    ]


def _all_parameters(groups: list[Group]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group.parameters]


_ORDINARY = _gradients(st.integers(-12, 12))
_HUGE = _gradients(st.integers(25, 37))


@_SETTINGS
@given(_ORDINARY)
def test_the_total_is_that_of_torch_and_groups_add_up(gradients: list[list[torch.Tensor]]) -> None:
    """The total equals torch's to the bit, and the squares of the groups' norms add up to its
    square.
    """
    groups = _groups(gradients)
    facts, each = inspect(groups, _LOSS)
    parameters = _all_parameters(groups)
    assert facts.total == float(
        nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    )
    assert math.hypot(*facts.norms.values()) == pytest.approx(facts.total, rel=1e-5)
    assert len(each) == len(parameters)
    assert list(facts.norms) == [group.name for group in groups]
    assert (facts.overflowed, facts.nonfinite) == (False, False)


_SCOPES = {
    "global": lambda _: "",
    "optimizer": lambda group: group.optimizer,
    "group": lambda group: group.name,
}


@_SETTINGS
@given(_ORDINARY, st.floats(1e-6, 1e6), st.sampled_from(sorted(_SCOPES)))
def test_clipping_is_that_of_torch_to_the_bit(
    gradients: list[list[torch.Tensor]], max_norm: float, clip_by: str
) -> None:
    """For finite norms each clipped gradient has the bits that ``clip_grad_norm_`` of its scope
    gives it.
    """
    ours, theirs = _groups(gradients), _groups(gradients)
    clip(ours, inspect(ours, _LOSS)[1], max_norm, clip_by)  # type: ignore[arg-type]
    for _, scope in itertools.groupby(theirs, key=_SCOPES[clip_by]):
        nn.utils.clip_grad_norm_(_all_parameters(list(scope)), max_norm)
    for mine, other in zip(_all_parameters(ours), _all_parameters(theirs), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


@_SETTINGS
@given(_ORDINARY | _HUGE, st.floats(1e-3, 1e3), st.sampled_from(sorted(_SCOPES)))
def test_no_norm_is_above_the_limit_afterwards(
    gradients: list[list[torch.Tensor]], max_norm: float, clip_by: str
) -> None:
    """After clipping, the norm of each scope is at most the limit, and exactly it where it was
    above.
    """
    groups = _groups(gradients)
    before, each = inspect(groups, _LOSS)
    clip(groups, each, max_norm, clip_by)  # type: ignore[arg-type]
    after, _ = inspect(groups, _LOSS)
    scope = _SCOPES[clip_by]
    for name in {scope(group) for group in groups}:
        members = [group.name for group in groups if scope(group) == name]
        was = math.hypot(*(before.norms[member] for member in members))
        now = math.hypot(*(after.norms[member] for member in members))
        # Torch divides by norm + 1e-6
        assert now == pytest.approx(min(was, max_norm), rel=1e-4, abs=2e-6)


@_SETTINGS
@given(_HUGE, st.floats(1e-3, 1e3))
def test_huge_gradients_keep_their_direction(
    gradients: list[list[torch.Tensor]], max_norm: float
) -> None:
    """Finite gradients of 1e25 and more are scaled by one factor and not multiplied by 0."""
    groups = _groups(gradients)
    facts, each = inspect(groups, _LOSS)
    clip(groups, each, max_norm, "global")
    exact = math.hypot(*(float(g.double().norm()) for group in gradients for g in group))
    assert facts.total == pytest.approx(exact, rel=1e-5)
    assert not facts.nonfinite
    factor = min(1.0, max_norm / exact) if exact else 1.0
    for parameter, gradient in zip(
        _all_parameters(groups), itertools.chain.from_iterable(gradients), strict=True
    ):
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad.double(), gradient.double() * factor, rtol=1e-4, atol=max_norm * 1e-6
        )


@_SETTINGS
@given(_ORDINARY | _HUGE, st.data())
def test_one_bad_value_is_always_found(
    gradients: list[list[torch.Tensor]], data: st.DataObject
) -> None:
    """Wherever a NaN or an Inf lies, and however large the others are, the step is non-finite."""
    places = [gradient for group in gradients for gradient in group if gradient.numel()]
    if not places:
        return
    victim = data.draw(st.sampled_from(places)).view(-1)
    victim[data.draw(st.integers(0, victim.numel() - 1))] = data.draw(
        st.sampled_from([math.nan, math.inf, -math.inf])
    )
    facts, _ = inspect(_groups(gradients), _LOSS)
    assert (facts.nonfinite, facts.overflowed) == (True, False)
