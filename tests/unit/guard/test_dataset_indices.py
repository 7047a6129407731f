"""Dataset indices of bad samples are named, and quarantined, only where they are those of the
guard's loader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

pytestmark = pytest.mark.usefixtures("unchecked_splits")

BAD = 5
"""The index of the sample that holds NaN, in whichever dataset."""


def dataset(count: int, *, bad: bool) -> TensorDataset:
    x = torch.randn(count, 8)
    y = x.sum(1, keepdim=True)
    if bad:
        x[BAD, 3] = math.nan
    return TensorDataset(x, y)


def cycle(loader: Any) -> Iterator[Any]:
    """Iterate a loader again and again; ``itertools.cycle`` would repeat the first epoch."""
    while True:
        yield from loader


class Run:
    """A run over 32 samples in batches of 4, beside a second loader over 16 samples in batches
    of 4.
    """

    def __init__(self, run_dir: Path, *, bad_in_second: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.loader = holdfast.DataLoader(
            dataset(32, bad=not bad_in_second), batch_size=4, shuffle=True, seed=3
        )
        self.second = holdfast.DataLoader(
            dataset(16, bad=bad_in_second), batch_size=4, shuffle=True, seed=1
        )
        self.second_batches = cycle(self.second)
        self.guard = holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.01),
            loader=self.loader,
            state={"second": self.second},
            drop_nonfinite_samples=True,
            save_interval_steps=None,
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def loss_of_dict(self, batch: Any) -> torch.Tensor:
        return self.loss((batch["x"], batch["y"]))

    def loss_of_inputs(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def loss_of_pair(self, batch: Any) -> torch.Tensor:
        own, second = batch
        return self.loss(own) + self.loss(second)

    def named(self) -> list[list[int] | None]:
        """Return the dataset indices of each event that says where NaN came from."""
        return [
            event.data["dataset_indices"]
            for event in self.guard.events()
            if event.kind == "nonfinite_origin"
        ]

    def quarantined(self) -> list[int]:
        return [entry.index for entry in self.loader.ledger]


def both_loaders(run: Run, batch: Any) -> Any:
    return run.guard.step((batch, next(run.second_batches)), run.loss_of_pair)


def both_loaders_second_first(run: Run, batch: Any) -> Any:
    return run.guard.step((next(run.second_batches), batch), run.loss_of_pair)


def second_loader_only(run: Run, batch: Any) -> Any:
    return run.guard.step(next(run.second_batches), run.loss)


def inputs_of_second_loader(run: Run, batch: Any) -> Any:
    return run.guard.step(next(run.second_batches)[0], run.loss_of_inputs)


def alternately(run: Run, batch: Any) -> Any:
    run.guard.step(batch, run.loss)
    return run.guard.step(next(run.second_batches), run.loss)


def second_loader_in_place(run: Run, batch: Any) -> Any:
    batch.extend(next(run.second_batches))
    return run.guard.step(batch, lambda parts: run.loss_of_pair((parts[:2], parts[2:])))


@pytest.mark.parametrize(
    "step",
    [
        both_loaders,
        both_loaders_second_first,
        second_loader_only,
        inputs_of_second_loader,
        alternately,
        second_loader_in_place,
    ],
)
def test_a_bad_sample_of_a_second_loader_is_no_sample_of_the_guards(
    tmp_path: Path, step: Callable[[Run, Any], Any]
) -> None:
    """The row is named and left out, but no dataset index is named, and no good sample
    quarantined.
    """
    run = Run(tmp_path, bad_in_second=True)

    results = [step(run, batch) for batch in run.guard.batches(max_epochs=1)]

    assert any(len(result.dropped_samples) == 1 for result in results)
    assert run.named()
    assert set(map(str, run.named())) == {"None"}
    assert run.quarantined() == []


def test_the_batch_before_does_not_have_the_indices_of_this_one(tmp_path: Path) -> None:
    """A loop that prefetches one batch steps with the one before.

    The loader's last indices are not its own.
    """
    run = Run(tmp_path)

    before = None
    for batch in run.guard.batches(max_epochs=1):
        if before is not None:
            run.guard.step(before, run.loss)
        before = batch

    assert run.named() == [None]
    assert run.quarantined() == []


def as_it_is(run: Run, batch: Any) -> Any:
    return run.guard.step(batch, run.loss)


def repacked(run: Run, batch: Any) -> Any:
    x, y = batch
    return run.guard.step((x, y), run.loss)


def repacked_in_a_dict(run: Run, batch: Any) -> Any:
    x, y = batch
    return run.guard.step({"x": x, "y": y}, run.loss_of_dict)


def inputs_only(run: Run, batch: Any) -> Any:
    x, _ = batch
    return run.guard.step(x, run.loss_of_inputs)


def moved_to_another_type(run: Run, batch: Any) -> Any:
    batch = [part.to("cpu", torch.bfloat16, copy=True) for part in batch]
    return run.guard.step(batch, lambda parts: run.loss([part.float() for part in parts]))


def augmented(run: Run, batch: Any) -> Any:
    x, y = batch
    return run.guard.step((x + 0.1 * torch.randn_like(x), y), run.loss)


def replaced_in_place(run: Run, batch: Any) -> Any:
    batch[0] = batch[0] * 0.5
    return run.guard.step(batch, run.loss)


def after_a_look_at_the_loader(run: Run, batch: Any) -> Any:
    next(iter(run.second))
    return run.guard.step([part.clone() for part in batch], run.loss)


@pytest.mark.parametrize(
    "step",
    [
        as_it_is,
        repacked,
        repacked_in_a_dict,
        inputs_only,
        moved_to_another_type,
        augmented,
        replaced_in_place,
        after_a_look_at_the_loader,
    ],
)
def test_a_batch_of_the_guards_loader_names_its_samples(
    tmp_path: Path, step: Callable[[Run, Any], Any]
) -> None:
    """Moved, taken apart or augmented, its rows are the samples that the loader put there."""
    run = Run(tmp_path)

    for batch in run.guard.batches(max_epochs=1):
        step(run, batch)

    assert run.named() == [[BAD]]
    assert run.quarantined() == [BAD]


def test_indices_stay_those_of_the_batch_when_the_loader_is_looked_at_meanwhile(
    tmp_path: Path,
) -> None:
    """Another iterator of the same loader hands out other samples, which are not those of the
    step.
    """
    run = Run(tmp_path)

    for batch in run.guard.batches(max_epochs=1):
        is_bad = bool(torch.isnan(batch[0]).any())
        if is_bad:
            next(iter(run.loader))
        run.guard.step(batch, run.loss)
        if is_bad:
            break
    run.guard.close()

    assert run.named() == [[BAD]]
    assert run.quarantined() == [BAD]


def test_a_micro_batch_of_the_second_loader_names_no_index(tmp_path: Path) -> None:
    """The event of a micro-batch that is left out names indices of the guard's loader only for
    its own batch.
    """
    torch.manual_seed(0)
    run = Run(tmp_path)
    second = holdfast.DataLoader(dataset(16, bad=True), batch_size=4)
    model = run.model
    guard = holdfast.Guard(
        tmp_path / "split",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=run.loader,
        state={"second": second},
        drop_nonfinite_samples=True,
        micro_batch_size=2,
        save_interval_steps=None,
    )
    others = cycle(second)

    for batch in guard.batches(max_steps=16):
        guard.step(batch, run.loss)
        guard.step(next(others), run.loss)

    named = [
        event.data["dataset_indices"]
        for event in guard.events()
        if event.kind == "micro_batch_dropped"
    ]
    assert None in named
    own = [indices for indices in named if indices is not None]
    assert own
    assert all(BAD in indices for indices in own)
