"""`Guard.validated` keeps the best checkpoints beside the newest, and stops when nothing gets
better.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_process import in_own_process
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint.store import Store
from holdfast.cli.main import make_app
from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge

VALUES = [0.5, 0.7, 0.6, 0.9, 0.8, 0.85, 0.7, 0.2]


def train(
    run: Path, *, epochs: int = len(VALUES), dies_at: int | None = None, **how: Any
) -> tuple[list[bool], Any]:
    """Validate once an epoch of two steps.

    Return what was kept, and the weights at the end of each epoch.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)],
        keep_latest_k=1,
        save_interval_steps=1000 if dies_at is None else 2,
    )
    kept, weights = [], {}
    for number, batch in enumerate(guard.batches(max_epochs=epochs), start=2 * guard.epoch):
        guard.step(batch, lambda x: model(x).square().mean())
        if number % 2:
            kept.append(guard.validated(VALUES[number // 2], name="accuracy", mode="max", **how))
            weights[guard.global_step] = model.weight.detach().clone()
            if dies_at == number // 2:
                os.kill(os.getpid(), signal.SIGKILL)
    best, reason = guard.best("accuracy"), guard.stop_reason
    guard.close()
    return kept, (weights, best, reason)


def test_the_best_checkpoints_stay(tmp_path: Path) -> None:
    """Beside the newest, by links.

    Their weights are those that were validated, and become one plain file.
    """
    kept, (weights, best, _) = train(tmp_path / "run", keep=2)
    assert kept == [True, True, True, True, True, True, False, False]
    assert (best.value, best.global_step) == (0.9, 8)
    store = Store(tmp_path / "run" / "best" / "accuracy" / "checkpoints")
    assert [entry.global_step for entry in store.entries()] == [12, 8]
    assert len(Store(tmp_path / "run" / "checkpoints").entries()) == 1
    from safetensors.torch import load_file

    def export(*step: str) -> str:
        given = [
            "checkpoints",
            str(store.directory.parent),
            "--export",
            str(tmp_path / "best.safetensors"),
            *step,
        ]
        return CliRunner().invoke(make_app(), given).output

    for step, which in ((8, ()), (12, ("--step", "12"))):
        assert re.findall(r"step(\d+) .*the best", export(*which)) == ["00000008"]
        assert torch.equal(load_file(tmp_path / "best.safetensors")["weight"], weights[step])
    assert "no checkpoint of step 7; steps there: 8, 12" in export("--step", "7")
    (store.directory.parent / "best.json").write_text("{}")
    assert "best.json cannot be read" in export()


def test_what_is_measured_after_the_loop_is_recorded(tmp_path: Path) -> None:
    """And the run has ended as it had before: it was stopped."""
    model, data = torch.nn.Linear(4, 1), [torch.ones(4, 4)] * 2
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loader=data
    )
    for batch in guard.batches(max_steps=2):
        guard.step(batch, lambda x: model(x).square().mean())
        guard.request_stop()
    ended = judge(collect(tmp_path)).cause
    guard.validated(0.5, name="accuracy", mode="max")
    guard.add_image("grid", torch.ones(2, 2))
    assert {"validated", "image_added"} < {event.kind for event in guard.events()}
    assert judge(collect(tmp_path)).cause == ended


def test_training_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    """After so many validations in a row, and the step of the best one is still there."""
    kept, (weights, best, reason) = train(tmp_path, patience=2)
    assert kept == [True, True, False, True, False, False]
    assert "accuracy" in reason
    assert "2 validations" in reason
    assert best.global_step == 8
    assert max(weights) == 12
    assert judge(collect(tmp_path)).family == "ended well"


def _dies(run: Path) -> None:
    train(run, dies_at=4, patience=3)


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    """Where nothing can be written, nothing is kept, and the training goes on."""
    (tmp_path / "best").write_text("in the way")
    kept, (weights, best, _) = train(tmp_path)
    assert (kept, best, max(weights)) == ([False] * 8, None, 16)


@pytest.mark.slow
def test_a_validation_that_is_made_again_counts_once(tmp_path: Path) -> None:
    """A process that was killed right after it goes on from a checkpoint before it."""
    with pytest.raises(AssertionError):  # it has answered nothing
        in_own_process(_dies, tmp_path)
    _, (weights, best, reason) = train(tmp_path, dies_at=99, patience=3)
    assert (best.value, best.global_step) == (0.9, 8)
    assert "in 3 validations" in reason
    assert max(weights) == 14


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../up"},
        {"name": ""},
        {"mode": "largest", "name": "a"},
        {"patience": 0},
        {"patience": "3"},
        {"keep": -1},
        {"keep": 1.5},
        {"value": "x"},
        {"value": torch.zeros(3)},
    ],
)
def test_what_no_metric_can_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """With what is possible."""
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with guard, pytest.raises(holdfast.PolicyError, match="H105"):
        guard.validated(**{"value": 1.0, **wrong})
