"""``num_workers="auto"``: the first batches are made in the training process and timed, then workers are chosen.

Nothing is wasted: those batches are trained on. Afterwards the waits are watched, and when their share rises other
numbers are tried, and kept if they are better. What is chosen is for ``tuning`` and ``retuning``; here it is applied.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.fetch import Report
from holdfast.loader.streams.sharding import EACH_READS_ALL
from holdfast.loader.tuning.choice import LoaderPlan, decide_workers, pace_of
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Concern, Load, preflight, unsendable, weigh
from holdfast.loader.tuning.probing import MOST_PROBES, Instant, Sample, Transfer, kept, measure_transfer, sample_of
from holdfast.loader.tuning.retuning import Watch, decide_again
from holdfast.loader.workers.recovery import Crew

_FEWEST_PROBES = 3
_LONGEST_PROBING = 2.0  # seconds of loading, the first batch apart: where loads are so long, more of them cost more
Made = tuple[Any, Report]
_MORE_THAN_PROCESSORS = "H630"  # which is right for samples that wait, as was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What of a loader matters for its workers.

    Args:
        dataset: The user's.
        collate_fn: The user's.
        worker_init_fn: The user's.
        num_workers: As given; None to choose.
        prefetch_factor: As given; None to choose, or torch's 2.
        method: Start method of workers.
        keep: Whether they are kept from one epoch to the next.
        most_workers: Choose no more; None for no limit but the machine's.
        exact_workers: Choose these, and only the prefetch factor; None to choose both.
    """

    dataset: Any
    collate_fn: Any
    worker_init_fn: Any
    num_workers: int | None
    prefetch_factor: int | None
    method: str
    keep: bool
    most_workers: int | None = None
    exact_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Largest:
    """The batch with the most bytes so far, as it was made: what the loop does to its batch is the loop's.

    Args:
        size: Its bytes.
        tensors: How many it has.
        copy: What `kept` has left of it, for as long as it is needed.
        unsendable: Why no worker can send it, or None.
    """

    size: int = -1
    tensors: int = 0
    copy: Any = None
    unsendable: Concern | None = None


class Tuner:
    """Looks at the batches of a loader as they pass, warns of what will go wrong, and chooses its workers.

    Args:
        given: What the user gave.
        apply: Called with a number of workers and a prefetch factor (None: torch's) when they are to change.
        tell: Called with the kind of an event and its facts.
        crew: How workers are run: healing may have lowered their number.

    Raises:
        LoaderError: H607 for a prefetch factor below 1.
    """

    def __init__(
        self, given: Given, apply: Callable[[int, int | None], None], tell: Callable[..., None], crew: Crew
    ) -> None:
        if given.prefetch_factor is not None and given.prefetch_factor < 1:
            raise LoaderError(
                f"prefetch_factor={given.prefetch_factor}",
                limit="each worker has at least one batch under way",
                fix="pass 1 or more, or leave it out.",
                rule="H607",
            )
        self._given = given
        self._apply = apply
        self._tell = tell
        self._crew = crew
        self._told: set[str] = set()
        self._checked = False
        self._machine: Machine | None = None
        self._samples: list[Sample] = []
        self._largest = _Largest()
        self._plan: LoaderPlan | None = None
        self._batches_per_start: int | None = None
        self._watch: Watch | None = None
        self._load = Load(num_workers=0)
        self._waits: list[float] = []
        self._steps: list[float] = []

    def before_workers(self) -> None:
        """Check what can be known before a worker is started.

        Raises:
            LoaderError: H63x or H64x for what certainly fails.
        """
        workers = self._given.num_workers or self._given.exact_workers
        if workers and not self._checked:
            self._check(self._load_of(workers), dataset=self._given.dataset)
            self._checked = True  # it walks through the dataset, and pickles it where workers are spawned

    def passing(self, batches: Generator[Made], batches_left: int | None) -> Generator[Made]:
        """Return batches on their way, timed for as long as something is to be decided.

        Args:
            batches: The loader's.
            batches_left: Of this epoch, if known.
        """
        if self._given.num_workers is None:
            if (
                batches_left is not None and not self._given.keep
            ):  # the most seen: an epoch that is resumed is shorter
                self._batches_per_start = max(self._batches_per_start or 1, batches_left)
            return self._choosing(batches)
        return self._checking(batches, self._given.num_workers) if self._given.num_workers else batches

    def _checking(self, batches: Generator[Made], workers: int) -> Generator[Made]:
        """Warn once the size of a batch is known: of shared memory, descriptors, memory."""
        with closing(batches):
            if self._machine is not None and self._largest.size < 0:
                for batch, report in itertools.islice(batches, 1):
                    size, tensors = weigh(batch)
                    self._largest = _Largest(size=size, tensors=tensors)
                    self._check(self._load_of(workers), batch=batch, raises=False)  # it is here: it can be made
                    yield batch, report
                    del batch, report
            yield from batches

    def _choosing(self, batches: Generator[Made]) -> Generator[Made]:
        with closing(batches):
            yield from self._timed(batches)

    def _timed(self, batches: Iterator[Made]) -> Iterator[Made]:
        while True:
            asked = Instant.now() if self._plan is None else None
            began = time.perf_counter()
            try:
                batch, report = next(batches)
            except StopIteration:
                return
            loaded = Instant.now() if asked is not None else None
            handed = time.perf_counter()
            if asked is not None:
                self._note(batch)
                noted = Instant.now()
            yield batch, report
            if asked is not None and loaded is not None:
                self._samples.append(sample_of(asked, loaded, Instant.now(), noted))
                if self._has_probed():
                    self._choose()
            elif self._watch is not None:
                self._waits.append(handed - began)
                self._steps.append(time.perf_counter() - handed)
                self._reconsider(self._watch)

    def _has_probed(self) -> bool:
        taken = sum(sample.load_seconds for sample in self._samples[1:])
        count = len(self._samples)
        return count >= MOST_PROBES or (count >= _FEWEST_PROBES and taken >= _LONGEST_PROBING)

    def _note(self, batch: Any) -> None:
        size, tensors = weigh(batch)
        if size > self._largest.size:
            why = next(unsendable(batch), None)
            copy = kept(batch) if why is None else None
            self._largest = _Largest(size=size, tensors=tensors, copy=copy, unsendable=why)

    def _load_of(self, workers: int) -> Load:
        return Load(
            num_workers=workers,
            prefetch_factor=self._given.prefetch_factor or 2,
            batch_bytes=max(self._largest.size, 0),
            batch_tensors=self._largest.tensors,
            start_method=self._given.method,
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        )

    def _choose(self) -> None:
        largest = self._largest
        self._load = load = self._load_of(0)
        step = statistics.median(sample.step_seconds for sample in self._samples)
        self._machine = Machine.of_this_rank()
        transfer = Transfer.assumed(largest.size, largest.tensors)
        # Another start would take longer than it could save.
        if load.start_method == "fork" and largest.copy is not None:
            try:
                transfer = measure_transfer(largest.copy, step_seconds=step, machine=self._machine)
            except Exception as error:  # noqa: BLE001 - a decision on assumptions is better than none
                self._tell("transfer_not_measured", error=repr(error))
        self._largest = replace(largest, copy=None)
        exact = self._given.exact_workers
        self._plan = plan = decide_workers(
            pace_of(self._samples, transfer),
            self._machine,
            load,
            num_workers=exact,
            prefetch_factor=self._given.prefetch_factor,
            most_workers=self._given.most_workers,
            batches_per_start=self._batches_per_start,
        )
        if exact is None:
            self._watch = Watch(num_workers=plan.num_workers, prefetch_factor=plan.prefetch_factor)
        limited = exact is None and self._given.most_workers is not None
        reason = f"{plan.reason}; {EACH_READS_ALL}" if limited else plan.reason
        self._use(plan.num_workers, plan.prefetch_factor, reason)

    def _use(self, workers: int, prefetch: int | None, reason: str) -> None:
        if workers:
            load = replace(self._load, num_workers=workers, prefetch_factor=prefetch or 2)
            try:
                if self._largest.unsendable is not None:
                    raise self._largest.unsendable.error()
                self._check(load, dataset=self._given.dataset)
            except LoaderError as error:  # without them it goes on as before
                self._tell("preflight", rule=error.rule, what=error.what, limit=error.limit, fix=error.fix)
                workers, prefetch, reason = 0, None, f"workers cannot be used: {error.what} [{error.rule}]"
                self._watch, self._given = None, replace(self._given, num_workers=0)
        self._tell("workers_chosen", num_workers=workers, prefetch_factor=prefetch, reason=reason)
        self._apply(workers, prefetch)

    def _reconsider(self, watch: Watch) -> None:
        if self._crew.workers < watch.num_workers:
            self._watch = None  # what healing has lowered stays: a raise, or what was before one, would undo a remedy
            return
        if self._plan is None or self._machine is None or len(self._steps) < watch.look_after_batches:
            return
        new = decide_again(
            watch,
            self._waits,
            self._steps,
            pace=self._plan.pace,
            machine=self._machine,
            load=self._load,
            prefetch_factor=self._given.prefetch_factor,
            most_workers=self._given.most_workers,
            batches_per_start=self._batches_per_start,
        )
        self._watch = new
        if (new.num_workers, new.prefetch_factor) != (watch.num_workers, watch.prefetch_factor):
            share = sum(self._waits) / max(1e-9, sum(self._waits) + sum(self._steps))
            self._use(new.num_workers, new.prefetch_factor, f"{100 * share:.0f} % of the time was spent waiting")
        self._waits.clear()
        self._steps.clear()

    def _check(self, load: Load, *, dataset: Any = None, batch: Any = None, raises: bool = True) -> None:
        self._machine = self._machine or Machine.here()
        parts: dict[str, Any] = {}
        if dataset is not None:
            given = self._given
            parts = {"dataset": dataset, "collate_fn": given.collate_fn, "worker_init_fn": given.worker_init_fn}
        for concern in preflight(load, self._machine, batch=batch, **parts):
            if concern.severity == "error" and raises:
                raise concern.error()
            chosen = self._given.num_workers is None and self._given.exact_workers is None
            meant = chosen and concern.rule == _MORE_THAN_PROCESSORS
            if concern.rule not in self._told and not meant:
                self._told.add(concern.rule)
                self._tell("preflight", rule=concern.rule, what=concern.what, limit=concern.limit, fix=concern.fix)
