"""What a forecast makes of a factory and what it returns: names, lines, losses, blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import PolicyError
from holdfast.memory.forecast import building
from holdfast.memory.forecast.jobs import find_blocks
from holdfast.memory.forecast.tracing import TraceRequest, trace_job
from holdfast.memory.forecast.user_functions import find_loss
from holdfast.run.loss import Loss

FACTORIES = Path(__file__).with_name("forecast_factories.py")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("broken", None)


def called(factory: Any, **options: Any) -> building.Built:
    given = {"size": 2, "length": None, "loading": contextlib.nullcontext, **options}
    return building.call_factory("jobs.py:build", factory, **given)


def parts(**other: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "batch": torch.zeros(4, 2), **other}


def test_a_dict_with_a_loss_function_and_a_batch_is_read() -> None:
    """Keys that a forecast does not need are passed over."""
    built = called(lambda: parts(loss_fn=len, scheduler=object()))
    assert (list(built.models), list(built.optimizers), built.function, built.is_step) == (
        ["model"], ["optimizer"], len, None,
    )  # fmt: skip
    assert built.has_batch


def test_a_factory_is_told_what_it_has_parameters_for() -> None:
    """A factory with parameters for size and length gets both, one without gets neither."""
    seen: dict[str, Any] = {}

    def build(micro_batch_size: int, length: int = 7) -> dict[str, Any]:
        seen.update(size=micro_batch_size, length=length)
        return parts(loss_fn=len)

    assert called(build, size=6, length=50).batch_size == 6
    assert seen == {"size": 6, "length": 50}
    assert building.takes_length(build)
    assert not building.takes_length(lambda: None)


def test_tuples_are_read_by_their_length() -> None:
    """Three things end with a step of its own, four with a sample batch for a function of unknown kind."""
    given = parts()
    model, optimizer, batch = given["model"], given["optimizer"], given["batch"]
    assert called(lambda: (model, optimizer, len)).is_step is True
    assert not called(lambda: (model, optimizer, len)).has_batch
    built = called(lambda: (model, optimizer, len, batch))
    assert (built.is_step, built.batch is batch) == (None, True)


def test_a_loader_gives_its_first_batch_without_workers() -> None:
    """The batch is loaded in this process, whatever number of workers the loader has."""
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=5, num_workers=2, timeout=9)
    given = parts(loss_fn=len, loader=loader)
    del given["batch"]
    built = called(lambda: given)
    assert built.batch[0].shape == (5, 2)
    assert built.batch_size == 5


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType"),
        (nn.Linear(1, 1), "returned a Linear"),
        ((1, 2), "returned a tuple of 2"),
        ({"model": nn.Linear(1, 1)}, "without 'optimizer'|without optimizer and batch"),
        ((nn.Linear(1, 1), nn.Linear(1, 1), len), "a Linear as optimizer"),
        ((nn.Linear(1, 1), None, len), "a NoneType as optimizer"),
        (("net", None, len), "a str as model"),
        ((nn.Linear(1, 1), None, 3), "a int where"),
    ],
)
def test_what_a_factory_may_not_return_is_said(returned: Any, said: str) -> None:
    """Each wrong return is named, with the line of the factory and what to return instead."""
    with pytest.raises(PolicyError, match=said) as caught:
        called(lambda: returned)
    assert caught.value.rule == "H412"
    assert "test_forecast_jobs.py:" in caught.value.what


@pytest.mark.parametrize(
    ("text", "rule", "said"),
    [
        ("import torch\ndef build(:\n", "H411", "SyntaxError"),
        ("import nothing_of_that_name\n", "H411", "nothing_of_that_name.*at broken.py:1 in <module>"),
        ("import flash_attn_9\n", "H410", "needs CUDA while it was imported.*at broken.py:1"),
        ("raise SystemExit(2)\n", "H411", "SystemExit: 2"),
        ("build = 3\n", "H411", "it is a int"),
        ("x = 3\n", "H411", "no attribute 'build'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, text: str, rule: str, said: str
) -> None:
    """Syntax errors, missing packages, CUDA packages, exits and missing names each give their own message."""
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(PolicyError, match=said) as caught:
        building.load_factory(f"{path}:build")
    assert caught.value.rule == rule


@pytest.mark.parametrize("name", ["build", "missing.py:build", "no_such_module_here:build", ":build", "x:"])
def test_a_name_that_leads_nowhere_is_refused(name: str) -> None:
    """A factory needs a module or a file, a colon and a function."""
    with pytest.raises(PolicyError) as caught:
        building.load_factory(name)
    assert caught.value.rule == "H411"


def test_the_line_of_an_error_is_the_users_own() -> None:
    """An error deep in torch is told by the innermost line outside torch and holdfast."""
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(3, 2)(torch.zeros(4, 5))
    assert building.line_of(caught.value).endswith("in test_the_line_of_an_error_is_the_users_own")


def test_a_loss_is_found_in_whatever_guard_takes() -> None:
    """A tensor, a Loss, a pair, several Loss and a model's output all hold one loss."""
    loss = torch.tensor(2.0)
    assert find_loss(loss) is loss
    assert find_loss(Loss(loss, 3)) is loss
    assert find_loss((loss, 3)) is loss
    assert find_loss({"loss": loss, "logits": torch.zeros(3)}) is loss
    assert find_loss(SimpleNamespace(loss=loss)) is loss
    for several in ((Loss(loss, 3), Loss(loss, 4)), {"a": Loss(loss, 3), "b": Loss(loss, 4)}):
        found = find_loss(several)
        assert found is not None
        assert found.item() == 4.0
    assert find_loss(None) is None
    assert find_loss([]) is None


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


def test_an_unknown_module_to_recompute_gives_the_nearest_name() -> None:
    """A name that no module has is refused in the child, with a proposal."""
    with pytest.raises(PolicyError, match=r"did you mean 'encoder\.layers\.1'"):
        trace_job(TraceRequest(factory=f"{FACTORIES}:transformer", recompute=("encoder.layer.1",)))
