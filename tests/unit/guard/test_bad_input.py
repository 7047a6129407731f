"""Every mistake that a caller can make is an error that says what, the limit and the fix, and
damages nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import kinds_of, square_of
from torch import nn

import holdfast


def make(
    *more: nn.Module,
    width: int = 3,
    dtype: Any = torch.float32,
    kind: Any = torch.optim.Adam,
    average: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), *more).to(dtype)
    state = {"state": {"ema": torch.optim.swa_utils.AveragedModel(model)}} if average else {}
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1), **state}


def assert_says(error: BaseException, rule: str, *words: str) -> None:
    assert isinstance(error, holdfast.HoldfastError)
    text = str(error)
    assert re.fullmatch(r"(?s).+; .+\.\nFix: .+\n\[H\d{3}\] run `holdfast explain H\d{3}`", text), (
        text
    )
    assert error.rule == rule, text
    for word in words:
        assert word in text, text


@contextlib.contextmanager
def refused(rule: str, *words: str) -> Iterator[None]:
    """Expect an error that says this."""
    with pytest.raises(holdfast.HoldfastError) as caught:
        yield
    assert_says(caught.value, rule, *words)


BAD_LOSSES = {
    "vector": (lambda model, x: model(x).squeeze(1), "H201", ["shape (8,)", ".mean()"]),
    "number": (lambda model, x: 3.0, "H201", ["a float"]),
    "detached": (
        lambda model, x: model(x).mean().detach(),
        "H202",
        ["without a graph", "requires_grad"],
    ),
    "no parameter": (
        lambda model, x: x.clone().requires_grad_().mean(),
        "H202",
        ["received a gradient"],
    ),
    "zero items": (lambda model, x: (model(x).mean(), 0), "H203", ["items=0"]),
    "nan items": (lambda model, x: (model(x).mean(), float("nan")), "H203", ["items=nan"]),
    "items are text": (lambda model, x: (model(x).mean(), "many"), "H203", ["many"]),
    "two losses": (
        lambda model, x: (model(x).mean(), model(x).std()),
        "H203",
        ["loss_a + loss_b", "whole number"],
    ),
    "two losses, one detached": (
        lambda model, x: (model(x).mean(), model(x).square().mean().detach()),
        "H203",
        ["loss_a + loss_b"],
    ),
    "loss and logits": (
        lambda model, x: (model(x).mean(), model(x)),
        "H203",
        ["tensor of shape (8, 1)", "only the loss"],
    ),
    "loss and array": (lambda model, x: (model(x).mean(), np.ones((8, 99))), "H203", ["a ndarray"]),
    "half an item": (lambda model, x: (model(x).mean(), 7.5), "H203", ["items=7.5"]),
    "items with a graph": (
        lambda model, x: holdfast.Loss(model(x).mean(), model(x).sum()),
        "H203",
        ["with a graph"],
    ),
    "items are a flag": (
        lambda model, x: (model(x).mean(), torch.tensor(True)),
        "H203",
        ["torch.bool"],
    ),
    "output of a model": (
        lambda model, x: SimpleNamespace(loss=model(x).mean()),
        "H201",
        ["a SimpleNamespace", "return the loss"],
    ),
    "numpy scalar": (lambda model, x: np.float32(model(x).mean().item()), "H201", ["a float32"]),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_a_bad_loss_is_named_and_leaves_no_trace(tmp_path, case, request):
    """Whatever a loss function returns by mistake, no weight or statistic moves, and training
    goes on.
    """
    # One for each way in which a trial ends
    if case not in ("vector", "no parameter", "nan items", "two losses"):
        request.getfixturevalue("unchecked_splits")
    loss, rule, words = BAD_LOSSES[case]
    parts = make()
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, **parts)
    before = {name: value.clone() for name, value in parts["model"].state_dict().items()}
    random_before = torch.get_rng_state()
    x = torch.ones(8, 3)
    with pytest.raises(holdfast.HoldfastError) as caught:
        guard.step(x, lambda part: loss(parts["model"], part))
    assert_says(caught.value, rule, *words)
    assert len(str(caught.value)) < 900  # no tensor is printed
    assert "tensor(" not in str(caught.value)
    assert all(
        torch.equal(value, before[name]) for name, value in parts["model"].state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), random_before)
    assert guard.step(torch.randn(8, 3), square_of(parts["model"])).attempts == 1
    assert guard.global_step == 1


def test_a_step_of_no_optimizer_is_named(tmp_path):
    """A list of optimizers may come out empty, and groups may have been cleared."""
    parts = make()
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, **parts)
    with refused("H202", "no parameter", "received a gradient"):
        guard.step(torch.ones(8, 3), square_of(parts["model"]), optimizer=[])


def never(part: Any) -> Any:
    pytest.fail("the loss function was called")


BAD_CALLS: dict[str, tuple[Any, Any, str, list[str]]] = {
    "leaves disagree": (
        {"x": torch.ones(8, 3), "y": torch.ones(7)},
        never,
        "H204",
        ["batch['x'] (8, 3)", "batch['y'] (7,)"],
    ),
    "no samples": (torch.ones(0, 3), never, "H205", ["0 samples"]),
    "a loss for its function": (
        torch.ones(8, 3),
        torch.zeros((), requires_grad=True),
        "H201",
        ["loss_fn is a Tensor", "lambda batch"],
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_batch_or_function_is_named_at_the_first_step(tmp_path, case):
    """What cannot be meant is an error before the loss function is called."""
    batch, loss_fn, rule, words = BAD_CALLS[case]
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, micro_batch_size=4, **make())
    with refused(rule, *words):
        guard.step(batch, loss_fn)
    assert "split_refused" not in kinds_of(guard)


def test_a_step_of_an_unknown_optimizer_names_the_nearest(tmp_path):
    """A misspelt optimizer name is an error that offers the right one."""
    models = {"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 2)}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
    guard = holdfast.Guard(tmp_path, model=models, optimizer=optimizers)
    with refused("H104", "did you mean 'generator'?"):
        guard.step(torch.ones(2, 2), square_of(models["generator"]), optimizer="generatr")


def constructor_mistakes() -> dict[str, tuple[dict[str, Any], str, list[str]]]:
    parts, stranger = make(), make()
    lbfgs = torch.optim.LBFGS(parts["model"].parameters())
    return {
        "no module": ({**parts, "model": lambda x: x}, "H105", ["model 'model' is a function"]),
        "no optimizer": ({**parts, "optimizer": 0.1}, "H105", ["a float"]),
        "no models": ({**parts, "model": {}}, "H105", ["at least one"]),
        "stateless state": (
            {**parts, "state": {"ema": 3}},
            "H105",
            ["state 'ema' is a int", "state_dict"],
        ),
        "scheduler": ({**parts, "scheduler": 3}, "H105", ["state_dict"]),
        "strangers": ({**parts, "optimizer": stranger["optimizer"]}, "H106", ["(4, 3)"]),
        "closure": ({**parts, "optimizer": lbfgs}, "H107", ["LBFGS"]),
        "unknown field": (
            {**parts, "max_gradient_norm": 1.0},
            "H101",
            ["did you mean 'max_grad_norm'?"],
        ),
        "negative norm": ({**parts, "max_grad_norm": -1.0}, "H102", ["max_grad_norm=-1.0"]),
        "policy file": ({**parts, "policy": "nowhere.yaml"}, "H103", ["nowhere.yaml"]),
    }


@pytest.mark.parametrize("case", constructor_mistakes())
def test_a_wrong_argument_is_named_before_a_run_directory_is_made(tmp_path, case):
    """The constructor checks what it was given before it touches the disk."""
    arguments, rule, words = constructor_mistakes()[case]
    with refused(rule, *words):
        holdfast.Guard(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loader", "limits", "rule"),
    [(None, {"max_epochs": 1}, "H105"), ([torch.ones(2, 3)], {}, "H105")],
)
def test_batches_needs_a_loader_and_a_limit(tmp_path, loader, limits, rule):
    """A loop that could not begin or not end is an error where it is asked for."""
    guard = holdfast.Guard(tmp_path, loader=loader, **make())
    with refused(rule):
        guard.batches(**limits)


@pytest.mark.parametrize(
    "loader", [[], iter([]), torch.utils.data.DataLoader([0], batch_size=4, drop_last=True)]
)
def test_an_empty_loader_is_an_error_and_not_an_endless_loop(tmp_path, loader):
    """A loader without a batch ends with an error, and the directory is free again."""
    guard = holdfast.Guard(tmp_path, loader=loader, **make())
    with refused("H601", "drop_last"):
        list(guard.batches(max_steps=3))
    holdfast.Guard(tmp_path, **make()).close()


def test_a_loop_without_a_step_is_an_error_and_not_an_endless_loop(tmp_path):
    """`max_steps` with a body that never steps ends after one epoch."""
    guard = holdfast.Guard(tmp_path, loader=[torch.ones(2, 3)] * 3, **make())
    with refused("H602"):
        list(guard.batches(max_steps=3))


def trained(run_dir: Path, **how: Any) -> None:
    parts = make()
    with holdfast.Guard(run_dir, loader=[torch.randn(4, 3)] * 3, **how, **parts) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, square_of(parts["model"]))


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted((directory / "checkpoints").rglob("*"))
        if path.is_file()
    }


@pytest.mark.usefixtures("unchecked_splits")
@pytest.mark.parametrize(
    ("other", "rule", "words"),
    [
        ({"width": 5}, "H304", ["'0.weight'", "(4, 3)", "(4, 5)"]),
        (nn.Linear(1, 1), "H304", ["'3.weight'", "only in the model"]),
        ({"dtype": torch.bfloat16}, "H304", ["'0.weight'", "torch.float32", "torch.bfloat16"]),
        ({"kind": torch.optim.SGD}, "H313", ["was a Adam"]),
        ({"average": True}, "H313", ["no state 'ema'"]),
    ],
)
def test_the_run_directory_of_something_else_is_refused_and_not_damaged(
    tmp_path, other, rule, words
):
    """Another model, type, optimizer or state is named, nothing is loaded, and the right one
    still resumes.
    """
    trained(tmp_path)
    before = content_of(tmp_path)
    parts = make(**other) if isinstance(other, dict) else make(other)
    weights = [p.clone() for p in parts["model"].parameters()]
    with refused(rule, *words):
        holdfast.Guard(tmp_path, **parts)
    assert all(torch.equal(a, b) for a, b in zip(weights, parts["model"].parameters(), strict=True))
    assert content_of(tmp_path) == before
    guard = holdfast.Guard(tmp_path, loader=[torch.randn(4, 3)] * 3, **make())
    assert guard.global_step == 3
    guard.close()


@pytest.mark.usefixtures("unchecked_splits")
@pytest.mark.parametrize("place", ["directory", "checkpoint"])
def test_a_newer_format_is_refused_and_not_damaged(tmp_path, place):
    """A directory or checkpoint of a later holdfast is left alone, and the error says to
    upgrade.
    """
    trained(tmp_path)
    if place == "directory":
        (tmp_path / "run.json").write_text(json.dumps({"format": 2}))
    else:
        import hashlib

        manifest = max((tmp_path / "checkpoints").iterdir()) / "manifest.json"
        body = json.dumps(
            {**json.loads(manifest.read_bytes().split(b"\n")[0]), "format": 2}
        ).encode()
        manifest.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
    before = content_of(tmp_path), (tmp_path / "run.json").read_bytes()
    with refused("H303", "upgrade"):
        holdfast.Guard(tmp_path, **make())
    assert (content_of(tmp_path), (tmp_path / "run.json").read_bytes()) == before


def test_a_read_only_place_is_refused(tmp_path):
    """A directory that cannot be written is an error before any work is done."""
    # Root writes everywhere but there
    place = Path("/proc/self/run") if os.geteuid() == 0 else tmp_path
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
    with refused("H302", "cannot be written"):
        holdfast.Guard(place / "run", **make())


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "deep": [{"bad": object()}]}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("what", ["pickle", "infinite"])
def test_what_can_never_be_saved_is_refused_before_the_first_step(tmp_path, what):
    """State that would need pickle, and weights that are not finite, are named before a batch is
    trained.
    """
    parts = make()
    if what == "infinite":
        parts["model"][2].weight.data[0, 1] = torch.inf
    state = {"odd": Odd()} if what == "pickle" else {}
    guard = holdfast.Guard(
        tmp_path, loader=[torch.randn(4, 3)], **parts, **({"state": state} if state else {})
    )
    said = (
        ("H502", "2.weight")
        if what == "infinite"
        else ("H310", "state.odd['deep']['0']['bad'] is a builtins.object")
    )
    with refused(*said):
        next(guard.batches(max_epochs=1))


@pytest.mark.usefixtures("unchecked_splits")
def test_a_loader_with_another_order_is_refused(tmp_path):
    """A changed seed or length would point the position at other samples: an error says which."""
    data = list(torch.randn(12, 3).unbind())
    parts = make()
    guard = holdfast.Guard(
        tmp_path, loader=holdfast.DataLoader(data, batch_size=4, seed=1), **parts
    )
    for batch in guard.batches(max_steps=2):
        guard.step(batch, square_of(parts["model"]))
    with refused("H604", "seed=2", "seed=1"):
        holdfast.Guard(tmp_path, loader=holdfast.DataLoader(data, batch_size=4, seed=2), **make())


def test_several_ranks_are_refused_for_now(tmp_path):
    """A process group of two ranks is an error, since ranks that skip by themselves would
    diverge (faked here).
    """
    import torch.distributed as distributed

    if not distributed.is_available() or not hasattr(distributed.Backend, "FAKE"):
        pytest.skip("this torch has no fake process group")
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    try:
        with refused("H108", "world_size=2"):
            holdfast.Guard(tmp_path, **make())
    finally:
        distributed.destroy_process_group()
