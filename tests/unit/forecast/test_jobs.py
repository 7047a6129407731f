"""What a forecast makes of a factory and what it returns: names, lines, losses, blocks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from holdfast.core.errors import PolicyError
from holdfast.forecast.job import building
from holdfast.forecast.job.training_job import find_blocks

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("broken", None)


def called(factory: Any, **options: Any) -> building.BuiltJob:
    return building.call_factory("jobs.py:build", factory, **{"size": 2, **options})


def parts(**other: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "batch": torch.zeros(4, 2),
        **other,
    }


def test_a_dict_with_a_loss_function_and_a_batch_is_read() -> None:
    """Keys that a forecast does not need are passed over."""
    built = called(lambda: parts(loss_fn=len, scheduler=object()))
    assert (list(built.models), list(built.optimizers), built.function, built.is_step) == (
        ["model"],
        ["optimizer"],
        len,
        False,
    )
    assert built.has_batch


def test_a_factory_is_told_what_it_has_parameters_for() -> None:
    """A factory with a parameter for the size gets it, whatever it returns is of that size."""
    assert called(lambda batch_size: parts(loss_fn=len, batch_size=9), size=6).batch_size == 6


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType"),
        (nn.Linear(1, 1), "returned a Linear"),
        ((1, 2), "returned a tuple"),
        ({"model": nn.Linear(1, 1)}, "without optimizer and batch"),
        (parts(optimizer=nn.Linear(1, 1), loss_fn=len), "a Linear as optimizer"),
        (parts(model="net", loss_fn=len), "a str as model"),
        (parts(loss_fn=3), "a int as loss_fn"),
        (
            parts(model=[nn.Linear(1, 1)], loss_fn=len),
            "a list as model.*{'a': model_a",
        ),
    ],
)
def test_what_a_factory_may_not_return_is_said(returned: Any, said: str) -> None:
    """Each wrong return is named, with the line of the factory and what to return instead."""
    with pytest.raises(PolicyError, match=said) as caught:
        called(lambda: returned)
    assert caught.value.rule == "H412"
    assert "test_jobs.py:" in caught.value.what


def test_a_scripted_model_is_refused() -> None:
    """What TorchScript runs is seen by no trace.

    A forecast of it would have parameters and nothing else.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.* is deprecated")
        scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(PolicyError, match=r"torch\.jit") as caught:
        called(lambda: parts(model=scripted, loss_fn=len))
    assert caught.value.rule == "H412"


@pytest.mark.parametrize(("text", "rule", "said"), REFUSED["modules"])
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, text: str, rule: str, said: str
) -> None:
    """Syntax errors, missing packages, CUDA packages, exits and missing names each give their
    own message.
    """
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(PolicyError, match=said) as caught:
        building.load_factory(f"{path}:build")
    assert caught.value.rule == rule
    for name in ("build", "missing.py:build", "no_such_module_here:build", ":build", "x:"):
        with pytest.raises(PolicyError, match="H411"):
            building.load_factory(name)


def test_blocks_are_repeated_modules_or_else_the_children() -> None:
    """Names begin with the key of the model where there are several, as Guard names them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    repeated = nn.Sequential(nn.Linear(2, 2), Block(), Block())
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [name for name, _ in find_blocks({"": repeated})] == ["1", "2"]
    assert [name for name, _ in find_blocks({"net": plain})] == ["net.0", "net.2"]
