"""From a log to statements.

What was raised and what was printed, by whom, when, and whether the run went on.

The text of a log is foreign: nothing in it is followed or evaluated. Does not: judge which
    statement matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.explain.evidence import Ending, Statement
from holdfast.explain.logs.keeping import Readable, keep_lines, relevant_lines
from holdfast.explain.logs.lines import CleanLine, clean_lines
from holdfast.explain.logs.progress import (
    Pulse,
    goes_on,
    is_end,
    is_progress_bar,
    printed_losses,
    printed_norms,
)
from holdfast.explain.logs.quick import QuickPattern
from holdfast.explain.logs.tracebacks import (
    HEADER,
    Raised,
    TracebackReader,
    is_frame,
    is_syntax_error,
    split_exception,
    without_margins,
)

# Statements that are lines, and that are exceptions: the first third and the newest
_MOST_OF_A_KIND = 900
_WENT_ON = 2  # lines of progress after a statement of the same process that show that it went on
_MOST_MESSAGE = 20_000
_SHORT = 100
_MOST_LAST_LINE = 300
# Lines of progress that other ranks or a summary print after a fatal exception, rather than more
_BUFFERED = 12
# The same after a line of the scheduler: many ranks, 8 KiB of buffered lines each
_BUFFERED_BY_RANKS = 400

_NOT_FATAL_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "SUCCESS", "TRACE"})
_WARNING = re.compile(r"(?:\S{1,300}:\d+: )?(?:[\w.]*\.)?(\w*Warning): ")
_NOT_UNCAUGHT = re.compile(
    r"Exception ignored in|--- Logging error ---|Exception in thread |Exception ignored on"
)
_ALOUD = frozenset({"WARNING", "WARN", "ERROR", "CRITICAL", "FATAL"})
_RETRY = re.compile(
    r"\b(?:retry|retrying|attempt #?\d+|restart(?:ing|ed)?|resum(?:e|es|ed|ing))\b", re.IGNORECASE
)
_SCHEDULER = QuickPattern(
    r"\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE)\b|\boom[-_ ]kill"
    r" event|\bslurmstepd: error: "
    r"|\bsrun: error: |\bPBS: job killed|\bTERM_(?:MEM|RUN)LIMIT\b|\bWatchdog caught collective"
    r" operation timeout\b",
    flags=0,
)
# Logged as a warning
_TOLD_TO_END = re.compile(r"\bdeath signal, shutting down|\bSIGTERM received at time=")
_FIELD = re.compile(r"\s*(rank|exitcode)\s*:\s*(.*)$")  # of the table of torchrun
_STATUS = re.compile(r"(-?\d{1,4})\b(?:\s*\(pid:\s*(\d{1,10})\))?")
_CPLUSPLUS = re.compile(
    r"\s*terminate called (?:after throwing an instance of|without an active exception|recursively)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    """What a log says."""

    # In order of the lines; of a chain of exceptions the root first
    statements: tuple[Statement, ...]
    endings: tuple[Ending, ...]  # of ranks, as a table or a line of a launcher says
    ended_well: bool  # whether its end says that the training is done
    total_lines: int  # of the whole log
    complete: bool  # whether all of it was looked at closely
    # Line and value of each training loss that was printed
    losses: tuple[tuple[int, float], ...] = ()
    norms: tuple[tuple[int, float], ...] = ()  # the same of norms of gradients
    cut_off: str = ""  # frame with which it ends inside a traceback, or an empty text
    last_line: str = ""  # that is no progress bar, cut, or an empty text


def read_log(stream: Readable, *, name: str, first_number: int = 1, alone: bool = False) -> LogText:
    """Return what a log says; of any size, in bounded memory.

    `name` is for the sources of statements.

    Where nothing else is known of the run (`alone`), each line of a short log counts, since who
    reports a failure often quotes a message without the words that errors have.
    """
    kept = keep_lines(stream, first_number=first_number)
    lines = clean_lines(kept.lines)
    numbered = [(line.number, line.text) for line in lines]
    statements: list[Statement] = []
    endings: list[Ending] = []
    done = _ended_well(lines)
    cut_off = ""
    for process in _by_rank(lines):
        reader = _Process(process, name, done=done, alone=alone and len(lines) <= _SHORT)
        statements += reader.statements()
        endings += reader.endings
        cut_off = cut_off or reader.cut_off
    newest = next((line.number for line in reversed(lines) if line.text.strip()), None)
    statements = [
        replace(each, last=True) if each.position == newest else each for each in statements
    ]
    # Stable: a chain of exceptions keeps its order, and its own lines stay together.
    statements.sort(key=lambda statement: statement.position)
    return LogText(
        statements=tuple(_bounded(statements)),
        endings=tuple(endings),
        ended_well=done,
        total_lines=kept.total_lines,
        complete=kept.complete,
        losses=printed_losses(numbered),
        norms=printed_norms(numbered),
        cut_off=cut_off,
        last_line=_last_line(lines),
    )


def _last_line(lines: Sequence[CleanLine]) -> str:
    shown = (line.shown.strip() for line in reversed(lines) if not is_progress_bar(line.text))
    return next((text for text in shown if text and not text.startswith("--- holdfast: ")), "")[
        :_MOST_LAST_LINE
    ]


def _by_rank(lines: Sequence[CleanLine]) -> list[list[CleanLine]]:
    found: dict[int | None, list[CleanLine]] = {}
    for line in lines:
        found.setdefault(line.rank, []).append(line)
    return list(found.values())


def _ended_well(lines: Sequence[CleanLine]) -> bool:
    """Return whether one of the last lines says that all is done, after any traceback that may
    have ended it.
    """
    newest = [line.text for line in lines if line.text.strip()][-15:]
    for before, text in zip(reversed(["", *newest[:-1]]), reversed(newest), strict=False):
        if is_end(text) or (HEADER.search(text) and not _NOT_UNCAUGHT.search(before)):
            return is_end(text)
    return False


def _bounded(statements: list[Statement]) -> list[Statement]:
    """Return statements without those in the middle, if there are too many of a kind.

    Chains stay whole.
    """
    left_out: set[int] = set()
    for kind in ("line", "exception"):
        found = [index for index, statement in enumerate(statements) if statement.kind == kind]
        if len(found) > _MOST_OF_A_KIND:
            left_out |= set(found[_MOST_OF_A_KIND // 3 : -2 * _MOST_OF_A_KIND // 3])
    kept = []
    whole = True  # whether the chain that a statement belongs to is kept from its beginning
    for index, statement in enumerate(statements):
        whole = index not in left_out if index == 0 or not statements[index - 1].cause else whole
        if whole:
            kept.append(statement)
    return kept


class _Process:
    """The lines of one rank, or of all that says no rank."""

    def __init__(self, lines: Sequence[CleanLine], name: str, *, done: bool, alone: bool) -> None:
        self._lines = without_margins(lines)
        self._name = name
        self._reader = TracebackReader(self._lines)
        self._pulse = Pulse([line.text for line in self._lines])
        self._done = done
        self._alone = alone
        texts = [line.text for line in self._lines]
        self._relevant = set(range(len(texts))) if alone else relevant_lines(texts)
        self._newest_sign = next(
            (i for i in reversed(range(len(lines))) if goes_on(lines[i].text)), -1
        )
        self.endings: list[Ending] = []
        self.cut_off = ""

    def statements(self) -> list[Statement]:
        found: list[Statement] = []
        # The newest chain of exceptions, and the index after it
        raised: tuple[slice, int] | None = None
        index = 0
        while index < len(self._lines):
            made, following = self._at(index)
            if made and made[0].kind == "exception":
                between = self._lines[raised[1] : index] if raised is not None else []
                if raised and (
                    self._pulse.between(raised[1], index)
                    or any(_RETRY.search(line.text) for line in between)
                ):
                    found[raised[0]] = [replace(each, resumed=True) for each in found[raised[0]]]
                raised = (
                    slice(len(found), len(found) + len(made)),
                    self._after_line(made[-1].position, following),
                )
            found += made
            index = max(following, index + 1)
        return found

    def _after_line(self, number: int, index: int) -> int:
        """Return where the lines after one begin, of those before an index.

        A message may have taken them in.
        """
        while index > 0 and self._lines[index - 1].number > number:
            index -= 1
        return index

    def _at(self, index: int) -> tuple[list[Statement], int]:
        """Return the statements that begin at a line, and the index after them."""
        line = self._lines[index]
        text = line.text
        # A report often leaves out the header and the outer frames of a traceback.
        if HEADER.search(text) or is_frame(text) or is_syntax_error(self._lines, index):
            raised, after = self._reader.read(index)
            if raised is None and after >= len(self._lines):
                shown = [line.text.strip() for line in self._lines[index:]]
                self.cut_off = [shown[0], *(each for each in shown if each.startswith("File "))][-1]
                raised = self._reader.about_to_raise(index)
            return (self._chain(raised, index, after) if raised is not None else []), after
        if text.startswith("Fatal Python error: "):
            frames, after = self._reader.fatal_error(index)
            return [replace(self._line(line, after - 1), frames=frames, fatal=True)], after
        if _CPLUSPLUS.match(text):
            what = [
                each.text.strip()
                for each in self._lines[index + 1 : index + 3]
                if "what():" in each.text
            ]
            return [
                replace(self._line(line, index), text="\n".join([*what, text.strip()]))
            ], index + 1 + len(what)
        if "Root Cause (first observed failure)" in text:
            self.endings += _first_failure(
                [each.text for each in self._lines[index + 1 : index + 16]]
            )
            return [], index + 1
        bare = split_exception(text)
        if bare is not None:
            message, nested, after = self._reader.message(index, bare[1], bare=not self._alone)
            raised = Raised(
                bare[0].rpartition(".")[2], message, (), line.number, [], line.unix_seconds
            )
            raised.take([nested] if nested is not None else [])
            return self._chain(raised, index, after), after
        if index in self._relevant and text.strip() and not is_progress_bar(text):
            return [self._line(line, index)], index + 1
        return [], index + 1

    def _line(self, line: CleanLine, last: int) -> Statement:
        needed = (
            _WENT_ON
            if self._done or not _SCHEDULER.search(line.text, line.text.lower())
            else _BUFFERED_BY_RANKS
        )
        progress = self._pulse.after(last)
        fatal = False if progress >= needed else None
        quiet = line.level in _NOT_FATAL_LEVELS and not _TOLD_TO_END.search(line.text)
        warned = quiet or _WARNING.match(line.text) is not None
        if warned and (self._done or progress):
            fatal = False
        return Statement(
            text=line.shown.strip(),
            source=f"{self._name}:{line.number}",
            position=line.number,
            unix_seconds=line.unix_seconds,
            rank=line.rank,
            fatal=fatal,
            logged=warned,
        )

    def _chain(self, raised: Raised, first: int, after: int) -> list[Statement]:
        before = self._lines[first - 1] if first else None
        logged = self._lines[first].level is not None or (
            before is not None and before.level in _ALOUD
        )
        outermost = raised.frames[0].function if raised.frames else ""
        at = self._after_line(raised.number, after) - 1
        # A shell script prints that it is done all the same.
        ended = outermost == "<module>" and not logged and self._pulse.only_ends(at)
        progress = 0 if ended else self._pulse.after(after - 1)
        fatal = False if progress >= (1 if logged else _WENT_ON) else None
        waited = progress < _BUFFERED or not self._pulse.before(first)
        overtaken = (
            fatal is False and waited and not logged and not self._done and outermost == "<module>"
        )
        if (before and _NOT_UNCAUGHT.search(before.text)) or self._lines[
            first
        ].level in _NOT_FATAL_LEVELS:
            fatal, overtaken = False, False
        chain = raised.from_the_root()
        last = bool(raised.frames) and fatal is None and (at > self._newest_sign or ended)
        return [
            Statement(
                text=each.message[:_MOST_MESSAGE],
                kind="exception",
                exception=each.exception,
                frames=each.frames,
                source=f"{self._name}:{each.number}",
                position=raised.number,
                unix_seconds=each.unix_seconds,
                rank=self._lines[first].rank,
                fatal=fatal,
                cause=each is not raised,
                logged=logged,
                overtaken=overtaken,
                last=last,
            )
            for each in chain
        ]


def _first_failure(lines: Sequence[str]) -> list[Ending]:
    """Return how the rank ended that torchrun saw fail first, from its table.

    Nothing if that is cut off.
    """
    fields = {found[1]: found[2] for found in map(_FIELD.match, lines) if found is not None}
    status = _STATUS.match(fields.get("exitcode", ""))
    if status is None:
        return []
    rank = re.match(r"\d{1,7}", fields.get("rank", ""))
    pid = int(status[2]) if status[2] else None
    return [
        Ending(status=int(status[1]), pid=pid, rank=int(rank[0]) if rank else None, role="trainer")
    ]


def quoted(statement: Statement, *, most_lines: int = 6) -> Iterator[str]:
    """Yield the lines of a statement as evidence shows them: few, and not long."""
    head = statement.exception or ""
    if head and statement.text:
        head += ": "
    lines = (head + statement.text).strip().splitlines() or [""]
    for line in lines[:most_lines]:
        yield line if len(line) <= 300 else f"{line[:297]}..."
