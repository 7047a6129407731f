"""`HoldfastMixin` in the real Trainer: equal where nothing goes wrong, and what comes of faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.hugging_face import (
    LENGTH,
    digest,
    distance,
    logged,
    make_gpt2,
    make_pegasus,
    make_trainer,
    samples,
)

from holdfast import NonFiniteError, PolicyError
from holdfast.guard.splitting import split_trials
from holdfast.recorder.reader import read_events

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = [
    pytest.mark.slow,  # the import alone takes five seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def guarded() -> Any:
    from holdfast.integrations.transformers import HoldfastTrainer

    return HoldfastTrainer


def trained(kind: type, folder: Path, model: Any = None, data: Any = None, **settings: Any) -> Any:
    """Return a trainer that has trained, a small GPT-2 unless told otherwise."""
    trainer = make_trainer(
        kind, folder, make_gpt2() if model is None else model, data or samples(), **settings
    )
    trainer.train()
    return trainer


class Failing(torch.nn.Module):
    """Runs out of memory, as torch says it, in some calls that are given too many samples."""

    def __init__(self, inner: torch.nn.Module, *, most: int, calls: range) -> None:
        super().__init__()
        self.inner, self.most, self.calls, self.count = inner, most, calls, 0
        self.config = inner.config

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training:
            self.count += 1
            if self.count in self.calls and len(input_ids) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.inner(input_ids=input_ids, labels=labels, **kwargs)


def on_cpu(kind: type, *, init_scale: float = 2.0**7) -> type:
    """Return a Trainer in whose Accelerator fp16 is on, which on a CPU it leaves off."""

    class OnCpu(kind):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    return OnCpu


@pytest.mark.parametrize(
    ("windows", "precision"),
    [(1, "fp32"), (3, "fp32"), (3, "bf16"), (1, "fp16"), (3, "fp16"), (1, "fp16, left off")],
)
def test_training_is_bit_identical_to_the_plain_trainer(
    tmp_path: Path, windows: int, precision: str
) -> None:
    """With dropout, weight decay, clipping and a schedule, weights and logs are those of the
    Trainer alone.
    """
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": windows,
        precision[:4]: precision != "fp32",
    }
    settings.pop("fp32", None)
    wrapped = on_cpu if precision == "fp16" else lambda kind: kind
    plain = make_trainer(
        wrapped(transformers.Trainer), tmp_path / "a", make_gpt2(), samples(), **settings
    )
    one = plain.train()
    guard = make_trainer(wrapped(guarded()), tmp_path / "b", make_gpt2(), samples(), **settings)
    other = guard.train()
    assert digest(plain.model) == digest(guard.model) != digest(make_gpt2())
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(plain, key) == pytest.approx(logged(guard, key), rel=1e-6)
    assert one.training_loss == pytest.approx(other.training_loss, rel=1e-6)
    assert guard.holdfast_guard is None


def test_out_of_memory_keeps_the_batch_and_the_schedule(tmp_path: Path) -> None:
    """A batch that does not fit is cut inside its step, token-exact, and training ends as
    undisturbed.
    """
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "holdfast_policy": {"recompute": False},
    }
    calm = trained(guarded(), tmp_path / "a", make_gpt2(dropout=0.0), **settings)
    model = Failing(make_gpt2(dropout=0.0), most=2, calls=range(5, 40))
    struck = trained(guarded(), tmp_path / "b", model, **settings)
    assert distance(calm.model, model.inner) < 1e-5
    assert struck.state.global_step == 6
    assert logged(struck, "out_of_memory")[-1] >= 2
    assert logged(struck, "learning_rate") == logged(calm, "learning_rate")
    assert logged(struck, "loss") == pytest.approx(logged(calm, "loss"), rel=1e-4)


def test_accumulation_is_token_exact_also_where_the_model_ignores_the_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ragged batches of Pegasus train as one large batch does.

    The plain Trainer's loss is twice too large.

    On an accelerator, and on the CPU of a machine that has one, no fork can try out what the mean
    is over.
    """
    large = trained(
        transformers.Trainer, tmp_path / "large", make_pegasus(), per_device_train_batch_size=8
    )
    plain = trained(
        transformers.Trainer, tmp_path / "plain", make_pegasus(), gradient_accumulation_steps=2
    )
    assert logged(plain, "loss")[0] == pytest.approx(2 * logged(large, "loss")[0], rel=0.05)
    for forks in (True, False):
        if not forks:
            monkeypatch.setattr(split_trials, "backward_works_in_a_copy", lambda: False)
        exact = trained(
            guarded(), tmp_path / f"exact {forks}", make_pegasus(), gradient_accumulation_steps=2
        )
        assert distance(large.model, exact.model) < 1e-5
        assert logged(exact, "loss") == pytest.approx(logged(large, "loss"), rel=1e-4)
        # Parts count by their tokens too
        model = Failing(make_pegasus(), most=2, calls=range(3, 60))
        settings = {"gradient_accumulation_steps": 2, "holdfast_policy": {"recompute": False}}
        trained(guarded(), tmp_path / f"cut {forks}", model, **settings)
        assert distance(large.model, model.inner) < 1e-5


class Poisoned(torch.nn.Module):
    """A model whose loss is NaN for samples that hold a certain token."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels, **kwargs)
        hurt = (input_ids == 2).any(dim=1).to(out.logits.dtype)
        # Log 0 is -inf, and 0 times that NaN
        out["loss"] = out["loss"] * (1 + 0 * torch.log(1 - hurt.max()))
        return out


def with_poison(at: int) -> list[dict[str, torch.Tensor]]:
    data = samples()
    data[at]["input_ids"] = data[at]["input_ids"].clone()
    data[at]["input_ids"][0] = 2
    return data


def test_a_nan_is_skipped_and_stays_in_the_log(tmp_path: Path) -> None:
    """A step with NaN moves neither weights nor schedule, is logged as NaN, and training ends as
    without it.
    """
    settings: dict[str, Any] = {"lr_scheduler_type": "constant"}
    data = samples()[:8] + samples()[12:]
    calm = trained(guarded(), tmp_path / "a", Poisoned(make_gpt2()), data, max_steps=5, **settings)
    hurt = make_trainer(
        guarded(), tmp_path / "b", Poisoned(make_gpt2()), with_poison(9), **settings
    )
    done = hurt.train()
    assert digest(calm.model) == digest(hurt.model)
    assert [math.isnan(loss) for loss in logged(hurt, "loss")] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert logged(hurt, "skipped_steps") == [1, 1, 1, 1]
    made = [loss for loss in logged(hurt, "loss") if math.isfinite(loss)]
    assert done.training_loss == pytest.approx(sum(made) / len(made), abs=1e-6)


@pytest.mark.parametrize("at", [5, 17])
def test_train_loss_is_the_mean_of_the_steps_that_were_made_in_all_lives(
    tmp_path: Path, at: int
) -> None:
    """A run that is resumed reports the mean of one that was not, also with a skipped step
    before or after.
    """

    def trainer(folder: str, steps: int) -> Any:
        settings: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": 2,
            "lr_scheduler_type": "constant",
        }
        settings["holdfast_policy"] = {"provenance": False}
        model = Poisoned(make_gpt2())
        return make_trainer(
            guarded(), tmp_path / folder, model, with_poison(at), max_steps=steps, **settings
        )

    whole = trainer("a", 6).train().training_loss
    trainer("b", 4).train()
    for _ in range(2):  # the second time there is nothing left to train
        done = trainer("b", 6).train(resume_from_checkpoint=True)
        assert done.training_loss == pytest.approx(whole, abs=1e-6)


def test_persistent_nan_ends_with_weights_that_are_sound(tmp_path: Path) -> None:
    """When every batch gives NaN the run returns, then stops with H501; no weight was touched."""
    data = [with_poison(at)[at] for at in range(24)]
    model = Poisoned(make_gpt2())
    before = digest(model)
    trainer = make_trainer(guarded(), tmp_path, model, data, max_steps=6)
    with pytest.raises(NonFiniteError, match="H501"):
        trainer.train()
    assert digest(model) == before
    assert trainer.holdfast_guard is None  # the run directory is free again
    trainer.train_dataset = samples()
    trainer.train()


class Stream(torch.utils.data.IterableDataset):
    """Samples of a length that nobody knows."""

    def __init__(self, data: list[dict[str, torch.Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def test_the_rest_of_a_stream_is_not_lost(tmp_path: Path) -> None:
    """The last batch of a stream, too few for a window, is trained with the first window of the
    next epoch.
    """
    trainer = make_trainer(
        guarded(),
        tmp_path,
        make_gpt2(dropout=0.0),
        Stream(samples(12)),
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    sizes: list[int] = []
    loss_of = type(trainer).compute_loss
    trainer.compute_loss = lambda model, inputs, **k: (
        sizes.append(len(inputs["input_ids"])) if model.training else None,
        loss_of(trainer, model, inputs, **k),
    )[1]
    trainer.train()
    assert trainer.state.global_step == 2
    # 8 in the first step; the rest of 4 and 8 of the next epoch in the second
    assert sum(sizes) == 20


def test_evaluation_logs_and_the_best_model_are_the_trainers(tmp_path: Path) -> None:
    """``load_best_model_at_end`` with evaluations gives the metrics, best step and weights of
    the plain Trainer.
    """
    settings: dict[str, Any] = {
        "eval_dataset": samples(8),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
    }
    plain = trained(transformers.Trainer, tmp_path / "a", **settings)
    guard = trained(guarded(), tmp_path / "b", **settings)
    assert plain.state.best_global_step == guard.state.best_global_step
    assert plain.state.best_metric == guard.state.best_metric
    assert digest(plain.model) == digest(guard.model)
    assert {path.name for path in (tmp_path / "a").glob("checkpoint-*")} == {
        path.name for path in (tmp_path / "b").glob("checkpoint-*")
    }
    for path in (tmp_path / "b").glob("checkpoint-*"):
        assert (path / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("settings", "policy", "rule", "says"),
    [
        ({"auto_find_batch_size": True}, None, "H111", "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, None, "H111", "enable_jit_checkpoint"),
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 5.0}, "H109", "TrainingArguments"),
        ({}, {"precision": "fp16"}, "H109", "fp16"),
        ({}, {"save_interval_steps": 7}, "H109", "save_interval_steps=7"),
        ({}, {"scheduler_interval": "epoch"}, "H109", "scheduler_interval='epoch'"),
        ({}, {"max_grad_nrom": 5.0}, "H101", "max_grad_norm"),
    ],
)
def test_what_cannot_be_guarded_is_refused(
    tmp_path: Path, settings: dict[str, Any], policy: Any, rule: str, says: str
) -> None:
    """A setting that excludes holdfast, or contradicts its policy, is an error that names it
    before training.
    """
    with pytest.raises(PolicyError, match=says) as found:
        make_trainer(
            guarded(), tmp_path, make_gpt2(), samples(), holdfast_policy=policy, **settings
        )
    assert found.value.rule == rule


def test_a_limit_that_is_off_or_changed_later_is_the_trainers(tmp_path: Path) -> None:
    """A negative ``max_grad_norm`` turns clipping off, and one that is set after the Trainer was
    made holds.
    """
    for name, first, later in (("off", -1.0, -1.0), ("later", 1.0, 0.01)):
        found = []
        for kind in (transformers.Trainer, guarded()):
            trainer = make_trainer(
                kind, tmp_path / name, make_gpt2(), samples(), max_grad_norm=first
            )
            trainer.args.max_grad_norm = later
            trainer.train()
            found.append(digest(trainer.model))
        assert found[0] == found[1]


class OwnLoss(transformers.Trainer):
    """Ignores ``num_items_in_batch``, as most losses of one's own do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_mean_of_ones_own_is_weighted_by_the_labels_that_it_is_over(tmp_path: Path) -> None:
    """Two ragged batches of a GPT-2 whose loss shifts labels train as one large one, also where
    they are cut.
    """
    from holdfast.integrations.transformers import HoldfastMixin

    class Guarded(HoldfastMixin, OwnLoss):
        pass

    large = trained(OwnLoss, tmp_path / "a", make_gpt2(dropout=0.0), per_device_train_batch_size=8)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "holdfast_policy": {"recompute": False},
    }
    exact = trained(Guarded, tmp_path / "b", make_gpt2(dropout=0.0), **settings)
    assert distance(large.model, exact.model) < 1e-5
    model = Failing(make_gpt2(dropout=0.0), most=2, calls=range(5, 60))
    struck = trained(Guarded, tmp_path / "c", model, **settings)
    assert logged(struck, "out_of_memory")
    assert distance(large.model, model.inner) < 1e-5


def with_a_table(batch: Any) -> dict[str, Any]:
    """Collate samples with a tensor that all of them share."""
    return transformers.default_data_collator(batch) | {"table": torch.zeros(3, 2)}


def test_a_batch_without_one_batch_dimension_is_trained_and_cut_as_told(tmp_path: Path) -> None:
    """With splitting off it is trained as it is.

    Told where its dimension is, it is cut after out-of-memory.
    """
    settings: dict[str, Any] = {"remove_unused_columns": False, "data_collator": with_a_table}

    def model() -> Any:
        inner = Failing(make_gpt2(dropout=0.0), most=99, calls=range(0))
        inner.forward = lambda table=None, **named: Failing.forward(inner, **named)
        return inner

    plain = trained(transformers.Trainer, tmp_path / "a", model(), **settings)
    policy = {"micro_batch_size": None}
    whole = trained(guarded(), tmp_path / "b", model(), holdfast_policy=policy, **settings)
    assert digest(plain.model) == digest(whole.model)
    short = model()
    short.most, short.calls = 2, range(3, 40)
    split = {"input_ids": 0, "labels": 0, "table": None}
    policy = {"recompute": False}
    trained(
        guarded(), tmp_path / "c", short, holdfast_policy=policy, holdfast_split=split, **settings
    )
    assert distance(plain.model, short) < 1e-5


def test_several_devices_are_refused(tmp_path: Path) -> None:
    """DataParallel, an engine of its own and several processes are refused by name, also when
    set later.
    """
    trainer = make_trainer(guarded(), tmp_path, make_gpt2(), samples(LENGTH))
    trainer.args._n_gpu = 2
    with pytest.raises(PolicyError, match="n_gpu=2"):
        trainer.train()
    trainer.args._n_gpu = 0
    from accelerate.utils import DistributedType

    state = trainer.accelerator.state
    usual = state._shared_state["distributed_type"]
    try:
        state._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        with pytest.raises(PolicyError, match="DEEPSPEED"):
            trainer.train()
    finally:
        state._shared_state["distributed_type"] = usual


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_live_on_are_warned_of_before_training(
    tmp_path: Path, persistent: bool
) -> None:
    """With ``dataloader_persistent_workers=True`` a resume may differ, which is an event before
    the first step.
    """
    trained(
        guarded(),
        tmp_path,
        dataloader_num_workers=1,
        dataloader_persistent_workers=persistent,
        num_train_epochs=2,
    )
    events = read_events(tmp_path / "holdfast" / "recorder" / "rank0")
    steps = [event.global_step for event in events if event.kind == "resume_may_differ"]
    assert steps == ([0] if persistent else [])
