"""Which remedy follows which loss.

New workers, fewer, none, files for descriptors, an honest end; and the queue.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.loader.samples import Samples, items
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.core.errors import LoaderError
from holdfast.core.events.data import EventData
from holdfast.core.events.run_events import DescriptorLimitRaised
from holdfast.loader.loader import DataLoader
from holdfast.loader.workers.board import PREPARING, STARTING, WorkerStatus
from holdfast.loader.workers.map_source import BatchSource
from holdfast.loader.workers.pool import WorkerSettings
from holdfast.loader.workers.recovery import WorkerRecovery
from holdfast.loader.workers.watch import WorkerLoss

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def _events(loader: DataLoader) -> list[dict[str, Any]]:
    """Let a loader record what happens in a list."""
    found: list[dict[str, Any]] = []

    def record(data: EventData) -> None:
        if data.kind in {"loader_healed", "sample_quarantined"}:
            found.append({"kind": data.kind, **data.facts()})

    loader._record = record
    return found


def test_workers_that_never_start_are_done_without() -> None:
    """If workers exit at every start, fewer are tried, and at last the main process reads by
    itself.
    """
    loader = DataLoader(
        Samples(40), batch_size=4, num_workers=2, worker_init_fn=lambda worker: os._exit(4)
    )
    events = _events(loader)
    assert items(loader) == list(range(40))
    assert [event["workers"] for event in events] == [2, 1, 0]
    assert all(event["cause"] for event in events)


def test_the_cause_of_a_loss_between_epochs_is_told() -> None:
    """A worker that was kept and is killed before the next epoch begins is named with what
    killed it.
    """
    loader = DataLoader(Samples(40), batch_size=4, num_workers=2, persistent_workers=True)
    events = _events(loader)
    items(loader)
    killed = multiprocessing.active_children()[0]
    os.kill(killed.pid or 0, signal.SIGKILL)
    assert items(loader) == list(range(40))
    loader.close()
    assert [event["cause"][1 + len("worker ") :] for event in events] == [" was killed by SIGKILL"]


class Own(IterableDataset[int]):
    """A stream that divides its items among its workers, which die at once."""

    def __iter__(self) -> Iterator[int]:
        if get_worker_info() is not None:
            os._exit(9)
        return iter(range(8))


def test_a_stream_that_shards_itself_is_never_given_fewer_workers() -> None:
    """The items of a worker that is missing would be missing too, so it ends with H614."""
    loader = DataLoader(Own(), batch_size=2, num_workers=2)
    _events(loader)
    with pytest.raises(LoaderError) as caught:
        list(loader)
    assert caught.value.rule == "H614"


# --- the table of remedies, loss by loss


class Idle(BatchSource):
    """A source of which only the sample that is quarantined matters."""

    def __init__(self) -> None:
        self.quarantined: list[Any] = []

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        self.quarantined.append((index, kind))


def _remedies(
    losses: list[tuple[WorkerLoss, Any]], workers: int = 4, events: list[Any] | None = None
) -> tuple[list[int], list[Any], WorkerSettings]:
    """Return the workers after each loss in a row, what was quarantined, and the settings."""
    settings = WorkerSettings(
        workers=workers, method=None, options={"pin_memory": True}, timeout_seconds=0.0
    )
    recovery = WorkerRecovery(settings, ([] if events is None else events).append)
    source, after = Idle(), []
    for loss, index in losses:
        recovery.adapt_settings(loss, index, source)
        after.append(settings.workers)
    return after, source.quarantined, settings


def _died(*, fine: bool | None, done: int = 0, shortage: str | None = None) -> WorkerLoss:
    return WorkerLoss(
        cause="worker 0 was killed by SIGKILL",
        kind="died",
        worker=0,
        status=WorkerStatus(3, 0, done),
        others_fine=fine,
        shortage=shortage,
    )


def _hung(*, fine: bool | None, done: int = 0, offset: int = 0) -> WorkerLoss:
    return WorkerLoss(
        cause="worker 0 hung",
        kind="hung",
        worker=0,
        status=WorkerStatus(3, offset, done),
        others_fine=fine,
    )


def test_if_every_worker_is_blocked_there_are_none_from_then_on() -> None:
    """Workers that hang at whatever they read blame no sample; the main process goes on."""
    after, quarantined, _ = _remedies([(_hung(fine=False), 7)] * 3)
    assert after[-1] == 0
    assert not quarantined
    for offset in (STARTING, PREPARING):
        starting = _hung(fine=False, offset=offset)
        assert _remedies([(starting, None)] * 2)[0] == [4, 0]


def test_a_sample_that_takes_its_worker_down_is_never_left_to_the_main_process() -> None:
    """A want of memory at one sample leaves a worker for the second look, which then sets the
    sample aside.
    """
    for workers in (1, 4):
        short = _died(fine=True, done=1, shortage="memory")
        after, quarantined, _ = _remedies([(short, 7)] * 2, workers)
        assert min(after) >= 1
        assert quarantined == [(7, "killed its worker")]


def test_descriptors_that_run_out_are_spared() -> None:
    """First tensors go through files and the limit is raised, which is an event.

    Then there are fewer workers.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    loss = WorkerLoss(cause="too many files", kind="machinery", shortage="file descriptors")
    events: list[Any] = []
    try:
        after, _, settings = _remedies([(loss, None)] * 2, events=events)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert settings.share_by_file
    assert after == [4, 2]
    (event,) = events
    assert isinstance(event, DescriptorLimitRaised)
    assert (event.before, event.now) == (before[1] - 1, before[1])


def test_indices_that_cannot_be_pickled_are_an_error_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop hears of it; without workers they are used as they are."""
    functions = Samples(4, lambda index: index())
    numbers: list[Any] = [lambda: 0, lambda: 1, lambda: 2, lambda: 3]
    assert items(DataLoader(functions, batch_size=2, sampler=numbers)) == [0, 1, 2, 3]
    loader = DataLoader(functions, batch_size=2, sampler=numbers, num_workers=2)
    with pytest.raises(TypeError, match="indices cannot be pickled"):
        next(iter(loader))
    assert not caplog.records, "no worker was given up for it"
    loader.close()
