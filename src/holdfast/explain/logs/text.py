"""Read a whole log into statements, and find what it says about its own end.

The log is split by rank; ``processes`` reads the lines of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.explain.evidence import Ending, Statement
from holdfast.explain.logs.keeping import Readable, keep_lines
from holdfast.explain.logs.lines import CleanLine, clean_lines
from holdfast.explain.logs.processes import (
    ABOUT_CAUGHT_EXCEPTION,
    LogContext,
    ProcessText,
    read_process,
)
from holdfast.explain.logs.progress import is_progress_bar, printed_losses, printed_norms, says_done
from holdfast.explain.logs.tracebacks import HEADER

# At most this many lines and this many exceptions are kept: the first third and the newest.
_MAX_STATEMENTS_OF_A_KIND = 900
# A log of at most this many lines was probably pasted into a bug report.
_SHORT_LOG = 100
# How many of the last lines may say that the training is done.
_LAST_LINES = 15
_MAX_LAST_LINE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    """What a log says."""

    # In the order of the lines; in a chain of exceptions, the root first.
    statements: tuple[Statement, ...]
    # How ranks ended, according to launchers.
    endings: tuple[Ending, ...]
    # Whether its last lines say that the training is done.
    says_done: bool
    # How many lines the whole log has.
    total_lines: int
    # Whether all of them were read closely.
    complete: bool
    # Line number and value of each printed training loss and gradient norm.
    losses: tuple[tuple[int, float], ...] = ()
    norms: tuple[tuple[int, float], ...] = ()
    # Its last frame, if the log ends inside a traceback.
    cut_off: str = ""
    # Its last line that is not a progress bar, shortened for display.
    last_line: str = ""


def read_log(stream: Readable, *, name: str, first_number: int = 1, alone: bool = False) -> LogText:
    """Return what a log says. A log of any size is read in bounded memory.

    Args:
        stream: The log.
        name: Its name, for `Statement.source`.
        first_number: The number of its first line.
        alone: Whether nothing else is known about the run. Then every line of a short log counts,
            because bug reports often quote messages without any error word.
    """
    kept = keep_lines(stream, first_number=first_number)
    lines = clean_lines(kept.lines)
    context = LogContext(
        name=name,
        says_done=_log_says_done(lines),
        every_line_counts=alone and len(lines) <= _SHORT_LOG,
    )
    processes = [read_process(own_lines, context) for own_lines in _lines_by_rank(lines)]
    numbered = [(line.number, line.text) for line in lines]
    return LogText(
        statements=tuple(_without_middle(_in_order(processes, lines))),
        endings=tuple(ending for process in processes for ending in process.endings),
        says_done=context.says_done,
        total_lines=kept.total_lines,
        complete=kept.complete,
        losses=printed_losses(numbered),
        norms=printed_norms(numbered),
        cut_off=next((process.cut_off for process in processes if process.cut_off), ""),
        last_line=_last_line(lines),
    )


def _lines_by_rank(lines: Sequence[CleanLine]) -> list[list[CleanLine]]:
    """Return one list of lines per rank; lines without a rank form a list of their own."""
    lines_of_rank: dict[int | None, list[CleanLine]] = {}
    for line in lines:
        lines_of_rank.setdefault(line.rank, []).append(line)
    return list(lines_of_rank.values())


def _in_order(processes: Sequence[ProcessText], lines: Sequence[CleanLine]) -> list[Statement]:
    """Return the statements of all processes in log order, with the last line's marked."""
    last_number = next((line.number for line in reversed(lines) if line.text.strip()), None)
    statements = [
        replace(statement, last=True) if statement.position == last_number else statement
        for process in processes
        for statement in process.statements
    ]
    # The statements of a chain of exceptions have one position. The sort is stable, so it keeps
    # their order.
    statements.sort(key=lambda statement: statement.position)
    return statements


def _without_middle(statements: list[Statement]) -> list[Statement]:
    """Drop statements from the middle if there are too many of a kind.

    A chain of exceptions is kept or dropped as a whole, according to its first statement.
    """
    left_out: set[int] = set()
    for kind in ("line", "exception"):
        indices = [index for index, statement in enumerate(statements) if statement.kind == kind]
        if len(indices) > _MAX_STATEMENTS_OF_A_KIND:
            left_out |= set(
                indices[_MAX_STATEMENTS_OF_A_KIND // 3 : -2 * _MAX_STATEMENTS_OF_A_KIND // 3]
            )
    kept = []
    chain_is_kept = True
    for index, statement in enumerate(statements):
        begins_chain = index == 0 or not statements[index - 1].cause
        if begins_chain:
            chain_is_kept = index not in left_out
        if chain_is_kept:
            kept.append(statement)
    return kept


def _log_says_done(lines: Sequence[CleanLine]) -> bool:
    """Return whether one of the last lines says that the training is done.

    A later traceback refutes it, unless its exception is known to have been caught.
    """
    newest = [line.text for line in lines if line.text.strip()][-_LAST_LINES:]
    for index in reversed(range(len(newest))):
        text = newest[index]
        if says_done(text):
            return True
        before = newest[index - 1] if index > 0 else ""
        if HEADER.search(text) and not ABOUT_CAUGHT_EXCEPTION.search(before):
            return False
    return False


def _last_line(lines: Sequence[CleanLine]) -> str:
    for line in reversed(lines):
        text = line.shown.strip()
        is_own = text.startswith("--- holdfast: ")
        if text and not is_own and not is_progress_bar(line.text):
            return text[:_MAX_LAST_LINE_CHARACTERS]
    return ""
