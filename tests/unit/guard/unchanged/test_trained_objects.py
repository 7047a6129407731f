"""The models and optimizers of a script are found through its variables."""

from __future__ import annotations

import sys

import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.guard.unchanged.trained_objects import find_trained_objects


class TwoSteps(torch.optim.Optimizer):
    """An optimizer like SAM: the script calls methods of its own, which step the inner one."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)


def test_optimizer_inside_another_one_is_refused_with_the_name_of_the_outer_one() -> None:
    """The user can tell which variable cannot be saved, although it holds the stepped optimizer."""
    model = torch.nn.Linear(1, 1)
    around = TwoSteps(list(model.parameters()))

    with pytest.raises(HoldfastError) as raised:
        find_trained_objects([sys._getframe()], around.inner)

    assert raised.value.rule == "H738"
    assert "'around'" in str(raised.value)
