"""Out of memory on some ranks of a sharded model: they begin what the others begin, and all make the step again."""

from __future__ import annotations

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_out_of_memory import PLANS, STEPS, WIDTH, Net, any_plan, too_much
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import holdfast

pytestmark = pytest.mark.slow


def trained(rank, run, kind, plan, sizes=(8,) * STEPS):
    """Train; `plan` says where an attempt fails, by ``(step, rank, attempt)``."""
    torch.manual_seed(0)
    model = Net("plain")
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"mp_policy": low} if kind == "bf16" else {}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=kind != "kept", **given)
    fully_shard(model, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seeds = (torch.Generator().manual_seed(7 * step + rank) for step in range(len(sizes)))
    loader = [torch.randn(size, WIDTH, generator=seed) for size, seed in zip(sizes, seeds, strict=True)]
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, max_grad_norm=0.1, save_interval_steps=None
    )
    attempts, names = [], set()
    torch.manual_seed(rank)
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        calls = iter(range(100))

        def loss_fn(part, step=step, calls=calls):
            fails = plan.get((step, rank, next(calls)))
            if fails == "early":
                too_much()
            return model(part, fails).float().square().mean() * (1 + torch.rand(()))

        result = guard.step(batch, loss_fn)
        attempts.append(result.attempts)
    names = {event.kind for event in guard.events()}
    state = [value for each in optimizer.state.values() for value in each.values()]
    found = [getattr(each, "to_local", lambda each=each: each)() for each in [*model.parameters(), *state]]
    return [*(each.detach().clone() for each in found), torch.get_rng_state()], attempts, names


def undisturbed_and(rank, run, kind, plans, sizes=(8,) * STEPS):
    return [trained(rank, f"{run}/{n}", kind, plan, sizes) for n, plan in enumerate([{}, *plans])]


def check(ends, plans):
    for (undisturbed, _, _), *disturbed in ends:
        for plan, (found, attempts, _) in zip(plans, disturbed, strict=True):
            failed_at = [max((key[2] + 1 for key in plan if key[0] == step), default=0) for step in range(STEPS)]
            assert attempts == [1 + failures for failures in failed_at]
            assert all(torch.equal(a, b) for a, b in zip(undisturbed, found, strict=True)), plan


@pytest.mark.parametrize("kind", ["resharded", "kept", "bf16"])
def test_a_step_is_made_again_by_all_ranks_bit_for_bit(tmp_path, kind):
    """Wherever memory was short: no rank waits for ever, and nobody sees a gradient of half a step."""
    plans = [*PLANS.values()][-2 if kind != "resharded" else 0 :]
    check(all_returned(run_ranks(undisturbed_and, 2, tmp_path, kind, plans)), plans)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_can_be_short_at_once(tmp_path, ranks):
    """Each follows those that come further."""
    everywhere = {(step, rank, 0): ("backward", rank + 1) for step in (0, 1, 3) for rank in range(ranks)}
    check(all_returned(run_ranks(undisturbed_and, ranks, tmp_path, "resharded", [everywhere])), [everywhere])


def recomputed(rank, run, failures):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seeds = (torch.Generator().manual_seed(9 * n + rank) for n in range(STEPS))
    loader = [torch.randn(1024, WIDTH, generator=seed) for seed in seeds]
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=None)
    attempts = []
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        calls = iter(range(100))

        def loss_fn(part, step=step, calls=calls):
            output = model(part)
            if rank == 1 and step == 2 and next(calls) < failures:
                too_much()
            return output.square().mean()

        attempts.append(guard.step(batch, loss_fn).attempts)
    kinds = [event.kind for event in guard.events()]
    return [p.to_local().detach().clone() for p in model.parameters()], attempts, kinds, guard.statistics().recompute


def test_what_is_short_again_is_recomputed_by_all(tmp_path):
    """One plan holds for all ranks, so that they gather the same weights in the same order."""
    whole = all_returned(run_ranks(recomputed, 2, tmp_path / "a", 0))
    found = all_returned(run_ranks(recomputed, 2, tmp_path / "b", 2))
    for rank, ((undisturbed, _, _, _), (state, attempts, kinds, recomputes)) in enumerate(
        zip(whole, found, strict=True)
    ):
        assert all(torch.equal(a, b) for a, b in zip(undisturbed, state, strict=True))
        assert attempts == [1, 1, 3, 1, 1, 1]
        assert recomputes
        assert ("recompute" in kinds) == (rank == 1)


def test_failures_at_random_places_leave_no_trace(tmp_path):
    """Ten runs on two ranks, of batches of unequal sizes, each with failures at other steps, ranks and phases."""
    plans = [any_plan(seed) for seed in range(10)]
    sizes = (8, 5, 8, 3, 7, 1)
    check(all_returned(run_ranks(undisturbed_and, 2, tmp_path, "kept", plans, sizes, limit_seconds=90.0)), plans)
