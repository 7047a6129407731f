"""`holdfast.DataLoader`.

Stopped anywhere and continued anyhow, each sample comes exactly once, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loader.loader import DataLoader

_FAST = settings(deadline=None, max_examples=50)


class Noisy:
    """Samples that are their index and a random number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def _samples(batches: list[torch.Tensor]) -> list[tuple[float, float]]:
    return [tuple(sample) for batch in batches for sample in batch.tolist()]  # type: ignore[misc]


def _take(loader: DataLoader, batches: int) -> list[torch.Tensor]:
    """Return so many batches, over as many epochs as that takes."""
    taken: list[torch.Tensor] = []
    iterator: Any = iter(())
    while len(taken) < batches:
        for batch in iterator:
            taken.append(batch)
            break
        else:
            iterator = iter(loader)
    return taken


@st.composite
def _loaders(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "length": draw(st.integers(1, 25)),
        "batch_size": draw(st.integers(1, 8)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**40)),
    }


def _make(options: dict[str, Any], **changes: Any) -> DataLoader:
    options = {**options, **changes}
    return DataLoader(Noisy(options.pop("length")), **options)


@_FAST
@given(_loaders(), st.integers(0, 30), st.integers(1, 9))
def test_each_sample_comes_once_in_the_same_order_after_any_cut(
    options: dict[str, Any], cut: int, new_batch_size: int
) -> None:
    """Two epochs, cut anywhere and continued with any batch size, are the samples of two
    undisturbed epochs.
    """
    undisturbed = _make(options)
    per_epoch = len(undisturbed)
    expected = _samples([batch for _ in range(2) for batch in undisturbed])
    cut = min(cut, 2 * per_epoch)
    stopped, continued = _make(options), _make(options, batch_size=new_batch_size)
    found = _samples(_take(stopped, cut))
    continued.load_state_dict(stopped.state_dict())
    while len(found) < len(expected):
        found += _samples(list(continued))
    assert found == expected
    for epoch in (found[: options["length"]], found[options["length"] :]):
        assert sorted(index for index, _ in epoch) == list(range(options["length"]))
