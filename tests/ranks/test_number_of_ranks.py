"""A run with a loader that is not holdfast's says what a resume on another number of ranks does
to its data.
"""

from __future__ import annotations

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import holdfast

pytestmark = pytest.mark.slow
SAMPLES = 48
IN_THE_MIDDLE = {"max_steps": 3}
AFTER_AN_EPOCH = {"max_epochs": 1}
TO_THE_END = {"max_epochs": 2}


class WithPosition:
    """A loader that counts its own batches, as torchdata's does, and starts again behind them."""

    def __init__(self, loader):
        self.loader = loader
        self.batches = 0

    def __iter__(self):
        for number, batch in enumerate(self.loader):
            if number < self.batches:
                continue
            self.batches += 1
            yield batch
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def loader_of(kind):
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, torch.arange(SAMPLES))
    if kind == "holdfast":
        return holdfast.DataLoader(data, batch_size=4, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    return WithPosition(loader) if kind == "stateful" else loader


def training(rank, run, kind, limits):
    """Train up to a limit; return the samples of this rank, and what was promised and reported."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader_of(kind))
    begun_at = len(guard.events())
    samples = []
    for inputs, numbers in guard.batches(**limits):
        guard.step(inputs, lambda inputs: model(inputs).square().mean())
        samples += [(guard.statistics().epoch, number) for number in numbers.tolist()]
    events = guard.events()[begun_at:]
    (promise,) = [event.data["resume_promise"] for event in events if event.kind == "loop"]
    return (
        samples,
        promise,
        [event.data["why"] for event in events if event.kind == "resume_may_differ"],
    )


def resumed(run, kind, before, now, stopped_at):
    """Train up to a limit on some ranks, and then to the end on others; return how these ended."""
    all_returned(run_ranks(training, before, run, kind, stopped_at))
    ends = run_ranks(training, now, run, kind, TO_THE_END)
    all_returned(ends)
    return ends


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [("torch", 2, 1), ("torch", 1, 2), ("torch", 2, 3), ("stateful", 2, 1)],
)
def test_a_foreign_loader_resumed_on_another_number_of_ranks_promises_nothing(
    tmp_path, kind, before, now
):
    """In the middle of an epoch, one event and one line on stderr give both numbers of ranks."""
    ends = resumed(tmp_path, kind, before, now, IN_THE_MIDDLE)

    for end in ends:
        _, promise, reasons = end.returned
        assert promise.startswith("none, because")
        assert reasons == [promise]
        assert f"{before} rank" in promise
        assert f"{now} rank" in promise
    assert "".join(end.output for end in ends).count("resume promise: none") == 1


@pytest.mark.parametrize(
    ("kind", "before", "now", "stopped_at", "promise"),
    [
        ("torch", 2, 2, IN_THE_MIDDLE, "bit-exact"),
        ("torch", 2, 1, AFTER_AN_EPOCH, "bit-exact"),
        ("holdfast", 2, 1, IN_THE_MIDDLE, "bit-exact"),
        ("stateful", 2, 2, IN_THE_MIDDLE, "not known"),
    ],
)
def test_the_promise_stays_where_the_position_holds(
    tmp_path, kind, before, now, stopped_at, promise
):
    """It holds on as many ranks, between two epochs, and for holdfast's own loader."""
    for end in resumed(tmp_path, kind, before, now, stopped_at):
        assert end.returned[1].startswith(promise)
        assert not end.returned[2]


def test_holdfasts_loader_reads_each_sample_once_on_another_number_of_ranks(tmp_path):
    """What two ranks have read before the stop and one after it is each sample of both epochs."""
    first = all_returned(run_ranks(training, 2, tmp_path, "holdfast", IN_THE_MIDDLE))
    rest = all_returned(run_ranks(training, 1, tmp_path, "holdfast", TO_THE_END))

    samples = [sample for ended in (*first, *rest) for sample in ended[0]]
    assert sorted(samples) == [(epoch, number) for epoch in range(2) for number in range(SAMPLES)]
