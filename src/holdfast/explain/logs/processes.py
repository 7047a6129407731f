"""Convert the log lines of one process to statements, and infer which failures it survived.

A log without ranks is treated as the log of a single process. A log does not say whether an
exception ended the process, but the lines after the exception may show that the process continued.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.explain.evidence import Ending, Statement
from holdfast.explain.logs.excerpt import find_lines_with_error_words
from holdfast.explain.logs.lines import CleanLine
from holdfast.explain.logs.progress import ProgressIndex, is_progress_bar, is_sign_of_life
from holdfast.explain.logs.quick_pattern import QuickPattern
from holdfast.explain.logs.tracebacks import (
    HEADER,
    Raised,
    TracebackReader,
    is_frame,
    is_syntax_error,
    split_exception,
    split_quoted_exception,
    without_margins,
)

# If at least this many progress lines follow a statement, the process continued.
_PROGRESS_OF_SURVIVOR = 2
# If fewer progress lines than this follow an exception, the process may have printed these lines
# before the exception, and a buffer may have delayed them.
_MAX_BUFFERED_LINES = 12
# If fewer progress lines than this follow a scheduler's message, a buffer may have delayed them as
# well. This limit is higher, because each of many ranks may have a buffer of 8 KiB.
_MAX_BUFFERED_LINES_OF_RANKS = 400
_MAX_MESSAGE_CHARACTERS = 20_000
# The maximum length, in lines, of torchrun's table about the first failure.
_LINES_OF_TABLE = 15

_NOT_FATAL_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "SUCCESS", "TRACE"})
# A log line with one of these levels may be followed by its traceback on the next line.
_ALARMING_LEVELS = frozenset({"WARNING", "WARN", "ERROR", "CRITICAL", "FATAL"})

ABOUT_CAUGHT_EXCEPTION = re.compile(
    r"Exception ignored (?:in|on)|--- Logging error ---"
    # If the thread that pins memory fails, the main thread raises an error.
    r"|Exception in thread (?!.{0,80}_pin_memory_loop)"
)
_WARNING = re.compile(r"(?:\S{1,300}:\d+: |[\w-]{1,30}: )?(?:[\w.]*\.)?(\w*Warning): ")
_RETRY = re.compile(
    r"\b(?:retry|retrying|attempt #?\d+|restart(?:ing|ed)?|resum(?:e|es|ed|ing))\b", re.IGNORECASE
)
_SCHEDULER = QuickPattern(
    r"\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE)\b"
    r"|\boom[-_ ]kill event|\bslurmstepd: error: "
    r"|\bsrun: error: |\bPBS: job killed|\bTERM_(?:MEM|RUN)LIMIT\b"
    r"|\bWatchdog caught collective operation timeout\b",
    flags=0,
)
# Launchers log a termination request as a warning.
_ASKED_TO_END = re.compile(r"\bdeath signal, shutting down|\bSIGTERM received at time=")
# A shell prints this on the line on which the cursor is, behind an unfinished progress bar.
_KILLED_BEHIND_A_BAR = re.compile(r"Killed(?:: 9)?\s*$")
_FATAL_PYTHON_ERROR = "Fatal Python error: "
_CPLUSPLUS_TERMINATION = re.compile(
    r"\s*terminate called "
    r"(?:after throwing an instance of|without an active exception|recursively)"
)
# The heading and the fields of torchrun's table about the first failure.
_FIRST_FAILURE = "Root Cause (first observed failure)"
_FIELD = re.compile(r"\s*(rank|exitcode)\s*:\s*(.*)$")
_EXIT_CODE = re.compile(r"(-?\d{1,4})\b(?:\s*\(pid:\s*(\d{1,10})\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """Properties of the whole log."""

    # The name of the log in `Statement.source`.
    name: str
    # Whether the last lines of the log say that training is done.
    says_done: bool
    # Whether every line becomes a statement, not only lines with an error word.
    every_line_counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessText:
    """The statements and endings that were read from the lines of one process."""

    statements: tuple[Statement, ...]
    # How ranks ended, according to a launcher's failure table.
    endings: tuple[Ending, ...]
    # The last line with a frame, if the lines end inside a traceback; otherwise empty.
    cut_off: str


def read_process(lines: Sequence[CleanLine], context: LogContext) -> ProcessText:
    """Return the statements and endings found in the lines of one process."""
    reader = _ProcessReader(lines, context)
    statements = reader.read_statements()
    return ProcessText(
        statements=tuple(statements), endings=tuple(reader.endings), cut_off=reader.cut_off
    )


class _Passage(NamedTuple):
    """The statements that begin at a line, and the index of the line after them."""

    statements: list[Statement]
    next_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Whether a process survived an exception, in the fields of a `Statement`."""

    fatal: bool | None
    logged: bool
    followed_by_progress: bool = False
    ends_output: bool = False


class _ProcessReader:
    """Reads the lines of one process from top to bottom.

    At each line, the first function in `_READERS` that recognizes the line reads it, possibly
    together with the lines that follow.
    """

    def __init__(self, lines: Sequence[CleanLine], context: LogContext) -> None:
        self._context = context
        self._lines = without_margins(lines)
        self._tracebacks = TracebackReader(self._lines)
        texts = [line.text for line in self._lines]
        self._progress = ProgressIndex(texts)
        self._relevant = (
            set(range(len(texts)))
            if context.every_line_counts
            else find_lines_with_error_words(texts)
        )
        # The index of the last line that shows that the run continued, or -1 if there is none.
        self._newest_sign = next(
            (index for index in reversed(range(len(lines))) if is_sign_of_life(lines[index].text)),
            -1,
        )
        self.endings: list[Ending] = []
        self.cut_off = ""

    def read_statements(self) -> list[Statement]:
        """Return all statements, in log order."""
        passages: list[_Passage] = []
        # The newest passage with exceptions, and the index after the line that contains the class
        # name of the last exception in it.
        newest: _Passage | None = None
        index_after_newest = 0
        index = 0
        while index < len(self._lines):
            passage = self._read_at(index)
            if passage.statements and passage.statements[0].kind == "exception":
                if newest is not None and self._resumed_between(index_after_newest, index):
                    newest.statements[:] = [
                        replace(statement, continued_before_next=True)
                        for statement in newest.statements
                    ]
                newest = passage
                position = passage.statements[-1].position
                index_after_newest = self._index_after(position, passage.next_index)
            passages.append(passage)
            index = max(passage.next_index, index + 1)
        return [statement for passage in passages for statement in passage.statements]

    def _resumed_between(self, first: int, end: int) -> bool:
        """Return whether the lines with indices `first` to `end - 1` show progress or a retry."""
        if self._progress.any_between(first, end):
            return True
        return any(_RETRY.search(line.text) for line in self._lines[first:end])

    def _index_after(self, number: int, index: int) -> int:
        """Return the index after the last line whose number is at most `number`.

        Args:
            number: The line number.
            index: The index from which to search backward.
        """
        while index > 0 and self._lines[index - 1].number > number:
            index -= 1
        return index

    def _read_at(self, index: int) -> _Passage:
        """Return the statements that begin at a line, read by the first reader that recognizes it.

        If no reader recognizes the line, the passage is empty.
        """
        for reader in _READERS:
            passage = reader(self, index)
            if passage is not None:
                return passage
        return _Passage([], index + 1)

    def _read_traceback(self, index: int) -> _Passage | None:
        """Read the traceback that begins at a line, or return None if none does.

        The header and the outer frames may be missing, as is common in bug reports.
        """
        text = self._lines[index].text
        begins = HEADER.search(text) or is_frame(text) or is_syntax_error(self._lines, index)
        if not begins:
            return None
        raised, next_index = self._tracebacks.read(index)
        if raised is None and next_index >= len(self._lines):
            self.cut_off = self._newest_frame(index)
            raised = self._tracebacks.about_to_raise(index)
        statements = (
            self._statements_of_chain(raised, index, next_index) if raised is not None else []
        )
        return _Passage(statements, next_index)

    def _newest_frame(self, index: int) -> str:
        """Return the last line with a frame at or after a line, or that line if there is none."""
        texts = [line.text.strip() for line in self._lines[index:]]
        frames = [text for text in texts if text.startswith("File ")]
        return frames[-1] if frames else texts[0]

    def _read_fatal_python_error(self, index: int) -> _Passage | None:
        """Read the faulthandler dump that begins at a line, or return None if none does."""
        line = self._lines[index]
        if not line.text.startswith(_FATAL_PYTHON_ERROR):
            return None
        frames, next_index = self._tracebacks.fatal_error(index)
        statement = self._statement_of_line(line, next_index - 1)
        return _Passage([replace(statement, frames=frames, fatal=True)], next_index)

    def _read_cplusplus_termination(self, index: int) -> _Passage | None:
        """Read the C++ termination message on a line, or return None if there is none.

        One of the next two lines may contain the error message.
        """
        line = self._lines[index]
        if not _CPLUSPLUS_TERMINATION.match(line.text):
            return None
        messages = [
            following.text.strip()
            for following in self._lines[index + 1 : index + 3]
            if "what():" in following.text
        ]
        text = "\n".join([*messages, line.text.strip()])
        statement = replace(self._statement_of_line(line, index), text=text)
        return _Passage([statement], index + 1 + len(messages))

    def _read_table_of_launcher(self, index: int) -> _Passage | None:
        """Read how the first rank failed from torchrun's table, or return None if there is none."""
        if _FIRST_FAILURE not in self._lines[index].text:
            return None
        rows = self._lines[index + 1 : index + 1 + _LINES_OF_TABLE]
        self.endings += _first_failure([row.text for row in rows])
        return _Passage([], index + 1)

    def _read_exception_line(self, index: int) -> _Passage | None:
        """Read an exception that was printed without a traceback, or return None."""
        line = self._lines[index]
        bare = split_exception(line.text) or split_quoted_exception(line.text)
        if bare is None:
            return None
        dotted_name, first_line = bare
        message = self._tracebacks.message(
            index, first_line, bare=not self._context.every_line_counts
        )
        raised = Raised(
            exception=dotted_name.rpartition(".")[2],
            message=message.text,
            frames=(),
            number=line.number,
            unix_seconds=line.unix_seconds,
        )
        raised.add_causes_in(message)
        return _Passage(
            self._statements_of_chain(raised, index, message.next_index), message.next_index
        )

    def _read_relevant_line(self, index: int) -> _Passage | None:
        """Read a line that contains an error word, or return None."""
        line = self._lines[index]
        if index not in self._relevant or not line.text.strip():
            return None
        if is_progress_bar(line.text) and not _KILLED_BEHIND_A_BAR.search(line.text):
            return None
        return _Passage([self._statement_of_line(line, index)], index + 1)

    def _statement_of_line(self, line: CleanLine, last_index: int) -> Statement:
        """Return a statement that quotes a line.

        Args:
            line: The first line of the statement.
            last_index: The index of the statement's last line. The lines after it show whether the
                process continued.
        """
        progress = self._progress.count_after(last_index)
        warned = _is_warning(line)
        continued = progress >= self._progress_needed_after(line)
        harmless = warned and (self._context.says_done or progress > 0)
        return Statement(
            text=line.shown.strip(),
            source=f"{self._context.name}:{line.number}",
            position=line.number,
            unix_seconds=line.unix_seconds,
            rank=line.rank,
            fatal=False if continued or harmless else None,
            logged=warned,
        )

    def _progress_needed_after(self, line: CleanLine) -> int:
        """Return how many progress lines must follow a line to show that the process continued."""
        of_scheduler = _SCHEDULER.search(line.text, line.text.lower()) is not None
        if of_scheduler and not self._context.says_done:
            return _MAX_BUFFERED_LINES_OF_RANKS
        return _PROGRESS_OF_SURVIVOR

    def _statements_of_chain(self, raised: Raised, first: int, next_index: int) -> list[Statement]:
        """Return a chain of exceptions as statements that share a position, root cause first.

        Args:
            raised: The last exception of the chain.
            first: The index of the first line of the traceback.
            next_index: The index of the line after the exception's message.
        """
        outcome = self._judge_outcome(raised, first, next_index)
        return [
            Statement(
                text=exception.message[:_MAX_MESSAGE_CHARACTERS],
                kind="exception",
                exception=exception.exception,
                frames=exception.frames,
                source=f"{self._context.name}:{exception.number}",
                position=raised.number,
                unix_seconds=exception.unix_seconds,
                rank=self._lines[first].rank,
                fatal=outcome.fatal,
                led_to_another=exception is not raised,
                replaces_previous=_was_raised_on_purpose(exception),
                logged=outcome.logged,
                followed_by_progress=outcome.followed_by_progress,
                ends_output=outcome.ends_output,
            )
            for exception in raised.from_the_root()
        ]

    def _judge_outcome(self, raised: Raised, first: int, next_index: int) -> _Outcome:
        """Return whether the process survived an exception, judging by the lines after it.

        Args:
            raised: The last exception of a chain.
            first: The index of the first line of the traceback.
            next_index: The index of the line after the exception's message.
        """
        logged = self._is_logged(first)
        if self._is_said_to_be_caught(first):
            return _Outcome(fatal=False, logged=logged)

        left_main_module = bool(raised.frames) and raised.frames[0].function == "<module>"
        looks_uncaught = left_main_module and not logged
        # The index of the line that contains the class name of the exception.
        class_index = self._index_after(raised.number, next_index) - 1
        # A shell script may print that it is done although the program that it started has failed.
        # Such a line does not count as progress after an uncaught exception.
        only_end_follows = looks_uncaught and self._progress.only_completion_after(class_index)
        if not only_end_follows:
            progress = self._progress.count_after(next_index - 1)
            # Code that logs an exception has caught it, so a single line of progress suffices.
            if progress >= (1 if logged else _PROGRESS_OF_SURVIVOR):
                followed_by_progress = looks_uncaught and self._progress_may_be_buffered(
                    first, progress
                )
                return _Outcome(
                    fatal=False, logged=logged, followed_by_progress=followed_by_progress
                )
        no_sign_of_life = only_end_follows or class_index > self._newest_sign
        return _Outcome(
            fatal=None, logged=logged, ends_output=bool(raised.frames) and no_sign_of_life
        )

    def _progress_may_be_buffered(self, first: int, progress: int) -> bool:
        """Return whether progress lines after an exception may have been delayed in a buffer.

        Args:
            first: The index of the first line of the traceback.
            progress: The number of progress lines after the exception.
        """
        if self._context.says_done:
            return False
        return progress < _MAX_BUFFERED_LINES or not self._progress.any_before(first)

    def _is_logged(self, first: int) -> bool:
        """Return whether a logger printed the traceback that begins at a line.

        The level may be on that line or on the line before the traceback.
        """
        if self._lines[first].level is not None:
            return True
        return first > 0 and self._lines[first - 1].level in _ALARMING_LEVELS

    def _is_said_to_be_caught(self, first: int) -> bool:
        """Return whether the log says that an exception was caught.

        Either the logging level of the traceback or the line before the traceback can say so.

        Args:
            first: The index of the first line of the traceback.
        """
        if self._lines[first].level in _NOT_FATAL_LEVELS:
            return True
        return first > 0 and bool(ABOUT_CAUGHT_EXCEPTION.search(self._lines[first - 1].text))


# Functions that read the statements at a line. The first function that returns a passage wins.
_READERS: tuple[Callable[[_ProcessReader, int], _Passage | None], ...] = (
    _ProcessReader._read_traceback,
    _ProcessReader._read_fatal_python_error,
    _ProcessReader._read_cplusplus_termination,
    _ProcessReader._read_table_of_launcher,
    _ProcessReader._read_exception_line,
    _ProcessReader._read_relevant_line,
)


def _is_warning(line: CleanLine) -> bool:
    """Return whether a line is a warning or less severe, according to its level or its words."""
    if line.level in _NOT_FATAL_LEVELS and not _ASKED_TO_END.search(line.text):
        return True
    return _WARNING.match(line.text) is not None


def _was_raised_on_purpose(raised: Raised) -> bool:
    """Return whether a `raise` statement replaced an exception that was being handled."""
    if not raised.while_handling or not raised.message or not raised.frames:
        return False
    return raised.frames[-1].code.startswith("raise ")


def _first_failure(rows: Sequence[str]) -> list[Ending]:
    """Return a list with the ending of the rank that failed first.

    The list is empty if the table contains no exit code.

    Args:
        rows: The rows of torchrun's table about the first failure.
    """
    fields = {}
    for row in rows:
        field = _FIELD.match(row)
        if field is not None:
            fields[field[1]] = field[2]
    exit_code = _EXIT_CODE.match(fields.get("exitcode", ""))
    if exit_code is None:
        return []
    rank = re.match(r"\d{1,7}", fields.get("rank", ""))
    return [
        Ending(
            status=int(exit_code[1]),
            pid=int(exit_code[2]) if exit_code[2] else None,
            rank=int(rank[0]) if rank is not None else None,
            role="trainer",
        )
    ]
