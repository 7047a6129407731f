"""Advice about the learning rate.

Which rule for which optimizer, and that the rules keep training as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.learning.learning_rate import advise_learning_rate


def _parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_adam_follows_by_the_square_root_with_its_betas_and_eps() -> None:
    """The rate changes by sqrt(k), 1 - beta by k and eps by 1/sqrt(k), for each group by its own
    values.
    """
    parameters = [
        {"params": _parameter()},
        {"params": _parameter(), "betas": (0.8, 0.99), "eps": 1e-6},
    ]
    advice = advise_learning_rate(torch.optim.AdamW(parameters), 64, 256, by="batch")
    assert (advice.rule, advice.factor) == ("square root", 2.0)
    assert advice.betas == (pytest.approx((0.6, 0.996)), pytest.approx((0.2, 0.96)))
    assert advice.eps == pytest.approx((0.5e-8, 0.5e-6))
    assert "2205.10287" in advice.source


def test_decay_rates_that_the_rule_cannot_reach_are_left_alone() -> None:
    """Where k x (1 - beta) is 1 or more there is no such decay rate, and the advice says so."""
    advice = advise_learning_rate(torch.optim.Adam(_parameter()), 32, 512, by="batch")
    assert (advice.factor, advice.betas) == (4.0, ())
    assert "betas" in advice.reason


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (torch.optim.SGD, "linear"),
        (torch.optim.Adam, "square root"),
        (torch.optim.NAdam, "square root"),
        (torch.optim.RAdam, "square root"),
        (torch.optim.Adamax, "square root"),
        (torch.optim.RMSprop, "square root"),
        (torch.optim.Rprop, "none"),
        (torch.optim.Adagrad, "none"),
    ],
)
def test_the_rule_goes_by_the_kind_of_the_optimizer(
    make: Callable[..., Optimizer], rule: str
) -> None:
    """Plain steps are linear, normalised ones follow the root, and for others nothing is made
    up.
    """
    advice = advise_learning_rate(make(_parameter(), lr=0.01), 8, 16, by="batch")
    assert advice.rule == rule
    assert (advice.factor == 1.0) is (rule == "none") is (advice.source == "")
    assert advice.reason


@pytest.mark.parametrize(
    ("arguments", "by"),
    [
        ((0, 8), "batch"),
        ((8, -1), "batch"),
        ((True, 8), "batch"),
        ((8, 2.0), "batch"),
        ((8, 8), "k"),
    ],
)
def test_what_is_no_count_is_refused(arguments: Any, by: Any) -> None:
    """Batches are whole numbers from 1, and `by` is one of three words."""
    with pytest.raises(PolicyError) as caught:
        advise_learning_rate(torch.optim.SGD(_parameter(), lr=0.1), *arguments, by=by)
    assert caught.value.rule == "H105"
