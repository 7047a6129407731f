"""``num_workers="auto"``: doubled in the first batches while the loop waits less by it, and then left alone."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from tests.unit.loader.samples import Samples
from torch.utils.data import IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.loader import auto_workers
from holdfast.loader.auto_workers import WorkerProbe
from holdfast.loader.loader import DataLoader
from holdfast.loader.machine import Machine
from holdfast.loader.workers.pool import WorkerSettings

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
PLENTY = Machine(cpu_quota=16)


class Simulated:
    """A loop on a clock of its own: a batch takes `load` seconds in one worker, and a step `step` seconds.

    Sending a batch from a worker costs `sending` seconds; more than `readers` workers do not load any faster.
    """

    def __init__(
        self, load: float, step: float, *, sending: float = 0.0, readers: int = 64, most: Any = None, **events: Any
    ) -> None:
        self.load, self.step, self.sending, self.readers = load, step, sending, readers
        self.clock = 0.0
        self.settings = WorkerSettings(workers=0, method=None, options={}, timeout_seconds=0)
        self.events: list[dict[str, Any]] = []
        self.tried = [0]
        self.probe = WorkerProbe(
            None, most, self.settings, apply=self.apply, emit=lambda event: self.events.append(event.facts())
        )

    def apply(self, workers: int) -> None:
        self.settings.workers = workers
        self.tried.append(workers)

    def batches(self, count: int) -> Generator[tuple[Any, Any]]:
        for _ in range(count):
            workers = self.settings.workers
            period = self.load / min(max(workers, 1), self.readers)
            self.clock += max(period - self.step, 0) + self.sending if workers else self.load
            yield torch.zeros(4), None

    def run(self, monkeypatch: pytest.MonkeyPatch, count: int = 1000, machine: Machine = PLENTY) -> int | None:
        monkeypatch.setattr(auto_workers.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(Machine, "of_this_rank", classmethod(lambda cls: machine))
        for _ in self.probe.passing(self.batches(count)):
            self.clock += self.step
        return self.probe.chosen


@pytest.mark.parametrize(
    ("how", "expected", "tried"),
    [
        ({"load": 0.0001, "step": 0.01}, 0, [0]),  # it hardly waits
        ({"load": 0.005, "step": 0.01}, 1, [0, 1]),
        ({"load": 0.035, "step": 0.01}, 4, [0, 1, 2, 4]),
        ({"load": 0.02, "step": 0.0}, 16, [0, 1, 2, 4, 8, 16]),  # one worker alone gains nothing, two do
        ({"load": 0.001, "step": 0.001, "sending": 0.002}, 0, [0, 1, 2, 0]),  # sending costs more than loading
        ({"load": 0.04, "step": 0.005, "readers": 2}, 2, [0, 1, 2, 4, 2]),  # a disk that two workers keep busy
    ],
    ids=["little", "one", "four", "all", "none", "disk"],
)
def test_workers_are_doubled_while_the_wait_falls(
    how: dict[str, Any], expected: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last number that shortened it is taken, with the reason in one event, within the first 150 batches."""
    loop = Simulated(**how)
    assert loop.run(monkeypatch, 150) == expected
    assert loop.tried == tried
    ((event,)) = loop.events
    assert (event["num_workers"], event["reason"]) == (expected, loop.probe.reason)
    assert "wait" in event["reason"]


@pytest.mark.parametrize(
    ("machine", "most", "expected", "named"),
    [
        (Machine(cpu_quota=3), None, 3, "3 processors"),
        (Machine(cpu_quota=16, shared_memory_free_bytes=100), None, 2, "/dev/shm has 100 B free"),
        (Machine(cpu_quota=16), (1, "of the dataset"), 1, "of the dataset"),
    ],
    ids=["processors", "shared memory", "stream"],
)
def test_what_the_machine_has_bounds_the_workers(
    machine: Machine, most: Any, expected: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the loop waits; the reason says which bound it was."""
    loop = Simulated(0.5, 0.1, most=most)
    assert loop.run(monkeypatch, machine=machine) == expected
    assert named in loop.probe.reason


def test_short_epochs_take_what_is_known_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers, batches of several epochs are timed together; workers that an epoch cannot time do not pay."""
    loop = Simulated(0.03, 0.01)
    assert loop.run(monkeypatch, 4) is None
    assert loop.run(monkeypatch, 6) == 0
    assert "the epoch ended before 1 workers had been timed" in loop.probe.reason
    assert loop.settings.workers == 0


def test_workers_that_are_lost_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What their recovery has lowered is not raised again."""
    loop = Simulated(0.1, 0.01)
    apply = loop.apply
    loop.probe._apply = lambda workers: apply(workers // 2 if workers == 4 else workers)
    assert loop.run(monkeypatch) == 2
    assert "lost while 4 were tried" in loop.probe.reason


def _wait(index: int) -> tuple[int, float]:
    time.sleep(0.003)
    return index, float(torch.rand(()))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 3}])
def test_the_batches_are_those_of_any_number_of_workers(options: dict[str, Any]) -> None:
    """While workers are tried and changed no batch is lost, repeated or augmented otherwise, nor in later epochs."""
    expected = DataLoader(Samples(160, _wait), batch_size=4, shuffle=True)
    loader = DataLoader(Samples(160, _wait), batch_size=4, shuffle=True, num_workers="auto", **options)
    events: list[tuple[str, dict[str, Any]]] = []
    loader._record = lambda data: events.append((data.kind, data.facts()))
    for _ in range(2):
        for one, other in zip(expected, loader, strict=True):
            assert all(map(torch.equal, one, other))
    assert [kind for kind, _ in events if kind != "preflight"] == ["workers_chosen"]
    assert loader.num_workers == events[-1][1]["num_workers"]
    loader.close()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_what_cannot_be_chosen_is_refused() -> None:
    """The depth of prefetching is given or torch's; what torch refuses of the other arguments is refused at once."""
    loader = DataLoader(Numbers(), batch_size=3, num_workers="auto")
    assert sum(len(batch) for batch in loader) == 6
    assert loader.probe is not None
    assert loader.probe._most is not None
    assert loader.probe._most[0] == 1, "each worker would read the whole stream"
    for options in ({"prefetch_factor": "auto"}, {"prefetch_factor": 0}, {"num_workers": "many"}):
        with pytest.raises(LoaderError) as caught:
            DataLoader([1], **{"num_workers": 1, **options})
        assert caught.value.rule == "H607"
    with pytest.raises(ValueError, match="timeout"):
        DataLoader([1], num_workers="auto", timeout=-1)
    with pytest.raises(ValueError, match="multiprocessing"):
        DataLoader([1], num_workers="auto", multiprocessing_context="threads")


def test_a_number_that_is_given_is_checked_against_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before workers start, and again when the size of a batch is known; each rule is an event once."""
    machine = Machine(cpu_quota=1, shared_memory_free_bytes=50)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    loader = DataLoader(torch.zeros(24), batch_size=4, num_workers=2)
    rules: list[Any] = []
    loader._record = lambda data: rules.append(data.rule)
    batches = iter(loader)
    next(batches)
    assert rules == ["H630", "H631"]
    assert len(list(batches)) == 5
    list(loader)
    assert rules == ["H630", "H631"]
