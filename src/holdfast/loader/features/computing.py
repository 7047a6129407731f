"""Items of a feature cache, computed here or in worker processes, in the order of the dataset.

Each item has its own random numbers, from (seed, index), and one thread, so it is the same whatever the number of
workers. Workers that are lost are replaced, as those of every `DataLoader`; only an item that ends or blocks its
worker each time ends the build.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from holdfast.core.errors import LoaderError
from holdfast.core.warned import ignoring
from holdfast.loader.features.files import failure
from holdfast.loader.features.items import digest_of, encode
from holdfast.loader.loader import DataLoader
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.fetch import as_is

_PREFETCHED = 16
"""Items for each worker that may be under way or wait for a slower one before them; it bounds the memory."""


class _Failure(NamedTuple):
    what: str
    traceback: str


class Computed(Dataset[Any]):
    """The bytes of what `fn` returns for each item of a dataset, and their digest."""

    def __init__(self, dataset: Any, fn: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._fn = fn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[bytes, bytes] | _Failure:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums are rounded differently by another number of threads
        try:
            data = encode(self._fn(self._dataset[index]))
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises; not all of it can be pickled
            let_through(error)
            line = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return _Failure(line, traceback.format_exc())
        finally:
            torch.set_num_threads(threads)
        return data, digest_of(index, data)


def compute(
    computed: Computed, indices: range, *, seed: int, num_workers: int, method: str | None
) -> Generator[tuple[bytes, bytes]]:
    """Yield each of these items and its digest, in order. Close it to end the workers.

    Raises:
        LoaderError: H623, naming the item that cannot be computed; H625, if no worker can be started.
    """
    how: dict[str, Any] = {"batch_size": None, "collate_fn": as_is, "num_workers": num_workers}
    if num_workers:
        how |= {"multiprocessing_context": method, "prefetch_factor": _PREFETCHED}
    with ignoring(UserWarning):  # of more workers than processors: the loader itself says so
        loader = DataLoader(computed, sampler=indices, seed=seed, quarantine=0, rank=0, world_size=1, **how)
    items: Any = iter(loader)
    with contextlib.closing(items):
        for index in indices:
            try:
                item = next(items)
            except LoaderError as error:  # it names the item that its workers were lost to
                raise failure(error.what, rule="H623") from error
            except Exception as error:
                raise LoaderError(
                    f"a worker process cannot be started ({type(error).__name__}: {error})",
                    limit='with "spawn" and "forkserver" the dataset and fn must be names of a module',
                    fix='define them in a module, or pass multiprocessing_context="fork" or num_workers=0.',
                    rule="H625",
                ) from error
            if isinstance(item, _Failure):
                raised = failure(f"item {index} of the dataset raised {item.what}", rule="H623")
                raised.add_note(item.traceback)
                raise raised
            yield item
