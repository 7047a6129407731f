"""Where batches come from, as the recovery of workers sees it, and the source that a map-style
dataset is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.events.event import EventData
from holdfast.loader.order.plan import Entry, Plan
from holdfast.loader.quarantine import Ledger, key_of
from holdfast.loader.workers.board import Board, Showing
from holdfast.loader.workers.fetch import Fetcher, Report


class Source:
    """The rest of an epoch.

    What is written out here is that of a source that nobody can look into, as a stream.
    """

    needs_all_workers = False
    """Whether the number of workers decides which sample comes when."""

    def dataset(self, board: Board | None) -> Any:
        """Return the dataset whose items are batches with reports, from the position on."""
        raise NotImplementedError

    def entries(self, *, again: bool, suspect: Any = None) -> Iterator[Any]:
        """Yield what is not handed out yet.

        `again`: workers were lost meanwhile, one of them at `suspect`.
        """
        del again, suspect
        return iter(())

    def complete(self, report: Report) -> Report:
        """Return a report with what a worker need not send."""
        return report

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether all is handed out, as far as that is known before asking."""
        return False

    def is_short(self) -> bool:
        """Return whether something is missing although the workers say that they are done."""
        return False

    def sample_at(self, showing: Showing) -> Any:
        """Return the index of the sample that a worker shows.

        None where no sample can be left out.
        """
        del showing

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        """Leave a sample out from now on."""


class MapSource(Source):
    """The rest of an epoch of a map-style dataset.

    What is out, what was handed out, which sample is suspect.
    """

    def __init__(
        self,
        plan: Plan,
        epoch: int,
        start: int,
        ledger: Ledger,
        make_fetcher: Callable[[Board | None], Fetcher],
        emit: Callable[[EventData], None],
    ) -> None:
        self.position = start
        self._make_fetcher = make_fetcher
        self._epoch = epoch
        self._ledger = ledger
        self._emit = emit
        self._bad = ledger.bad(epoch)
        self._planned = plan.entries(epoch, start, self._bad)
        # That workers have: by number, with the position after it
        self._out: dict[int, tuple[Entry, int]] = {}
        self._exhausted = False
        self._losses = 0

    def dataset(self, board: Board | None) -> Fetcher:
        """Return the dataset whose items are batches with reports."""
        return self._make_fetcher(board)

    def entries(self, *, again: bool, suspect: Any = None) -> Iterator[Entry]:
        """Yield what is not handed out yet; after a loss, what was out comes first."""
        self._losses += again
        for number in sorted(self._out):
            entry, after = self._out[number]
            bad = tuple(
                index for index in (*entry.indices, *entry.spares) if key_of(index) in self._bad
            )
            entry = entry._replace(
                bad=bad, control=self._control(entry, suspect) if again else None
            )
            self._out[number] = entry, after
            yield entry
        for entry, after in self._planned:
            self._out[entry.number] = entry, after
            yield entry
        self._exhausted = True

    def _control(self, entry: Entry, suspect: Any) -> int | None:
        """Return the place of a sample to read first, another one each time, that is not known
        to be bad.
        """
        avoided = self._bad | {key_of(suspect)}
        indices = enumerate((*entry.indices, *entry.spares))
        others = [place for place, index in indices if key_of(index) not in avoided]
        return others[self._losses % len(others)] if others else None

    def complete(self, report: Report) -> Report:
        """Return a report with the batch's indices, which a worker leaves out where they are
        those of the entry.
        """
        return (
            report
            if report.indices is not None
            else report._replace(indices=self._out[report.number][0].indices)
        )

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out, and quarantine what was bad in it.

        H612 if these are too many.

        Where no sample could stand in, none is: a drive that is away must not cost a run all that
        it may do without.
        """
        _, self.position = self._out.pop(report.number)
        if report.fatal is None or report.fatal.index is None:
            for failure in report.failures:
                self.quarantine(failure.index, "raised", failure.text)

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        """Leave a sample out from now on, and say so; H612 if that would be one too many."""
        if event := self._ledger.add(index, kind, self._epoch, evidence):
            self._bad.update(self._ledger.bad(self._epoch))  # the plan reads this very set
            self._emit(event)

    def is_finished(self) -> bool:
        """Return whether all is handed out, as far as that is known before asking."""
        return self._exhausted and not self._out

    def is_short(self) -> bool:
        """Return whether something is still out."""
        return bool(self._out)

    def sample_at(self, showing: Showing) -> Any:
        """Return the index of the sample that a worker shows, or None."""
        found = self._out.get(showing.number)
        if found is None or showing.offset < 0:
            return None
        entry, _ = found
        return next(itertools.islice((*entry.indices, *entry.spares), showing.offset, None), None)
