"""A second ``holdfast.DataLoader`` that the loop advances by hand, as in semi-supervised
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events
from torch import nn

import holdfast

pytestmark = pytest.mark.usefixtures("unchecked_splits")


def cycle(loader: Any) -> Iterator[torch.Tensor]:
    """Iterate a loader again and again; ``itertools.cycle`` would repeat the first epoch."""
    while True:
        yield from loader


class ByHand:
    """Calls ``next``, and ``iter`` again at the end of an epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.iterator = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


def train(
    run_dir: Path, advance: Any, *, held: bool = True, workers: int = 0, leave: int | None = None
) -> tuple[list[list[float]], holdfast.Guard]:
    """Train three epochs of six steps with labelled batches beside; return these, and the guard.

    The loop is left by ``break`` at a step, without a save, as if the process were killed there.
    """
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    unlabelled = holdfast.DataLoader(torch.arange(24.0)[:, None], 4, shuffle=True)
    labelled = holdfast.DataLoader(
        torch.arange(10.0)[:, None], 2, shuffle=True, seed=1, num_workers=workers
    )
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loader=unlabelled,
        state={"labelled": labelled} if held else None,
        save_interval_steps=4,
        async_save=False,
    )
    batches = advance(labelled)
    found = []
    for batch in guard.batches(max_epochs=3):
        with_labels = next(batches)
        found.append(with_labels[:, 0].tolist())
        guard.step((batch, with_labels), lambda both: sum(model(x).square().mean() for x in both))
        if guard.global_step == leave:
            break
    return found, guard


@pytest.mark.parametrize(("advance", "workers"), [(cycle, 0), (ByHand, 0), (ByHand, 1)])
@pytest.mark.parametrize("leave", [5, 10])
def test_a_second_loader_is_kept_as_state(tmp_path, advance, workers, leave):
    """By ``state={"labelled".

    Loader}`` a run that was cut off reads the labelled batches of the undisturbed one.
    """
    undisturbed, guard = train(tmp_path / "undisturbed", advance, workers=workers)
    assert not events(guard, "resume_may_differ")

    first, _ = train(tmp_path / "left", advance, workers=workers, leave=leave)
    rest, guard = train(tmp_path / "left", advance, workers=workers)

    saved = leave // 4 * 4
    assert first[:saved] + rest == undisturbed
    assert not events(guard, "resume_may_differ")


@pytest.mark.parametrize("advance", [cycle, ByHand])
def test_a_second_loader_that_nobody_holds_is_warned_of_once(tmp_path, advance):
    """A loader in the middle of its epoch at a boundary, in no ``state``, is one event at the
    first step.
    """
    _, guard = train(tmp_path, advance, held=False)

    (event,) = events(guard, "resume_may_differ")
    assert event.global_step == 1


def test_loaders_inside_a_loader_that_keeps_no_position_are_warned_of(tmp_path):
    """A loader of one's own over two of holdfast's, without a ``state_dict``, restores neither."""
    model = nn.Linear(1, 1)
    loaders = [holdfast.DataLoader(torch.arange(8.0)[:, None], 2, seed=seed) for seed in (1, 2)]

    class Both:
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*loaders, strict=True))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=Both())
    for both in guard.batches(max_epochs=1):
        guard.step(both, lambda both: sum(model(x).square().mean() for x in both))

    before, after = events(guard, "resume_may_differ")
    assert before.global_step == 0
    assert after.global_step == 1


def test_evaluations_are_not_warned_of(tmp_path):
    """Loaders that are iterated to the end, or left early and given up, within a step have no
    position to keep.
    """
    model = nn.Linear(1, 1)
    train_loader = holdfast.DataLoader(torch.arange(8.0)[:, None], 2)
    test_loader = holdfast.DataLoader(torch.arange(8.0)[:, None], 4)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loader=train_loader,
    )
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, lambda x: model(x).square().mean())
        with guard.evaluate():
            losses = [float(model(x).square().mean()) for x in test_loader]
        guard.validated(sum(losses))
        for x in test_loader:
            guard.log(first=x[0])
            break

    assert not events(guard, "resume_may_differ")


def train_with_inner_loop(
    run_dir: Path, *, inner_batches: int, held: bool, leave: int | None = None
) -> tuple[list[list[float]], holdfast.Guard]:
    """Take own steps in a loop over another loader, inside of each batch of the guard.

    Return the batches of the other loader, and the guard.

    Args:
        run_dir: Run directory.
        inner_batches: After how many of the four batches the inner loop is left.
        held: Whether the guard holds the other loader.
        leave: The batch after which the outer loop is left by ``break``.
    """
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    other = holdfast.DataLoader(torch.arange(8.0)[:, None], 2, shuffle=True, seed=1)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        loader=holdfast.DataLoader(torch.arange(24.0)[:, None], 4, shuffle=True),
        state={"other": other} if held else None,
        save_interval_steps=1,
        async_save=False,
    )
    found = []
    for number, _ in enumerate(guard.batches(max_epochs=2), start=1):
        for count, batch in enumerate(other, start=1):
            found.append(batch[:, 0].tolist())
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if count == inner_batches:
                break
        if number == leave:
            break
    return found, guard


@pytest.mark.parametrize("inner_batches", [3, 4])
def test_an_inner_loop_over_a_held_loader_resumes_exactly(tmp_path, inner_batches):
    """An inner loop that is left early, like one that is not, begins the same epoch as in the
    undisturbed run.
    """
    undisturbed, _ = train_with_inner_loop(
        tmp_path / "undisturbed", inner_batches=inner_batches, held=True
    )

    first, _ = train_with_inner_loop(
        tmp_path / "left", inner_batches=inner_batches, held=True, leave=5
    )
    rest, guard = train_with_inner_loop(tmp_path / "left", inner_batches=inner_batches, held=True)

    # The newest checkpoint is that after the fourth batch.
    assert first[: 4 * inner_batches] + rest == undisturbed
    assert not events(guard, "resume_may_differ")


def test_a_loader_that_is_read_to_its_end_between_steps_is_warned_of(tmp_path):
    """Its order depends on its epoch, which no checkpoint holds, so a resume would not be exact."""
    _, guard = train_with_inner_loop(tmp_path, inner_batches=4, held=False)

    (event,) = events(guard, "resume_may_differ")
    assert event.global_step == 4
