"""Extract statements, losses and other evidence about the end of a run from a whole log.

The log is split by rank, and ``processes`` parses the lines of each rank.
"""

from __future__ import annotations

import re
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

# At most this many lines, and at most this many exceptions, become statements. One third of them
# come from the beginning of the log and two thirds from its end.
_MAX_STATEMENTS_OF_A_KIND = 900
# A log of at most this many lines was probably pasted from a bug report.
_SHORT_LOG = 100
# This many lines at the end of the log are searched for a message that training is done.
_LAST_LINES = 15
# Failures that end a process or its job even if the process has just said that training is done.
_FATAL_AT_THE_END = re.compile(
    r"\bWatchdog caught collective operation timeout\b"
    r"|(?:^|: )(?:Aborted|Segmentation fault|Bus error)(?: \(core dumped\))?$"
    r"|\bsrun: error: .{1,200}: (?:Exited with exit code [1-9]|Killed|Out Of Memory)"
    r"|\bChildFailedError\b|\bexits with return code = -?[1-9]|\bfailed \(exitcode: -?[1-9]"
    r"|^\s*terminate called "
)
_MAX_LAST_LINE_CHARACTERS = 300
# An epoch and the number of all epochs, such as "Epoch 10/10" or "Epoch [10/10]".
_EPOCH = re.compile(r"\bepochs?\W{0,4}(\d{1,6})\s?(?:/|of)\s?(\d{1,6})\b", re.IGNORECASE)
_EVALUATION_OF_NANOGPT = re.compile(r"step (\d{1,9}): train loss [\d.]{1,20}, val loss [\d.]{1,20}")
_STEP_OF_NANOGPT = re.compile(r"iter (\d{1,9}): loss ")


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
    """Return one list of lines per rank, and one list for the lines without a rank."""
    lines_of_rank: dict[int | None, list[CleanLine]] = {}
    for line in lines:
        lines_of_rank.setdefault(line.rank, []).append(line)
    return list(lines_of_rank.values())


def _in_log_order(processes: Sequence[ProcessText], lines: Sequence[CleanLine]) -> list[Statement]:
    """Return the statements of all processes in log order.

    `Statement.last` is set for a statement that begins on the last non-blank line of the log.
    """
    last_number = next((line.number for line in reversed(lines) if line.text.strip()), None)
    statements = [
        replace(statement, last=True) if statement.position == last_number else statement
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
        begins_chain = index == 0 or not statements[index - 1].cause
        if begins_chain:
            chain_is_kept = index not in left_out
        if chain_is_kept:
            remaining.append(statement)
    return remaining


def _log_says_done(lines: Sequence[CleanLine]) -> bool:
    """Return whether one of the last lines says that training is done.

    A line that is followed by a traceback does not count, unless the exception is known to have
    been caught. Neither does a line that is followed by a failure that no process survives.
    """
    newest = [line.text for line in lines if line.text.strip()][-_LAST_LINES:]
    if _ends_with_an_evaluation(newest) or _ends_with_the_time_of_detectron2(newest):
        return True
    if _ends_with_the_last_epoch(newest):
        return True
    for index in reversed(range(len(newest))):
        text = newest[index]
        if says_done(text):
            return True
        before = newest[index - 1] if index > 0 else ""
        if HEADER.search(text) and not ABOUT_CAUGHT_EXCEPTION.search(before):
            return False
        if _FATAL_AT_THE_END.search(text):
            return False
    return False


def _ends_with_an_evaluation(newest: Sequence[str]) -> bool:
    """Return whether the last lines report an evaluation and the loss of the same step.

    nanoGPT evaluates every few hundred steps and after the last one. It prints the loss of every
    tenth step, so the log of a run that was killed rarely ends there.
    """
    if len(newest) < 2:
        return False
    evaluation = _EVALUATION_OF_NANOGPT.fullmatch(newest[-2].strip())
    step = _STEP_OF_NANOGPT.match(newest[-1].strip())
    return evaluation is not None and step is not None and evaluation[1] == step[1]


def _ends_with_the_last_epoch(newest: Sequence[str]) -> bool:
    """Return whether the last line reports the last epoch, and the line before it another one.

    If a program prints several lines per epoch, the last of them is not known.
    """
    epochs = [_EPOCH.search(text) for text in newest]
    reported = [epoch for epoch in epochs if epoch is not None]
    if len(reported) < 2 or epochs[-1] is None:
        return False
    number, total = int(reported[-1][1]), int(reported[-1][2])
    return number == total and int(reported[-2][1]) == number - 1


def _ends_with_the_time_of_detectron2(newest: Sequence[str]) -> bool:
    """Return whether detectron2 reports the time of the training, and no error before that.

    It reports the time after a failure too.
    """
    if any(HEADER.search(text) or "ERROR" in text or "Error" in text for text in newest):
        return False
    return any("d2.engine.hooks" in text and "Total training time: " in text for text in newest)


def _last_line(lines: Sequence[CleanLine]) -> str:
    """Return the last line that the command printed, shortened for display; "" if there is none.

    Progress bars and lines that holdfast printed are ignored.
    """
    for line in reversed(lines):
        text = line.shown.strip()
        is_own = text.startswith("--- holdfast: ")
        if text and not is_own and not is_progress_bar(line.text):
            return text[:_MAX_LAST_LINE_CHARACTERS]
    return ""
