"""Samplers that carry state from epoch to epoch.

A resumed run reads the batches of the undisturbed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import events
from torch import nn
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data import DataLoader as TorchDataLoader

import holdfast
from holdfast.testing import check_resumable

SAMPLES = torch.arange(60.0)[:, None]
pytestmark = pytest.mark.usefixtures("unchecked_splits")


class Balanced(Sampler[list[int]]):
    """Batches of two classes; the list of a class is shuffled again when it is used up."""

    def __init__(self) -> None:
        self.lists = {label: np.arange(label, 60, 5) for label in range(5)}
        self.used = dict.fromkeys(range(5), 0)
        for samples in self.lists.values():
            np.random.shuffle(samples)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(3):
            batch: list[int] = []
            for label in np.random.choice(5, 2, replace=False):
                batch += self.lists[label][self.used[label] : self.used[label] + 4].tolist()
                self.used[label] += 4
                if self.used[label] + 4 > 12:
                    np.random.shuffle(self.lists[label])
                    self.used[label] = 0
            yield batch


class Passes(Sampler[list[int]]):
    """Counts its epochs itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        return iter(torch.randperm(60, generator=generator)[:24].view(3, 8).tolist())


class SavedPasses(Passes):
    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class OwnRandom(Sampler[int]):
    """Yields samples, from a generator of numpy's that nobody seeds again."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(60)[:24].tolist())


class Endless(Sampler[int]):
    """Goes on where the epoch before has ended, in an iterator that nobody can look into."""

    def __init__(self) -> None:
        self.samples = itertools.cycle(range(0, 60, 7))

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.samples, 24)


class Weighted(Sampler[int]):
    """Weights that the loop may set between epochs."""

    def __init__(self) -> None:
        self.weights = torch.ones(60)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 24).tolist())


class SavedWeighted(Weighted):
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weights = state["weights"]


class Cached(Passes):
    """Keeps the batches of its epoch in an attribute, as many do; nothing is carried over."""

    def __iter__(self) -> Iterator[list[int]]:
        self.batches = torch.randperm(60)[:24].view(3, 8).tolist()
        return iter(self.batches)


class SavedInside(BatchSampler):
    """Torch's batches of a sampler that says its state."""

    def __init__(self) -> None:
        super().__init__(SavedWeighted(), 8, drop_last=False)

    @property
    def weights(self) -> torch.Tensor:
        return self.sampler.weights

    @weights.setter
    def weights(self, weights: torch.Tensor) -> None:
        self.sampler.weights = weights


def make_loader(kind: type[Sampler[Any]]) -> holdfast.DataLoader:
    np.random.seed(0)
    if kind in (OwnRandom, Endless, Weighted, SavedWeighted):
        return holdfast.DataLoader(SAMPLES, 8, sampler=kind(), repeats=True)
    return holdfast.DataLoader(SAMPLES, batch_sampler=kind(), repeats=True)


def train(run_dir: Path, loader: Any, *, stop: int | None = None, reweigh: bool = False) -> Any:
    """Train four epochs of three batches, or until a stop; return the batches and the guard.

    With `reweigh` the loop gives the samples of each batch half the weight from the next epoch on.
    """
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=loader)
    batches = []
    for batch in guard.batches(max_epochs=4):
        batches.append(batch[:, 0].int().tolist())
        guard.step(batch, lambda x: model(x).square().mean())
        if reweigh:
            sampler = (
                loader.batch_sampler
                if isinstance(loader.batch_sampler, SavedInside)
                else loader.sampler
            )
            sampler.weights = sampler.weights.clone()
            sampler.weights[batches[-1]] /= 2
        if guard.global_step == stop:
            guard.request_stop()
    return batches, guard


KINDS = [Balanced, Passes, SavedPasses, OwnRandom, Endless, Weighted, Cached]


@pytest.mark.parametrize("stop", [1, 4, 6, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_reads_the_batches_of_the_undisturbed_run(tmp_path, kind, stop):
    """Stopped in the first epoch, in a later one, or between two, the rest of the batches is the
    same.
    """
    undisturbed, _ = train(tmp_path / "undisturbed", make_loader(kind))

    first, _ = train(tmp_path / "stopped", make_loader(kind), stop=stop)
    rest, guard = train(tmp_path / "stopped", make_loader(kind))

    assert first + rest == undisturbed
    assert not events(guard, "resume_may_differ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_found_again_in_the_same_process_and_in_a_new_one(kind):
    """After every batch of two epochs, a new loader and the same one go on with the same
    batches.
    """
    check_resumable(lambda: make_loader(kind), same=torch.equal)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Endless])
def test_the_same_loader_goes_back_to_an_earlier_epoch(kind):
    """A loader that has read on, as before a rollback, reads the same batches again from an
    earlier position.
    """
    loader = make_loader(kind)
    list(loader)
    batches = iter(loader)
    next(batches)
    position = loader.state_dict()
    expected = [*batches, *loader, *loader]

    loader.load_state_dict(position)

    assert all(map(torch.equal, [*loader, *loader, *loader], expected))


@pytest.mark.parametrize("kind", [SavedWeighted, SavedInside])
def test_what_the_loop_sets_on_a_sampler_is_kept_by_its_state_dict(tmp_path, kind):
    """Weights that change at every batch, and decide the next epoch, come back through the
    sampler's state_dict.
    """
    undisturbed, guard = train(tmp_path / "undisturbed", make_loader(kind), reweigh=True)
    assert not events(guard, "resume_may_differ")

    first, _ = train(tmp_path / "stopped", make_loader(kind), stop=5, reweigh=True)
    rest, _ = train(tmp_path / "stopped", make_loader(kind), reweigh=True)

    assert first + rest == undisturbed


@pytest.mark.parametrize("torchs", [False, True])
def test_what_the_loop_sets_on_a_sampler_without_a_state_dict_is_said_at_the_first_epoch_change(
    tmp_path, torchs
):
    """The first batch of the second epoch says that the run cannot be resumed, and a resume is
    H604.
    """

    def loader() -> holdfast.DataLoader:
        if not torchs:
            return make_loader(Weighted)
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(60), 24)
        return holdfast.DataLoader(SAMPLES, 8, sampler=sampler)

    _, guard = train(tmp_path, loader(), stop=4, reweigh=True)

    (event,) = events(guard, "resume_may_differ")
    assert event.global_step == 3
    with pytest.raises(holdfast.LoaderError) as raised:
        train(tmp_path, loader())
    assert raised.value.rule == "H604"


def test_a_sampler_that_is_made_otherwise_is_refused_between_two_epochs_too(tmp_path):
    """A state that no draw can bring back is H604 at the end of an epoch, and not other batches
    without a word.
    """
    train(tmp_path, make_loader(Balanced), stop=6)
    np.random.seed(1)
    other = holdfast.DataLoader(SAMPLES, batch_sampler=Balanced(), repeats=True)

    with pytest.raises(holdfast.LoaderError) as raised:
        train(tmp_path, other)

    assert raised.value.rule == "H604"


def test_a_sampler_that_carries_nothing_costs_a_resume_no_earlier_epoch():
    """A position holds the epochs before only for a sampler that needs them."""
    stateless, carrying = make_loader(Cached), make_loader(Passes)
    for loader in (stateless, carrying):
        for _ in range(3):
            list(loader)

    assert "sampler" not in stateless.state_dict()
    assert carrying.state_dict()["sampler"]["epochs"] == [[0, 2]]


def test_torchs_loader_with_a_sampler_without_a_state_dict_says_so_before_training(tmp_path):
    """The same sampler in torch's own loader cannot be drawn again.

    The promise is not known, and that is said.
    """
    _, guard = train(tmp_path, TorchDataLoader(SAMPLES, batch_sampler=Passes()), stop=1)

    (event,) = events(guard, "resume_may_differ")
    assert event.global_step == 0
    assert event.data["why"].startswith("not known")
