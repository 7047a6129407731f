"""Turn a whole log into statements, and find out what it says about the end of the run.

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
    """Everything that a log says about a run."""

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
    """Return everything that a log says about a run. The log is read in bounded memory.

    Args:
        stream: The log, of any size.
        name: The name of the log, for `Statement.source`.
        first_number: The number of the first line in `stream`.
        alone: Whether the log is all that is known about the run. If so, every line of a short log
            becomes a statement, because bug reports often quote messages without any error word.
    """
    kept_log = keep_lines(stream, first_number=first_number)
    lines = clean_lines(kept_log.lines)
    context = LogContext(
        name=name,
        says_done=_log_says_done(lines),
        every_line_counts=alone and len(lines) <= _SHORT_LOG,
    )
    processes = [read_process(own_lines, context) for own_lines in _lines_by_rank(lines)]
    statements = _in_log_order(processes, lines)
    cut_offs = [process.cut_off for process in processes if process.cut_off]
    numbered = [(line.number, line.text) for line in lines]
    return LogText(
        statements=tuple(_without_middle(statements)),
        endings=tuple(ending for process in processes for ending in process.endings),
        says_done=context.says_done,
        total_lines=kept_log.total_lines,
        complete=kept_log.complete,
        losses=printed_losses(numbered),
        norms=printed_norms(numbered),
        cut_off=cut_offs[0] if cut_offs else "",
        last_line=_last_line(lines),
    )


def _lines_by_rank(lines: Sequence[CleanLine]) -> list[list[CleanLine]]:
    """Return one list of lines per rank; lines without a rank form a list of their own."""
    lines_of_rank: dict[int | None, list[CleanLine]] = {}
    for line in lines:
        lines_of_rank.setdefault(line.rank, []).append(line)
    return list(lines_of_rank.values())


def _in_log_order(processes: Sequence[ProcessText], lines: Sequence[CleanLine]) -> list[Statement]:
    """Return the statements of all processes in log order, and mark that of the last line."""
    last_number = next((line.number for line in reversed(lines) if line.text.strip()), None)
    statements = [
        replace(statement, last=True) if statement.position == last_number else statement
        for process in processes
        for statement in process.statements
    ]
    # All statements of a chain of exceptions have the same position; a stable sort keeps their
    # order.
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
    remaining = []
    chain_is_kept = True
    for index, statement in enumerate(statements):
        begins_chain = index == 0 or not statements[index - 1].cause
        if begins_chain:
            chain_is_kept = index not in left_out
        if chain_is_kept:
            remaining.append(statement)
    return remaining


def _log_says_done(lines: Sequence[CleanLine]) -> bool:
    """Return whether one of the last lines says that the training is done.

    A traceback after such a line refutes it, unless its exception is known to have been caught.
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
    """Return the last line that the run itself printed, ignoring progress bars."""
    for line in reversed(lines):
        text = line.shown.strip()
        is_own = text.startswith("--- holdfast: ")
        if text and not is_own and not is_progress_bar(line.text):
            return text[:_MAX_LAST_LINE_CHARACTERS]
    return ""
