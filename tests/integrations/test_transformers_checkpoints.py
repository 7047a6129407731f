"""Checkpoints of a guarded Trainer: sealed, verified, and resumed where training stood."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.integrations.hugging_face import digest, make_gpt2, make_trainer, samples
from tests.prepared import FRAMEWORKS, run_prepared

from holdfast import CheckpointError, NonFiniteError, OutOfMemoryError, RunDirectoryError
from holdfast.checkpoint.verify import verify
from holdfast.core.run_requests import Action, RequestFolder
from holdfast.guard import outside_requests
from holdfast.recorder.reader import read_events
from holdfast.testing import flip_bit

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = [
    pytest.mark.usefixtures("unchecked_splits"),
    pytest.mark.slow,  # the import alone takes five seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 8,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "random",
}


def guarded(folder: Path, **settings: Any) -> Any:
    from holdfast.integrations.transformers import HoldfastTrainer

    return make_trainer(HoldfastTrainer, folder, make_gpt2(), samples(20), **(SAVING | settings))


class At(transformers.TrainerCallback):
    """Does something after a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            self.what(named["model"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    trainer = guarded(tmp_path_factory.mktemp("calm"))
    trainer.train()
    return digest(trainer.model)


def test_sigterm_saves_and_the_run_goes_on_bit_exact(tmp_path: Path, undisturbed: str) -> None:
    """SIGTERM in the middle of an epoch ends training with a checkpoint, from which it ends as
    if undisturbed.
    """
    first = guarded(tmp_path, callbacks=[At(5, lambda _: os.kill(os.getpid(), signal.SIGTERM))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "SIGTERM", signal.SIGTERM)
        first.train()
    assert first.state.global_step == 5
    verify(tmp_path / "checkpoint-5")
    second = guarded(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 8
    assert digest(second.model) == undisturbed


@pytest.mark.parametrize(
    ("name", "code", "raised"),
    [("SIGUSR1", None, None), ("SIGUSR1", 85, SystemExit), ("SIGINT", None, KeyboardInterrupt)],
)
def test_other_signals_stop_a_trainer_as_sigterm_does(
    tmp_path: Path, name: str, code: int | None, raised: type[BaseException] | None
) -> None:
    """The step is saved first; then what the policy and Ctrl-C ask for is raised from `train`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stops = At(5, lambda _: os.kill(os.getpid(), getattr(signal, name)))
    trainer = guarded(tmp_path, callbacks=[stops], holdfast_policy={"stop_exit_code": code})
    with pytest.raises(raised) if raised is not None else contextlib.nullcontext() as error:
        trainer.train()
    signal.signal(signal.SIGINT, before)
    assert getattr(error and error.value, "code", None) == code
    assert trainer.state.global_step == 5
    verify(tmp_path / "checkpoint-5")
    events = read_events(tmp_path / "holdfast" / "recorder" / "rank0")
    assert [event.data.get("signal") for event in events if event.kind == "stop_requested"] == [
        name
    ]
    assert (events[-1].kind, events[-1].data.get("how")) == ("closed", "stopped")


def test_a_request_from_outside_stops_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`holdfast stop` is noticed in the next step, which is saved; `holdfast save` is refused."""
    monkeypatch.setattr(outside_requests, "_POLL_SECONDS", 0.0)
    folder = RequestFolder(tmp_path / "holdfast")
    requests = {}

    def ask(_: Any) -> None:
        for action in get_args(Action):
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            requests[action] = folder.send(action, holder)

    trainer = guarded(tmp_path, callbacks=[At(5, ask)])
    trainer.train()
    save = folder.answer_to(requests["save"])
    stop = folder.answer_to(requests["stop"])

    assert trainer.state.global_step == 6
    verify(tmp_path / "checkpoint-6")
    assert save is not None
    assert save.problem is not None
    assert stop is not None
    assert stop.problem is None


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_taken(
    tmp_path: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in the newest weights, which loads without an error elsewhere, leads back by one
    checkpoint.
    """
    guarded(tmp_path, max_steps=8, callbacks=[At(6, lambda _: None)]).train()
    weights = tmp_path / "checkpoint-8" / "model.safetensors"
    flip_bit(weights, 8 * weights.stat().st_size - 3)
    trainer = guarded(tmp_path)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trainer.train(resume_from_checkpoint=True)
    assert "damaged-checkpoint-8" in caplog.text
    assert (tmp_path / "damaged-checkpoint-8").is_dir()
    assert digest(trainer.model) == undisturbed
    verify(tmp_path / "checkpoint-8")


def dies_in_its_next_save(folder: Path) -> None:
    """Train and be killed when half of the weights are on the disk."""
    trainer = guarded(folder)
    save = trainer.save_model

    def save_half(target: str, **named: Any) -> None:
        save(target, **named)
        weights = Path(target, "model.safetensors")
        os.truncate(weights, weights.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.save_model = save_half
    trainer.train(resume_from_checkpoint=True)


def evaluated(folder: Path, step: int = 0, where: str = "on_step_end") -> tuple[str, list[int]]:
    """Train to the end, or to death in a callback of a step.

    Return the weights and the steps of evaluations.
    """

    def die(_: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    dies = type("Dies", (transformers.TrainerCallback,), {where: die})()
    trainer = guarded(folder, eval_dataset=samples(8), eval_strategy="epoch", callbacks=[dies])
    trainer.train(resume_from_checkpoint=True)
    return digest(trainer.model), [
        each["step"] for each in trainer.state.log_history if "eval_loss" in each
    ]


@pytest.mark.parametrize(("step", "where"), [(6, "on_prediction_step"), (7, "on_step_end")])
def test_an_evaluation_after_a_save_is_not_left_out_after_a_kill(
    tmp_path: Path, step: int, where: str
) -> None:
    """Killed in the evaluation of an epoch whose last step saves, or after it, training ends as
    if undisturbed.
    """
    program = (
        f"import {__name__} as t; t.evaluated(t.Path({str(tmp_path)!r}, 'cut'), {step}, {where!r})"
    )
    life = run_prepared(
        ["-c", program], cwd=Path(__file__).parents[2], timeout=300, loaded=FRAMEWORKS
    )
    assert life.returncode == -signal.SIGKILL, life.stderr
    assert evaluated(tmp_path / "cut") == evaluated(tmp_path / "calm")


@pytest.mark.parametrize("begun_without", [False, True])
def test_a_first_save_that_was_killed_is_not_resumed_from(
    tmp_path: Path, undisturbed: str, caplog: pytest.LogCaptureFixture, begun_without: bool
) -> None:
    """Where nothing was sealed yet training starts anew, or goes on from what the plain Trainer
    has left.
    """
    if begun_without:
        plain = make_trainer(
            transformers.Trainer,
            tmp_path,
            make_gpt2(),
            samples(20),
            **SAVING,
            callbacks=[At(4, lambda _: setattr(plain.control, "should_training_stop", True))],
        )
        plain.train()
    torn = "checkpoint-6" if begun_without else "checkpoint-2"
    program = (
        f"import pathlib, {__name__} as here;"
        f" here.dies_in_its_next_save(pathlib.Path({str(tmp_path)!r}))"
    )
    life = run_prepared(
        ["-c", program], cwd=Path(__file__).parents[2], timeout=300, loaded=FRAMEWORKS
    )
    assert life.returncode == -signal.SIGKILL, life.stderr
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / torn)
    trainer = guarded(tmp_path)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trainer.train(resume_from_checkpoint=True)
    assert re.search(rf"{torn}.*manifest\.json", caplog.text)
    assert (f"no checkpoint in {tmp_path}" in caplog.text) is not begun_without
    assert (tmp_path / f"damaged-{torn}").is_dir()
    assert digest(trainer.model) == undisturbed
    verify(tmp_path / torn)


def test_a_path_falls_back_and_what_is_lost_is_said(tmp_path: Path) -> None:
    """A damaged checkpoint that was named leads to the one before it.

    When none is left, that is an error.
    """
    guarded(tmp_path, max_steps=4).train()
    newest, oldest = tmp_path / "checkpoint-4", tmp_path / "checkpoint-2"
    flip_bit(newest / "optimizer.pt", 12345)
    trainer = guarded(tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=str(newest))
    flip_bit(newest / "optimizer.pt", 12345)
    flip_bit(oldest / "scheduler.pt", 99)
    with pytest.raises(CheckpointError, match="H312"):
        guarded(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_lost_checkpoints_are_no_silent_new_start(elsewhere: bool, tmp_path: Path) -> None:
    """Where a run has saved and nothing is found, or its folder is out of reach, asking for the
    newest is an H312.
    """
    from holdfast.integrations.transformers import HoldfastTrainer, last_good_checkpoint

    output, run_dir = (
        tmp_path / "output",
        tmp_path / "run" if elsewhere else tmp_path / "output" / "holdfast",
    )
    settings = SAVING | {"max_steps": 4}
    trainer = make_trainer(
        HoldfastTrainer, output, make_gpt2(), samples(20), holdfast_run_dir=str(run_dir), **settings
    )
    trainer.train()
    for folder in output.glob("checkpoint-*"):
        folder.rename(tmp_path / folder.name)
    with pytest.raises(CheckpointError, match="H312"):
        last_good_checkpoint(output, run_dir)
    with pytest.raises(CheckpointError, match="H312"):
        trainer.train(resume_from_checkpoint=True)
    if elsewhere:
        output.rename(tmp_path / "moved")
        output.symlink_to(tmp_path / "not mounted")
        with pytest.raises(CheckpointError, match="H312"):
            last_good_checkpoint(output, run_dir)
        output.unlink()
        (tmp_path / "moved").rename(output)
    trainer.train()  # anew, as it is asked for
    assert last_good_checkpoint(output, run_dir) == str(output / "checkpoint-4")


def test_a_save_that_fails_does_not_end_training(tmp_path: Path, undisturbed: str) -> None:
    """Where the disk refuses a checkpoint training goes on, and the older one stays, also with a
    limit of one.
    """
    (tmp_path / "checkpoint-4").write_text("in the way")  # a folder cannot be made here
    trainer = guarded(
        tmp_path, save_total_limit=1, callbacks=[At(5, lambda _: verify(tmp_path / "checkpoint-2"))]
    )
    trainer.train()
    assert digest(trainer.model) == undisturbed
    assert trainer.args.save_total_limit == 1
    assert [path.name for path in tmp_path.glob("checkpoint-*") if path.is_dir()] == [
        "checkpoint-8"
    ]
    verify(tmp_path / "checkpoint-8")


def test_weights_with_nan_are_never_saved(tmp_path: Path) -> None:
    """Weights that somebody has spoilt end training; what was saved before is not touched."""

    def spoil(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan

    trainer = guarded(tmp_path, callbacks=[At(4, spoil)], holdfast_policy={"max_rollbacks": 0})
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert not (tmp_path / "checkpoint-4").exists()
    verify(tmp_path / "checkpoint-2")


def test_samples_of_a_holdfast_loader_are_quarantined_by_their_index(tmp_path: Path) -> None:
    """A sample with NaN is found in its window, left out, and named by its index in the dataset."""
    from tests.integrations.test_transformers import Poisoned, with_poison

    from holdfast import DataLoader
    from holdfast.integrations.transformers import HoldfastTrainer

    class Own(HoldfastTrainer):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            collate = transformers.default_data_collator
            return DataLoader(
                self.train_dataset, 4, shuffle=True, seed=7, collate_fn=collate, quarantine=2
            )

    policy = {"drop_nonfinite_samples": True}
    make_trainer(
        Own, tmp_path, Poisoned(make_gpt2()), with_poison(13), **SAVING, holdfast_policy=policy
    ).train()
    text = (tmp_path / "holdfast" / "quarantine.json").read_text()
    assert '"index": 13' in text or '"13"' in text, text


def test_checkpoints_that_cannot_be_read_now_or_reached_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an older one nor a new start takes their place.

    H307 for a fault that passes, H312 for a dead link.
    """
    from holdfast.integrations.transformers import last_good_checkpoint

    guarded(tmp_path, max_steps=4).train()
    newest = tmp_path / "checkpoint-4"
    really_open = os.open

    def refuses(place: Any, *given: Any, **named: Any) -> Any:
        path = Path(place)
        if path.name == "optimizer.pt" and newest in path.parents:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really_open(place, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuses)
        for asked in (True, str(newest)):
            with pytest.raises(RunDirectoryError, match="H307"):
                guarded(tmp_path).train(resume_from_checkpoint=asked)
    assert last_good_checkpoint(tmp_path) == str(newest)
    newest.rename(tmp_path / "moved")
    newest.symlink_to(tmp_path / "not mounted")
    for asked in (True, str(newest), None):
        with pytest.raises(CheckpointError, match="H312"):
            guarded(tmp_path).train(resume_from_checkpoint=asked)
    assert newest.is_symlink()


def test_what_can_never_be_saved_is_said_at_once(tmp_path: Path) -> None:
    """A first save that fails for another reason than the disk ends training, as it does in the
    plain Trainer.
    """
    model = torch.nn.Linear(2, 2)
    trainer = guarded(tmp_path)
    trainer.model.extra = model
    trainer.model.again = torch.nn.Module()
    # Shares memory, which safetensors refuses
    trainer.model.again.weight = torch.nn.Parameter(model.weight[:1])
    with pytest.raises(RuntimeError, match="shared tensors"):
        trainer.train()


EVALUATED: dict[str, Any] = {
    "eval_dataset": samples(8),
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 8,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that the best is the first, whatever is learnt
}


@pytest.mark.parametrize("where", ["on_step_end", "on_evaluate"])
def test_sigterm_saves_also_where_only_the_best_is_saved(tmp_path: Path, where: str) -> None:
    """With ``save_strategy="best"`` the step at which training was stopped is saved although it
    is not the best.
    """

    def kill(_: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    Kill = type("Kill", (transformers.TrainerCallback,), {where: kill})
    settings = EVALUATED | {"save_strategy": "best", "learning_rate": 3.0}
    trainer = guarded(tmp_path, callbacks=[Kill()], **settings)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.state.best_global_step == 2
    verify(tmp_path / "checkpoint-4")


class NoRoom(torch.nn.Module):
    """Runs out of memory in training after so many calls, or in evaluation."""

    def __init__(self, *, calls: int = 10**9, evaluates: bool = True) -> None:
        super().__init__()
        self.inner, self.calls, self.evaluates = make_gpt2(), calls, evaluates
        self.config = self.inner.config

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        self.calls -= self.training
        if self.calls < 0 or (len(input_ids) == 8 and not self.evaluates):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.inner(input_ids=input_ids, labels=labels, **kwargs)


def test_out_of_memory_in_an_evaluation_loses_no_step(tmp_path: Path) -> None:
    """It ends training with a checkpoint of the step before, from which training goes on."""
    trainer = guarded(tmp_path, **(EVALUATED | {"save_steps": 6}))
    trainer.model = trainer.model_wrapped = NoRoom(evaluates=False)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    verify(tmp_path / "checkpoint-2")
    assert trainer.holdfast_guard is None


@pytest.mark.parametrize(("calls", "steps"), [(7, [2, 4]), (9, [2, 4, 5])])
def test_a_checkpoint_that_is_there_is_not_written_again_at_the_end(
    tmp_path: Path, calls: int, steps: list[int]
) -> None:
    """When memory ends a training right after a save, the good checkpoint is left alone.

    Later steps are saved.
    """
    saved: list[str] = []
    trainer = guarded(tmp_path, holdfast_policy={"recompute": False})
    trainer.model = trainer.model_wrapped = NoRoom(calls=calls)
    save = trainer.save_model
    trainer.save_model = lambda folder, **named: (
        saved.append(Path(folder).name),
        save(folder, **named),
    )[1]
    with pytest.raises(OutOfMemoryError, match="H401"):
        trainer.train()
    assert saved == [f"checkpoint-{step}" for step in steps]


def test_a_best_model_that_was_damaged_is_not_loaded(tmp_path: Path) -> None:
    """One flipped bit in the weights of the best checkpoint is an error, and not the result of
    the training.
    """

    def hurt(_: Any) -> None:
        weights = tmp_path / "checkpoint-2" / "model.safetensors"
        flip_bit(weights, 8 * weights.stat().st_size - 3)

    settings: dict[str, Any] = EVALUATED | {"load_best_model_at_end": True, "learning_rate": 3.0}
    trainer = guarded(tmp_path, callbacks=[At(7, hurt)], **settings)
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        trainer.train()
    assert trainer.state.best_global_step == 2


TRAINER_WITHOUT_ROOM = """
import sys
from pathlib import Path
from tests.integrations.hugging_face import make_gpt2, make_trainer, samples
from holdfast.integrations.transformers import HoldfastTrainer

folder = Path(sys.argv[1])
for step in sys.argv[2:]:
    (folder / f"checkpoint-{step}").write_text("in the way")  # a folder cannot be made here
trainer = make_trainer(HoldfastTrainer, folder, make_gpt2(), samples(20), save_strategy="steps", save_steps=2)
trainer.train()
print("after training")
"""


@pytest.mark.parametrize(
    ("refused", "status", "newest"),
    [((2, 4, 6), 74, None), ((4, 6), 74, 2), ((2, 4), 0, "saved")],
    ids=["all", "the last ones", "not the last one"],
)
def test_a_training_that_could_not_save_at_its_end_says_so(
    refused: tuple[int, ...], status: int, newest: Any, tmp_path: Path
) -> None:
    """With the last saves refused by the disk, the recording and the exit code say which step is
    in a checkpoint.
    """
    program = ["-c", TRAINER_WITHOUT_ROOM, tmp_path, *refused]

    ended = run_prepared(program, timeout=200, loaded=FRAMEWORKS, cwd=Path(__file__).parents[2])

    assert ended.returncode == status, ended.stderr
    assert "after training" in ended.stdout
    found = read_events(tmp_path / "holdfast" / "recorder" / "rank0")
    said = [event.data["newest_checkpoint"] for event in found if event.kind == "not_saved"]
    assert (said, found[-1].kind) == ([] if newest == "saved" else [newest], "closed")
