"""Several ranks under a guard: undisturbed they are a bare loop, and whatever happens to one happens to all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.ranks.harness import Ended, all_returned, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 8


def model_and_optimizer(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model):
    return lambda batch: model(batch).square().mean()


def batches_of(rank, *, sizes=(8,) * STEPS):
    return [torch.randn(n, 6, generator=torch.Generator().manual_seed(10 * k + rank)) for k, n in enumerate(sizes)]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def state_of(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [weights(model), *buffers, *moments, torch.get_rng_state()]


def bare(rank, norm):
    model, optimizer = model_and_optimizer(norm=norm)
    torch.manual_seed(rank)
    for batch in batches_of(rank, sizes=(8,) * (STEPS - 1) + (3,)):
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return state_of(model, optimizer)


def guarded(rank, run, norm):
    model, optimizer = model_and_optimizer(norm=norm)
    loader = batches_of(rank, sizes=(8,) * (STEPS - 1) + (3,))
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, max_grad_norm=1.0)
    torch.manual_seed(rank)
    losses = [float(guard.step(batch, loss_of(model)).loss) for batch in guard.batches(max_epochs=1)]
    found = state_of(model, optimizer)
    guard.close()
    return found, losses


def bare_and_guarded(rank, run, norm):
    return bare(rank, norm), guarded(rank, run, norm)


@pytest.mark.parametrize(("world_size", "norm"), [(2, False), (3, True)])
def test_undisturbed_ranks_equal_a_bare_loop_bit_for_bit(tmp_path, world_size, norm):
    """Weights, buffers, moments and random state are those of a loop without a guard; the loss is that of all."""
    ends = all_returned(run_ranks(bare_and_guarded, world_size, tmp_path, norm))
    for of_bare, (of_guarded, losses) in ends:
        assert all(torch.equal(a, b) for a, b in zip(of_bare, of_guarded, strict=True))
        assert losses == ends[0][1][1]


RAGGED = {2: [(5, 8, 3, 1), (2, 1, 7, 6)], 3: [(5, 8, 3, 1), (2, 1, 7, 6), (4, 4, 1, 9)]}


def ragged(rank, run, world_size):
    model, optimizer = model_and_optimizer()
    model.eval()
    loader = batches_of(rank, sizes=RAGGED[world_size][rank])
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader)
    items = [guard.step(batch, loss_of(model)).items for batch in guard.batches(max_epochs=1)]
    return weights(model), items


@pytest.mark.parametrize("world_size", [2, 3])
def test_ragged_batches_weigh_by_their_items(tmp_path, world_size):
    """The weights are those of one process which trains on the batches of all ranks together."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for of_ranks in zip(*(batches_of(rank, sizes=s) for rank, s in enumerate(RAGGED[world_size])), strict=True):
        optimizer.zero_grad()
        loss_of(alone)(torch.cat(of_ranks)).backward()
        optimizer.step()
    found = all_returned(run_ranks(ragged, world_size, tmp_path, world_size))
    for of_rank, items in found:
        assert torch.equal(of_rank, found[0][0])
        assert (of_rank - weights(alone)).norm() / weights(alone).norm() < 1e-6
        assert items == [sum(sizes) for sizes in zip(*RAGGED[world_size], strict=True)]


def disturbed(rank, run, what, where):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    results = []

    def loss_fn(batch):
        loss = loss_of(model)(batch)
        if rank == where and len(results) == 2:
            if what == "bad input":
                return loss.detach()
            if what == "exception":
                raise KeyError("the wrong key")
            if what == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    for batch in guard.batches(max_epochs=1):
        if what == "nan" and rank == where and len(results) in (0, 2):
            batch[3] = float("nan")
        if what == "outside" and rank == where and len(results) == 2:
            raise ValueError("uncaught in the body")
        results.append(guard.step(batch, loss_fn))
        if what == "killed" and rank == where and len(results) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return weights(model), [(result.skipped, result.reason) for result in results]


@pytest.mark.parametrize("where", [0, 1])
def test_nan_on_one_rank_is_skipped_by_all_and_the_rank_is_named(tmp_path, where):
    """Also in the first step, before the reducer has rebuilt its buckets."""
    found = all_returned(run_ranks(disturbed, 2, tmp_path, "nan", where))
    for of_rank, results in found:
        assert torch.equal(of_rank, found[0][0])
        assert torch.isfinite(of_rank).all()
        assert [skipped for skipped, _ in results] == [True, False, True] + [False] * (STEPS - 3)
        assert f"rank {where}: " in results[0][1]
        assert f"rank {where}: " in results[2][1]
    assert "without sample 3" in found[where][1][2][1]


TEXTS = {
    "bad input": "H202",
    "exception": "KeyError: 'the wrong key'",
    "out of memory": "H401",
    "outside": "ValueError: uncaught in the body",
    "killed": "H114",
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("what", TEXTS)
def test_what_one_rank_fails_with_ends_all_with_its_text(tmp_path, what, where):
    """Nobody hangs or runs into the timeout of a collective: the others end within seconds."""
    ends = run_ranks(disturbed, 2, tmp_path, what, where, limit_seconds=20.0)
    assert all(end.exit_code for end in ends), ends
    assert max(end.seconds for end in ends) - min(end.seconds for end in ends) < 5.0
    assert TEXTS[what] in ends[1 - where].output, ends
    if what != "killed":
        assert f"rank {where}" in ends[1 - where].output, ends


def stopped(rank, run, how, where):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        if rank == where and guard.global_step == 3:
            guard.request_stop("enough") if how == "call" else os.kill(os.getpid(), signal.SIGTERM)
    return guard.global_step, guard.statistics().checkpoints_saved


@pytest.mark.parametrize(("how", "where"), [("signal", 1), ("call", 0)])
def test_a_stop_on_one_rank_stops_all_at_the_same_step(tmp_path, how, where):
    """One rank writes the checkpoint."""
    found = all_returned(run_ranks(stopped, 2, tmp_path, how, where))
    assert [step for step, _ in found] == [4, 4]
    assert [saved for _, saved in found] == [2, 0]


def counted(rank, run):
    model, optimizer = model_and_optimizer()
    group, batches, found = model.process_group, batches_of(rank), []
    for batch in batches[:4]:
        before = group._get_sequence_number_for_group()
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()
        found.append(group._get_sequence_number_for_group() - before)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches)
    for batch in guard.batches(max_steps=4):
        before = group._get_sequence_number_for_group()
        guard.step(batch, loss_of(model))
        found.append(group._get_sequence_number_for_group() - before)
    return found


def test_an_undisturbed_step_adds_one_collective(tmp_path):
    """Counted on the model's own group, beside the reductions of a bare step."""
    for found in all_returned(run_ranks(counted, 2, tmp_path)):
        assert found[7] == found[3] + 1


def going_back(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=batches_of(rank),
        save_interval_steps=1,
        async_save=False,
        nonfinite_patience=2,
        provenance=False,
    )
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        if rank and number in (3, 4, 5):
            batch[0] = float("nan")
        guard.step(batch, loss_of(model))
    return weights(model), guard.statistics().rollbacks, guard.global_step


def test_all_ranks_roll_back_to_the_same_checkpoint(tmp_path):
    """Patience with NaN of one rank ends on all of them, and the others read what the first one has written."""
    found = all_returned(run_ranks(going_back, 2, tmp_path))
    for of_rank, rollbacks, step in found:
        assert torch.equal(of_rank, found[0][0])
        assert (rollbacks, step) == (1, found[0][2])


def part_of_a_run(rank, run, until):
    model, optimizer = model_and_optimizer()
    data = list(torch.randn(72, 6, generator=torch.Generator().manual_seed(1)).unbind())
    seen = []
    loader = holdfast.DataLoader(list(enumerate(data)), batch_size=4, shuffle=True, seed=3)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=2)
    torch.manual_seed(100 + rank) if guard.resumed_from is None else None
    for indices, batch in guard.batches(max_epochs=1, max_steps=until):
        seen += indices.tolist()
        guard.step(batch, loss_of(model))
    guard.close()
    return seen, state_of(model, optimizer)


def test_a_resume_on_as_many_ranks_is_bit_exact(tmp_path):
    """Each rank goes on with the random state and the samples that it had."""
    whole = all_returned(run_ranks(part_of_a_run, 2, tmp_path / "whole", None))
    first = all_returned(run_ranks(part_of_a_run, 2, tmp_path / "parts", 5))
    rest = all_returned(run_ranks(part_of_a_run, 2, tmp_path / "parts", None))
    for (seen, state), (before, _), (after, resumed) in zip(whole, first, rest, strict=True):
        assert before + after == seen
        assert all(torch.equal(a, b) for a, b in zip(state, resumed, strict=True))


def test_a_resume_on_other_numbers_of_ranks_takes_every_sample_once(tmp_path):
    """On two ranks, then on three, then on one, all in one epoch."""
    seen: list[int] = []
    for world_size, until in ((2, 3), (3, 6), (2, None)):
        found = all_returned(run_ranks(part_of_a_run, world_size, tmp_path, until))
        seen += [index for of_rank, _ in found for index in of_rank]
        assert all(torch.equal(state[0], found[0][1][0]) for _, state in found)
    assert sorted(seen) == list(range(72))


def differing(rank, run, what):
    model, optimizer = model_and_optimizer()
    if what == "run directory" and rank:
        run = Path(run, "other")
    if what == "lr" and rank:
        optimizer.param_groups[0]["lr"] = 0.5
    policy = {"max_grad_norm": float(rank + 1)} if what == "policy" else {}
    length = STEPS - rank if what == "loader" else STEPS
    loader = batches_of(rank)[:length]
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, **policy)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))


@pytest.mark.parametrize("what", ["run directory", "lr", "policy"])
def test_ranks_that_differ_are_refused_on_all_of_them(tmp_path, what):
    """The error names what differs."""
    for end in run_ranks(differing, 2, tmp_path, what):
        assert "H115" in end.output, end
        assert what in (end.raised or ""), end


def test_a_loader_that_ends_early_on_one_rank_is_said_on_all(tmp_path):
    """The others are in the middle of a step, and do not wait for ever."""
    ends = run_ranks(differing, 2, tmp_path, "loader", limit_seconds=20.0)
    for end in ends:
        assert "the loader of rank 1 has ended" in (end.raised or ""), ends


def stays(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    try:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda b: 1 / 0 if rank else loss_of(model)(b))
    except ZeroDivisionError:
        time.sleep(8.0)  # it is caught, and the process stays
    return guard.global_step


def test_a_rank_that_catches_its_error_and_stays_holds_nobody(tmp_path):
    """The other one is ended by its own process although it waits in a collective."""
    first, _ = run_ranks(stays, 2, tmp_path, limit_seconds=20.0)
    assert isinstance(first, Ended)
    assert first.exit_code == 1
    assert first.seconds < 8.0
    assert "rank 1 has failed with ZeroDivisionError" in first.output
