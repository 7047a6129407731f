"""`FeatureCache`: features that are computed once, and then read from a file that verifies every
item.

How items are stored is in ``files`` and ``items``. What the features are made from is stated by the
caller, as a version and parameters: nothing here looks into the function.

Each item has its own random numbers, from (seed, index), and one thread, so it is the same whatever
the number of workers. Workers that are lost are replaced, as those of every `DataLoader`; only an
item that ends or blocks its worker each time ends the build.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import Dataset

from holdfast.core.control_groups import cpu_quota
from holdfast.core.errors import LoaderError
from holdfast.core.warned import ignore_warnings
from holdfast.loader.loader import DataLoader
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.fetch import as_is
from recipes.features.files import (
    Contents,
    Draft,
    failure,
    missing,
    open_finished,
    read_item,
    require_h5py,
)
from recipes.features.items import decode, digest_of, encode

_PREFETCHED = 16
"""Items for each worker that may be under way or wait for a slower one before them; it bounds the
memory."""
_DRAWN = 100
"""Times that the progress bar is drawn in a build, at most."""


class FeatureCache(Dataset[Any]):
    """The features of a dataset, in a file.

    A map-style dataset of what ``fn`` returned for each sample.

    Items are read one by one, with their types, shapes and every bit as they were; tensors are on
    the CPU. Any number of processes may read, forked or spawned, and each item is checked against
    its digest when it is read.

    Args:
        path: A file that `build` has finished.

    Raises:
        LoaderError: H620 for another kind of file, H621 for one that is not finished, H622 for a
            damaged one, H624 for one that cannot be read, H625 if there is none.

    Example:
        >>> import tempfile; path = tempfile.mkdtemp() + "/squares.h5"
        >>> build = lambda: FeatureCache.build([1, 2, 3], lambda x: x * x, path, version=1, progress=False)
        >>> with build() as cache:
        ...     list(cache)
        [1, 4, 9]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._descriptor, self._contents = _opened(self.path)

    @classmethod
    def build(
        cls,
        dataset: Any,
        fn: Callable[[Any], Any],
        path: str | os.PathLike[str],
        *,
        version: int | str,
        parameters: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        multiprocessing_context: str | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """Compute ``fn(dataset[index])`` for each index that is not in the file yet, and open it.

        Killed or stopped at any moment, the next call continues, and the file is the same to the
        last byte as that of a build that nothing happened to. It gets its name when it is complete,
        and is never changed again.

        A finished file is opened, and an unfinished one continued, only if it was made with the
        same `version`, `parameters` and `seed` from as many samples. Neither the code of ``fn`` nor
        the samples are compared: change `version` when ``fn`` changes, and name what else decides
        the features in `parameters`.

        Args:
            dataset: Map-style, with a length.
            fn: Returns the features of a sample: a tensor, numpy array, number or text, or a tuple,
                list or dict of these. Items may differ in shape.
            path: The file; beside it, ``<path>.building`` holds what is not finished.
            version: Of ``fn`` and of the data, such as ``1`` or ``"mel-2, corpus of May"``.
            parameters: What decides the features, by name: numbers, text, and lists and dicts of
                these. For instance the sample rate, or the digest of a file that ``fn`` opens.
            num_workers: Processes that compute; 0 computes here, None takes one for each usable
                processor.
            multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for python's
                default.
            seed: Decides, with the index, the random numbers that a sample and ``fn`` draw.
            progress: Whether to draw a bar on stderr.

        Raises:
            LoaderError: H620 if the file was made from something else, H621 if somebody else is
                building it, H622 if it is damaged, H623 if an item cannot be computed, H624 if the
                disk refuses, H625 for a dataset, version or parameters that cannot be used.
        """
        require_h5py()
        if (
            not isinstance(dataset, Sized)
            or not hasattr(dataset, "__getitem__")
            or not len(dataset)
        ):
            raise _unusable(
                f"dataset={type(dataset).__name__}", "it needs __len__ and __getitem__, and an item"
            )
        place, draft = Path(path).absolute(), Draft(Path(path).absolute())
        key = _key(version, parameters, seed, len(dataset))
        if _is_finished(draft, key):
            return cls(place)
        try:
            draft.acquire()
            try:
                if not _is_finished(draft, key):  # as it may be by now, by who had the lock
                    _prepare(draft, key)
                    workers = max(1, int(cpu_quota())) if num_workers is None else num_workers
                    items, method = _Computed(dataset, fn), multiprocessing_context
                    _fill(
                        draft,
                        len(dataset),
                        lambda left: _compute(items, left, seed, workers, method),
                        shown=progress,
                    )
                    draft.finish(key)
            finally:
                draft.release()
        except OSError as error:
            raise failure(
                f"feature cache {place}: {error.strerror or error}", rule="H624"
            ) from error
        return cls(place)

    def __len__(self) -> int:
        return self._contents.length

    def __getitem__(self, index: int) -> Any:
        """Return an item as ``fn`` returned it; H622 if it is not what was written."""
        length, place = len(self), operator.index(index)
        if not -length <= place < length:
            raise IndexError(f"item {place} of a feature cache of {length}")
        return decode(read_item(self._open(), self._contents, self.path, place % length))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _open(self) -> int:
        if self._descriptor < 0:
            descriptor, contents = _opened(self.path)
            if contents.identity != self._contents.identity:
                os.close(descriptor)
                raise failure(
                    f"feature cache {self.path} was replaced by another one since it was opened",
                    rule="H620",
                )
            self._descriptor = descriptor
        return self._descriptor

    def close(self) -> None:
        """Close the file; it is opened again when an item is read."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": -1}  # a number of this process

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def _opened(path: Path) -> tuple[int, Contents]:
    try:
        return open_finished(path)
    except FileNotFoundError as error:
        raise missing(path) from error


def _unusable(what: str, limit: str) -> LoaderError:
    return LoaderError(
        what, limit=limit, fix="pass what FeatureCache.build describes.", rule="H625"
    )


def _key(version: Any, parameters: Any, seed: int, length: int) -> dict[str, str]:
    """Return what decides the features, by name."""
    if type(version) not in (int, str):
        raise _unusable(
            f"version={version!r}", "a number or text says which version of fn and the data this is"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _unusable(
            f"parameters={parameters!r}", 'it names values, such as {"sample_rate": 16000}'
        )
    key = {"version": json.dumps(version)}
    for name, value in (parameters or {}).items():
        try:
            key[f"parameter {name}"] = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            limit = f"it is compared as JSON ({error}); a digest can stand for it"
            raise _unusable(f"parameters[{name!r}] is a {type(value).__name__}", limit) from error
    return key | {"seed": str(seed), "length of the dataset": str(length)}


def _is_finished(draft: Draft, key: dict[str, str]) -> bool:
    """Return whether the file is there and holds just these features; H620 if it holds others."""
    try:
        descriptor, contents = open_finished(draft.path)
    except FileNotFoundError:
        return False
    os.close(descriptor)
    _compare(f"feature cache {draft.path}", contents.key, key)
    return True


def _compare(which: str, there: dict[str, str], here: dict[str, str]) -> None:
    found = [
        f"{name} was {there.get(name, 'not there')} and is {here.get(name, 'gone')}"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]
    if found:
        raise failure(f"{which} was made from something else: {'; '.join(found)}", rule="H620")


def _prepare(draft: Draft, key: dict[str, str]) -> None:
    there = draft.key()
    if there is None:
        draft.begin(key)
    else:
        _compare(f"the unfinished build of feature cache {draft.path}", there, key)


def _fill(
    draft: Draft,
    total: int,
    computed: Callable[[range], Generator[tuple[bytes, bytes]]],
    *,
    shown: bool,
) -> None:
    """Add every item that is not there yet.

    The bar has no thread of its own: that is a danger to forked workers.
    """
    quiet: dict[str, Any] = {
        "auto_refresh": False,
        "redirect_stdout": False,
        "redirect_stderr": False,
    }
    bar = Progress(console=Console(stderr=True), disable=not shown, **quiet)
    task, every = bar.add_task(draft.path.name, total=total), max(1, total // _DRAWN)
    with bar:
        for done in draft.resume():
            bar.update(task, completed=done, refresh=done % every == 0)
        with contextlib.closing(computed(range(draft.length, total))) as items:
            for data, digest in items:
                draft.add(data, digest)
                bar.update(task, completed=draft.length, refresh=draft.length % every == 0)


class _Failure(NamedTuple):
    what: str
    traceback: str


class _Computed(Dataset[Any]):
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


def _compute(
    computed: _Computed, indices: range, seed: int, num_workers: int, method: str | None
) -> Generator[tuple[bytes, bytes]]:
    """Yield each of these items and its digest, in order. Close it to end the workers.

    H623 names the item that cannot be computed; H625 if no worker can be started.
    """
    how: dict[str, Any] = {"batch_size": None, "collate_fn": as_is, "num_workers": num_workers}
    if num_workers:
        how |= {"multiprocessing_context": method, "prefetch_factor": _PREFETCHED}
    with ignore_warnings(UserWarning):  # of more workers than processors: the loader itself says so
        loader = DataLoader(
            computed, sampler=indices, seed=seed, quarantine=0, rank=0, world_size=1, **how
        )
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
                    limit=(
                        'with "spawn" and "forkserver" the dataset and fn must be names of a module'
                    ),
                    fix=(
                        'define them in a module, or pass multiprocessing_context="fork" or'
                        " num_workers=0."
                    ),
                    rule="H625",
                ) from error
            if isinstance(item, _Failure):
                raised = failure(f"item {index} of the dataset raised {item.what}", rule="H623")
                raised.add_note(item.traceback)
                raise raised
            yield item
