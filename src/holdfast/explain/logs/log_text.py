"""Extract statements, losses and other evidence about the end of a run from a whole log.

The log is split by rank, and ``processes`` parses the lines of each rank. ``log_end`` judges the
last lines of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.explain.evidence import Ending, Statement
from holdfast.explain.logs.excerpt import Readable, read_excerpt
from holdfast.explain.logs.lines import CleanLine, clean_lines
from holdfast.explain.logs.log_end import ends_with_completion, find_last_line
from holdfast.explain.logs.printed_values import find_printed_losses, find_printed_norms
from holdfast.explain.logs.processes import (
    LogContext,
    ProcessText,
    read_process,
)

# At most this many lines, and at most this many exceptions, become statements. One third of them
# come from the beginning of the log and two thirds from its end.
_MAX_STATEMENTS_OF_A_KIND = 900
# A log of at most this many lines was probably pasted from a bug report.
_SHORT_LOG = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    """The evidence that was extracted from a log."""

    # The statements in log order; in a chain of exceptions, the root cause comes first.
    statements: tuple[Statement, ...]
    # How ranks ended, according to the failure tables of launchers.
    endings: tuple[Ending, ...]
    # Whether the last lines say that training is done.
    says_done: bool
    # The number of lines in the whole log.
    total_lines: int
    # Whether all lines were fully analyzed. The middle of a large log is not.
    complete: bool
    # The line number and value of each printed training loss, oldest first.
    losses: tuple[tuple[int, float], ...] = ()
    # The line number and value of each printed gradient norm, oldest first.
    norms: tuple[tuple[int, float], ...] = ()
    # The last line with a frame, if the log ends inside a traceback; otherwise empty.
    cut_off: str = ""
    # The last line that is not a progress bar, shortened for display.
    last_line: str = ""


def read_log(stream: Readable, *, name: str, first_number: int = 1, alone: bool = False) -> LogText:
    """Return the evidence in a log, using bounded memory.

    Args:
        stream: The log, which may be of any size.
        name: The name of the log in `Statement.source`.
        first_number: The number to assign to the first line in `stream`.
        alone: Whether the log is the only evidence about the run. If so, every line of a short log
            becomes a statement, because bug reports often quote messages without any error word.
    """
    excerpt = read_excerpt(stream, first_number=first_number)
    lines = clean_lines(excerpt.lines)
    context = LogContext(
        name=name,
        says_done=ends_with_completion(lines),
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
        total_lines=excerpt.total_lines,
        complete=excerpt.complete,
        losses=find_printed_losses(numbered),
        norms=find_printed_norms(numbered),
        cut_off=cut_offs[0] if cut_offs else "",
        last_line=find_last_line(lines),
    )


def _lines_by_rank(lines: Sequence[CleanLine]) -> list[list[CleanLine]]:
    """Return one list of lines per rank, and one list for the lines without a rank."""
    lines_of_rank: dict[int | None, list[CleanLine]] = {}
    for line in lines:
        lines_of_rank.setdefault(line.rank, []).append(line)
    return list(lines_of_rank.values())


def _in_log_order(processes: Sequence[ProcessText], lines: Sequence[CleanLine]) -> list[Statement]:
    """Return the statements of all processes in log order.

    `Statement.ends_output` is set for a statement on the last line of the log that is not blank.
    """
    last_number = next((line.number for line in reversed(lines) if line.text.strip()), None)
    statements = [
        replace(statement, ends_output=True) if statement.position == last_number else statement
        for process in processes
        for statement in process.statements
    ]
    # All statements of a chain of exceptions have the same position. The sort is stable, so their
    # order does not change.
    statements.sort(key=lambda statement: statement.position)
    return statements


def _without_middle(statements: list[Statement]) -> list[Statement]:
    """Return the statements, omitting the middle if there are too many lines or exceptions.

    A chain of exceptions is kept or omitted as a whole, depending on its first statement.
    """
    left_out: set[int] = set()
    for kind in ("line", "exception"):
        indices = [index for index, statement in enumerate(statements) if statement.kind == kind]
        if len(indices) > _MAX_STATEMENTS_OF_A_KIND:
            # Everything after the first third and before the last two thirds of the limit.
            left_out |= set(
                indices[_MAX_STATEMENTS_OF_A_KIND // 3 : -2 * _MAX_STATEMENTS_OF_A_KIND // 3]
            )
    remaining = []
    chain_is_kept = True
    for index, statement in enumerate(statements):
        begins_chain = index == 0 or not statements[index - 1].led_to_another
        if begins_chain:
            chain_is_kept = index not in left_out
        if chain_is_kept:
            remaining.append(statement)
    return remaining
