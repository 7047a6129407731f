"""`HoldfastCallback` in a plain Trainer: what can be had without subclassing."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.hugging_face import digest, logged, make_gpt2, make_trainer, samples
from tests.integrations.test_transformers import Poisoned, with_poison

from holdfast import CheckpointError, PolicyError
from holdfast.checkpoint.seal import verify
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import read_events, read_steps
from holdfast.testing import flip_bit

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def watched(folder: Path, model: Any, data: Any, *others: Any, **settings: Any) -> Any:
    from holdfast.integrations.transformers import HoldfastCallback

    callbacks = [HoldfastCallback(settings.pop("policy", None)), *others]
    return make_trainer(transformers.Trainer, folder, model, data, callbacks=callbacks, **settings)


def test_it_changes_nothing_and_records_every_step(tmp_path: Path) -> None:
    """Weights are those of the Trainer alone, and the black box has each step with its loss."""
    plain = make_trainer(transformers.Trainer, tmp_path / "a", make_gpt2(), samples())
    plain.train()
    trainer = watched(tmp_path / "b", make_gpt2(), samples())
    trainer.train()
    assert digest(plain.model) == digest(trainer.model)
    steps = [step for step in read_steps(tmp_path / "b/holdfast/recorder/rank0") if step.mark is StepMark.COMMITTED]
    assert [step.global_step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.loss for step in steps] == logged(trainer, "loss")


def test_a_nan_moves_no_weight_and_stays_in_the_log(tmp_path: Path) -> None:
    """A step with NaN is left out; without the callback the weights are NaN and the log hides it."""
    plain = make_trainer(transformers.Trainer, tmp_path / "a", Poisoned(make_gpt2()), with_poison(9))
    plain.train()
    assert any(not parameter.isfinite().all() for parameter in plain.model.parameters())
    assert all(map(math.isfinite, logged(plain, "loss")[:3]))
    trainer = watched(tmp_path / "b", Poisoned(make_gpt2()), with_poison(9))
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert math.isnan(logged(trainer, "loss")[2])
    kinds = [event.kind for event in read_events(tmp_path / "b/holdfast/recorder/rank0")]
    assert kinds.count("skip_step") == 1


def test_sigterm_saves_and_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    """SIGTERM ends training with a sealed checkpoint; resuming from it with one bit flipped is an error."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = watched(tmp_path, make_gpt2(), samples(), Kill(), **settings)
    trainer.train()
    assert trainer.state.global_step == 4
    for step in (2, 4):
        verify(tmp_path / f"checkpoint-{step}")
    flip_bit(tmp_path / "checkpoint-4" / "optimizer.pt", 54321)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        watched(tmp_path, make_gpt2(), samples(), **settings).train(resume_from_checkpoint=True)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that stops one rank alone would hang the others, so it says no."""
    trainer = watched(tmp_path, make_gpt2(), samples())
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(PolicyError, match="world_size=2"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_a_training_that_failed_can_be_begun_again_in_its_folder(tmp_path: Path) -> None:
    """An exception, of which callbacks hear nothing, does not leave the recording locked for the next Trainer."""

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    failed = watched(tmp_path, make_gpt2(), samples(), Fails())
    with pytest.raises(KeyboardInterrupt):
        failed.train()
    watched(tmp_path, make_gpt2(), samples()).train()
    assert failed is not None  # still there, as in a notebook
