"""What the recipes gpt, lora and diffusion give to `holdfast plan`.

Sizes that they name, and a step that trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.forecast.job.building import load_factory

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "sizes", "parameters", "learnt"),
    [
        pytest.param(
            "lora", {"micro_batch_size": 2, "context": 8}, 1.2367e9, 851968, marks=pytest.mark.slow
        ),
        ("gpt", {"micro_batch_size": 2, "context": 8}, 123.7e6, 123.7e6),
        ("diffusion", {"micro_batch_size": 2}, 9.1e6, 9.1e6),
    ],
)
def test_a_forecast_is_about_the_sizes_that_it_names(
    name: str,
    sizes: dict[str, int],
    parameters: float,
    learnt: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model of its defaults is built without memory, and a step reaches all that shall learn
    and nothing else.
    """
    monkeypatch.syspath_prepend(RECIPES.parent)
    with torch.device("meta"):
        found: dict[str, Any] = load_factory(f"{RECIPES / name / 'forecast.py'}:build")(**sizes)
        if name != "lora":  # transformers looks at what is in a mask
            found["loss_fn"](found["batch"]).backward()
    weights = list(found["model"].parameters())
    trained = [each for group in found["optimizer"].param_groups for each in group["params"]]
    assert sum(each.numel() for each in weights) == pytest.approx(parameters, rel=0.02)
    assert sum(each.numel() for each in trained) == pytest.approx(learnt, rel=0.02)
    assert all(each.requires_grad == any(each is one for one in trained) for each in weights)
    assert name == "lora" or all(each.grad is not None for each in trained)
