"""``num_workers="auto"`` with real loaders: when it decides, and that short epochs do not disturb it."""

from __future__ import annotations

import gc
import logging
import os
import resource
import time
import weakref
from typing import Any

import pytest
import torch
from tests.own_process import in_own_process
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.tuning.autotune import Given, Tuner
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.retuning import Watch
from holdfast.loader.workers.recovery import Crew


class Waits(Dataset[torch.Tensor]):
    """Samples that wait for a disk."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor(index)


@pytest.mark.parametrize(("length", "batch_size", "epochs"), [(8, 1, 2), (16, 4, 3), (1, 1, 9)])
def test_an_epoch_may_end_with_the_last_batch_that_is_timed(length: int, batch_size: int, epochs: int) -> None:
    """The choice is then made where no batch is left of the epoch; it looks at whole epochs, and training goes on."""
    loader = DataLoader(Waits(length, 0.0), batch_size=batch_size, num_workers="auto", seed=0)
    for _ in range(epochs):
        assert sorted(int(index) for batch in loader for index in batch) == list(range(length))


@pytest.mark.parametrize("length", [8, 9])
def test_a_choice_near_the_end_of_an_epoch_is_made_for_whole_epochs(length: int) -> None:
    """One batch or none is left when workers are chosen; they still pay, since each epoch to come has all of them."""
    loader = DataLoader(Waits(length, 0.06), num_workers="auto", seed=0)
    for _ in range(2):
        assert sorted(int(index) for batch in loader for index in batch) == list(range(length))
    assert loader.num_workers > 1


def test_slow_batches_are_not_all_loaded_without_workers() -> None:
    """Of batches of a second three are timed, not eight: what they tell is clear, and each costs a second."""
    given = Given(
        dataset=[0],
        collate_fn=None,
        worker_init_fn=None,
        num_workers=None,
        prefetch_factor=None,
        method="fork",
        keep=True,
    )
    chosen: list[int] = []
    crew = Crew(workers=0, method=None, options={}, timeout_seconds=0.0)
    tuner = Tuner(given, lambda workers, _: chosen.append(workers), lambda *_, **__: None, crew)

    def made() -> Any:
        for number in range(10):
            time.sleep(1.05)
            yield torch.tensor([number]), None

    passing = tuner.passing(made(), 10)
    for _ in range(4):  # the choice is made when the fourth is asked for
        assert not chosen
        next(passing)
    assert chosen
    assert chosen[0] > 1
    passing.close()


@pytest.mark.parametrize("told", ["", "0", "two", "-1"])
def test_a_launcher_that_tells_no_number_of_processes_leaves_one(monkeypatch, told: str) -> None:
    """What stands in the environment does not end a training; a number that is one divides the machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    alone = Machine.of_this_rank()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Machine.of_this_rank().cpu_quota == alone.cpu_quota / 4


def test_batches_that_no_worker_can_send_need_none(caplog: pytest.LogCaptureFixture) -> None:
    """Samples that wait would gain by workers; what cannot be pickled is loaded without them, which is a warning."""
    caplog.set_level(logging.WARNING, "holdfast")
    loader = DataLoader(Waits(40, 0.02), num_workers="auto", seed=0, collate_fn=_a_function)
    assert [batch() for batch in loader] == list(range(40))
    assert loader.num_workers == 0
    assert "H641" in caplog.text
    assert "return tensors, arrays, numbers and strings" in caplog.text


class Slots:
    """A batch that is no container."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self.more: dict[str, Any] = {}


def _named(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {"x": torch.stack(samples), "names": ["a", "b"]}


def _as_an_object(samples: list[torch.Tensor]) -> Slots:
    return Slots(torch.stack(samples))


def _keep(batch: Any, key: str, what: Any) -> None:
    (batch.more if isinstance(batch, Slots) else batch)[key] = what


@pytest.mark.parametrize("collate", [_named, _as_an_object])
@pytest.mark.parametrize("result", ["graph", "function", "removed"])
def test_what_the_loop_does_to_its_batch_costs_no_workers(
    collate: Any, result: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Results that are put into a batch need not be sent by any worker."""
    caplog.set_level(logging.WARNING, "holdfast")
    weight = torch.ones((), requires_grad=True)
    loader = DataLoader(Waits(24, 0.02), num_workers="auto", seed=0, collate_fn=collate)
    for batch in loader:
        if result == "removed":
            vars(batch).clear() if isinstance(batch, Slots) else batch.clear()
        else:
            _keep(batch, "logits", weight * 2 if result == "graph" else lambda: 0)
    assert loader.num_workers > 1
    assert not caplog.text


def test_no_graph_is_kept_by_what_is_measured() -> None:
    """The activations of the first step go with it, not when workers are chosen."""
    weight = torch.ones((), requires_grad=True)
    loader = DataLoader(Waits(8, 0.0), num_workers="auto", seed=0, collate_fn=_named)
    held = []
    for batch in loader:
        batch["logits"] = weight * batch["x"]
        held.append(weakref.ref(batch["logits"]))
        del batch
        gc.collect()
        assert [each() for each in held[:-1]] == [None] * (len(held) - 1)  # the last one is still at hand


def test_what_healing_has_lowered_is_not_raised_again() -> None:
    """Workers were given up, and each batch is waited for then: that is no reason to start what failed."""
    events: list[tuple[str, Any]] = []
    loader = DataLoader(Waits(140, 0.012), num_workers="auto", seed=0, worker_init_fn=lambda _: os._exit(4))
    loader._happened = lambda kind, **facts: events.append((kind, facts.get("num_workers")))
    for _ in loader:
        time.sleep(0.006)
    assert loader._healer.crew.workers == 0
    assert [kind for kind, _ in events].count("workers_chosen") == 1
    assert "loader_healed" in [kind for kind, _ in events]


def test_a_trial_in_which_healing_lowers_the_number_is_not_taken_back() -> None:
    """The number from before a raise may be more than what healing has left."""
    crew = Crew(workers=8, method=None, options={}, timeout_seconds=0.0)
    told: list[str] = []
    tuner = Tuner(
        Given(
            dataset=[0], collate_fn=None, worker_init_fn=None, num_workers=None, prefetch_factor=None, method="fork",
            keep=True,
        ),
        lambda workers, _: setattr(crew, "workers", workers), lambda kind, **_: told.append(kind), crew,
    )  # fmt: skip

    def made() -> Any:
        for number in range(200):
            time.sleep(0.002)
            yield torch.tensor([number]), None

    for count, _ in enumerate(tuner.passing(made(), 200)):
        if count == 10:
            assert tuner._watch is not None
            tuner._watch = Watch(num_workers=8, prefetch_factor=2, look_after_batches=100, tried_from=(4, 2, 1e-6))
            crew.workers = 2
    assert crew.workers == 2
    assert told.count("workers_chosen") == 1


def _first_batch_with_few_descriptors() -> tuple[int, list[str]]:
    told: list[str] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    loader = DataLoader([torch.zeros(4) for _ in range(800)], batch_size=400, num_workers=1, collate_fn=list)
    loader._happened = lambda kind, **_: told.append(kind)
    return sum(len(batch) for batch in loader), told


def test_a_batch_that_came_is_no_reason_to_end_the_epoch() -> None:
    """Healing has found a way round what would certainly fail; what is known of the batch is then only a warning."""
    found, told = in_own_process(_first_batch_with_few_descriptors)
    assert found == 800
    assert "loader_healed" in told


def test_no_batch_is_kept_after_it_was_weighed() -> None:
    """It may lie in shared or pinned memory, of which there is little."""
    loader = DataLoader([torch.zeros(4)] * 40, batch_size=4, num_workers=1)
    held = []
    for batch in loader:
        held.append(weakref.ref(batch))
        del batch
    gc.collect()
    assert [each() for each in held] == [None] * 10


@pytest.mark.parametrize(("workers", "prefetch"), [("auto", 0), ("auto", -1), (2, 0)])
def test_a_prefetch_factor_below_one_is_refused_when_the_loader_is_made(workers: Any, prefetch: int) -> None:
    """Not in the middle of the first epoch, when workers are started."""
    with pytest.raises(LoaderError, match=f"prefetch_factor={prefetch};") as caught:
        DataLoader([1, 2], num_workers=workers, prefetch_factor=prefetch)
    assert caught.value.rule == "H607"


def test_what_a_fixed_number_of_workers_prefetches_can_be_chosen() -> None:
    """Once, from the first batches: the number stays, and the batches are those of any loader."""
    chosen: list[tuple[int, int]] = []

    def happened(kind: str, **facts: Any) -> None:
        if kind == "workers_chosen":
            chosen.append((facts["num_workers"], facts["prefetch_factor"]))

    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 4}
    dataset = Waits(60, 0.004)
    loader = DataLoader(dataset, num_workers=2, prefetch_factor="auto", **options)
    loader._happened = happened
    expected = [batch.tolist() for batch in DataLoader(dataset, **options)]
    assert [batch.tolist() for batch in loader] == expected
    ((workers, prefetch),) = chosen
    assert workers == loader.num_workers == loader._healer.crew.workers == 2
    assert prefetch == loader.prefetch_factor
    assert len(list(loader)) == 30
    assert len(chosen) == 1


def test_nothing_is_prefetched_without_workers() -> None:
    """A depth alone is no wish that can be met, as with torch."""
    with pytest.raises(LoaderError, match="only workers prefetch") as caught:
        DataLoader([1, 2], prefetch_factor="auto")
    assert caught.value.rule == "H607"


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": -1}, {"timeout": "5"}, {"multiprocessing_context": "spwan"}, {"multiprocessing_context": 3}],
    ids=str,
)
def test_what_torch_refuses_for_workers_is_refused_when_the_loader_is_made(wrong: dict[str, Any]) -> None:
    """Not when workers are chosen, after eight batches or hours."""
    with pytest.raises((ValueError, TypeError)) as torchs:
        TorchDataLoader([1, 2], num_workers=1, **wrong)
    with pytest.raises(torchs.type) as ours:
        DataLoader([1, 2], num_workers="auto", **wrong)
    assert str(ours.value) == str(torchs.value)


def _a_function(samples: list[torch.Tensor]) -> Any:
    return lambda: int(samples[0])
