"""What Guard takes by its methods is checked when the guard is made.

Loaders, further state, names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import square_of
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import holdfast

DATA = torch.randn(16, 2)


def make() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def assert_refused(run: Any, **arguments: Any) -> None:
    with pytest.raises(holdfast.PolicyError) as caught:
        holdfast.Guard(run, **{**make(), **arguments})
    assert caught.value.rule == "H105"
    assert not run.exists()


def numbers() -> Any:
    yield from [DATA[:8], DATA[8:]]


def used_up() -> Any:
    """Return a generator that has yielded all it has."""
    generator = numbers()
    list(generator)
    return generator


class Index:
    """It has an index, and cannot be iterated."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return DATA[index]


@pytest.mark.parametrize(
    "loader",
    [
        TensorDataset(DATA),
        DATA,
        np.zeros((4, 2)),
        "data/train.csv",
        {"train": [DATA]},
        numbers,
        torch.utils.data.DataLoader,
        used_up(),
        Index(),
        3,
    ],
)
def test_a_loader_that_yields_no_batches_is_refused(tmp_path, loader):
    """A dataset, rows, characters, keys, a function, a class, and a generator that has ended."""
    assert_refused(tmp_path / "run", loader=loader)


class Batches(IterableDataset[torch.Tensor]):
    """A stream that makes whole batches itself."""

    def __iter__(self) -> Any:
        return numbers()


@pytest.mark.parametrize(
    "loader", [Batches(), numbers(), list(DATA.split(8)), range(0), iter([DATA])]
)
def test_any_other_iterable_may_yield_batches(tmp_path, loader):
    """Whether it does is seen when it is iterated."""
    holdfast.Guard(tmp_path, loader=loader, **make()).close()


class Kept:
    """Further state, as it should be."""

    def __init__(self) -> None:
        self.values = {"n": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values = dict(state)


class NoCall(Kept):
    """Its state is an attribute."""

    state_dict = {"n": 0}  # type: ignore[assignment]  # noqa: RUF012


class NeedsArguments(Kept):
    """As the gather-on-rank methods of some libraries."""

    def state_dict(self, rank: int) -> dict[str, int]:  # type: ignore[override]
        return {"n": rank}


class TakesNothing(Kept):
    """It cannot be given a state."""

    def load_state_dict(self) -> None:  # type: ignore[override]
        self.values = {}


class Forwarding:
    """A wrapper that finds everything in what it wraps."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    "state",
    [Kept, NoCall(), NeedsArguments(), TakesNothing(), nn.Sequential(nn.LazyLinear(2)), object()],
)
def test_state_that_could_not_be_saved_and_put_back_is_refused(tmp_path, state):
    """A class, an attribute, methods with other arguments, and lazy layers without shapes."""
    assert_refused(tmp_path / "run", state={"mine": state})


def test_state_is_known_by_its_methods_wherever_they_come_from(tmp_path):
    """A wrapper that forwards them is saved and restored."""
    for n in (0, 1):
        kept = Kept()
        parts = make()
        guard = holdfast.Guard(tmp_path, loader=[DATA], state={"mine": Forwarding(kept)}, **parts)
        assert kept.values == {"n": n}
        kept.values["n"] += 1
        for batch in guard.batches(max_steps=guard.global_step + 1):
            guard.step(batch, square_of(parts["model"]))


def test_one_object_under_two_names_is_refused(tmp_path):
    """It would be stepped, or loaded, twice."""
    parts = make()
    twice = {"a": parts["optimizer"], "b": parts["optimizer"]}
    assert_refused(tmp_path / "run", model=parts["model"], optimizer=twice)
    assert_refused(tmp_path / "run", state=dict.fromkeys(["a", "b"], Kept()))


def test_an_average_must_be_an_object_that_takes_in_this_model(tmp_path):
    """A class, a module and an average of another model are refused."""
    other = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 1))
    for averaged in (
        torch.optim.swa_utils.AveragedModel,
        nn.Linear(2, 1),
        other,
        {"nobody": other},
    ):
        assert_refused(tmp_path / "run", averaged=averaged)
