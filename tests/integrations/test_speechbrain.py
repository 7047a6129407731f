"""The real SpeechBrain, with and without holdfast; skipped by name where it cannot be imported.

Memory is really refused: 1 PiB is beyond the address space. NaN comes from the data.
"""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.out_of_memory import FailsAbove
from torch import nn

from holdfast.core.errors import CheckpointError, NonFiniteError, RunDirectoryError
from holdfast.recorder.reader import read_events
from holdfast.testing import flip_bit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the imports of SpeechBrain itself
    sb = pytest.importorskip("speechbrain", exc_type=ImportError, reason="run `make speechbrain`")
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.utils.checkpoints import Checkpointer

from holdfast.integrations.speechbrain import HoldfastMixin
from holdfast.integrations.speechbrain.padded_batches import split_padded

logging.getLogger("speechbrain").setLevel(logging.ERROR)
pytestmark = [pytest.mark.filterwarnings("ignore:.*recoverable is marked as optional")]


class Plain(sb.Brain):
    """A recogniser of one number, over padded batches, in two parameter groups."""

    fails_at: dict[int, int] = {}  # noqa: RUF012 - replaced, never changed

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        x, lengths = batch.x
        mask = torch.arange(x.shape[1]) < (lengths * x.shape[1]).round().unsqueeze(1)
        found = self.modules.model((x * mask).unsqueeze(2)).mean(1)
        return FailsAbove.apply(found, self.fails_at.get(self.step, 2**40))

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        return (predictions - batch.y.data).square().mean()

    def init_optimizers(self) -> None:
        model = self.modules.model
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        self.optimizers_dict = {"sgd": self.optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("sgd", self.optimizer)

    def on_fit_batch_end(
        self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool
    ) -> None:
        assert outputs.shape[0] == len(batch)
        self.seen.append((float(loss.detach()), outputs.shape[0], should_step))

    def on_stage_end(self, stage: Any, stage_loss: Any, epoch: Any = None) -> None:
        self.means.append(stage_loss)


class Guarded(HoldfastMixin, Plain):
    """The same, guarded."""


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))


def batches(count: int = 6, bad: int | None = None) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        items = [torch.randn(3 + place % 4, generator=generator) for place in range(8)]
        if number == bad:
            items[2][1] = math.nan
        found.append(
            PaddedBatch([{"id": str(n), "x": x, "y": x.sum().view(1)} for n, x in enumerate(items)])
        )
    return torch.utils.data.DataLoader(found, batch_size=None, collate_fn=lambda batch: batch)


def train(
    kind: type,
    folder: Path,
    data: Any,
    *,
    epochs: int = 2,
    checkpointer: Any = None,
    **options: Any,
) -> Any:
    made = {"holdfast_run_dir": folder / "holdfast"} if issubclass(kind, HoldfastMixin) else {}
    options = {"device": "cpu", "noprogressbar": True, "max_grad_norm": 1e6, **options}
    fails_at = options.pop("fails_at", {})
    brain = kind(
        {"model": options.pop("model", None) or model()},
        run_opts=options,
        checkpointer=checkpointer,
        **made,
    )
    brain.seen, brain.means, brain.fails_at = [], [], fails_at
    torch.manual_seed(11)
    brain.fit(range(1, epochs + 1), data)
    return brain


def weights(brain: Any) -> list[torch.Tensor]:
    return list(brain.modules.state_dict().values())


def assert_same(found: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(found), weights(expected), strict=True))


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder / "holdfast" / "recorder" / "rank0")]


@pytest.mark.parametrize("options", [{}, {"grad_accumulation_factor": 3}, {"precision": "bf16"}])
def test_an_undisturbed_training_is_speechbrains_own_bit_for_bit(tmp_path, options):
    """Weights, losses, outputs, should_step and stage means are those of plain SpeechBrain."""
    plain, guarded = (train(kind, tmp_path, batches(), **options) for kind in (Plain, Guarded))
    assert_same(guarded, plain)
    assert guarded.seen == plain.seen
    assert guarded.means == plain.means
    assert guarded.optimizer_step == plain.optimizer_step


def test_the_last_window_of_an_epoch_is_stepped_although_it_is_not_full(tmp_path):
    """Of seven batches in windows of three there are three steps in an epoch.

    SpeechBrain drops the last batch.
    """
    plain = train(Plain, tmp_path, batches(7), epochs=1, grad_accumulation_factor=3)
    guarded = train(Guarded, tmp_path, batches(7), epochs=1, grad_accumulation_factor=3)
    assert (plain.optimizer_step, guarded.optimizer_step) == (2, 3)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_padded_batch_that_does_not_fit_is_cut_and_training_ends_where_it_would_have(
    tmp_path, factor
):
    """After out-of-memory in backward, weights and losses are the undisturbed ones up to
    rounding, of all parts.
    """
    plain = train(Plain, tmp_path, batches(), grad_accumulation_factor=factor)
    guarded = train(
        Guarded, tmp_path, batches(), grad_accumulation_factor=factor, fails_at={2: 5, 6: 2}
    )
    for a, b in zip(weights(guarded), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [size for _, size, _ in guarded.seen].count(8) < 12 == len(guarded.seen)
    assert [loss for loss, _, _ in guarded.seen] == pytest.approx(
        [loss for loss, _, _ in plain.seen], rel=1e-4
    )
    assert "split" in kinds(tmp_path)
    with pytest.raises(RuntimeError, match="allocate"):
        train(Plain, tmp_path, batches(), fails_at={2: 5})


def test_parts_of_a_padded_batch_are_padded_batches():
    """Parts keep keys, padding and relative lengths, hold all samples in order, and move to a
    device as wholes do.
    """
    batch = next(iter(batches(1)))
    parts = split_padded(batch, 3)
    assert [len(part) for part in parts] == [part.batchsize for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.x.data for part in parts]), batch.x.data)
    assert torch.equal(torch.cat([part.x.lengths for part in parts]), batch.x.lengths)
    assert [name for part in parts for name in part.id] == batch.id
    parts[0].to(torch.float64)
    assert (parts[0].x.data.dtype, batch.x.data.dtype) == (torch.float64, torch.float32)


def test_every_parameter_group_is_clipped(tmp_path):
    """With a limit the step of all groups together is at most as long.

    SpeechBrain's second group runs free.
    """
    data = torch.utils.data.DataLoader(
        list(batches(1)), batch_size=None, collate_fn=lambda batch: batch
    )
    lengths = {}
    for kind in (Plain, Guarded):
        brain = train(kind, tmp_path / kind.__name__, data, epochs=1, max_grad_norm=0.01)
        moved = [
            a - b
            for a, b in zip(brain.modules.model.parameters(), model().parameters(), strict=True)
        ]
        lengths[kind] = torch.cat([each.detach().flatten() for each in moved]).norm().item() / 0.05
    assert lengths[Guarded] == pytest.approx(0.01, rel=1e-3)
    assert lengths[Plain] > 0.1


def test_a_batch_with_nan_leaves_no_trace(tmp_path):
    """Weights are those of a training without this batch, its loss stays NaN, and no step is
    reported for it.
    """
    data = list(batches(6, bad=3))
    without = torch.utils.data.DataLoader(
        [*data[:3], *data[4:]], batch_size=None, collate_fn=lambda batch: batch
    )
    plain = train(Plain, tmp_path / "plain", without, epochs=1)
    guarded = train(Guarded, tmp_path, batches(6, bad=3), epochs=1)
    assert_same(guarded, plain)
    assert math.isnan(guarded.seen[3][0])
    assert [should_step for _, _, should_step in guarded.seen] == [
        True,
        True,
        True,
        False,
        True,
        True,
    ]
    assert guarded.optimizer_step == 5
    assert {"skip_step", "nonfinite_origin"} <= set(kinds(tmp_path))
    spoiled = train(Plain, tmp_path / "spoiled", batches(6, bad=3), epochs=1)
    assert any(torch.isnan(each).any() for each in weights(spoiled))


@pytest.mark.parametrize("kind", [Plain, Guarded])
def test_patience_is_speechbrains(tmp_path, kind):
    """With a patience of 1 one NaN is passed over, and a second right after it ends training, as
    in SpeechBrain.
    """
    good, bad = list(batches(2)), next(iter(batches(1, bad=0)))

    def fed(*data: Any) -> Any:
        loader = torch.utils.data.DataLoader(
            list(data), batch_size=None, collate_fn=lambda batch: batch
        )
        return train(kind, tmp_path, loader, epochs=1, nonfinite_patience=1)

    assert len(fed(good[0], bad).seen) == 2
    with pytest.raises((NonFiniteError, ValueError)):
        fed(good[0], bad, bad, good[1])


class Alternating(Plain):
    """Two optimizers, by a ``fit_batch`` of its own."""

    def init_optimizers(self) -> None:
        model = self.modules.model
        parts = {"first": model[0], "second": model[3]}
        self.optimizers_dict = {
            name: torch.optim.Adam(part.parameters(), lr=0.05) for name, part in parts.items()
        }

    def one_loss(self, batch: Any) -> torch.Tensor:
        stage = sb.Stage.TRAIN
        return self.compute_objectives(self.compute_forward(batch, stage), batch, stage)

    def fit_batch(self, batch: Any) -> torch.Tensor:
        for name, optimizer in self.optimizers_dict.items():
            if isinstance(self, HoldfastMixin):
                loss = self.guarded_step(batch, self.one_loss, optimizer=name).loss
                continue
            self.modules.zero_grad()
            loss = self.one_loss(batch)
            loss.backward()
            optimizer.step()
        return loss.detach()


class GuardedAlternating(HoldfastMixin, Alternating):
    """The same, guarded."""

    fit_batch = Alternating.fit_batch


def test_a_brain_with_two_optimizers_makes_guarded_steps_of_its_own(tmp_path):
    """Alternating guarded steps give SpeechBrain's own weights, also where one of them was cut."""
    plain = train(Alternating, tmp_path / "plain", batches())
    assert_same(train(GuardedAlternating, tmp_path / "same", batches()), plain)
    short = train(GuardedAlternating, tmp_path / "short", batches(), fails_at={2: 3})
    for a, b in zip(weights(short), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert "split" in kinds(tmp_path / "short")


# --- checkpoints


class Saves(Plain):
    """Saves after each epoch, and counts epochs as recipes do."""

    def on_stage_end(self, stage: Any, stage_loss: Any, epoch: Any = None) -> None:
        super().on_stage_end(stage, stage_loss, epoch)
        self.step = 0  # as after the epoch
        self.modules.eval()
        self.checkpointer.save_and_keep_only(meta={"epoch": epoch}, num_to_keep=3)


class GuardedSaves(HoldfastMixin, Saves):
    """The same, guarded."""


def saving(kind: type, folder: Path, epochs: int, *, dropout: float = 0.0, factor: int = 1) -> Any:
    net = model()
    net[2].p = dropout
    counter = sb.utils.epoch_loop.EpochCounter(epochs)
    checkpointer = Checkpointer(folder / "save", {"model": net, "counter": counter})
    made = {"holdfast_run_dir": folder / "holdfast"} if issubclass(kind, HoldfastMixin) else {}
    options = {"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": factor}
    brain = kind({"model": net}, run_opts=options, checkpointer=checkpointer, **made)
    brain.seen, brain.means = [], []
    torch.manual_seed(11)
    loader = SaveableDataLoader(batches(4).dataset, batch_size=None, collate_fn=lambda batch: batch)
    checkpointer.add_recoverable("loader", loader)
    brain.fit(counter, loader)
    return brain


class Stopped(GuardedSaves):
    """Gets SIGTERM in its first batch, which is the first of a window."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_after_sigterm_the_window_is_finished_and_saved_and_training_goes_on_from_there(tmp_path):
    """The process ends with code 0 after a checkpoint at the end of a window, and the rest is
    bit-exact.
    """
    whole = saving(GuardedSaves, tmp_path / "whole", 1, dropout=0.4, factor=2)
    with pytest.raises(SystemExit) as ended:
        saving(Stopped, tmp_path / "cut", 1, dropout=0.4, factor=2)
    assert ended.value.code == 0
    resumed = saving(GuardedSaves, tmp_path / "cut", 1, dropout=0.4, factor=2)
    assert [loss for loss, _, _ in resumed.seen] == [loss for loss, _, _ in whole.seen[2:]]
    assert_same(resumed, whole)


def test_a_checkpoint_that_is_damaged_or_unfinished_is_passed_over(tmp_path):
    """A flipped bit and a save that was interrupted are set aside, and the newest that verifies
    is loaded.
    """
    saving(GuardedSaves, tmp_path, 3)
    third = max(
        (tmp_path / "save").glob("CKPT*"), key=lambda path: (path / "CKPT.yaml").stat().st_mtime_ns
    )
    flip_bit(third / "model.ckpt", 8 * 1500)
    unfinished = tmp_path / "save" / "CKPT+interrupted"
    unfinished.mkdir()
    (unfinished / "CKPT.yaml").write_text("end-of-epoch: true\nunixtime: 9999999999.0\nepoch: 9\n")
    brain = saving(GuardedSaves, tmp_path, 3)
    assert len(brain.seen) == 4  # the third epoch, again
    damaged = {path.name for path in (tmp_path / "save").glob("damaged-*")}
    assert damaged == {f"damaged-{third.name}", "damaged-CKPT+interrupted"}
    for path in (tmp_path / "save").glob("CKPT*"):
        flip_bit(path / "model.ckpt", 8 * 1500)
    with pytest.raises(CheckpointError, match="H312"):
        saving(GuardedSaves, tmp_path, 4)


def test_a_checkpoint_that_cannot_be_read_now_or_reached_is_kept(tmp_path, monkeypatch):
    """Neither an older one nor a new start takes its place.

    H307 for a fault that passes, H312 for a dead link.
    """
    saving(GuardedSaves, tmp_path, 2)
    newest = max(
        (tmp_path / "save").glob("CKPT*"), key=lambda path: (path / "CKPT.yaml").stat().st_mtime_ns
    )
    really_open = os.open

    def refuses(place: Any, *given: Any, **named: Any) -> Any:
        path = Path(place)
        if path.name == "model.ckpt" and newest in path.parents:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really_open(place, *given, **named)

    with monkeypatch.context() as patch, pytest.raises(RunDirectoryError, match="H307"):
        patch.setattr(os, "open", refuses)
        saving(GuardedSaves, tmp_path, 3)
    newest.rename(tmp_path / "moved")
    newest.symlink_to(tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match="H312"):
        saving(GuardedSaves, tmp_path, 3)
    assert newest.is_symlink()


def dies_in_its_first_save(folder: Path, meta_is_flushed: bool) -> None:
    """Train and be killed when the model is half on the disk."""

    def kills(obj: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        if not meta_is_flushed:
            os.truncate(path.with_name("CKPT.yaml"), 0)
        os.kill(os.getpid(), signal.SIGKILL)

    make = Checkpointer.__init__
    Checkpointer.__init__ = lambda self, *given: make(
        self, *given, custom_save_hooks={"model": kills}
    )
    saving(GuardedSaves, folder, 1)


@pytest.mark.parametrize("meta_is_flushed", [True, False])
def test_a_first_save_that_was_killed_is_not_loaded(tmp_path, caplog, meta_is_flushed):
    """Where nothing was ever whole training starts anew, and what was torn is set aside."""
    life = multiprocessing.get_context("spawn").Process(
        target=dies_in_its_first_save, args=(tmp_path, meta_is_flushed)
    )
    life.start()
    life.join()
    assert life.exitcode == -signal.SIGKILL
    (torn,) = (tmp_path / "save").glob("CKPT*")
    brain = saving(GuardedSaves, tmp_path, 1)
    assert len(brain.seen) == 4
    assert (tmp_path / "save" / f"damaged-{torn.name}").is_dir()
    assert re.search(rf"{re.escape(torn.name)}.*manifest\.json", caplog.text)


def test_a_save_that_fails_keeps_the_older_ones_and_training_goes_on(tmp_path, monkeypatch):
    """Where a file cannot be written, the draft is removed, nothing older is deleted, and all
    epochs are trained.
    """
    saving(GuardedSaves, tmp_path, 2)
    before = {path.name for path in (tmp_path / "save").glob("CKPT*")}

    def refuses(obj: Any, path: Path) -> None:
        path.with_name("sub").mkdir()
        (path.with_name("sub") / "is a file").write_text("")
        (path.with_name("sub") / "is a file" / "below").write_text("")

    make = Checkpointer.__init__

    def with_refusal(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, custom_save_hooks={"model": refuses}, **kwargs)

    monkeypatch.setattr(Checkpointer, "__init__", with_refusal)
    brain = saving(GuardedSaves, tmp_path, 4)
    assert len(brain.seen) == 8
    assert {path.name for path in (tmp_path / "save").glob("CKPT*")} == before
    assert kinds(tmp_path).count("save_failed") == 2
