"""What a signal's handler raises leaves the loader, wherever the main thread is by then."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, default_collate

from holdfast.data.loader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Preempted(Exception):  # noqa: N818 - as users name it
    """As many a training script has one."""


class Slow:
    """A sample waits, so that a signal finds the loader at it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


class SlowStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(40):
            time.sleep(0.05)
            yield index


def _slow_collate(samples: list[Any]) -> Any:
    time.sleep(0.2)
    return default_collate(samples)


@pytest.mark.parametrize("error", [SystemExit(143), Preempted()], ids=["exit", "exception"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Slow(), {}),
        (Slow(), {"num_workers": 1}),
        (list(range(40)), {"collate_fn": _slow_collate}),
        (SlowStream(), {}),
    ],
    ids=["sample", "wait", "collate", "stream"],
)
def test_a_handlers_exception_is_not_taken_for_a_samples(
    dataset: Any, options: dict[str, Any], error: BaseException
) -> None:
    """It ends the loop, as with torch, and is neither tried again, nor healed, nor turned into another error."""
    events: list[str] = []
    loader = DataLoader(dataset, batch_size=4, **options)
    loader._happened = lambda kind, **_: events.append(kind)

    def handle(number: int, frame: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handle)
    seen = 0
    try:
        with pytest.raises(type(error)):
            for _ in loader:
                if not seen:
                    signal.setitimer(signal.ITIMER_REAL, 0.12)
                seen += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen < 10
    assert not {"loader_healed", "sample_quarantined"} & set(events)


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("bad")], ids=["exit", "exception"])
def test_what_a_sample_raises_itself_is_still_the_samples(error: BaseException) -> None:
    """One that ends the interpreter is set aside, also while there are handlers."""

    class Bad(Slow):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise error
            return index

    found = [item for batch in DataLoader(Bad(), batch_size=4) for item in batch.tolist()]
    assert len(found) == 40
    assert 3 not in found
