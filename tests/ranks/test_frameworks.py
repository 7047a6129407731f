"""Frameworks on several ranks.

The same steps as by themselves, and one truth where a rank differs.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_ranks import weights
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from holdfast.recorder.reader import read_events
from holdfast.testing import flip_bit

pytestmark = pytest.mark.slow
WIDTH, CLASSES = 5, 3


def as_torchrun(rank, world_size):
    """Set what a launcher sets; the process group is there already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}


def data(samples=24, bad=()):
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs[list(bad)] = torch.nan
    return TensorDataset(inputs, torch.arange(samples) % CLASSES)


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, CLASSES),
    )


def accelerated(rank, run, world_size, *, guarded, accumulate=1, epochs=2, bad=()):
    """Train with Accelerate, by itself or under a guard.

    Return weights, the learning rate and what was skipped.
    """
    accelerate = pytest.importorskip("accelerate")
    as_torchrun(rank, world_size)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, project_dir=run
    )
    assert accelerator.num_processes == world_size
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data(bad=bad), batch_size=2, shuffle=True), scheduler
    )
    torch.manual_seed(rank)

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    skipped = []
    if guarded:
        from holdfast.integrations.accelerate import accelerate_guard

        parts = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
        guard = accelerate_guard(
            accelerator, **parts, max_grad_norm=0.5, save_interval_steps=2, async_save=False
        )
        skipped = [guard.step(batch, loss_fn).skipped for batch in guard.batches(max_epochs=epochs)]
        guard.close()
    else:
        for batch in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model), optimizer.param_groups[0]["lr"], skipped


def accelerated_by_itself_and_guarded(rank, run, world_size, accumulate):
    from accelerate.state import AcceleratorState, GradientState

    found = []
    for guarded in (False, True):
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        run_of = f"{run}/{guarded}"
        found.append(
            accelerated(rank, run_of, world_size, guarded=guarded, accumulate=accumulate)[:2]
        )
    return found


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2)])
def test_accelerate_on_several_ranks_trains_as_by_itself(tmp_path, world_size, accumulate):
    """Dropout, shuffling, clipping, a schedule that counts all processes, windows: bit for bit."""
    given = world_size, accumulate
    ends = run_ranks(accelerated_by_itself_and_guarded, world_size, tmp_path, *given)
    for (of_itself, rate), (found, guarded_rate) in all_returned(ends):
        assert rate == guarded_rate
        assert torch.equal(of_itself, found) or (
            accumulate > 1 and torch.allclose(of_itself, found, rtol=1e-5)
        )


def accelerated_in_parts(rank, run, epochs):
    """Train until the end of each of these epochs, in one run directory; sample 7 is NaN."""
    from accelerate.state import AcceleratorState, GradientState

    for until in epochs:
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        found = accelerated(rank, run, 2, guarded=True, epochs=until, bad=(7,))
    return found


def test_accelerate_resumes_and_skips_on_all_ranks(tmp_path):
    """A run of two parts equals one of one part; NaN on one rank is skipped by both."""

    def train(run, epochs):
        return all_returned(run_ranks(accelerated_in_parts, 2, tmp_path / run, epochs))

    for (whole, _, skipped), (resumed, _, then_skipped) in zip(
        train("a", (3,)), train("b", (1, 3)), strict=True
    ):
        assert torch.equal(whole, resumed)
        assert (skipped.count(True), then_skipped.count(True)) == (3, 2)


def in_trainers(run, kinds, settings):
    """Train with these kinds of a Trainer on two ranks; return for each what `train_each` does."""
    pytest.importorskip("transformers")
    from tests.ranks import trainer_training  # imports it once for all ranks

    return all_returned(run_ranks(trainer_training.train_each, 2, run, kinds, settings))


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}]
)
def test_a_trainer_on_several_ranks_trains_as_by_itself(tmp_path, settings):
    """Tokens counted over all ranks, or means of each; dropout and accumulation: bit for bit."""
    kinds = [(False, 6), (True, 6)]
    for (of_itself, losses), (found, of_guarded) in in_trainers(tmp_path, kinds, settings):
        assert (found, of_guarded) == (of_itself, losses)


def test_a_trainer_resumes_on_several_ranks(tmp_path):
    """Two parts are one run, also where the newest checkpoint is damaged.

    All take the one before.
    """
    saves = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}

    def train(name, kinds):
        return in_trainers(tmp_path / name, kinds, saves)

    whole = train("whole", [(True, 6)])
    train("parts", [(True, 4)])
    (state,) = (tmp_path / "parts" / "same" / "checkpoint-4").glob("rng_state_1*")
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert train("parts", [(True, 6)]) == whole
    assert (tmp_path / "parts" / "same" / "damaged-checkpoint-4").is_dir()


def in_lightning(run, trainings):
    """Fit in one training after the other on two ranks.

    Return for each rank what `lightning_training.fit` does.
    """
    pytest.importorskip("lightning.pytorch")
    from tests.ranks import lightning_training  # imports it once for all ranks

    return all_returned(run_ranks(lightning_training.fit_each, 2, run, trainings))


def test_lightning_on_several_ranks_trains_as_by_itself(tmp_path):
    """Undisturbed, and where one rank had no memory, bit for bit.

    NaN of one is skipped by both, or all refuse.
    """
    trainings = {
        "plain": {"guarded": False},
        "guarded": {},
        "memory": {"fails": (1, 3)},
        "nan": {"bad": (7,)},
        "window": {"accumulate_grad_batches": 2},
        "manual": {"manual": True, "gradient_clip_val": None},
        "sync": {"sync": True},
    }
    first, second = in_lightning(tmp_path, trainings)
    for found in (first, second):
        for name in ("guarded", "memory"):
            assert torch.equal(found[name][0], found["plain"][0])
            assert found[name][1:] == found["plain"][1:]
        assert torch.equal(found["nan"][0], first["nan"][0])
        assert not torch.equal(found["nan"][0], found["plain"][0])
        for name, word in (
            ("window", "accumulate_grad"),
            ("manual", "manual opt"),
            ("sync", "sync_dist"),
        ):
            assert word in found[name]
            assert "H111" in found[name]
    for rank in ("rank0", "rank1"):
        events = read_events(tmp_path / "nan" / "holdfast" / "recorder" / rank)
        assert [
            "rank 0: NaN in the batch" in str(event)
            for event in events
            if event.kind == "skip_step"
        ] == [True] * 2


def test_lightning_stops_and_resumes_on_several_ranks(tmp_path):
    """SIGTERM on one rank ends both with one checkpoint.

    Damaged, it leads both to the one before: always exact.
    """
    whole = {"own_loader": True, "max_epochs": 3}
    saved = tmp_path / "parts" / "saved" / "stopped-step=8.ckpt"
    trainings = {
        "whole": whole,
        "parts": {**whole, "saves": {"every_n_train_steps": 3}, "stops": (1, 7)},
        "rest": {**whole, "ckpt_path": saved},
        "epochs": {"max_epochs": 3},
        "epoch": {"max_epochs": 1, "saves": {"every_n_epochs": 1}},
        "epochs later": {
            "max_epochs": 3,
            "ckpt_path": tmp_path / "epoch" / "saved" / "step=6.ckpt",
        },
    }
    ends = in_lightning(tmp_path, trainings)
    assert sorted(path.name for path in saved.parent.glob("*.ckpt")) == [
        "step=3.ckpt",
        "step=6.ckpt",
        saved.name,
    ]
    flip_bit(saved, 8 * (saved.stat().st_size // 2))
    older = in_lightning(tmp_path, {"older": {**whole, "ckpt_path": saved}})
    for found in map(dict.__or__, ends, older):
        assert found["parts"].startswith("SIGTERM")
        for name, of in (("rest", "whole"), ("older", "whole"), ("epochs later", "epochs")):
            assert torch.equal(found[name][0], found[of][0])
            assert found[of][1][-len(found[name][1]) :] == found[name][1]
        assert [len(found[name][1]) for name in ("rest", "older", "epochs later")] == [10, 12, 12]
