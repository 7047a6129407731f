"""Checkpoints of a guarded Trainer: sealed, verified, and resumed where training stood."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.hugging_face import digest, make_gpt2, make_trainer, samples

from holdfast import CheckpointError, NonFiniteError
from holdfast.checkpoint.sealing import verify
from holdfast.testing import flip_bit

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = [
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
    """SIGTERM in the middle of an epoch ends training with a checkpoint, from which it ends as if undisturbed."""
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


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_taken(
    tmp_path: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in the newest weights, which loads without an error elsewhere, leads back by one checkpoint."""
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


def test_an_unfinished_save_is_passed_over(tmp_path: Path) -> None:
    """A folder that a killed save has left is not resumed from, although it has the largest number."""
    from holdfast.integrations.transformers import last_good_checkpoint

    guarded(tmp_path, max_steps=4).train()
    for name in ("manifest.json", "trainer_state.json"):
        (tmp_path / "checkpoint-4" / name).unlink()
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    assert last_good_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert last_good_checkpoint(tmp_path / "nothing") is None


def test_a_path_falls_back_and_what_is_lost_is_said(tmp_path: Path) -> None:
    """A damaged checkpoint that was named leads to the one before it; when none is left, that is an error."""
    guarded(tmp_path, max_steps=4).train()
    newest, oldest = tmp_path / "checkpoint-4", tmp_path / "checkpoint-2"
    flip_bit(newest / "optimizer.pt", 12345)
    trainer = guarded(tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=str(newest))
    flip_bit(newest / "optimizer.pt", 12345)
    flip_bit(oldest / "scheduler.pt", 99)
    with pytest.raises(CheckpointError, match="H312"):
        guarded(tmp_path).train(resume_from_checkpoint=True)


def test_a_save_that_fails_does_not_end_training(tmp_path: Path, undisturbed: str) -> None:
    """Where the disk refuses a checkpoint training goes on, and the older one stays, also with a limit of one."""
    (tmp_path / "checkpoint-4").write_text("in the way")  # a folder cannot be made here
    trainer = guarded(tmp_path, save_total_limit=1, max_steps=8, callbacks=[At(5, lambda _: kept(tmp_path))])
    trainer.train()
    assert digest(trainer.model) == undisturbed
    assert trainer.args.save_total_limit == 1
    assert [path.name for path in tmp_path.glob("checkpoint-*") if path.is_dir()] == ["checkpoint-8"]
    verify(tmp_path / "checkpoint-8")


def kept(folder: Path) -> None:
    verify(folder / "checkpoint-2")


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


def test_a_resumed_guard_knows_what_it_had_learnt(tmp_path: Path) -> None:
    """What was counted and learnt about memory before is in the checkpoint, and goes on."""
    first = guarded(tmp_path, max_steps=2)
    first.train()
    told: list[Any] = []
    second = guarded(tmp_path, callbacks=[At(3, lambda _: told.append(second.holdfast_guard.statistics()))])
    second.train(resume_from_checkpoint=True)
    assert told[0].global_step == 3
    assert told[0].resumes == 1


def test_a_checkpoint_of_the_plain_trainer_is_taken_over(tmp_path: Path, undisturbed: str) -> None:
    """A run that was begun without holdfast goes on with it, bit for bit."""
    plain = make_trainer(
        transformers.Trainer, tmp_path, make_gpt2(), samples(20), **(SAVING | {"max_steps": 8}),
        callbacks=[At(4, lambda _: setattr(plain.control, "should_training_stop", True))],
    )  # fmt: skip
    plain.train()
    trainer = guarded(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert digest(trainer.model) == undisturbed


def test_a_holdfast_loader_keeps_its_order_and_names_its_samples(tmp_path: Path) -> None:
    """Resumed in the middle of an epoch its batches go on, and a sample with NaN is set aside by its index."""
    from tests.integrations.test_transformers import Poisoned, with_poison

    from holdfast import DataLoader
    from holdfast.integrations.transformers import HoldfastTrainer

    seen: list[tuple[int, ...]] = []

    class Own(HoldfastTrainer):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            data = self.train_dataset
            collate = transformers.default_data_collator
            return DataLoader(data, batch_size=4, shuffle=True, seed=7, collate_fn=collate, quarantine=2)

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            seen.append(tuple(inputs["input_ids"].flatten().tolist()))
            return super().training_step(model, inputs, *rest)

    def train(folder: Path, *callbacks: Any, resume: bool = False, data: Any = None) -> Any:
        seen.clear()
        model = Poisoned(make_gpt2())
        settings: dict[str, Any] = {"callbacks": list(callbacks), "holdfast_policy": {"drop_nonfinite_samples": True}}
        trainer = make_trainer(Own, folder, model, data or samples(24), **(SAVING | settings))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    calm = digest(train(tmp_path / "a").model)
    order = list(seen)
    train(tmp_path / "b", At(5, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    first = list(seen)
    assert digest(train(tmp_path / "b", resume=True).model) == calm
    assert first + seen == order
    train(tmp_path / "c", data=with_poison(13))
    text = (tmp_path / "c" / "holdfast" / "quarantine.json").read_text()
    assert '"index": 13' in text or '"13"' in text, text


def test_what_can_never_be_saved_is_said_at_once(tmp_path: Path) -> None:
    """A first save that fails for another reason than the disk ends training, as it does in the plain Trainer."""
    model = torch.nn.Linear(2, 2)
    trainer = guarded(tmp_path)
    trainer.model.extra = model
    trainer.model.again = torch.nn.Module()
    trainer.model.again.weight = torch.nn.Parameter(model.weight[:1])  # shares memory, which safetensors refuses
    with pytest.raises(RuntimeError, match="shared tensors"):
        trainer.train()
