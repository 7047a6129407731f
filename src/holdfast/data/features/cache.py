"""`FeatureCache`: features that are computed once, and then read from a file that proves every item.

What is stored how lies in ``files``, ``finished`` and ``items``, who computes in ``workers``, what a cache is known
by in ``keys``.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import Dataset

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import LoaderError
from holdfast.data.features.changing import Origin, tell
from holdfast.data.features.errors import (
    being_written,
    damaged_items,
    not_computed,
    refused,
    replaced,
    stale,
    unfinished,
    unusable,
)
from holdfast.data.features.files import Draft
from holdfast.data.features.finished import announce_items, open_finished, read_item, require_h5py
from holdfast.data.features.items import decode
from holdfast.data.features.keys import as_known, completed, differences, facts_of, not_read
from holdfast.data.features.telling import Teller
from holdfast.data.features.workers import Item, Work, compute_here, compute_in_workers
from holdfast.data.tuning.machine import cpu_quota

_REFRESH_SECONDS = 0.2
_left: dict[Path, tuple[Origin, dict[str, str | None]]] = {}
"""Of builds that computed in this process: what they were of, and the facts about ``fn`` that they have changed."""


class FeatureCache(Dataset[Any]):
    """The features of a dataset, in a file: a map-style dataset of what ``fn`` returned for each sample.

    Items are read one by one, with their types, shapes and every bit as they were; tensors are on the CPU. Any number
    of processes may read, forked or spawned, and each item is checked against its digest when it is read.

    Args:
        path: A file that `build` has finished.

    Raises:
        LoaderError: H620 for another kind of file, H621 for one that is not finished, H622 for a damaged one, H624
            for one that cannot be read, H625 if there is none.

    Example:
        >>> import tempfile; path = tempfile.mkdtemp() + "/squares.h5"
        >>> with FeatureCache.build([1, 2, 3], lambda x: x * x, path, num_workers=0, progress=False) as cache:
        ...     list(cache)
        [1, 4, 9]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        try:
            self._descriptor, self._contents = open_finished(self.path)
        except FileNotFoundError as error:
            raise _missing(self.path) from error

    @classmethod
    def build(
        cls,
        dataset: Any,
        fn: Callable[[Any], Any],
        path: str | os.PathLike[str],
        *,
        parameters: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        multiprocessing_context: str | None = None,
        seed: int = 0,
        progress: bool = True,
        rebuild: bool = False,
    ) -> Self:
        """Compute ``fn(dataset[index])`` for each index that is not in the file yet, and open it.

        Killed or stopped at any moment, the next call continues, and the file is the same to the last byte as that of
        a build that nothing happened to. It gets its name when it is complete, and is never changed again.

        A finished file is opened only if it was made from the same: of a dataset that is a list, tuple, array, tensor
        or TensorDataset of plain values and at most 256 MiB every sample is compared, of any other its length and
        eight samples. So one corrected file of a dataset on disk is not seen: say it in ``parameters`` (a version, a
        digest), or pass ``rebuild=True``. What ``fn`` changes itself when it runs (a counter, a table that it fills,
        an attribute that it makes late) is not compared; what somebody else changes is, also a flag that a caller
        turns between two builds.

        Args:
            dataset: Map-style, with a length.
            fn: Returns the features of a sample: a tensor, numpy array, number or text, or a tuple, list or dict of
                these. Items may differ in shape.
            path: The file; beside it, ``<path>.building`` holds what is not finished.
            parameters: What decides the features and cannot be seen in ``fn``, its defaults, closure, attributes and
                the globals it reads, such as the contents of a file that it opens.
            num_workers: Processes that compute; 0 computes here, None takes one for each usable processor.
            multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for python's default.
            seed: Decides, with the index, the random numbers that a sample and ``fn`` draw.
            progress: Whether to draw a bar on stderr.
            rebuild: Throw away what is there and begin anew. The old file stays until the new one is complete. Leave
                it out when a killed build is to be continued.

        Raises:
            LoaderError: H620 if the file was made from something else, H621 if somebody else is building it, H622 if
                it is damaged, H623 if an item cannot be computed, H624 if the disk refuses, H625 for an argument
                that cannot be used.
        """
        _check_arguments(dataset, fn, parameters, num_workers, multiprocessing_context)
        place, draft = Path(path).absolute(), Draft(Path(path).absolute())
        work, key = Work(dataset, fn, seed), facts_of(dataset, fn, parameters, seed)
        if not rebuild and _is_finished(draft, key, fn):
            draft.tidy()
            return cls(place)
        try:
            draft.acquire()
            try:
                if rebuild or not _is_finished(draft, key, fn):  # as it may be by now, by who had the lock
                    origin = _prepare(draft, key, fn, rebuild=rebuild)
                    with _Bar(place.name, len(dataset), SystemClock(), shown=progress) as bar:
                        origin = _fill(draft, origin, work, num_workers, multiprocessing_context, bar)
                    draft.finish(origin)
            finally:
                draft.release()
        except OSError as error:
            raise refused(place, error) from error
        return cls(place)

    @property
    def key(self) -> Mapping[str, str]:
        """Return what the features were made from: facts about function, parameters and dataset, by name."""
        return MappingProxyType(self._contents.origin.key)

    def __len__(self) -> int:
        return self._contents.length

    def __getitem__(self, index: int) -> Any:
        """Return an item as ``fn`` returned it.

        Raises:
            LoaderError: H622, if it is not what was written.
            IndexError: if there is no such item.
            TypeError: for what is no whole number, such as a slice.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items; from a disk that is faster than one after the other."""
        places = [self._place(index) for index in indices]
        descriptor = self._open()
        if len(places) > 1:
            announce_items(descriptor, self._contents, places)
        return [decode(read_item(descriptor, self._contents, self.path, place)) for place in places]

    def _place(self, index: int) -> int:
        length, place = len(self), operator.index(index)
        if not -length <= place < length:
            raise IndexError(f"item {place} of a feature cache of {length}")
        return place % length

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def verify(self) -> None:
        """Read every item.

        Raises:
            LoaderError: H622, naming the items that are not what was written.

        Cost: reads the whole file; SHA-256 at about 1.5 GB/s.
        """
        bad = []
        for index in range(len(self)):
            try:
                read_item(self._open(), self._contents, self.path, index)
            except LoaderError:
                bad.append(index)
        if bad:
            raise damaged_items(self.path, bad, len(self))

    def _open(self) -> int:
        if self._descriptor < 0:
            try:
                descriptor, contents = open_finished(self.path)
            except FileNotFoundError as error:
                raise _missing(self.path) from error
            if contents.identity != self._contents.identity:
                os.close(descriptor)
                raise replaced(self.path)
            self._descriptor = descriptor
        return self._descriptor

    def close(self) -> None:
        """Give the file back; it is opened again when an item is read."""
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

    def __repr__(self) -> str:
        return f"FeatureCache({str(self.path)!r}, {len(self)} items)"


class _Bar:
    """A bar on stderr that is drawn when it is told to: a thread of its own would be a danger to forked workers."""

    def __init__(self, name: str, total: int, clock: Clock, *, shown: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(
            *columns,
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not shown,
        )
        self._task = self._progress.add_task(name, total=total)
        self._clock = clock
        self._drawn = clock.monotonic_seconds()

    def show(self, done: int) -> None:
        """Move the bar; it is drawn a few times a second at most."""
        now = self._clock.monotonic_seconds()
        draw = now - self._drawn >= _REFRESH_SECONDS
        self._progress.update(self._task, completed=done, refresh=draw)
        self._drawn = now if draw else self._drawn

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._progress.stop()


def _check_arguments(dataset: Any, fn: Any, parameters: Any, num_workers: Any, multiprocessing_context: Any) -> None:
    require_h5py()
    methods = (None, *multiprocessing.get_all_start_methods())
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        wrong = f"dataset={type(dataset).__name__}", "items have numbers, so it needs __len__ and __getitem__"
    elif not len(dataset):
        wrong = f"dataset={type(dataset).__name__} is empty", "there is nothing to compute"
    elif not callable(fn):
        wrong = f"fn={fn!r}", "it is called with each sample"
    elif parameters is not None and not isinstance(parameters, Mapping):
        wrong = f"parameters={parameters!r}", "it names values"
    elif num_workers is not None and (type(num_workers) is not int or num_workers < 0):
        wrong = f"num_workers={num_workers!r}", "0 or more processes can compute"
    elif multiprocessing_context not in methods:
        wrong = f"multiprocessing_context={multiprocessing_context!r}", f"it is one of {methods}"
    else:
        return
    raise unusable(*wrong, "pass what FeatureCache.build describes; a dataset that is empty may have a wrong path.")


def _is_finished(draft: Draft, key: dict[str, str], fn: Any) -> bool:
    """Return whether the file is there and holds just these features.

    Raises:
        LoaderError: H620, if it holds others; H623, if that cannot be said, as a sample cannot be read.
    """
    try:
        descriptor, contents = open_finished(draft.path)
    except FileNotFoundError:
        return False
    os.close(descriptor)
    begun = draft.origin()
    if begun and not _differences(draft.path, begun, key, fn):
        return False  # a rebuild that was killed: by whoever did not trust the file, although it has this key
    if found := _differences(draft.path, contents.origin, key, fn):
        raise stale(draft.path, found, unfinished=False)
    if unread := not_read(contents.origin.key, key):
        raise not_computed(unread[0], "cannot be read, so it cannot be compared with that of the finished file")
    return True


def _differences(path: Path, origin: Origin, key: dict[str, str], fn: Any) -> list[str]:
    if origin.key == key:
        return []
    made, left = _left.get(path, (None, {}))
    return differences(origin.key, as_known(origin, key, fn, left if made == origin else {}))


def _prepare(draft: Draft, key: dict[str, str], fn: Any, *, rebuild: bool) -> Origin:
    there = draft.origin()
    if rebuild:
        with contextlib.suppress(FileNotFoundError):
            os.close(open_finished(draft.path)[0])  # nothing is replaced but a feature cache
    elif there is not None:
        if found := _differences(draft.path, there, key, fn):
            raise stale(draft.path, found, unfinished=True)
        if there.key != (whole := completed(there.key, key)):
            there = Origin(whole, there.runs)
            draft.describe(there)
        return there
    draft.begin(Origin(key))
    return Origin(key)


def _fill(
    draft: Draft, origin: Origin, work: Work, num_workers: int | None, multiprocessing_context: str | None, bar: _Bar
) -> Origin:
    """Add every item that is not there yet; return what they were made from, with what has shown by computing."""
    for done in draft.resume():
        bar.show(done)
    left = range(draft.length, len(work.dataset))
    if num_workers is None:
        num_workers = max(1, int(cpu_quota()))
    before = {} if num_workers else tell(Teller(), work.fn).facts
    try:
        if num_workers:
            items = compute_in_workers(work, left, num_workers, multiprocessing_context)
        else:
            items = compute_here(work, left)
        with contextlib.closing(items):
            origin = _add_first(draft, origin, items)
            bar.show(draft.length)
            for item in items:
                draft.add(item.data, item.digest)
                bar.show(draft.length)
    finally:
        if not num_workers:
            _note_left(draft, before, work.fn)
    return origin


def _add_first(draft: Draft, origin: Origin, items: Iterator[Item]) -> Origin:
    """Add the first two items behind what they have told of ``fn``, so that a kill leaves neither or both."""
    first: list[Item] = []
    if draft.length:
        return origin
    try:
        for item in itertools.islice(items, 2):
            first = [*first, item]
    finally:  # one, if the second cannot be computed
        if first:
            origin = Origin(origin.key, first[-1].runs)
            draft.describe(origin)
        for item in first:
            draft.add(item.data, item.digest)
    return origin


def _note_left(draft: Draft, before: dict[str, str], fn: Any) -> None:
    """Remember what computing here has changed of ``fn`` beyond what its first items have told."""
    try:
        origin, after = draft.origin(), tell(Teller(), fn).facts
    except Exception:  # noqa: BLE001 - it holds what cannot be told: the features are good all the same
        return
    if origin is None or before == after:
        return
    made, left = _left.get(draft.path, (None, {}))
    changed = {name: after.get(name) for name in [*before, *after] if before.get(name) != after.get(name)}
    _left[draft.path] = origin, (left if made == origin else {}) | changed


def _missing(path: Path) -> LoaderError:
    draft = Draft(path)
    if builder := draft.builder():
        return being_written(path, builder, draft.items_written())
    if draft.exists:
        return unfinished(path, draft.items_written())
    return unusable(
        f"there is no feature cache {path}",
        "it is opened after it was built",
        "call FeatureCache.build(dataset, fn, path), or correct the path.",
    )
