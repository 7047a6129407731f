"""`Guard(averaged=...)`.

One update for each committed step, which goes back, is saved and resumed with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
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


def make(*, norm: bool = False, use_buffers: bool = False) -> dict[str, Any]:
    """Return a model, its optimizer, and an average that follows it quickly."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 1)
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=use_buffers)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "averaged": average,
    }


def all_of(parts: dict[str, Any]) -> list[torch.Tensor]:
    """Return copies of weights, buffers, moments and averages."""
    return [*tensors_of(parts["model"], parts["optimizer"]), *tensors_of(parts["averaged"])]


def bare(batches: list[torch.Tensor], **how: bool) -> list[torch.Tensor]:
    """Return what a loop ends with that keeps an average as torch shows it."""
    parts = make(**how)
    for batch in batches:
        parts["optimizer"].zero_grad()
        square_of(parts["model"])(batch).backward()
        parts["optimizer"].step()
        parts["averaged"].update_parameters(parts["model"])
    return all_of(parts)


def with_nan(*places: int) -> list[torch.Tensor]:
    return [torch.full_like(each, math.nan) if n in places else each for n, each in enumerate(DATA)]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_average_is_that_of_a_bare_loop_over_skips_retries_and_resumes(
    tmp_path: Path, use_buffers: bool
) -> None:
    """Bit for bit, and so is the number of averaged steps; a step that was skipped is not in it."""
    how = {"norm": True, "use_buffers": use_buffers}
    for until in (1, 5, 7):
        parts, short = make(**how), Short(1)
        guard, loss = (
            holdfast.Guard(tmp_path, loader=with_nan(3), **parts),
            square_of(parts["model"]),
        )
        for batch in guard.batches(max_epochs=1, max_steps=until):
            guard.step(batch, lambda x: (short(), loss(x))[1])  # noqa: B023
    assert {"retry", "skip_step"} < set(kinds_of(guard))
    assert_same(all_of(parts), bare(DATA[:3] + DATA[4:], **how))


def test_an_average_that_runs_out_of_memory_goes_back_with_the_step(tmp_path: Path) -> None:
    """The weights have moved by then.

    The run returns to its checkpoint and makes the steps again, bit for bit.
    """
    parts, short = make(), Short()
    update = parts["averaged"].update_parameters
    parts["averaged"].update_parameters = lambda of: (update(of), short())
    guard = holdfast.Guard(tmp_path, loader=DATA, save_interval_steps=3, **parts)
    for batch in guard.batches(max_epochs=1):
        short.times = guard.global_step == 4 and not kinds_of(guard, "roll_back")
        guard.step(batch, square_of(parts["model"]))
    assert kinds_of(guard, "roll_back") == ["roll_back"]
    assert_same(all_of(parts), bare(DATA))


def test_the_average_rolls_back_with_the_weights(tmp_path: Path) -> None:
    """After NaN in a row the run goes on from an earlier state, of the average too."""
    settings = {
        "save_interval_steps": 2,
        "async_save": False,
        "nonfinite_patience": 2,
        "provenance": False,
    }
    guard = holdfast.Guard(tmp_path, loader=with_nan(3, 4), **settings, **(parts := make()))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(parts["model"]))
    assert_same(all_of(parts), bare(DATA[:2] + DATA[5:]))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_weights_are_in_the_model_for_an_evaluation_only(
    tmp_path: Path, use_buffers: bool
) -> None:
    """Its outputs are those of the average; all bits come back, after an error too.

    A step or save inside is one.
    """
    model, _, average = (parts := make(norm=True, use_buffers=use_buffers)).values()
    guard = holdfast.Guard(tmp_path, loader=DATA, **parts)
    average.module[0].weight.data.zero_()
    with guard.averaged():
        assert model[0].weight.any()  # there is no average yet
    batches = guard.batches(max_epochs=1)
    for _ in range(4):
        guard.step(batch := next(batches), square_of(model))
    if not use_buffers:
        update_bn(DATA, average)
    before, expected = all_of(parts), average.eval()(batch).detach()
    inside = [
        lambda: guard.step(batch, square_of(model)),
        lambda: guard.validated(1.0, keep=1),
        guard.close,
        lambda: guard.averaged().__enter__(),
        lambda: next(batches),
    ]
    for wrong in inside:
        with contextlib.suppress(ZeroDivisionError), guard.averaged(), guard.evaluate():
            assert torch.equal(model(batch), expected)
            with pytest.raises(holdfast.PolicyError, match=r"inside guard\.averaged"):
                wrong()
            1 / 0  # noqa: B018
        assert_same(all_of(parts), before)
    assert not torch.equal(model.eval()(batch), expected)
    assert holdfast.latest(tmp_path).global_step == 0  # nothing was saved inside
    guard.close()
    holdfast.Guard(tmp_path, **(parts := make(norm=True, use_buffers=use_buffers)))
    assert_same(all_of(parts), before)


def terminated(run: Path) -> Any:
    """Be asked to stop in the midst of an evaluation of the average.

    Return what there was before.
    """
    guard = holdfast.Guard(run, **(parts := make()))
    for batch in DATA[:3]:
        guard.step(batch, square_of(parts["model"]))
    trained = all_of(parts)
    with contextlib.suppress(SystemExit), guard.averaged(), guard.evaluate():
        os.kill(os.getpid(), signal.SIGTERM)
    return trained


def test_a_run_that_is_stopped_in_the_midst_of_an_evaluation_saves_what_it_has_trained(
    tmp_path: Path,
) -> None:
    """Not the averages that stood in its place."""
    trained = in_own_process(terminated, tmp_path)
    holdfast.Guard(tmp_path, **(parts := make()))
    assert_same(all_of(parts), trained)


def test_of_several_models_the_one_that_was_stepped_is_averaged_and_exported(
    tmp_path: Path,
) -> None:
    """Once, in however many parts.

    `holdfast checkpoints` writes averages, and says where there are none.
    """
    models = {"generator": nn.Linear(4, 4), "discriminator": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
    average = AveragedModel(models["generator"], multi_avg_fn=get_ema_multi_avg_fn(0.5))
    given = {
        "model": models,
        "optimizer": optimizers,
        "averaged": {"generator": average},
        "micro_batch_size": 2,
    }
    with holdfast.Guard(tmp_path / "gan", **given) as guard:
        for steps, name in ((0, "discriminator"), (8, "generator")):
            for batch in DATA:
                guard.step(batch, square_of(models[name]), optimizer=name)
            assert int(average.n_averaged) == steps
    from safetensors.torch import load_file

    def export(run: str) -> Any:
        given = [
            "checkpoints",
            str(tmp_path / run),
            "--export-averaged",
            str(tmp_path / "average.safetensors"),
        ]
        return CliRunner().invoke(make_app(), given)

    assert "the averaged weights of" in export("gan").output
    found = load_file(tmp_path / "average.safetensors")
    assert_same([found["weight"], found["bias"]], tensors_of(average.module))
    with holdfast.Guard(
        tmp_path / "plain", model=models["generator"], optimizer=optimizers["generator"]
    ) as guard:
        guard.step(DATA[0], square_of(models["generator"]))
    assert "contains no averaged weights" in export("plain").output


def test_what_is_no_average_of_the_model_is_refused(tmp_path: Path) -> None:
    """With what is needed."""
    model, optimizer, average = make().values()
    for given in (
        model,
        AveragedModel(nn.Linear(4, 1)),
        AveragedModel(nn.Sequential(model)),
        {"other": average},
    ):
        with pytest.raises(holdfast.PolicyError, match=r"(?s)averaged=.*H105"):
            guarded(tmp_path, model, optimizer, averaged=given)
    with pytest.raises(holdfast.PolicyError, match=r"(?s)'averaged'.*H105"):
        guarded(tmp_path, model, optimizer, averaged=average, state={"averaged": model})
    with pytest.raises(holdfast.PolicyError, match="without an average"):
        guarded(tmp_path, model, optimizer).averaged().__enter__()


@contextlib.contextmanager
def average_in_place(model: nn.Module) -> Iterator[None]:
    """Put other weights into a model and take them out again, as torch_ema and ema_pytorch do."""
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    try:
        yield
    finally:
        for parameter, weights in zip(model.parameters(), trained, strict=True):
            parameter.data.copy_(weights)


@pytest.mark.parametrize("order", ["evaluation_in_average", "average_in_evaluation"])
def test_a_signal_while_a_script_evaluates_its_own_average_saves_what_was_trained(
    tmp_path: Path, order: str
) -> None:
    """The average stands in the model, so the evaluation ends first, and the loop after it."""
    model = nn.Linear(2, 1)
    guard = guarded(tmp_path, model, loader=[torch.ones(4, 2)] * 8, save_interval_steps=100)

    for batch in guard.batches(max_epochs=1):
        guard.step(batch, lambda x: model(x).square().mean())
        contexts = [average_in_place(model), guard.evaluate()]
        if order == "average_in_evaluation":
            contexts.reverse()
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            os.kill(os.getpid(), signal.SIGTERM)

    assert (guard.stop_reason, guard.global_step) == ("SIGTERM", 1)
    resumed = nn.Linear(2, 1)
    guarded(tmp_path, resumed, loader=[torch.ones(4, 2)] * 8).close()
    assert torch.equal(resumed.weight, model.weight)
