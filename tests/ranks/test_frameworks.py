"""Frameworks on several ranks: the same steps as by themselves, and one truth where a rank differs."""

from __future__ import annotations

import os

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.slow
WIDTH, CLASSES = 5, 3


def as_torchrun(rank, world_size):
    """Set what a launcher sets; the process group is there already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}


def data(samples=24, bad=()):
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs[list(bad)] = torch.nan
    return TensorDataset(inputs, torch.arange(samples) % CLASSES)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, CLASSES)
    )


def accelerated(rank, run, world_size, *, guarded, accumulate=1, epochs=2, bad=()):
    """Train with Accelerate, by itself or under a guard; return weights, the learning rate and what was skipped."""
    accelerate = pytest.importorskip("accelerate")
    as_torchrun(rank, world_size)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, project_dir=run)
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
        guard = accelerate_guard(accelerator, **parts, max_grad_norm=0.5, save_interval_steps=2, async_save=False)
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
        found.append(accelerated(rank, run_of, world_size, guarded=guarded, accumulate=accumulate)[:2])
    return found


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2)])
def test_accelerate_on_several_ranks_trains_as_by_itself(tmp_path, world_size, accumulate):
    """Dropout, shuffling, clipping, a schedule that counts all processes, windows: bit for bit."""
    ends = run_ranks(accelerated_by_itself_and_guarded, world_size, tmp_path, world_size, accumulate, limit_seconds=60)
    for (of_itself, rate), (found, guarded_rate) in all_returned(ends):
        assert rate == guarded_rate
        assert torch.equal(of_itself, found) or (accumulate > 1 and torch.allclose(of_itself, found, rtol=1e-5))


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
        return all_returned(run_ranks(accelerated_in_parts, 2, tmp_path / run, epochs, limit_seconds=60))

    for (whole, _, skipped), (resumed, _, then_skipped) in zip(train("a", (3,)), train("b", (1, 3)), strict=True):
        assert torch.equal(whole, resumed)
        assert (skipped.count(True), then_skipped.count(True)) == (3, 2)
