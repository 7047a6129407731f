"""`holdfast explain` of runs that a real `Guard` has made.

Why each ended, and what to do about it.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import FailsHalfWay, ask_for_too_much
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli.main import make_app
from holdfast.explain.signatures.signature import FAMILIES

app = make_app()
HERE = Path(__file__).name
ENDED_WELL = ("H1601", 0)


def explain(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["explain", str(run), *options])


def verdict_of(run: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads(explain(run, "--json").output)
    return verdict


def said_of(run: Path) -> tuple[str, int]:
    verdict = verdict_of(run)
    assert explain(run).exit_code == verdict["exit_code"]
    return verdict["cause"], verdict["exit_code"]


def of_family(name: str) -> int:
    return 10 + FAMILIES.index(name)  # type: ignore[arg-type] # a wrong one raises


def guard_of(
    run: Path, *extra: nn.Module, count: int = 12, **more: Any
) -> tuple[holdfast.Guard, nn.Module]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), *extra, nn.Tanh(), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(8 * count, 4))
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": holdfast.DataLoader(data, batch_size=8),
        **more,
    }
    return holdfast.Guard(run, model=model, **given), model


def mean_of(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda batch: model(batch[0]).square().mean()


def train(guard: holdfast.Guard, loss_fn: Callable[[Any], Any], *, max_steps: int = 6) -> None:
    for batch in guard.batches(max_steps=max_steps):
        guard.step(batch, loss_fn)


# --- memory
# ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["batch norm", "coupled loss", "one sample"])
def test_out_of_memory_is_said_as_such_whatever_was_refused(tmp_path, what):
    """H401 with its class, the line of the user's step, the whole fix and the reason.

    Never a divergence.
    """
    guard, model = guard_of(tmp_path, *([nn.BatchNorm1d(8)] if what == "batch norm" else []))
    least = 0 if what == "one sample" else 4

    def loss_fn(batch: Any) -> torch.Tensor:
        if len(batch[0]) > least and guard.global_step == 2:
            ask_for_too_much()
        out = model(batch[0])
        return (out - out.mean()).square().mean() if what == "coupled loss" else out.square().mean()

    with pytest.raises(holdfast.OutOfMemoryError) as caught:
        train(guard, loss_fn)
    assert caught.value.rule == "H401"
    assert said_of(tmp_path) == ("H401", of_family("out of memory"))
    verdict = verdict_of(tmp_path)
    assert verdict["fix"] == caught.value.fix
    assert HERE in verdict["where"]
    assert verdict["where"].endswith("in train")
    assert caught.value.what[:60] in verdict["summary"]
    assert "H503" not in explain(tmp_path).output


@pytest.mark.parametrize("saves", [5, None])
def test_an_optimizer_that_runs_out_of_memory_half_way_is_h402(tmp_path, saves):
    """An optimizer step that is only partly done has its own rule, with or without a checkpoint."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=FailsHalfWay(model.parameters(), lr=0.1),
        loader=[(torch.randn(8, 4),)] * 3,
        save_interval_steps=saves,
    )
    with pytest.raises(holdfast.OutOfMemoryError) as caught:
        train(guard, mean_of(model))
    assert said_of(tmp_path) == ("H402", of_family("out of memory"))
    assert verdict_of(tmp_path)["fix"] == caught.value.fix


def test_an_error_of_the_users_after_a_lack_of_memory_is_his(tmp_path):
    """A lack of memory that was helped is not the cause of whatever fails next."""
    guard, _ = guard_of(tmp_path)
    calls = []

    def loss_fn(batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        if len(calls) == 1:
            ask_for_too_much()
        return batch[0] @ torch.ones(7, 2)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(guard, loss_fn)
    assert said_of(tmp_path) == ("H965", of_family("shape or type"))
    assert verdict_of(tmp_path)["where"].endswith("in loss_fn")


def test_an_error_that_was_caught_is_no_verdict_on_a_run_that_went_on(tmp_path):
    """Out of memory in one step that the user passes over, and a stop of an earlier life, leave
    a good end good.
    """
    guard, model = guard_of(tmp_path)

    def loss_fn(batch: Any) -> torch.Tensor:
        if guard.global_step == 3:
            ask_for_too_much()
        return model(batch[0]).square().mean()

    with pytest.raises(holdfast.OutOfMemoryError):
        train(guard, loss_fn)
    assert said_of(tmp_path)[0] == "H401"
    again, model = guard_of(tmp_path)
    assert again.global_step == 3
    refused = 0
    for batch in again.batches(max_steps=8):
        try:
            again.step(
                batch,
                ask_for_too_much if again.global_step == 5 and not refused else mean_of(model),
            )
        except holdfast.OutOfMemoryError:
            refused += 1
    assert refused == 1
    assert said_of(tmp_path) == ENDED_WELL


# --- numbers
# ------------------------------------------------------------------------


def test_persistent_nan_is_h501(tmp_path):
    """A Guard that stops for NaN has that rule, with its fix."""
    guard, model = guard_of(tmp_path, nonfinite_patience=1, max_rollbacks=1)
    with pytest.raises(holdfast.NonFiniteError) as caught:
        train(guard, lambda batch: mean_of(model)(batch) * math.nan)
    assert said_of(tmp_path) == ("H501", of_family("numerics"))
    assert verdict_of(tmp_path)["fix"] == caught.value.fix


@pytest.mark.slow
def test_a_divergence_is_h503_said_once_and_whole(tmp_path):
    """The reason stands once in what happened, without the rule's own words for it, and the fix
    is whole.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    batches = [(x, x.sum(1, keepdim=True) + torch.randn(16, 1)) for x in torch.randn(2000, 16, 8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        loader=batches,
        save_interval_steps=50,
        spike_action="roll_back",
    )
    with pytest.raises(holdfast.core.errors.DivergenceError) as caught:
        for batch in guard.batches(max_epochs=1):
            if guard.global_step >= 120:
                optimizer.param_groups[0]["lr"] = 3.0
            guard.step(batch, lambda pair: (model(pair[0]) - pair[1]).square().mean())
    assert said_of(tmp_path) == ("H503", of_family("numerics"))
    verdict = verdict_of(tmp_path)
    assert verdict["fix"] == caught.value.fix
    assert "\n" not in verdict["summary"]
    assert "stood far out, or the loss stayed" not in verdict["summary"], (
        "the rule's words for the same"
    )


@pytest.mark.parametrize(
    ("where", "rule", "known"), [("input", "H806", "dataset index 37"), ("loss", "H801", "log")]
)
def test_what_was_traced_of_a_nan_is_what_a_finding_points_to(tmp_path, where, rule, known):
    """The sample by its index in the dataset, or the operation, in place of a list of usual
    causes.
    """
    torch.manual_seed(1)
    inputs = torch.randn(96, 4)
    if where == "input":
        inputs[37, 2] = math.nan
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=holdfast.DataLoader(TensorDataset(inputs), batch_size=8),
    )

    def loss_fn(batch: Any) -> torch.Tensor:
        out = mean_of(model)(batch)
        # The sixth batch, also read again
        struck = where == "loss" and bool((batch[0] == inputs[40]).all(1).any())
        return (out - out).log() * 0 if struck else out

    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_fn)
    fixes = {
        event.data["rule"]: event.data["fix"]
        for event in guard.events()
        if event.kind in ("finding", "note")
    }
    assert known in fixes[rule]
    assert known in fixes["H801"]
    assert "learning rate" not in fixes["H801"]
    assert said_of(tmp_path) == ENDED_WELL
    assert known in verdict_of(tmp_path)["fix"]


# --- ends
# ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [6, 100, 101])
def test_a_run_that_came_to_its_end_ended_well(tmp_path, steps):
    """Whatever the Guard last saved, summed up or was asked before it closed.

    Also where nothing was left to do.
    """
    for _ in range(2):
        guard, model = guard_of(tmp_path, save_interval_steps=10)
        for batch in guard.batches(max_steps=steps):
            guard.step(batch, mean_of(model))
            if guard.global_step == steps:
                guard.validated(0.5)
        assert said_of(tmp_path) == ENDED_WELL
    assert verdict_of(tmp_path)["step"] == steps


def test_a_loop_of_ones_own_that_closes_its_guard_ended_well(tmp_path):
    """`close`, or the end of a with statement, says so; a Guard that nobody closed says nothing."""
    guard, model = guard_of(tmp_path / "open")
    for _ in range(3):
        guard.step((torch.randn(8, 4),), mean_of(model))
    assert said_of(tmp_path / "open")[0] == "H1600"
    assert "guard.close()" in explain(tmp_path / "open").output
    guard.close()
    assert said_of(tmp_path / "open") == ENDED_WELL
    again, model = guard_of(tmp_path / "with")
    with again:
        again.step((torch.randn(8, 4),), mean_of(model))
    assert said_of(tmp_path / "with") == ENDED_WELL


@pytest.mark.parametrize("where", ["in the loss", "while data are waited for", "in an evaluation"])
@pytest.mark.parametrize("handled", [True, False])
def test_ctrl_c_is_said_as_an_interruption_by_the_user(tmp_path, where, handled):
    """SIGINT inside anything that the Guard runs is a stop on request, or H1604 where it is none
    of its signals.
    """

    class Dataset(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if where == "while data are waited for" and index == 24:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    loader = holdfast.DataLoader(Dataset(torch.randn(96, 4)), batch_size=8)
    guard, model = guard_of(
        tmp_path, loader=loader, stop_signals=("SIGINT", "SIGTERM") if handled else ("SIGTERM",)
    )

    def loss_fn(batch: Any) -> torch.Tensor:
        if where == "in the loss" and guard.global_step == 3:
            signal.raise_signal(signal.SIGINT)
        return model(batch[0]).square().mean()

    def run() -> None:
        for batch in guard.batches(max_steps=6):
            guard.step(batch, loss_fn)
            if where == "in an evaluation":
                with guard.evaluate():
                    signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert said_of(tmp_path) == ("H1623" if handled else "H1604", of_family("preempted"))


def test_a_loop_that_was_left_early_is_said_to_be(tmp_path):
    """An error of the loop's own body is nothing that the Guard sees.

    Unknown, with the word that it was left.
    """

    def run(guard: holdfast.Guard, model: nn.Module) -> None:
        for batch in guard.batches(max_steps=6):
            guard.step(batch, mean_of(model))
            if guard.global_step == 5:  # right after a save, as older versions took for a good end
                raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        run(*guard_of(tmp_path / "bare", save_interval_steps=1, async_save=False))
    assert said_of(tmp_path / "bare")[0] == "H1600"
    assert "`break`" in verdict_of(tmp_path / "bare")["summary"]


def test_an_error_on_its_way_out_while_a_guard_is_closed_is_said(tmp_path):
    """`finally: guard.close()` is no good end where an error of the user's passes by."""
    guard, model = guard_of(tmp_path)

    def run() -> None:
        try:
            guard.step((torch.randn(8, 4),), mean_of(model))
            raise ValueError("of the body")
        finally:
            guard.close()

    with pytest.raises(ValueError, match="of the body"):
        run()
    assert said_of(tmp_path) == ("H1608", of_family("user code"))
    assert "of the body" in verdict_of(tmp_path)["summary"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stop_by_signal_is_said_with_its_name(tmp_path, name):
    """A signal that a Guard honours is a stop on request, no failure, with the reason."""
    guard, model = guard_of(tmp_path)
    for batch in guard.batches(max_steps=6):
        guard.step(batch, mean_of(model))
        if guard.global_step == 3:
            signal.raise_signal(getattr(signal, name))
    assert guard.global_step == 3
    assert said_of(tmp_path)[0] == "H1623"
    assert verdict_of(tmp_path)["title"] == "stopped on request"
    assert name in verdict_of(tmp_path)["summary"]
    again, model = guard_of(tmp_path)
    train(again, mean_of(model))
    assert said_of(tmp_path) == ENDED_WELL, "a stop of an earlier life is history"
