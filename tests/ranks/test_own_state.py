"""State that each rank has for itself although all train one model.

A resume gives every rank its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks.harness import all_returned, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import holdfast

WIDTH = 4
LARGE = 2_500_000  # float32: more than the store of the ranks takes in one piece


class WithQueue(nn.Module):
    """A model with the buffers that public code keeps on each rank.

    Statistics, counts, a queue, a constant.
    """

    def __init__(self, rank, length=64):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("queue", torch.zeros(length))
        self.register_buffer("rank_code", torch.full((3,), float(rank)))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("passes", torch.zeros(1), persistent=False)  # the same on all ranks

    def forward(self, batch):
        hidden = self.norm(self.first(batch))
        if self.training:
            self.queue[: len(batch)] = batch[:, 0]
            self.seen += batch.sum()
            self.passes += 1
        return self.last(hidden)


class Recent:
    """The last loss of this rank, which its script keeps as a ``state=`` of its own."""

    def __init__(self):
        self.value = torch.zeros(1)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def made(rank, kind):
    torch.manual_seed(0)
    net = WithQueue(rank, LARGE if kind == "large" else 64)
    if kind == "sharded":
        return net, fully_shard(net)
    if kind == "ignored":
        names = [
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
            "queue",
            "rank_code",
            "seen",
        ]
        names.append("passes")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        return net, DistributedDataParallel(net)
    if kind == "alone":
        return net, net
    return net, DistributedDataParallel(net, broadcast_buffers=kind == "sent")


def own_state(net, recent, averaged):
    found = {name: buffer.clone() for name, buffer in net.named_buffers()}
    found["recent"] = recent.value.clone()
    if averaged is not None:
        named = averaged.module.named_buffers()
        found |= {f"averaged.{name}": buffer.clone() for name, buffer in named if name != "passes"}
    return found


def training(rank, run, kind, max_steps, nan_from=None):
    net, model = made(rank, kind)
    recent = Recent()
    averaged = None if kind in ("sharded", "large") else AveragedModel(net, use_buffers=True)
    data = (
        torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
        + torch.arange(64)[:, None] / 8
    )
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=holdfast.DataLoader(data, batch_size=4, shuffle=True, seed=3),
        state={"recent": recent},
        averaged=averaged,
        save_interval_steps=2,
        nonfinite_patience=1,
        async_save=nan_from is None,
    )
    begun = guard.global_step, own_state(net, recent, averaged)
    at_step = {}
    for batch in guard.batches(max_steps=max_steps):
        fails = rank == 0 and len(at_step) == nan_from
        at_step[guard.global_step] = own_state(net, recent, averaged)
        result = guard.step(
            batch * float("nan") if fails else batch, lambda x: model(x).square().mean()
        )
        if not result.skipped:
            recent.value = batch.sum().reshape(1)
        if guard.statistics().rollbacks:
            return at_step[guard.global_step], own_state(net, recent, averaged)
    events = [event for event in guard.events() if event.kind == "own_state_not_kept"]
    return begun, own_state(net, recent, averaged), [event.data for event in events]


def differ(first, second):
    return {name for name in first if not torch.equal(first[name], second[name])}


@pytest.mark.parametrize(
    "kind",
    [
        "local",
        "ignored",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("large", "sharded")),
    ],
)
def test_each_rank_finds_its_own_buffers_and_state_again(tmp_path, kind):
    """A resume on as many ranks has the bits of a run without a break, on each of them."""
    whole = all_returned(run_ranks(training, 2, tmp_path / "whole", kind, 7))
    first = all_returned(run_ranks(training, 2, tmp_path / "parts", kind, 3))
    rest = all_returned(run_ranks(training, 2, tmp_path / "parts", kind, 7))

    assert {"norm.running_mean", "queue", "rank_code", "seen", "recent"} <= differ(
        first[0][1], first[1][1]
    )
    for rank in range(2):
        (begun_at, begun_with), ended_with, events = rest[rank]
        assert begun_at == 3
        assert not differ(begun_with, first[rank][1])
        assert not differ(ended_with, whole[rank][1])
        assert not events


def test_buffers_that_are_sent_in_each_step_are_saved_once(tmp_path):
    """Of these a checkpoint holds those of the first rank.

    Averages of them and `state=` are each rank's own.
    """
    first = all_returned(run_ranks(training, 2, tmp_path, "sent", 3))
    rest = all_returned(run_ranks(training, 2, tmp_path, "sent", 5))

    (_, begun_with), _, _ = rest[1]
    assert not torch.equal(first[0][1]["norm.running_mean"], first[1][1]["norm.running_mean"])
    assert torch.equal(begun_with["norm.running_mean"], first[0][1]["norm.running_mean"])
    for name in ("averaged.norm.running_mean", "recent"):
        assert torch.equal(begun_with[name], first[1][1][name])
    newest = max(Path(tmp_path, "checkpoints").iterdir())
    assert not [
        name for name in load_file(newest / "training.safetensors") if ".buffers.model." in name
    ]


def test_a_rollback_gives_each_rank_its_own_buffers(tmp_path):
    """They are those of the checkpoint that all return to, and not those of the first rank."""
    for before, after in all_returned(run_ranks(training, 2, tmp_path, "local", 9, 5)):
        assert not differ(before, after)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_says_what_it_does_not_keep(tmp_path, ranks):
    """All go on with the buffers of the first rank, and an event names them."""
    first = all_returned(run_ranks(training, 2, tmp_path, "local", 3))
    rest = all_returned(run_ranks(training, ranks, tmp_path, "local", 4))

    for (begun_at, begun_with), _, events in rest:
        assert begun_at == 3
        assert torch.equal(begun_with["queue"], first[0][1]["queue"])
        (event,) = events[:1]
        assert {"model.norm.running_mean", "model.queue", "recent"} <= {*event["names"]}
        assert (event["ranks_before"], event["ranks_now"]) == (2, ranks)


def with_ignored_weights(rank, run):
    net = WithQueue(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["last.weight"])
    model = DistributedDataParallel(net)
    holdfast.Guard(run, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def test_weights_that_each_rank_trains_by_itself_are_refused(tmp_path):
    """Their gradients and moments are no other rank's, so that one of them could not vote for
    all.
    """
    for end in run_ranks(with_ignored_weights, 2, tmp_path):
        assert "[H108]" in (end.raised or "") or "H108" in end.output, end
