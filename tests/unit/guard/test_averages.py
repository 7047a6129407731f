"""`Guard(averaged=...)`: one update for each committed step, which goes back, is saved and resumed with it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.own_process import in_own_process
from tests.unit.guard.guarded import Short, assert_same, guarded, kinds_of, square_of, tensors_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app

pytestmark = pytest.mark.usefixtures("unchecked_splits")
DATA = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]


def make(*, norm: bool = False, use_buffers: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, AveragedModel]:
    """Return a model, its optimizer, and an average that follows it quickly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=use_buffers)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), average


def bare(batches: list[torch.Tensor], **how: bool) -> list[torch.Tensor]:
    """Return weights, moments and averages of a loop that keeps an average as torch shows it."""
    model, optimizer, average = make(**how)
    for batch in batches:
        optimizer.zero_grad()
        square_of(model)(batch).backward()
        optimizer.step()
        average.update_parameters(model)
    return [*tensors_of(model, optimizer), *tensors_of(average)]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_average_is_that_of_a_bare_loop_over_skips_retries_and_resumes(tmp_path: Path, use_buffers: bool) -> None:
    """Bit for bit, and so is the number of averaged steps; a step that was skipped is not in it."""
    how = {"norm": True, "use_buffers": use_buffers}
    bad = [torch.full_like(each, math.nan) if n == 3 else each for n, each in enumerate(DATA)]
    for until in (1, 5, 7):
        (model, optimizer, average), short = make(**how), Short(1)
        guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, averaged=average, loader=bad)
        for batch in guard.batches(max_epochs=1, max_steps=until):
            guard.step(batch, lambda x: (short(), model(x).square().mean())[1])  # noqa: B023
    assert {"retry", "skip_step"} < set(kinds_of(guard))
    assert int(average.n_averaged) == 7
    assert_same([*tensors_of(model, optimizer), *tensors_of(average)], bare(DATA[:3] + DATA[4:], **how))


def test_parts_of_a_batch_are_one_step_of_the_average(tmp_path: Path) -> None:
    """However many micro-batches there were."""
    model, optimizer, average = make()
    guard = guarded(tmp_path, model, optimizer, averaged=average, micro_batch_size=2)
    for batch in DATA:
        assert guard.step(batch, square_of(model)).micro_batch_size == 2
    assert int(average.n_averaged) == len(DATA)


def test_an_average_that_runs_out_of_memory_goes_back_with_the_step(tmp_path: Path) -> None:
    """The weights have moved by then: the run returns to its checkpoint and makes the steps again, bit for bit."""
    model, optimizer, average = make()
    short, update = Short(), average.update_parameters
    average.update_parameters = lambda of: (update(of), short())
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, averaged=average, loader=DATA, save_interval_steps=3
    )
    for batch in guard.batches(max_epochs=1):
        if guard.global_step == 4 and not kinds_of(guard, "roll_back"):
            short.times = 1
        guard.step(batch, square_of(model))
    assert kinds_of(guard, "roll_back") == ["roll_back"]
    assert_same([*tensors_of(model, optimizer), *tensors_of(average)], bare(DATA))


def test_the_average_rolls_back_with_the_weights(tmp_path: Path) -> None:
    """After NaN in a row the run goes on from an earlier state, of the average too."""
    model, optimizer, average = make()
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, averaged=average, save_interval_steps=2, async_save=False,
        loader=[torch.full_like(each, math.nan) if n in (3, 4) else each for n, each in enumerate(DATA)],
        nonfinite_patience=2, provenance=False,
    )  # fmt: skip
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(model))
    assert kinds_of(guard, "roll_back") == ["roll_back"]
    assert int(average.n_averaged) == guard.global_step == 5
    assert_same([*tensors_of(model, optimizer), *tensors_of(average)], bare(DATA[:2] + DATA[5:]))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_weights_are_in_the_model_for_an_evaluation_only(tmp_path: Path, use_buffers: bool) -> None:
    """Its outputs are those of the average; all bits come back, after an error too; a step or save inside is one."""
    model, optimizer, average = make(norm=True, use_buffers=use_buffers)
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, averaged=average, loader=DATA)
    average.module[0].weight.data.zero_()
    with guard.averaged():
        assert model[0].weight.any()  # there is no average yet
    batches = guard.batches(max_epochs=1)
    for _ in range(4):
        guard.step(batch := next(batches), square_of(model))
    if not use_buffers:
        update_bn(DATA, average)
    before, expected = tensors_of(model, optimizer), average.eval()(batch).detach()
    inside = [
        lambda: guard.step(batch, square_of(model)), lambda: guard.validated(1.0, keep=1), guard.close,
        lambda: guard.averaged().__enter__(), lambda: next(batches),
    ]  # fmt: skip
    for wrong in inside:
        with contextlib.suppress(ZeroDivisionError), guard.averaged(), guard.evaluate():
            assert torch.equal(model(batch), expected)
            with pytest.raises(holdfast.PolicyError, match="asked for inside of"):
                wrong()
            1 / 0  # noqa: B018
        assert_same(tensors_of(model, optimizer), before)
    assert not torch.equal(model.eval()(batch), expected)
    guard.close()
    again = make(norm=True, use_buffers=use_buffers)
    holdfast.Guard(tmp_path, model=again[0], optimizer=again[1], averaged=again[2])
    assert_same([*tensors_of(again[0], again[1]), *tensors_of(again[2])], [*before, *tensors_of(average)])


def terminated(run: Path) -> Any:
    """Be asked to stop in the midst of an evaluation of the average; return the weights of then."""
    model, optimizer, average = make()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, averaged=average, loader=DATA)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(model))
        if guard.global_step == 3:
            trained = tensors_of(model)
            with contextlib.suppress(SystemExit), guard.averaged(), guard.evaluate():
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            return trained
    return None


def test_a_run_that_is_stopped_in_the_midst_of_an_evaluation_saves_what_it_has_trained(tmp_path: Path) -> None:
    """Not the averages that stood in its place."""
    trained = in_own_process(terminated, tmp_path)
    model, optimizer, average = make()
    assert guarded(tmp_path, model, optimizer, averaged=average).global_step == 3
    assert_same(tensors_of(model), trained)


def test_of_several_models_the_one_that_was_stepped_is_averaged_and_exported(tmp_path: Path) -> None:
    """By its name; `holdfast checkpoints` writes averages and weights, and says where there is no average."""
    models = {"generator": nn.Linear(4, 4), "discriminator": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
    averaged = {"generator": AveragedModel(models["generator"], multi_avg_fn=get_ema_multi_avg_fn(0.5))}
    with holdfast.Guard(tmp_path / "gan", model=models, optimizer=optimizers, averaged=averaged) as guard:
        for batch in DATA:
            guard.step(batch, square_of(models["discriminator"]), optimizer="discriminator")
        assert int(averaged["generator"].n_averaged) == 0
        for batch in DATA:
            guard.step(batch, square_of(models["generator"]), optimizer="generator")
    assert int(averaged["generator"].n_averaged) == len(DATA)
    from safetensors.torch import load_file

    def export(run: str) -> Any:
        given = ["checkpoints", str(tmp_path / run), "--export-averaged", str(tmp_path / "average.safetensors")]
        return CliRunner().invoke(make_app(), given)

    assert "the averaged weights of" in export("gan").output
    found = load_file(tmp_path / "average.safetensors")
    assert_same([found["weight"], found["bias"]], tensors_of(averaged["generator"].module))
    with holdfast.Guard(tmp_path / "plain", model=models["generator"], optimizer=optimizers["generator"]) as guard:
        guard.step(DATA[0], square_of(models["generator"]))
    assert export("plain").exit_code == 2
    assert "holds no averaged weights" in export("plain").output


def test_what_is_no_average_of_the_model_is_refused(tmp_path: Path) -> None:
    """With what is needed in its place."""
    model, optimizer, average = make()
    for given in (model, AveragedModel(nn.Linear(4, 1)), AveragedModel(nn.Sequential(model)), {"other": average}):
        with pytest.raises(holdfast.PolicyError, match="no average of a model"):
            guarded(tmp_path, model, optimizer, averaged=given)
    with (
        guarded(tmp_path, model, optimizer) as guard,
        pytest.raises(holdfast.PolicyError, match="without an average"),
    ):
        guard.averaged().__enter__()
