"""Out of memory on some ranks.

They pay what they owe, all make the step again, as if nothing had happened.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.unit.guard.guarded import ask_for_too_much
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.guard.splitting.window import Window

pytestmark = pytest.mark.slow
STEPS, WIDTH, LAYERS = 6, 23, 4


class InBackward(torch.autograd.Function):
    """Fails when its gradient is wanted."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            ask_for_too_much()
        return gradient, None


class Net(nn.Module):
    """Some layers, of which the second is not always used; any of them can be short of memory."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = (
            nn.BatchNorm1d(WIDTH) if kind in ("buffers", "unused", "views") else nn.Identity()
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, fails=None, *, skips=False):
        for at, layer in enumerate(self.layers):
            if fails == ("forward", at):
                ask_for_too_much()
            if not (skips and at == 1):
                x = InBackward.apply(torch.tanh(layer(x)), fails == ("backward", at))
        return self.head(self.norm(x))


def sharded(model, kind):
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"mp_policy": low} if kind == "bf16" else {}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=kind != "kept", **given)
    return fully_shard(model, **given)


def made(kind):
    torch.manual_seed(0)
    if kind in SHARDED:
        model = sharded(Net(kind), kind)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    unused = {"find_unused_parameters": True}
    given = {
        "unused": unused,
        "ragged": unused,
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
    }.get(kind, {})
    model = DistributedDataParallel(Net(kind), bucket_cap_mb=0.004, **given)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(rank, run, kind, plan, sizes=(8,) * STEPS, policy=None):
    """Train; `plan` says where an attempt fails, by ``(step, rank, attempt)``."""
    model, optimizer = made(kind)
    loader = [
        torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank))
        for step, size in enumerate(sizes)
    ]
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=loader,
        max_grad_norm=1.0,
        save_interval_steps=None,
        **(policy or {}),
    )
    attempts, parts = [], []
    torch.manual_seed(rank)
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        calls = iter(range(100))

        def loss_fn(part, step=step, calls=calls):
            fails = (
                plan(step, rank, next(calls), len(part))
                if callable(plan)
                else plan.get((step, rank, next(calls)))
            )
            if fails == "early":
                ask_for_too_much()
            noise = 0.0 if policy == SPLITS else torch.rand(())  # drawn again in each attempt
            out = model(part, fails, skips=kind in ("unused", "ragged") and step % 2 == rank)
            if kind == "views":
                out = out + model(part.flip(0))  # with buffers that the first call has changed
            return out.float().square().mean() * (1 + noise)

        result = guard.step(Window(batch.chunk(2)) if kind == "window" else batch, loss_fn)
        attempts.append(result.attempts)
        parts.append(result.micro_batch_size)
    state = [value for each in optimizer.state.values() for value in each.values()]
    found = [
        getattr(each, "to_local", lambda each=each: each)()
        for each in [*model.state_dict().values(), *state]
    ]
    return [*(each.detach().clone() for each in found), torch.get_rng_state()], attempts, parts


EXACT, SPLITS = {"recompute": False, "check_split": False}, {"recompute": False}
SHARDED = ["resharded", "kept", "bf16"]
# The first two with buffers, the second called twice.
KINDS = ["unused", "views", "hook", "window", "static"]
PLANS = {
    "backward": {
        (0, 1, 0): ("backward", 3),
        (2, 1, 0): ("backward", 0),
        (3, 0, 0): ("backward", 2),
    },
    "forward": {(0, 1, 0): ("forward", 3), (2, 0, 0): ("forward", 0), (4, 1, 0): ("forward", 2)},
    "before the model": {(0, 1, 0): "early", (1, 0, 0): "early", (4, 1, 0): "early"},
    "differently": {
        (0, 0, 0): "early",
        (0, 1, 0): ("backward", 1),
        (2, 0, 0): ("forward", 2),
        (2, 1, 0): ("backward", 2),
    },
    "in turns": {
        (0, 1, 0): ("backward", 2),
        (0, 0, 1): ("forward", 2),
        (2, 1, 0): "early",
        (2, 0, 1): ("backward", 2),
    },
}


def undisturbed_and(rank, run, kind, plans, policy=None, sizes=(8,) * STEPS):
    """Train without a failure, and by each of the plans."""
    runs = [{}, *plans]
    return [trained(rank, f"{run}/{n}", kind, plan, sizes, policy) for n, plan in enumerate(runs)]


def check(ends, plans, *, counts=True):
    for (undisturbed, _, sizes), *disturbed in all_returned(ends):
        for plan, (found, attempts, _) in zip(plans, disturbed, strict=True):
            failed = [
                max((key[2] + 1 for key in plan if key[0] == step), default=0)
                for step in range(len(sizes))
            ]
            assert not counts or attempts == [1 + failures for failures in failed]
            assert all(torch.equal(a, b) for a, b in zip(undisturbed, found, strict=True)), (
                plan,
                attempts,
            )


@pytest.mark.parametrize("kind", [*KINDS, *SHARDED])
def test_a_step_is_made_again_by_all_ranks_bit_for_bit(tmp_path, kind):
    """Wherever memory was short.

    No rank waits for ever, and nobody sees a gradient of half a step.
    """
    later = int(kind == "static")  # of its first attempt torch keeps what it has seen of the graph
    plans = [
        {(step + later, *place): where for (step, *place), where in plan.items()}
        for plan in PLANS.values()
    ]
    plans = plans[-2 if kind in ("kept", "bf16") else 0 :]
    ends = run_ranks(undisturbed_and, 2, tmp_path, kind, plans, None if kind in SHARDED else EXACT)
    # Of two batches: a second call need not be a second attempt
    check(ends, plans, counts=kind != "window")


def test_a_static_graph_that_torch_has_half_learned_ends_all(tmp_path):
    """Of the first attempt torch keeps what belongs to which pass, and nothing takes that back."""
    for end in run_ranks(
        undisturbed_and, 2, tmp_path, "static", [{(0, 1, 0): ("backward", 2)}], EXACT
    ):
        assert "the static graph" in end.output, end


@pytest.mark.parametrize(("kind", "ranks"), [("buffers", 3), ("resharded", 2), ("resharded", 3)])
def test_all_ranks_can_be_short_at_once(tmp_path, kind, ranks):
    """Each pays what it owes, which is not the same on each, or follows those that come further."""
    plan = {(step, rank, 0): ("backward", rank + 1) for step in (0, 1, 3) for rank in range(ranks)}
    policy = None if kind in SHARDED else EXACT
    check(run_ranks(undisturbed_and, ranks, tmp_path, kind, [plan], policy), [plan])


def too_large(where, ranks, most, since=0):
    """Say that more samples than that do not fit on these ranks, from some step on."""
    return partial(_too_large, where, ranks, most, since)


def _too_large(where, ranks, most, since, step, rank, _call, samples):
    return where if rank in ranks and samples > most and step >= since else None


WHO_IS_SHORT = [(0,), (1,), (0, 1)]


@pytest.mark.parametrize(
    ("kind", "sizes", "since"),
    [
        ("plain", (8,) * STEPS, 0),
        ("plain", (8,) * STEPS, 2),
        ("ragged", (8, 5, 8, 3, 7, 1), 0),
        ("hook", (8,) * 4, 1),
        ("static", (8,) * 4, 1),
    ],
)
def test_ranks_may_differ_in_their_micro_batches(tmp_path, kind, sizes, since):
    """One that splits works alone and pays with its own gradients.

    The sum is that of whole batches, to rounding.
    """
    plans = [too_large(("backward", 2), who, 4, since) for who in WHO_IS_SHORT]

    ends = all_returned(run_ranks(undisturbed_and, 3, tmp_path, kind, plans, SPLITS, sizes))

    of_first_rank = ends[0][1:]
    for rank, ((undisturbed, _, whole), *split) in enumerate(ends):
        assert whole == [*sizes]
        for who, (found, _, parts), (of_first, *_) in zip(
            WHO_IS_SHORT, split, of_first_rank, strict=True
        ):
            assert parts == [
                min(n, 4) if rank in who and at >= since else n for at, n in enumerate(sizes)
            ]
            for a, b, c in zip(undisturbed[:-1], found[:-1], of_first, strict=False):
                assert torch.equal(b, c)
                assert (a - b).norm() <= (2e-3 if kind == "hook" else 2e-6) * a.norm()


def any_plan(seed):
    """Return failures at random steps, ranks and phases, none twice in a row on one rank."""
    chance = random.Random(seed)
    phases = [
        "early",
        *((phase, layer) for phase in ("forward", "backward") for layer in (0, 2, 3)),
    ]
    return {
        (step, rank, 0): chance.choice(phases)
        for step in range(4)
        for rank in (0, 1)
        if chance.random() < 0.4
    }


@pytest.mark.parametrize(
    ("kind", "sizes", "policy"), [("buffers", (8,) * 4, EXACT), ("kept", (8, 5, 8, 3, 7, 1), None)]
)
def test_failures_at_random_places_leave_no_trace(tmp_path, kind, sizes, policy):
    """Ten runs on two ranks, each with failures at other steps, ranks and phases."""
    plans = [any_plan(seed) for seed in range(10)]
    check(
        run_ranks(undisturbed_and, 2, tmp_path, kind, plans, policy, sizes),
        plans,
    )


def compares_samples(rank, run, most):
    """Train with a loss over all pairs of samples, which is split in two passes."""
    model, optimizer = made("plain")
    loader = [
        torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7 * k + rank))
        for k in range(4)
    ]
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, recompute=False)

    def outputs(part):
        if rank and len(part) > most:
            ask_for_too_much()
        return model(part)

    for batch in guard.batches(max_epochs=1):
        found = guard.step(
            batch, holdfast.TwoPass(outputs, lambda out, _: (out @ out.T).square().mean())
        )
    return torch.cat([p.detach().flatten() for p in model.parameters()]), found.micro_batch_size


def test_a_loss_over_pairs_is_split_on_one_rank(tmp_path):
    """The pairs are those within the batch of a rank, split or not."""
    whole = all_returned(run_ranks(compares_samples, 2, tmp_path / "a", 8))
    split = all_returned(run_ranks(compares_samples, 2, tmp_path / "b", 4))
    assert [most for _, most in whole + split] == [8, 8, 8, 4]
    for (one, _), (other, _) in zip(whole, split, strict=True):
        assert (one - other).norm() < 1e-5 * one.norm()


def keeps_its_plan(rank, run):
    """Train three steps, and say what the first of them took."""
    plan = too_large("early", (1,), 4)
    model, optimizer = made("plain")
    loader = [
        torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7 * k + rank))
        for k in range(6)
    ]
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, recompute=False)

    def loss_fn(part):
        if plan(0, rank, 0, len(part)):
            ask_for_too_much()
        return model(part).square().mean()

    found = [
        guard.step(batch, loss_fn).attempts
        for batch in guard.batches(max_steps=guard.global_step + 3)
    ]
    guard.close()
    return found


def test_a_resumed_rank_does_not_fail_again(tmp_path):
    """What a rank has learnt of its memory is in the checkpoint, and each takes its own."""
    first = all_returned(run_ranks(keeps_its_plan, 2, tmp_path))
    assert first[0][0] == first[1][0] > 1
    assert all_returned(run_ranks(keeps_its_plan, 2, tmp_path)) == [[1, 1, 1]] * 2


def short_in_the_optimizer(rank, run, where, norm=None):
    """Train seven steps in two epochs, saving after the fourth.

    The optimizer fails half-way where it is said.
    """
    model, optimizer = made("plain")
    loader = [
        torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7 * k + rank))
        for k in range(4)
    ]
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=4
    )
    whole, steps = optimizer.step, []

    def step():
        if (len(steps), rank) not in where:
            return whole()
        left = [*model.parameters()][3:]
        kept = [p.grad for p in left]
        for p in left:
            p.grad = None
        whole()
        for p, gradient in zip(left, kept, strict=True):
            p.grad = gradient
        return ask_for_too_much()

    optimizer.step = step
    for batch in guard.batches(max_steps=7):
        steps += [guard.step(batch, lambda part: model(part).square().mean()).skipped]
    guard.close()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.state_dict().values(), *state], steps, [event.kind for event in guard.events()]


@pytest.mark.parametrize("where", [[(2, 1)], [(2, 0), (4, 1)], [(3, 0)], [(3, 1), (6, 0)]])
def test_an_optimizer_that_fails_half_way_takes_the_state_of_another_rank(tmp_path, where):
    """Within an epoch, at its end, before a save and at the end of a run.

    The bits are those of a run without.
    """
    whole = all_returned(run_ranks(short_in_the_optimizer, 2, tmp_path / "a", []))
    found = all_returned(run_ranks(short_in_the_optimizer, 2, tmp_path / "b", where))
    for rank, ((undisturbed, _, _), (state, steps, kinds)) in enumerate(
        zip(whole, found, strict=True)
    ):
        assert steps == [False] * 7
        assert kinds.count("state_taken") == sum(at == rank for _, at in where)
        assert all(torch.equal(a, b) for a, b in zip(undisturbed, state, strict=True))


def test_an_optimizer_that_fails_half_way_on_all_ranks_ends_them(tmp_path):
    """There is no whole state to take; the checkpoint of before is there."""
    for end in run_ranks(short_in_the_optimizer, 2, tmp_path, [(2, 0), (2, 1)]):
        assert "H402" in (end.raised or ""), end


def recomputed(rank, run, failures):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH), nn.Tanh())
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seeds = (torch.Generator().manual_seed(9 * n + rank) for n in range(STEPS))
    loader = [torch.randn(1024, WIDTH, generator=seed) for seed in seeds]
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=None
    )
    attempts = []
    for step, batch in enumerate(guard.batches(max_epochs=1)):
        calls = iter(range(100))

        def loss_fn(part, step=step, calls=calls):
            output = model(part)
            if rank == 1 and step == 2 and next(calls) < failures:
                ask_for_too_much()
            return output.square().mean()

        attempts.append(guard.step(batch, loss_fn).attempts)
    kinds = [event.kind for event in guard.events()]
    return (
        [p.to_local().detach().clone() for p in model.parameters()],
        attempts,
        kinds,
        guard.statistics().recompute,
    )


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
