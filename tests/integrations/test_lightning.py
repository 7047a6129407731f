"""The real Lightning, with and without holdfast.

Equal where nothing goes wrong, and what is kept where it does.

Memory is really refused: 1 PiB is beyond the address space. NaN comes from the data.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.out_of_memory import FailsAbove
from tests.prepared import FRAMEWORKS, run_prepared
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.core.errors import CheckpointError, NonFiniteError, PolicyError, RunDirectoryError
from holdfast.recorder.reader import read_events
from holdfast.testing import flip_bit

pytest.importorskip("lightning.pytorch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the imports of Lightning itself
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch.callbacks import (
        Callback,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.tuner import Tuner
    from torchmetrics import MeanMetric

    from holdfast.integrations.lightning import HoldfastStrategy, VerifiedCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::lightning.pytorch.utilities.rank_zero.LightningDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available on your system"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
unchecked = pytest.mark.usefixtures("unchecked_splits")  # where what is cut is not the subject
SIZE = 8


class Small(pl.LightningModule):
    """A regression with the layers that a retry could disturb."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [
            nn.Linear(5, 16),
            *([nn.BatchNorm1d(16)] if norm else []),
            nn.Tanh(),
            nn.Dropout(dropout),
        ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(16, 1)
        self.seen = MeanMetric()
        self.fails_at: dict[int, int] = {}
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        limit = self.fails_at.get(batch_idx, 2**40)
        loss = F.mse_loss(self.head(FailsAbove.apply(self.body(x), limit)), y)
        self.seen.update(y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "mean": y.mean()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Unscheduled(Small):
    """The same without a schedule, which the strategy holds where a step is skipped and
    Lightning does not.
    """

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def _note(name: str) -> Any:
    def hook(self: Any, *_: Any, **__: Any) -> None:
        self.calls.append(name)

    return hook


class Seen(Callback):
    """Notes what Lightning calls and logs, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.rates: list[float] = []

    on_before_zero_grad = _note("zero")
    on_before_backward = _note("before_backward")
    on_after_backward = _note("after_backward")
    on_before_optimizer_step = _note("before_step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.calls.append("end")
        self.losses.append(float(outputs["loss"]))
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def batches(count: int = 7, bad: int | None = None) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        x = torch.randn(SIZE, 5, generator=generator)
        y = x.sum(1, keepdim=True) + 3
        if number == bad:
            x[2, 1] = math.nan
        found.append((x, y))
    return found


def quiet(folder: Path) -> dict[str, Any]:
    return {
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "default_root_dir": folder,
    }


def fit(
    module: Any, folder: Path, data: Any, *, ckpt_path: Any = None, **given: Any
) -> tuple[Any, Seen]:
    seen = Seen()
    callbacks = [seen, *given.pop("callbacks", [])]
    trainer = pl.Trainer(callbacks=callbacks, **(quiet(folder) | given))
    torch.manual_seed(11)
    trainer.fit(module, train_dataloaders=as_loader(data), ckpt_path=ckpt_path)
    return trainer, seen


def as_loader(data: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None) if isinstance(data, list) else data


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [value for key, value in module.state_dict().items() if not key.startswith("seen")]


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    pairs = list(zip(weights(found), weights(expected), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder / "holdfast" / "recorder" / "rank0")]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"},
    ],
    ids=["plain", "accumulated", "clipped by value"],
)
def test_an_undisturbed_training_is_lightnings_own_bit_for_bit(tmp_path, settings):
    """Weights, losses, logs, rates, counters and the order of hooks are those of plain
    Lightning.
    """
    plain, guarded = Small(), Small()
    expected, usual = fit(plain, tmp_path / "plain", batches(), **settings)
    found, seen = fit(
        guarded, tmp_path / "guarded", batches(), strategy=HoldfastStrategy(), **settings
    )
    assert_same(guarded, plain)
    assert (seen.losses, seen.rates) == (usual.losses, usual.rates)
    assert seen.logged == usual.logged
    assert found.global_step == expected.global_step
    if "accumulate_grad_batches" not in settings:
        assert seen.calls == usual.calls
    assert sorted(seen.calls) == sorted(usual.calls)
    assert "skip_step" not in kinds(tmp_path / "guarded")


class EverySecond(Unscheduled):
    """Steps every second batch only, and runs the closure for the others, as Lightning's manual
    shows it.
    """

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "makes"),
    [
        (Unscheduled, lambda: [GradientAccumulationScheduler({0: 4, 1: 2})]),
        (Unscheduled, lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
        (EverySecond, list),
    ],
    ids=["other windows in each epoch", "averaged weights", "an optimizer step of one's own"],
)
def test_callbacks_that_reach_into_steps_are_as_in_plain_lightning(tmp_path, kind, makes):
    """Windows that change between epochs, batches without a backward pass, closures without a
    step: bit for bit.
    """
    plain, watched = kind(), kind()
    _, usual = fit(plain, tmp_path / "plain", batches(8), max_epochs=3, callbacks=makes())
    _, seen = fit(
        watched,
        tmp_path / "guarded",
        batches(8),
        max_epochs=3,
        callbacks=makes(),
        strategy=HoldfastStrategy(),
    )
    assert_same(watched, plain)
    assert seen.losses == usual.losses


@pytest.mark.parametrize(
    ("init_scale", "layers"),
    [(2.0**7, {}), (2.0**22, {"norm": False, "dropout": 0.0})],
    ids=["no overflow", "overflows"],
)
def test_fp16_is_lightnings_own_bit_for_bit(tmp_path, init_scale, layers):
    """In fp16, from the scale of the user's scaler on, weights and losses are Lightning's, skipped
    steps included.

    Lightning turns ``precision="16-mixed"`` into bf16 on a CPU; given as a plugin it trains in fp16
    there. A skipped step leaves BatchNorm and random numbers alone under holdfast only, hence other
    layers where one is skipped.
    """
    found = {}
    for name, own in {"plain": {}, "guarded": {"strategy": HoldfastStrategy()}}.items():
        module, scaler = Unscheduled(**layers), torch.amp.GradScaler("cpu", init_scale=init_scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        _, seen = fit(
            module, tmp_path / name, batches(), plugins=[plugin], gradient_clip_val=0.5, **own
        )
        found[name] = module, seen.losses
    (plain, losses), (guarded, same) = found["plain"], found["guarded"]
    assert not torch.equal(plain.head.weight, Unscheduled(**layers).head.weight)
    assert_same(guarded, plain)
    assert same == losses
    assert ("loss_scale_lowered" in kinds(tmp_path / "guarded")) is bool(layers)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_batch_that_does_not_fit_is_cut_and_training_ends_where_it_would_have(
    tmp_path, accumulated
):
    """After out-of-memory in backward, weights, losses and logged means are the undisturbed ones
    up to rounding.
    """
    plain, guarded = Small(norm=False, dropout=0.0), Small(norm=False, dropout=0.0)
    _, usual = fit(plain, tmp_path / "plain", batches(), accumulate_grad_batches=accumulated)
    guarded.fails_at = {1: 5, 4: 3}
    _, seen = fit(
        guarded,
        tmp_path / "guarded",
        batches(),
        strategy=HoldfastStrategy(),
        accumulate_grad_batches=accumulated,
    )
    for a, b in zip(weights(guarded), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert seen.losses == pytest.approx(usual.losses, rel=1e-4)
    for mine, theirs in zip(seen.logged, usual.logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert "split" in kinds(tmp_path / "guarded")


def test_a_batch_with_nan_leaves_no_trace_and_the_schedule_waits(tmp_path):
    """Weights, BatchNorm and rates are those of a training without this batch.

    The log keeps its NaN.
    """
    data = batches(7, bad=3)
    plain, guarded = Small(dropout=0.0), Small(dropout=0.0)
    _, usual = fit(plain, tmp_path / "plain", [*data[:3], *data[4:]], max_epochs=1)
    trainer, seen = fit(
        guarded, tmp_path / "guarded", data, max_epochs=1, strategy=HoldfastStrategy()
    )
    assert_same(guarded, plain)
    assert seen.rates[:3] + seen.rates[4:] == usual.rates
    assert math.isnan(seen.losses[3])
    assert math.isnan(seen.logged[3]["loss_step"])
    assert trainer.global_step == 7
    assert {"skip_step", "nonfinite_origin"} <= set(kinds(tmp_path / "guarded"))


@unchecked
@pytest.mark.parametrize(("accumulated", "bad"), [(1, 3), (3, 3), (3, 4), (3, 5)])
def test_a_window_with_a_batch_of_nan_leaves_no_trace(tmp_path, accumulated, bad):
    """Wherever in a step of three batches the NaN is, training goes on as if these three had not
    been there.
    """
    data, given = batches(9, bad=bad), {"accumulate_grad_batches": accumulated, "max_epochs": 1}
    plain, guarded = Unscheduled(), Unscheduled()
    fit(plain, tmp_path / "plain", [*data[:3], *data[3 + accumulated :]], **given)
    fit(guarded, tmp_path / "guarded", data, **given, strategy=HoldfastStrategy())
    assert_same(guarded, plain)
    assert "skip_step" in kinds(tmp_path / "guarded")


@unchecked
def test_nan_that_persists_ends_training_with_a_reason(tmp_path):
    """After the patience of the policy training ends with H501, and the run directory is free
    again.
    """
    with pytest.raises(NonFiniteError, match="H501"):
        bad = [(x * math.nan, y) for x, y in batches()]
        fit(Small(), tmp_path, bad, strategy=HoldfastStrategy({"nonfinite_patience": 2}))
    fit(Small(), tmp_path, batches(2), strategy=HoldfastStrategy({"nonfinite_patience": 2}))


def test_sigterm_ends_training_after_the_batch_with_a_checkpoint(tmp_path):
    """The batch that is under way is finished, and what is saved then verifies and holds the
    step.
    """

    class Ends(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(Small(), tmp_path, batches(), callbacks=[Ends()], strategy=HoldfastStrategy())
    found = VerifiedCheckpointIO().load_checkpoint(tmp_path / "checkpoints" / "stopped-step=5.ckpt")
    assert found["global_step"] == 5


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_other_signals_end_training_as_sigterm_does(tmp_path, name):
    """With the exit code of the policy, and a checkpoint of the step that was under way."""
    before = signal.signal(getattr(signal, name), signal.SIG_DFL)

    class Ends(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(SystemExit) as raised:
        fit(
            Small(),
            tmp_path,
            batches(),
            callbacks=[Ends()],
            strategy=HoldfastStrategy({"stop_exit_code": 85}),
        )
    signal.signal(getattr(signal, name), before)
    assert raised.value.code == 85
    found = VerifiedCheckpointIO().load_checkpoint(tmp_path / "checkpoints" / "stopped-step=5.ckpt")
    assert found["global_step"] == 5


def test_the_signal_that_requeues_a_slurm_job_is_lightnings(tmp_path):
    """Lightning saves and requeues upon it by a handler of its own, which is called.

    The guard stops nothing.
    """
    requeued: list[int] = []

    class Requeues(SLURMEnvironment):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """Take the one process that there is."""

    class Signalled(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            connector = trainer._signal_connector
            vars(connector)["_slurm_sigusr_handler_fn"] = lambda number, _: requeued.append(number)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SLURM_NTASKS", "SLURM_JOB_ID"):
            patch.setenv(variable, "1")
        for variable in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
            patch.setenv(variable, "0")
        strategy = HoldfastStrategy()
        before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        fit(
            Small(),
            tmp_path,
            batches(),
            callbacks=[Signalled()],
            strategy=strategy,
            plugins=[Requeues()],
        )
        signal.signal(signal.SIGUSR1, before)
    assert requeued == [signal.SIGUSR1]
    # Nor does the guard stop before the end of the job, so it does not ask Slurm for it.
    assert not {"stop_requested", "end_of_job_unknown"} & set(kinds(tmp_path))


# --- manual optimization


class Gan(pl.LightningModule):
    """Two networks, alternating, with or without the guard."""

    automatic_optimization = False

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator, self.discriminator = (
            nn.Linear(3, 5),
            nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)),
        )
        self.guarded, self.limit = guarded, 2**40

    def generator_loss(self, batch: Any) -> torch.Tensor:
        fake = FailsAbove.apply(self.generator(batch[1]), self.limit)
        loss = F.softplus(-self.discriminator(fake)).mean()
        self.log("generator", loss)
        return loss

    def discriminator_loss(self, batch: Any) -> torch.Tensor:
        real, noise = batch
        fake = self.generator(noise).detach()
        loss = (
            F.softplus(self.discriminator(fake)).mean()
            + F.softplus(-self.discriminator(real)).mean()
        )
        self.log("discriminator", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.limit = 3 if batch_idx == 2 and self.guarded == "short" else 2**40
        for optimizer, loss_fn in zip(
            self.optimizers(), (self.generator_loss, self.discriminator_loss), strict=True
        ):
            if self.guarded:
                self.trainer.strategy.guarded_step(batch, loss_fn, optimizer=optimizer)
                continue
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_fn(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=0.05) for part in parts], []


def test_a_gan_by_manual_optimization_is_the_same_with_a_guard_and_outlives_a_lack_of_memory(
    tmp_path,
):
    """Alternating guarded steps give the weights, logs and counter of Lightning's own, also
    where one was cut.
    """
    data = [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(4)]

    def train(guarded: Any, name: str, **settings: Any) -> tuple[Gan, Any]:
        module = Gan(guarded=guarded)
        trainer = pl.Trainer(**quiet(tmp_path / name), **settings)
        trainer.fit(module, train_dataloaders=as_loader(data))
        return module, trainer

    plain, usual = train(False, "plain")
    policy = {"objective": "adversarial"}
    same, found = train(True, "same", strategy=HoldfastStrategy(policy))
    assert_same(same, plain)
    assert found.global_step == usual.global_step == 16
    assert found.callback_metrics == usual.callback_metrics
    short, found = train("short", "short", strategy=HoldfastStrategy(policy))
    for a, b in zip(weights(short), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "split" in kinds(tmp_path / "short")


def test_manual_optimization_is_clipped_by_the_policy_and_steps_past_the_guard_are_told(tmp_path):
    """Lightning refuses ``gradient_clip_val`` there, so the policy's limit holds.

    Unguarded steps are an event.
    """
    data = [(torch.randn(8, 5), torch.randn(8, 3))]
    for guarded in (True, False):
        module = Gan(guarded=guarded)
        module.configure_optimizers = lambda module=module: (
            [
                torch.optim.SGD(part.parameters(), lr=1.0)
                for part in (module.generator, module.discriminator)
            ],
            [],
        )
        before = [each.clone() for each in weights(module.generator)]
        strategy = HoldfastStrategy({"max_grad_norm": 1e-3, "objective": "adversarial"})
        trainer = pl.Trainer(
            **(quiet(tmp_path / str(guarded)) | {"max_epochs": 1}), strategy=strategy
        )
        trainer.fit(module, as_loader(data))
        moved = torch.cat(
            [(a - b).flatten() for a, b in zip(weights(module.generator), before, strict=True)]
        ).norm()
        assert (moved.item() == pytest.approx(1e-3, rel=1e-2)) is guarded
        assert ("own_steps" in kinds(tmp_path / str(guarded))) is not guarded


# --- checkpoints


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(0, 1, 5) * index / 40 + 0.01 * torch.randn(5)  # an augmentation
        return x, x.sum().view(1)


def loader() -> Any:
    return holdfast.DataLoader(Samples(), batch_size=8, shuffle=True, seed=4)


class SavesAt(Callback):
    """Saves after one batch, whatever that is in the middle of."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@unchecked
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_checkpoint_in_the_middle_of_a_step_holds_what_its_batches_have_left(tmp_path, batch):
    """After any batch of a window of three, training goes on bit for bit.

    The gradients so far are in the file.
    """
    options: dict[str, Any] = {
        "strategy": "holdfast",
        "accumulate_grad_batches": 3,
        "max_epochs": 1,
    }
    saved, whole, resumed = tmp_path / "a.ckpt", Small(), Small()
    fit(whole, tmp_path / "whole", loader(), callbacks=[SavesAt(saved, batch)], **options)
    _, seen = fit(resumed, tmp_path / "rest", loader(), ckpt_path=str(saved), **options)
    assert len(seen.losses) == 4 - batch
    assert_same(resumed, whole)


@unchecked
def test_a_resume_does_not_replace_the_checkpoint_that_it_came_from(tmp_path):
    """The first batch of a step of two makes no step.

    What was saved at the step before stays as it is.
    """
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "enable_checkpointing": True,
        "strategy": "holdfast",
    }

    def saves() -> list[Any]:
        return [
            ModelCheckpoint(
                dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}"
            )
        ]

    fit(Small(), tmp_path, batches(8), max_epochs=1, callbacks=saves(), **options)
    first = tmp_path / "step=4.ckpt"
    before = first.stat().st_mtime_ns
    fit(
        Small(),
        tmp_path,
        batches(8),
        max_epochs=2,
        callbacks=saves(),
        ckpt_path=str(first),
        **options,
    )
    assert (tmp_path / "step=8.ckpt").exists()
    assert first.stat().st_mtime_ns == before


class Order(Callback):
    """Notes the targets of each batch, which are of other samples, otherwise augmented, in each."""

    def __init__(self) -> None:
        self.batches: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(float(batch[1].sum()))


@unchecked
@pytest.mark.parametrize("strategy", ["auto", "holdfast"])
@pytest.mark.parametrize(
    "saves", [{"every_n_train_steps": 5}, {"every_n_epochs": 1}], ids=["batch", "epoch"]
)
def test_no_epoch_is_left_out_or_repeated_after_a_checkpoint_at_the_end_of_one(
    tmp_path, strategy, saves
):
    """Plain Lightning too goes on with the next epoch of a holdfast loader, in its order."""
    whole, rest = Order(), Order()
    fit(Small(), tmp_path / "whole", loader(), strategy=strategy, max_epochs=3, callbacks=[whole])
    given: dict[str, Any] = {"enable_checkpointing": True, "strategy": strategy}
    given["callbacks"] = [ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1, **saves)]
    fit(Small(), tmp_path / "cut", loader(), max_epochs=1, **given)
    (saved,) = map(str, (tmp_path / "saved").glob("*.ckpt"))
    goes_on = {"strategy": strategy, "max_epochs": 3, "callbacks": [rest], "ckpt_path": saved}
    trainer, _ = fit(Small(), tmp_path / "cut", loader(), **goes_on)
    assert trainer.global_step == 15
    assert rest.batches == whole.batches[5:]


class Validated(Small):
    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Samples(), batch_size=20)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", batch[1].mean())


def validated(folder: Path, monitor: str | None, interval: float, *dies: str) -> Validated:
    """Train three epochs of five steps, to the end or, from step 10 on, to death in a hook.

    Return the module.
    """

    def die(_: Any, trainer: Any, *__: Any) -> None:
        if trainer.global_step >= 10:
            os.kill(os.getpid(), signal.SIGKILL)

    saves = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, monitor=monitor)
    callbacks = [type("Dies", (Callback,), dict.fromkeys(dies, die))(), saves]
    given = {
        "strategy": "holdfast",
        "ckpt_path": "last",
        "callbacks": callbacks,
        "val_check_interval": interval,
    }
    given |= {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    return fit(Validated(), folder, loader(), **given)[0].lightning_module


@unchecked
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("given", [(None, 1.0), ("validated", 1.0), (None, 2)])
@pytest.mark.parametrize("dies", ["on_validation_start", "on_train_batch_start"])
def test_a_validation_that_follows_a_save_is_not_left_out_after_a_kill(tmp_path, given, dies):
    """Killed in a validation at a step that saves, or after it, training ends as if undisturbed."""
    program = (
        f"import {__name__} as t; t.validated(t.Path({str(tmp_path)!r}, 'cut'), *{given}, {dies!r})"
    )
    life = run_prepared(
        ["-c", program], cwd=Path(__file__).parents[2], timeout=300, loaded=FRAMEWORKS
    )
    assert life.returncode == -signal.SIGKILL, life.stderr
    assert_same(validated(tmp_path / "cut", *given), validated(tmp_path / "calm", *given))


def test_the_tuner_leaves_no_file(tmp_path):
    """What ``lr_find`` saves to go back to is removed, although it is the only file that
    verifies.
    """
    module = Unscheduled()
    module.lr = 0.02
    trainer = pl.Trainer(**quiet(tmp_path), strategy=HoldfastStrategy())
    Tuner(trainer).lr_find(module, as_loader(batches()), num_training=3, update_attr=False)
    assert list(tmp_path.glob("*.ckpt*")) == []


def _saved(tmp_path: Path, **given: Any) -> list[Path]:
    saves = ModelCheckpoint(
        dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    fit(
        Small(),
        tmp_path,
        batches(),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saves],
        **given,
    )
    return sorted((tmp_path / "saved").glob("*.ckpt"))


@unchecked
def test_a_checkpoint_with_a_flipped_bit_is_not_loaded_but_the_one_before(tmp_path):
    """The flipped bit is found, training goes on from the newest file that verifies, and if none
    does it says so.
    """
    second, third, fourth = _saved(tmp_path, strategy=HoldfastStrategy())
    flip_bit(fourth, 8 * 3000)
    given = {"max_epochs": 1, "ckpt_path": str(fourth), "strategy": HoldfastStrategy()}
    trainer, seen = fit(Small(), tmp_path, batches(), **given)
    assert len(seen.losses) == 3  # of seven, from step 4
    assert trainer.global_step == 7
    for path in (second, third):
        flip_bit(path, 8 * 3000)
    with pytest.raises(CheckpointError, match="H312"):
        VerifiedCheckpointIO().load_checkpoint(str(fourth))


def test_weights_with_nan_are_not_saved_and_the_last_good_file_is_not_removed(tmp_path, caplog):
    """A poisoned state never becomes a checkpoint, and rotation leaves a file that verifies."""
    files = VerifiedCheckpointIO()
    good = {"state_dict": {"weight": torch.ones(3), "mask": torch.full((2,), -math.inf)}}
    files.save_checkpoint(good, tmp_path / "good.ckpt")
    files.save_checkpoint(
        {"state_dict": {"weight": torch.tensor([1.0, math.nan])}}, tmp_path / "bad.ckpt"
    )
    assert not (tmp_path / "bad.ckpt").exists()
    files.remove_checkpoint(tmp_path / "good.ckpt")
    assert files.load_checkpoint(tmp_path / "good.ckpt")["state_dict"]["weight"].tolist() == [
        1,
        1,
        1,
    ]
    files.save_checkpoint(good, tmp_path / "better.ckpt")
    files.remove_checkpoint(tmp_path / "good.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "better.ckpt",
        "better.ckpt.manifest.json",
    ]
    refused, kept = [record.message for record in caplog.records]
    assert "bad.ckpt" in refused
    assert "good.ckpt" in kept


@unchecked
def test_a_disk_that_refuses_a_save_does_not_end_training(tmp_path):
    """A save into a place that cannot be written is an event, and every step is made."""
    saved = tmp_path / "saved"

    class Breaks(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 0:
                saved.write_text("a file where the folder should be")

    saves = ModelCheckpoint(dirpath=saved, every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {
        "callbacks": [Breaks(), saves],
        "enable_checkpointing": True,
        "max_epochs": 1,
    }
    trainer, _ = fit(Small(), tmp_path / "run", batches(), strategy=HoldfastStrategy(), **options)
    assert trainer.global_step == 7
    assert "save_failed" in kinds(tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "goes_on"), [(errno.ESTALE, False), (errno.EMFILE, False), (errno.EIO, True)]
)
def test_only_lost_bytes_lead_back_to_an_older_file(tmp_path, monkeypatch, number, goes_on):
    """A file that cannot be read now is an H307, and none older is taken.

    What the disk has lost is damage.
    """
    files = VerifiedCheckpointIO()
    for step in (1, 2):
        files.save_checkpoint(
            {"state_dict": {"weight": torch.full((3,), float(step))}}, tmp_path / f"{step}.ckpt"
        )
    really_open = os.open

    def refuses(place: Any, *given: Any, **named: Any) -> Any:
        path = Path(place)
        if path.name == "2.ckpt":
            raise OSError(number, os.strerror(number), str(path))
        return really_open(place, *given, **named)

    monkeypatch.setattr(os, "open", refuses)
    if goes_on:
        assert files.load_checkpoint(tmp_path / "2.ckpt")["state_dict"]["weight"].tolist() == [
            1,
            1,
            1,
        ]
    else:
        with pytest.raises(RunDirectoryError, match="H307"):
            files.load_checkpoint(tmp_path / "2.ckpt")
    files.remove_checkpoint(tmp_path / "1.ckpt")
    assert (tmp_path / "1.ckpt").exists(), "the only one of which it is known that it is whole"


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_checkpoint_on_a_disk_that_is_not_mounted_is_no_new_start(tmp_path):
    """A link that leads nowhere is an H312, where it is named and where the training would begin
    anew beside it.
    """
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "last.ckpt").symlink_to(tmp_path / "not mounted" / "last.ckpt")
    with pytest.raises(CheckpointError, match="H312"):
        VerifiedCheckpointIO().load_checkpoint(saved / "last.ckpt")
    saves = ModelCheckpoint(dirpath=saved, save_last=True)
    with pytest.raises(CheckpointError, match="H312"):
        fit(
            Small(),
            tmp_path / "run",
            batches(),
            strategy=HoldfastStrategy(),
            ckpt_path="last",
            callbacks=[saves],
            enable_checkpointing=True,
        )


# --- what cannot be


@unchecked
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_what_contradicts_the_trainer_or_cannot_be_guarded_is_said_before_training(tmp_path):
    """A policy against the trainer's clipping, an overridden backward, no loss.

    Errors with a fix, and no step.
    """
    silent = Small()
    silent.training_step = lambda batch: None
    with pytest.raises(PolicyError, match="H111"):
        fit(silent, tmp_path, batches(), strategy=HoldfastStrategy())
    with pytest.raises(PolicyError, match="H109"):
        fit(
            Small(),
            tmp_path,
            batches(),
            strategy=HoldfastStrategy({"max_grad_norm": 2.0}),
            gradient_clip_val=1.0,
        )

    class Own(Small):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    with pytest.raises(PolicyError, match="guarded_step"):
        fit(Own(), tmp_path, batches(), strategy=HoldfastStrategy())
    trainer, _ = fit(Small(), tmp_path, batches(), strategy="holdfast")
    assert trainer.global_step == 14
    for strategy in ("holdfast", HoldfastStrategy()):
        with pytest.raises(PolicyError, match="H108"):
            pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False)


@unchecked
@pytest.mark.slow
def test_workers_that_live_on_are_warned_of_before_training(tmp_path):
    """With ``persistent_workers=True`` a resume may differ, which is an event before the first
    step.
    """
    loader = torch.utils.data.DataLoader(
        batches(3), batch_size=None, shuffle=True, num_workers=1, persistent_workers=True
    )
    fit(Small(), tmp_path, loader, max_epochs=2, strategy=HoldfastStrategy())
    recorded = read_events(tmp_path / "holdfast" / "recorder" / "rank0")
    assert [event.global_step for event in recorded if event.kind == "resume_may_differ"] == [0]
