"""Loaders that are not holdfast's: what a resume reads, and what is promised before training."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import events, the_event
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

import holdfast

SAMPLES = torch.arange(24.0)
pytestmark = pytest.mark.usefixtures("unchecked_splits")


class Passes(Sampler[list[int]]):
    """Batches whose order depends on how often they were asked for."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        return iter(torch.randperm(24, generator=generator).view(6, 4).tolist())


class SavedPasses(Passes):
    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Noise from a generator of the dataset's own."""

    def __init__(self, seed: int | None = None) -> None:
        self.noise = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return SAMPLES[index] + float(self.noise.random()) / 2


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(SAMPLES)


class Endless(DataLoader[torch.Tensor]):
    """Iterates in its own way."""

    def __iter__(self) -> Any:
        yield from itertools.islice(super().__iter__(), 4)


class Batches:
    def __iter__(self) -> Any:
        yield from SAMPLES.view(6, 4)


def persistent(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(SAMPLES, 4, shuffle=True, num_workers=1, persistent_workers=True, **options)


def with_own_generator() -> DataLoader[torch.Tensor]:
    return persistent(generator=torch.Generator().manual_seed(5))


def unseeded_augmentation() -> DataLoader[torch.Tensor]:
    return DataLoader(Subset(Augmented(), range(24)), 4, shuffle=True)


def saved_passes() -> DataLoader[torch.Tensor]:
    return DataLoader(SAMPLES, batch_sampler=SavedPasses())


def saved_passes_in_workers() -> DataLoader[torch.Tensor]:
    return DataLoader(SAMPLES, batch_sampler=SavedPasses(), num_workers=1)


def train(
    run_dir: Any, loader: Any, *, stop: int | None = None
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Train three epochs of a model with dropout, or until a stop.

    Return the batches and the weights.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        loader=loader,
        save_interval_steps=4,
        async_save=False,
    )
    batches = []
    for batch in guard.batches(max_epochs=3):
        batches.append(batch.tolist())
        guard.step(batch, lambda x: model(x[:, None]).square().mean())
        if guard.global_step == stop:
            guard.request_stop()
    # A restart has a process of its own. Workers that only the garbage collector ends take five
    # seconds each.
    vars(loader).pop("_iterator", None)
    return batches, [parameter.detach() for parameter in model.parameters()]


def assert_resumes(folder: Any, make_loader: Any, stops: tuple[int, ...]) -> None:
    """Compare an undisturbed run with one that is stopped, and goes on with new objects each
    time.
    """
    batches, weights = train(folder / "undisturbed", make_loader())
    resumed = []
    for stop in (*stops, None):
        part, resumed_weights = train(folder / "resumed", make_loader(), stop=stop)
        resumed += part
    assert resumed == batches
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed_weights, strict=True))


@pytest.mark.parametrize(
    ("make_loader", "stops"),
    [
        (persistent, (2,)),
        (persistent, (6,)),
        (persistent, (8, 11)),
        (persistent, (14,)),
        (with_own_generator, (8,)),
    ],
)
def test_workers_that_live_on_do_not_change_the_order_of_a_resume(tmp_path, make_loader, stops):
    """With ``persistent_workers=True`` batches and dropout after a stop in any epoch are the
    undisturbed ones.
    """
    assert_resumes(tmp_path, make_loader, stops)


@pytest.mark.parametrize(
    ("make_loader", "stops"),
    [
        (saved_passes, (4,)),
        (saved_passes, (6, 9)),
        (saved_passes, (14,)),
        (saved_passes_in_workers, (9,)),
    ],
)
def test_a_sampler_of_torchs_loader_is_kept_by_its_state_dict(tmp_path, make_loader, stops):
    """A batch sampler that counts its passes, and says so in its ``state_dict``, goes on where
    it was.
    """
    assert_resumes(tmp_path, make_loader, stops)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_in_the_dataset_is_kept(tmp_path, workers):
    """A restart whose dataset seeds its own generator otherwise draws what the interrupted run
    would have drawn.
    """
    # Of the undisturbed run, of the one that is stopped, and of its restart
    seeds = iter([1, 1, 2])

    def make_loader() -> DataLoader[torch.Tensor]:
        dataset = Subset(Augmented(next(seeds)), range(24))
        return DataLoader(dataset, 4, shuffle=True, num_workers=workers)

    assert_resumes(tmp_path, make_loader, (8,))


def test_a_second_loop_in_the_first_epoch_starts_its_workers_again(tmp_path):
    """A loop that was left and begun again by the same guard goes on in the same order, workers
    or not.
    """
    batches, _ = train(tmp_path / "undisturbed", persistent())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = holdfast.Guard(tmp_path / "left", model=model, optimizer=optimizer, loader=persistent())
    found = []
    for steps in (3, 9, 18):
        for batch in guard.batches(max_steps=steps):
            found.append(batch.tolist())
            guard.step(batch, lambda x: model(x[:, None]).square().mean())
    assert found == batches


PROMISES = {
    "torch's": (lambda: DataLoader(SAMPLES, 4, shuffle=True), "bit-exact"),
    "torch's with workers": (
        lambda: DataLoader(SAMPLES, 4, num_workers=2, prefetch_factor=3),
        "bit-exact",
    ),
    "a list of batches": (lambda: list(SAMPLES.view(6, 4)), "bit-exact"),
    "an unseeded dataset": (unseeded_augmentation, "bit-exact"),
    "persistent workers": (persistent, "not known, because"),
    "out of order": (
        lambda: DataLoader(SAMPLES, 4, num_workers=2, in_order=False),
        "none, because",
    ),
    "a stream": (lambda: DataLoader(Stream(), 4), "not known, because"),
    "a sampler of one's own": (
        lambda: DataLoader(SAMPLES, batch_sampler=Passes()),
        "not known, because",
    ),
    "a loader of one's own": (Batches, "not known, because"),
    "a subclass": (lambda: Endless(SAMPLES, 4), "not known, because"),
    "an iterator": (lambda: iter(SAMPLES.view(6, 4)), "none, because"),
    "a cycle": (lambda: itertools.cycle(DataLoader(SAMPLES, 4)), "none, because"),
    "a list of loaders": (lambda: [DataLoader(SAMPLES, 4)], "none, because"),
}


def first_batch(run_dir: Any, loader: Any) -> holdfast.Guard:
    """Begin a loop over a loader and leave it at the first batch."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=loader)
    for _ in guard.batches(max_steps=100):
        break
    return guard


@pytest.mark.parametrize("case", PROMISES)
def test_the_promise_of_a_foreign_loader_is_yes_no_or_not_known(tmp_path, case):
    """The event ``loop`` has a plain promise, and what is not kept is an event of its own before
    training.
    """
    make_loader, promise = PROMISES[case]

    guard = first_batch(tmp_path, make_loader())

    assert the_event(guard, "loop").data["resume_promise"].startswith(promise)
    warnings = [event.data["why"] for event in events(guard, "resume_may_differ")]
    assert warnings == (
        [] if promise == "bit-exact" else [the_event(guard, "loop").data["resume_promise"]]
    )


@pytest.mark.parametrize(
    "options", [{"batch_size": 8}, {"batch_size": 4, "num_workers": 1}], ids=str
)
def test_a_loader_that_is_set_up_otherwise_loses_its_promise(tmp_path, options):
    """Another batch size or number of workers than the checkpoint was made with is said before
    training.
    """
    train(tmp_path, DataLoader(SAMPLES, 4, shuffle=True), stop=2)

    guard = first_batch(tmp_path, DataLoader(SAMPLES, shuffle=True, **options))

    assert events(guard, "loop")[-1].data["resume_promise"].startswith("none, because")
    assert the_event(guard, "resume_may_differ").data["why"].startswith("none, because")


NOISE = np.random.default_rng(7)


def noise() -> float:
    return float(NOISE.random()) / 2


class AugmentedByAGlobal(torch.utils.data.Dataset[torch.Tensor]):
    """Noise from a generator at the top of the script, as many write it."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return SAMPLES[index] + noise()


def test_a_generator_in_a_global_variable_of_the_dataset_is_kept(tmp_path):
    """A restarted process makes it anew, and it is brought to where it was."""

    def make_loader() -> DataLoader[torch.Tensor]:
        NOISE.bit_generator.state = np.random.default_rng(7).bit_generator.state
        return DataLoader(AugmentedByAGlobal(), 4, shuffle=True)

    assert_resumes(tmp_path, make_loader, stops=(3, 8))


def train_and_change(run_dir: Any, loader: Any, change: Any) -> holdfast.Guard:
    """Train for three epochs, and change something after each step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    guard = holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=loader)
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, lambda x: model(x).square().mean())
        change(loader)
    return guard


def reverse(batches: list[torch.Tensor]) -> None:
    batches.reverse()


def reverse_indices(loader: DataLoader[torch.Tensor]) -> None:
    loader.sampler.reverse()


def weigh_the_first(loader: DataLoader[torch.Tensor]) -> None:
    loader.sampler.weights[0] += 1


@pytest.mark.parametrize(
    ("make_loader", "change"),
    [
        (lambda: list(SAMPLES.view(6, 4))[:5], reverse),
        (lambda: DataLoader(SAMPLES, 4, sampler=list(range(20))), reverse_indices),
        (
            lambda: DataLoader(SAMPLES, 4, sampler=WeightedRandomSampler(torch.ones(24), 24)),
            weigh_the_first,
        ),
    ],
)
def test_an_order_that_the_script_changes_loses_its_promise(tmp_path, make_loader, change):
    """What the list or the sampler was given is in no checkpoint, which is said when the next
    epoch begins.
    """
    guard = train_and_change(tmp_path, make_loader(), change)

    event = the_event(guard, "resume_may_differ")
    assert 0 < event.global_step < guard.global_step
    guard.close()
    again = train_and_change(tmp_path, make_loader(), change)
    assert events(again, "loop")[-1].data["resume_promise"].startswith("none")


def test_an_order_that_nobody_changes_keeps_its_promise(tmp_path):
    """A sampler inside of a sampler of batches is told the epoch.

    The order is another one in each, by design.
    """
    sampler = BatchSampler(DistributedSampler(range(24), 1, 0), 4, drop_last=False)
    orders = []
    guard = train_and_change(
        tmp_path, DataLoader(SAMPLES, batch_sampler=sampler), lambda _: orders.append(list(sampler))
    )

    assert not events(guard, "resume_may_differ")
    assert orders[0] == orders[5] != orders[6] == orders[11]
