"""One epoch of a map-style dataset, as healing sees it: what is out, what was handed out, which sample is suspect."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.errors import LoaderError
from holdfast.loader.fetch import Entry, Fetcher, Report
from holdfast.loader.handing_out import as_error
from holdfast.loader.order.plan import SPARES, Plan
from holdfast.loader.quarantine import Ledger, key_of, last_line, plain
from holdfast.loader.workers.board import Board, Showing

_MOST_SPARES = 512
"""Bad samples in a row beyond which it is no bad block but a drive that is away, and every second counts."""


class MapSource:
    """The rest of an epoch.

    Args:
        plan: Where entries come from.
        epoch: Which one.
        start: Position to begin at.
        ledger: Samples that are set aside.
        make_fetcher: Given the board, returns what fetches the entries.
        tell: Called with the kind of an event and its facts.
    """

    def __init__(
        self,
        plan: Plan,
        epoch: int,
        start: int,
        *,
        ledger: Ledger,
        make_fetcher: Callable[[Board | None], Fetcher],
        tell: Callable[..., None],
    ) -> None:
        self.needs_all_workers = False
        self.position = start
        self._epoch = epoch
        self._plan = plan
        self._ledger = ledger
        self._tell = tell
        self.dataset = make_fetcher
        self._aside = ledger.aside(epoch)
        self._planned = plan.entries(epoch, start, self._aside)
        self._out: dict[int, tuple[Entry, int]] = {}  # in the hands of workers: by number, with the position after it
        self._ahead: dict[int, int] = {}  # handed out before an earlier one: by number, the position after it
        self._next = 0  # number of the first that is not handed out
        self._exhausted = False
        self._losses = 0
        self._spares = SPARES  # so many that are not set aside may stand in for samples of what is asked for again
        self._in_a_row: list[Any] = []  # bad samples of that batch
        self._taken_back = False
        self._again: int | None = None  # number of the batch that is made again, with more of them

    def entries(self, *, again: bool, suspect: Any = None) -> Iterator[Entry]:
        """Yield what is not handed out yet; after a loss, what was out comes first, and the first is read twice."""
        self._losses += again
        lost, start = again, self.position
        for number in sorted(self._out):
            entry, after = self._out[number]
            if any(key_of(index) in self._aside for index in entry.spares):
                entry = entry._replace(spares=self._plan.spares(self._epoch, start, self._aside, self._spares))
            start = after
            bad = tuple(index for index in (*entry.indices, *entry.spares) if key_of(index) in self._aside)
            control = self._control(entry, suspect) if lost else None
            entry = entry._replace(aside=bad, twice=again, control=control)
            again = False
            self._out[number] = entry, after
            yield entry
        for entry, after in self._planned:
            self._out[entry.number] = entry, after
            yield entry
        self._exhausted = True

    def _control(self, entry: Entry, suspect: Any) -> int | None:
        """Return the place of a sample to read first, another one each time, that is not known to be bad."""
        avoided = self._aside | {key_of(suspect)}
        indices = enumerate((*entry.indices, *entry.spares))
        others = [place for place, index in indices if key_of(index) not in avoided]
        return others[self._losses % len(others)] if others else None

    def complete(self, report: Report) -> Report:
        """Return a report with the batch's indices, which a worker leaves out where they are those of the entry."""
        if report.indices is not None:
            return report
        return Report(report.number, self._out[report.number][0].indices, *report[2:])

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out, and set aside what was bad in it.

        Raises:
            LoaderError: H612 if these are too many.
        """
        if report.number == self._again:
            self._again = None
            return
        taken_back, self._taken_back = self._taken_back, False
        self._in_a_row.clear()
        self._spares = SPARES
        entry, after = self._out.pop(report.number)
        for failure in () if taken_back else report.failures:
            self.set_aside(failure.index, failure.kind, failure.text)
        if report.differs is not None:
            self._tell(
                "dataset_not_deterministic",
                what=report.differs,
                samples=list(entry.indices),
                why="read twice with the same random numbers after workers were lost, so the order of samples is "
                "as before but their values may not be",
            )
        self._ahead[report.number] = after
        while self._next in self._ahead:  # with in_order=False a later one may come first
            self.position = self._ahead.pop(self._next)
            self._next += 1

    def makes_again(self, report: Report) -> bool:
        """Set aside what was bad in a batch that could not be made; return whether more samples can stand in.

        Bad ones lie together, as in a file that is cut short. If hundreds in a row are bad, or more than the ledger
        allows, they are taken back, with their evidence. Who asks for the batch again does so by `entries`.

        Raises:
            LoaderError: H612 if too many are set aside.
        """
        assert report.fatal is not None
        # Else no sample is to blame, or none may be set aside.
        of_samples = report.fatal.index is not None and self._ledger.limit > 0
        is_first = not self._in_a_row
        try:
            for failure in report.failures:
                if key_of(failure.index) not in self._aside:
                    self._in_a_row.append(failure.index)
                self.set_aside(failure.index, failure.kind, failure.text)
        except LoaderError as error:
            if of_samples:
                self._take_back()
            if of_samples and is_first:  # too few are allowed to tell a bad block: what the sample raised says more
                return False
            raise error from as_error(report.fatal, report)
        if not of_samples:
            return False
        self._spares *= 2
        if self._spares > _MOST_SPARES:
            self._take_back()
            return False
        more = self._plan.spares(self._epoch, self.position, self._aside, self._spares)
        if all(key_of(index) in self._aside for index in more):
            self._take_back()
            return False
        entry, after = self._out[report.number]
        self._out[report.number] = entry._replace(spares=more), after
        self._again = report.number
        return True

    def _take_back(self) -> None:
        """Release what was found bad in a row: a drive that is away must not cost a run what it may do without."""
        with contextlib.suppress(OSError):  # a disk that is full ends nothing that is not at its end
            self._ledger.release(self._in_a_row)
        self._taken_back = True
        self._aside.difference_update(map(key_of, self._in_a_row))
        self._tell(
            "samples_taken_back",
            samples=list(map(plain, self._in_a_row)),
            why="none of these samples in a row can be read: a folder or a drive may be missing",
        )

    def set_aside(self, index: Any, kind: str, evidence: str) -> None:
        """Put a sample into quarantine, and tell it.

        Raises:
            LoaderError: H612 if that would be one too many.
        """
        if self._ledger.add(index, kind, self._epoch, evidence):
            self._aside.update(self._ledger.aside(self._epoch))  # the plan reads this very set
            self._tell(
                "sample_quarantined",
                sample=plain(index),
                why=kind,
                evidence=last_line(evidence),
                aside=len(self._ledger),
                **self._ledger.unwritten,
            )

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
