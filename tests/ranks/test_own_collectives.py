"""Losses and models with collectives of their own.

Nobody waits for a rank that cannot come to them.
"""

from __future__ import annotations

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_out_of_memory import InBackward
from tests.unit.guard.guarded import ask_for_too_much
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as differentiable
from torch.nn.parallel import DistributedDataParallel

import holdfast

pytestmark = pytest.mark.slow
STEPS = 8


def bare(features, step):
    return features.square().mean()


def clip(features, step):
    """Compare the features of this rank with those of all ranks."""
    gathered = [torch.empty_like(features) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, features.detach())
    return (features @ torch.cat(gathered).T).square().mean()


def clip_with_gradients(features, step):
    """Compare as `clip` does, with gradients for the features of all ranks."""
    gathered = torch.cat(differentiable.all_gather(features))
    return (features @ gathered.T).square().mean()


def detr(features, step):
    """Divide by a number of boxes that all ranks have counted together."""
    boxes = torch.tensor([float(len(features))])
    distributed.all_reduce(boxes)
    return features.square().mean(1).sum() * distributed.get_world_size() / boxes.item()


def detr_functional(features, step):
    boxes = functional.all_reduce(
        torch.tensor([float(len(features))]), "sum", distributed.group.WORLD
    )
    return features.square().mean(1).sum() * distributed.get_world_size() / boxes.item()


def detr_with_objects(features, step):
    boxes = [None] * distributed.get_world_size()
    distributed.all_gather_object(boxes, {"boxes": len(features)})
    return features.square().mean(1).sum() * len(boxes) / sum(each["boxes"] for each in boxes)


def detr_from_the_sixth_step_on(features, step):
    return detr(features, step) if step >= 5 else bare(features, step)


class SyncedMean(torch.autograd.Function):
    """Subtracts the mean over all ranks."""

    @staticmethod
    def forward(ctx, x):
        mean = x.mean(0) / distributed.get_world_size()
        distributed.all_reduce(mean)
        return x - mean

    @staticmethod
    def backward(ctx, gradient):
        mean = gradient.mean(0) / distributed.get_world_size()
        distributed.all_reduce(mean)
        return gradient - mean


class SyncedNorm(nn.Module):
    """What SyncBatchNorm does on GPUs, as far as it matters here."""

    def forward(self, x):
        return SyncedMean.apply(x)


def made(wrapper, norm=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), norm or nn.Tanh(), nn.Linear(8, 4))
    if wrapper == "ddp":
        model = DistributedDataParallel(net)
    else:
        fully_shard(net[0])
        fully_shard(net[2])
        model = fully_shard(net)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches_of(rank):
    return [
        torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * k + rank))
        for k in range(STEPS)
    ]


def trained(rank, run, wrapper, loss_of, shortages, norm=None):
    """Train; `shortages` holds ``(rank, step, place)`` where memory is short, once."""
    model, optimizer = made(wrapper, norm)
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=batches_of(rank),
        max_grad_norm=1.0,
        save_interval_steps=None,
    )
    left = set(shortages)

    def is_short(place):
        here = (rank, guard.global_step, place)
        if here not in left:
            return False
        left.remove(here)
        return True

    def loss_fn(batch):
        if is_short("before the model"):
            ask_for_too_much()
        features = model(batch)
        if is_short("before the loss"):
            ask_for_too_much()
        loss = loss_of(features, guard.global_step)
        if is_short("after the loss"):
            ask_for_too_much()
        return InBackward.apply(loss, is_short("backward"))

    attempts = [guard.step(batch, loss_fn).attempts for batch in guard.batches(max_epochs=1)]
    weights = [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]
    noticed = [
        (event.global_step, event.data["count"])
        for event in guard.events()
        if event.kind == "own_collectives"
    ]
    return weights, attempts, noticed


def check_ended(ends, short):
    """Check that the ranks of `short` have ended with H401, and the others with H114 and its
    text.
    """
    for rank, end in enumerate(ends):
        assert end.exit_code == 1, ends
        assert (end.raised or "").startswith(
            "OutOfMemoryError" if rank in short else "RankError"
        ), ends
        assert "[H401]" in end.raised, ends
        assert rank in short or "[H114]" in end.raised, ends


@pytest.mark.parametrize(
    ("wrapper", "loss_of"),
    [
        ("ddp", clip),
        ("ddp", clip_with_gradients),
        ("ddp", detr),
        ("ddp", detr_functional),
        ("ddp", detr_with_objects),
        ("fsdp", clip),
        ("fsdp", detr_functional),
    ],
)
def test_a_rank_that_cannot_come_to_a_collective_of_the_loss_ends_all(tmp_path, wrapper, loss_of):
    """The others wait in it, and no rank can begin it without what it is to be given."""
    ends = run_ranks(trained, 2, tmp_path, wrapper, loss_of, [(1, 4, "before the loss")])
    check_ended(ends, [1])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("step", [0, 5])
def test_it_does_so_in_the_step_in_which_there_is_one_for_the_first_time(tmp_path, wrapper, step):
    """Nothing is known of a first step, nor of a loss that begins to talk later."""
    loss_of = clip if step == 0 else detr_from_the_sixth_step_on
    ends = run_ranks(trained, 2, tmp_path, wrapper, loss_of, [(0, step, "before the loss")])
    check_ended(ends, [0])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_rank_that_cannot_come_to_a_collective_of_the_model_ends_all(tmp_path, wrapper):
    """A layer takes statistics over all ranks, and so does its backward."""
    ends = run_ranks(
        trained, 2, tmp_path / "a", wrapper, bare, [(1, 4, "before the model")], SyncedNorm()
    )
    check_ended(ends, [1])
    ends = run_ranks(trained, 2, tmp_path / "b", wrapper, bare, [(1, 4, "backward")], SyncedNorm())
    check_ended(ends, [1])


def test_two_ranks_of_three_are_short_of_memory(tmp_path):
    """The first of them to say so is heard by the others."""
    shortages = [(0, 4, "before the loss"), (2, 4, "before the loss")]
    ends = run_ranks(trained, 3, tmp_path, "ddp", clip, shortages)
    assert all("[H401]" in (end.raised or "") for end in ends), ends
    assert ends[1].raised.startswith("RankError"), ends


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_step_is_made_again_where_no_collective_of_the_loss_is_owed(tmp_path, wrapper):
    """Memory was short after them, or on all ranks before them.

    The bits are those of an undisturbed run.
    """
    plans = [
        [(1, 4, "after the loss")],
        [(0, 3, "backward"), (1, 6, "backward")],
        [(0, 4, "before the loss"), (1, 4, "before the loss")],
    ]
    undisturbed = all_returned(run_ranks(trained, 2, tmp_path / "undisturbed", wrapper, clip, []))
    for number, plan in enumerate(plans):
        again = all_returned(run_ranks(trained, 2, tmp_path / str(number), wrapper, clip, plan))
        for (weights, _, noticed), (of_rank, attempts, _) in zip(undisturbed, again, strict=True):
            assert noticed == [(0, 1)]
            assert all(torch.equal(a, b) for a, b in zip(weights, of_rank, strict=True))
            assert attempts == [1 + any(step == at for _, at, _ in plan) for step in range(STEPS)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_collectives_of_the_loss_are_noticed_in_the_first_step(tmp_path, wrapper):
    """In forward and in backward; those of torch and of the guard are not taken for them."""
    for loss_of, noticed in [
        (clip_with_gradients, [(0, 3)]),
        (detr_from_the_sixth_step_on, [(5, 1)]),
        (bare, []),
    ]:
        ends = run_ranks(trained, 2, tmp_path / loss_of.__name__, wrapper, loss_of, [])
        assert [returned[2] for returned in all_returned(ends)] == [noticed] * 2


def fails_otherwise(rank, run, wrapper):
    model, optimizer = made(wrapper)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))

    def loss_fn(batch):
        features = model(batch)
        if rank == 1 and guard.global_step == 4:
            raise ValueError("a broken sample")
        return clip(features, guard.global_step)

    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_fn)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_another_error_before_a_collective_of_the_loss_ends_all(tmp_path, wrapper):
    """The others end with the text of the rank that failed."""
    first, second = run_ranks(fails_otherwise, 2, tmp_path, wrapper)
    assert "[H114]" in first.raised
    assert "a broken sample" in first.raised
    assert second.raised == "ValueError: a broken sample"


def splits(rank, run):
    model, optimizer = made("ddp")
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches_of(rank), recompute=False
    )

    def loss_fn(batch):
        if rank == 1 and len(batch) > 4:
            ask_for_too_much()
        return detr_from_the_sixth_step_on(model(batch), guard.global_step)

    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_fn)


def test_a_rank_that_splits_does_not_begin_collectives_more_often_than_the_others(tmp_path):
    """Its second part would pair with something else of theirs."""
    check_ended(run_ranks(splits, 2, tmp_path), [1])


def gathers_nan(rank, run, wrapper, loss_of, source):
    """Train with NaN in the third step, from the batch or the forward pass of rank 1, or in
    every batch.
    """
    model, optimizer = made(wrapper)
    loader = batches_of(rank)
    if source == "every batch":
        loader[2][3] = float("nan")
    elif rank == 1:
        loader[2][3] = float("nan") if source == "batch" else 1000.0
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader)

    def loss_fn(batch):
        features = model(batch) + torch.log(100.0 - batch[:, :1])
        return loss_of(features, guard.global_step)

    reasons = [guard.step(batch, loss_fn).reason for batch in guard.batches(max_epochs=1)]
    origins = [event.data["origin"] for event in guard.events() if event.kind == "nonfinite_origin"]
    return reasons, [(origin["op"], origin["sent"]) for origin in origins]


def clip_functional(features, step):
    gathered = functional.all_gather_tensor(features.detach(), 0, distributed.group.WORLD)
    return (features @ gathered.T).square().mean()


@pytest.mark.parametrize("loss_of", [clip, clip_with_gradients, clip_functional])
@pytest.mark.parametrize(("source", "op"), [("batch", "batch tensor 0"), ("forward", "log")])
def test_nan_that_was_gathered_is_found_on_its_own_rank(tmp_path, loss_of, source, op):
    """The loss of each rank is NaN; only one rank has given NaN to the collective."""
    ends = run_ranks(gathers_nan, 2, tmp_path, "ddp", loss_of, source)
    (first, of_first), (second, of_second) = all_returned(ends)
    assert [number for number, reason in enumerate(first) if reason] == [2]
    assert "rank 1: " in first[2]
    assert first == second
    assert of_first == []
    assert of_second == [(op, True)]


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("batch", "rank 1: "),
        ("every batch", "ranks 0 and 1, after a collective"),
        ("forward", "ranks 0 and 1, after a collective"),
    ],
)
def test_nan_that_was_gathered_is_not_laid_on_a_rank_of_a_sharded_model(tmp_path, source, where):
    """No rank can make the step again by itself.

    One that alone has NaN in its batch is to blame.
    """
    for reasons, _ in all_returned(run_ranks(gathers_nan, 2, tmp_path, "fsdp", clip, source)):
        assert [number for number, reason in enumerate(reasons) if reason] == [2]
        assert where in reasons[2]
