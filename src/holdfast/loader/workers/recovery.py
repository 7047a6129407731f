"""What is done when a generation of workers is lost: a new one goes on where the last batch was handed out.

Which remedy, when it happens again at the same place:

a sample that kills or blocks its worker twice, while other workers do well      it is set aside
workers that are new after a loss                                                each reads another sample first
all workers are blocked (a lock that was held at the fork)                       none are used
file descriptors run out                                                         tensors are shared through files
memory or shared memory runs out, or workers die and no sample is to blame       half as many workers, at last none
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.errors import LoaderError
from holdfast.loader.fetch import Report
from holdfast.loader.quarantine import key_of, plain
from holdfast.loader.workers.board import Board, Showing
from holdfast.loader.workers.pool import Generation, WorkersLostError
from holdfast.loader.workers.watch import Loss

Tell = Callable[..., None]

_LIMIT_SECONDS = 60.0
"""Least time at one sample after which a worker is called stuck: the watchdog's floor of 30 s, doubled since a sample
may lie on a cold network drive. It is doubled again each time that the same place is stuck."""
_STRIKES = 2
_CONTROLS = 3
"""So many generations have to be blocked at different samples; one may have met a bad sample by chance."""
_OFTEN, _WITHIN_BATCHES = 4, 50
"""So many losses within so many batches are called repeated, although batches come between."""


class Source(Protocol):
    """Where batches come from, as far as healing is concerned."""

    needs_all_workers: bool
    """Whether the number of workers decides which sample comes when."""

    def dataset(self, board: Board | None) -> Any:
        """Return the dataset whose items are batches with reports, from the position on."""

    def entries(self, *, again: bool, suspect: Any = None) -> Iterator[Any]:
        """Yield what is not handed out yet; `again`: workers were lost meanwhile, one of them at `suspect`."""

    def complete(self, report: Report) -> Report:
        """Return a report with what a worker need not tell."""

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out."""

    def is_finished(self) -> bool:
        """Return whether all is handed out, as far as that is known before asking."""

    def is_short(self) -> bool:
        """Return whether something is missing although the workers say that they are done."""

    def sample_at(self, showing: Showing) -> Any:
        """Return the index of the sample that a worker shows, or None."""

    def set_aside(self, index: Any, kind: str, evidence: str) -> None:
        """Put a sample into quarantine."""


@dataclass(slots=True, kw_only=True)
class Crew:
    """How workers are run now; healing changes it.

    Args:
        workers: Worker processes.
        method: Start method, or None for the default.
        options: Further arguments of torch's loader.
        timeout_seconds: So long the loop may wait for a batch; 0 for no limit.
        share_by_file: Whether tensors are shared through named files.
        keep: Whether workers are kept from one epoch to the next.
    """

    workers: int
    method: str | None
    options: dict[str, Any]
    timeout_seconds: float
    share_by_file: bool = False
    keep: bool = False


class Healer:
    """Hands out the batches of a source, whatever happens to the workers.

    Args:
        crew: How they are run.
        tell: Called with the kind of an event and its facts.
    """

    def __init__(self, crew: Crew, tell: Tell) -> None:
        self.crew = crew
        self._tell = tell
        self._kept: Generation | None = None
        self._strikes: dict[Any, int] = {}
        self._in_a_row = 0  # losses since a batch was handed out
        self._suspected: Any = None  # the sample that a worker was at in the last loss
        self._stuck_in_a_row = 0
        self._batches = 0
        self._losses: deque[int] = deque(maxlen=_OFTEN)
        self._longest = 0.0
        self._asked_at = 0.0
        self._changed = False
        self._before_shortage: int | None = None  # workers that there were, until a batch tells who was to blame

    def change(self, workers: int, prefetch_factor: int | None) -> None:
        """Go on with other workers after this batch; which samples come, and in which order, stays."""
        self.crew.workers = workers
        self.crew.options = {**self.crew.options, "prefetch_factor": prefetch_factor}
        self._changed = True

    def batches(self, source: Source) -> Generator[tuple[Any, Report]]:
        """Yield the batches of a source with their reports."""
        generation = self._take_kept() or self._start(source)
        begun = again = False
        self._in_a_row = self._stuck_in_a_row = 0
        try:
            while True:
                loss: Loss
                if self._changed:
                    generation.close()
                    generation, begun, self._changed = self._start(source), False, False
                try:
                    if not begun:
                        generation.begin(source.entries(again=again, suspect=self._suspected))
                        begun = True
                    if source.is_finished():
                        return
                    self._asked_at = time.monotonic()
                    batch, report = generation.next()
                    report = source.complete(report)
                except StopIteration:
                    if not source.is_short():
                        return
                    loss = Loss(cause="the workers ended before the epoch did", kind="machinery")
                except WorkersLostError as error:
                    loss = error.loss
                else:
                    if report.shortage is None:
                        self._in_a_row, self._stuck_in_a_row, self._batches = 0, 0, self._batches + 1
                        if self._before_shortage is not None:
                            self._blame(report, self._before_shortage)
                        if self.crew.timeout_seconds:  # one that was too short for this batch is so for others
                            self.crew.timeout_seconds = max(self.crew.timeout_seconds, 2 * report.seconds)
                        if report.fatal is None:
                            source.delivered(report)
                            for index in report.indices or () if self._strikes else ():
                                self._strikes.pop(key_of(index), None)  # it could be read after all
                        if report.number >= 0:  # else a worker of a stream has passed its turn
                            yield batch, report
                        if report.fatal is not None:  # whoever asks for more wants to go on without this batch
                            source.delivered(report)
                        continue
                    loss = Loss(
                        cause=f"a worker ran out of {report.shortage}", kind="machinery", shortage=report.shortage
                    )
                generation = self._replace(generation, loss, source)
                begun, again = False, True
        finally:
            self._leave(generation)

    def _start(self, source: Source) -> Generation:
        crew = self.crew
        doubled = 2**self._stuck_in_a_row
        return Generation(
            source.dataset,
            crew.workers,
            method=crew.method,
            options=crew.options,
            limit_seconds=max(_LIMIT_SECONDS, 8 * self._longest) * doubled,
            timeout_seconds=crew.timeout_seconds * doubled,
            share_by_file=crew.share_by_file,
        )

    def _take_kept(self) -> Generation | None:
        kept, self._kept = self._kept, None
        return kept

    def _leave(self, generation: Generation) -> None:
        self._changed = False
        self._longest = max(self._longest, generation.longest_seconds)
        if self.crew.keep and self._kept is None and generation.can_go_on:
            self._kept = generation
        else:
            generation.close()

    def close(self) -> None:
        """End workers that were kept."""
        kept = self._take_kept()
        if kept is not None:
            kept.close()

    def _replace(self, lost: Generation, loss: Loss, source: Source) -> Generation:
        """Kill what is left of a generation, decide what has to change, and start the next."""
        noticed = max(lost.lost_at or 0.0, self._asked_at)  # what training took until it asked is no part of it
        self._longest = max(self._longest, lost.longest_seconds)
        lost.abandon()
        self._in_a_row += 1
        self._stuck_in_a_row += loss.kind == "hung" or loss.waited
        self._losses.append(self._batches)
        before = self.crew.workers
        if before == 0:
            raise _no_way_on(f"no batch can be made even without workers: {loss.cause}")
        index = None if loss.showing is None else source.sample_at(loss.showing)
        self._suspected = index
        remedy = self._decide(loss, index, source)
        if source.needs_all_workers and self.crew.workers != before:
            raise _no_way_on(
                f"{loss.cause}, {self._in_a_row} times in a row, and a dataset that divides its items among workers "
                f"itself needs all {before}"
            )
        generation = self._start(source)
        self._tell(
            "loader_healed",
            cause=loss.cause,
            sample=None if index is None else plain(index),
            remedy=remedy,
            workers_before=before,
            workers=self.crew.workers,
            seconds=round(time.monotonic() - noticed, 4),
        )
        return generation

    def _decide(self, loss: Loss, index: Any, source: Source) -> str:
        crew, repeated = self.crew, self._in_a_row > 1
        often = len(self._losses) == _OFTEN and self._batches - self._losses[0] < _WITHIN_BATCHES
        if loss.shortage == "file descriptors" and not crew.share_by_file:
            crew.share_by_file = True
            before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return (
                "tensors are shared through files from now on, and this process keeps a limit of descriptors that is "
                f"raised from {before} to the hard one, {most}"
            )
        at_sample = index is not None and loss.kind in {"died", "hung"}
        if loss.shortage is not None and not at_sample:
            self._before_shortage = self._before_shortage or crew.workers
            return self._fewer()
        if "Pin memory" in loss.cause and repeated:
            crew.options = {**crew.options, "pin_memory": False}
            return "memory is no longer pinned"
        if at_sample:
            return self._suspect(loss, index, source, repeated=repeated)
        if loss.kind == "hung" and repeated and loss.showing is not None:
            return self._blocked(loss, loss.showing)
        if not repeated and not (often and loss.kind == "died"):
            return "new workers"
        at_work = loss.kind == "died" and loss.showing is not None and loss.showing.is_at_work
        if repeated and crew.workers == 1 and at_work and not loss.from_outside:
            raise _no_way_on(
                f"{loss.cause}, {self._in_a_row} times at the same place, which would end this process too"
            )
        return self._fewer()

    def _blame(self, report: Report, before: int) -> None:
        """Have the workers back if this process, alone, ran short too: of one sample, as with a wrong size in it."""
        self._before_shortage = None
        bad = next((each for each in (*report.failures, report.fatal) if each is not None), None)
        if self.crew.workers or bad is None:
            return
        self.crew.workers, self._changed = before, True
        self._tell(
            "loader_healed",
            cause="without workers it cannot be made either, so these were not too many",
            sample=None if bad.index is None else plain(bad.index),
            remedy=f"{before} workers again",
            workers_before=0,
            workers=before,
            seconds=0.0,
        )

    def _blocked(self, loss: Loss, showing: Showing) -> str:
        if not showing.is_starting:
            raise _no_way_on(f"the workers were stuck at batch {showing.number} {self._in_a_row} times: {loss.cause}")
        self.crew.workers = 0
        unset = "" if self.crew.options.get("worker_init_fn") is None else "; worker_init_fn is not called then"
        return (
            f"no workers from now on: they are blocked from the start, as by a lock that was held at the fork{unset}"
        )

    def _suspect(self, loss: Loss, index: Any, source: Source, *, repeated: bool) -> str:
        """Decide about a loss in which a worker was at a sample."""
        key = key_of(index)
        again = key in self._strikes
        strikes = self._strikes.setdefault(key, 0)
        has_worked = loss.showing is not None and loss.showing.has_worked
        if loss.others_fine or (again and has_worked):  # workers that start after a loss read another sample first
            self._strikes[key] = strikes + 1
            if strikes + 1 >= _STRIKES:
                del self._strikes[key]
                self._in_a_row = 0
                source.set_aside(index, "hung" if loss.kind == "hung" else "killed its worker", loss.cause)
                return "the sample is set aside"
            if loss.shortage is not None:
                return self._fewer(least=1)  # never none: the sample would do to this process what it did to them
            return "new workers; the sample is tried again"
        if loss.shortage is not None:
            return self._fewer(least=0 if again else 1)
        if not repeated:
            return "new workers"
        if loss.kind == "hung":
            if self._in_a_row < _CONTROLS:
                return "new workers"
            self.crew.workers = 0
            return "no workers from now on: all of them are blocked, as by a lock that was held at the fork"
        return self._fewer()

    def _fewer(self, least: int = 0) -> str:
        self.crew.workers = max(least, self.crew.workers // 2)
        return f"{self.crew.workers} workers from now on"


def _no_way_on(what: str) -> LoaderError:
    return LoaderError(
        what,
        limit="no remedy is left",
        fix="look at the events loader_healed before it: they name each cause and what was tried.",
        rule="H614",
    )
