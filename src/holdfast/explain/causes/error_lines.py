"""Find the line that looks most like an error in a log in which no signature matches."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

from holdfast.explain.evidence import Statement
from holdfast.explain.logs.progress import is_progress
from holdfast.explain.signatures.matching import find_best_kind, match_all

# Patterns of words that mark a line as an error, from the most to the least certain.
_WORDS_OF_ERRORS = (
    # The class of an exception in the midst of other words, as in "RuntimeError appeared: ..."
    re.compile(r"[A-Z]\w{2,60}(?:Error|Exception)(?: \w{1,20})?\s?:"),
    re.compile(
        r"\b(?:(?:fatal|internal|runtime|compile|system|os) error|FAIL(?:ED)?\b|FATAL\b"
        r"|error (?:code|#)|error[:=<])"
        r"|\*ERROR\*|\bterminate called after\b|\bassertion\b.{0,300}\bfailed\b"
        r"|\bCheck failed: |^error\b",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:failed|cannot|can't|could not|couldn't|unable to|denied|not found|no such|invalid"
        r"|illegal|missing|doesn't match|does not match|doesn't support|does not support"
        r"|not supported|unsupported|errors?|timed out|Xid)\b",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:no longer|not yet|exhausted|exceed(?:s|ed)|insufficient|failure|expected|undefined"
        r"|must be|should be|fault|segfault|crash(?:ed)?|too old|\w*conflict\w*|locked|forbidden"
        r"|unauthorized|than is available|aren't available|pre-?empted by|interruption notice"
        r"|refused|doesn't|does not|assert|raise|different (?:to|from|than))\b",
        re.IGNORECASE,
    ),
)
# Lines that contain such words without being errors: error counts, structured data, and notes about
# skipped items.
_NO_ERROR = re.compile(
    r"\b(?:0|no|zero|without) (?:failed|errors?|failures?)\b|\berrors\W{1,4}\d|\berror[ _]rate\b"
    r"|^\s*\{|\bLmod\b|\bskip(?:ped|ping)\b|\b(?:INFO|DEBUG)\b"
    # Hydra prints this below the error that it reports.
    r"|^Error executing job with overrides"
    r"|^srun: error: .{1,200}: Exited with exit code"
    # What may happen, as in "This is not supported for all configurations and can yield errors".
    r"|\b(?:can|may|might|could) (?:yield|cause|lead to|result in) errors?\b"
    # Slurm runs epilogs, and steps, in another directory then.
    r"|^slurmstepd: error: .{0,60}couldn't change working dir",
    re.IGNORECASE,
)
_WARNING = re.compile(r"\bWARN(?:ING)?\b")
# The start of the only message that torch prints when it continues without a GPU.
_NO_CUDA = re.compile(r"Warning: CUDA initialization: ")
# If at least this many lines differ only in their numbers, they report a metric whose name contains
# a word such as "error".
_MIN_REPEATS_OF_A_METRIC = 4
# Only error lines that precede the newest error line by at most this many lines are assumed to
# report what ended the run.
_CLOSE_LINES = 150
# Kinds of unknown failures with at most this `Signature.rank` can be recognized from a single line.
_LAST_SPECIFIC_RANK = 91


def find_error_line(statements: Sequence[Statement], *, only_certain: bool) -> Statement | None:
    """Return the line that looks most like an error, or None if no line does.

    Only lines after the newest exception are considered.

    Args:
        statements: All statements of a log.
        only_certain: Whether to consider only the most certain words, and to ignore all lines that
            a logger printed.
    """
    # Each error line, preceded by its sort key. The smallest key marks the line that looks most
    # like an error.
    error_lines: list[tuple[tuple[bool, bool, int], Statement]] = []
    for line in _possible_errors(statements, only_certain=only_certain):
        index = _index_of_error_words(line.text, only_certain=only_certain)
        if index is not None:
            is_warning = _WARNING.search(line.text) is not None
            kind = find_best_kind(line)
            has_kind = kind is not None and kind.rank <= _LAST_SPECIFIC_RANK
            error_lines.append(((is_warning, not has_kind, index), line))
    if not error_lines:
        return None
    newest = error_lines[-1][1].position
    close = [entry for entry in error_lines if newest - entry[1].position <= _CLOSE_LINES]
    return min(close, key=lambda entry: entry[0])[1]


def _possible_errors(statements: Sequence[Statement], *, only_certain: bool) -> Iterator[Statement]:
    """Yield the lines after the newest exception that may report the failure that ended the run."""
    lines = [statement for statement in statements if statement.kind == "line"]
    frequencies = collections.Counter(_without_numbers(line.text) for line in lines)
    newest_exception = _position_of_newest_exception(statements)
    for line in lines:
        if line.position <= newest_exception or line.fatal is not None:
            continue
        if line.logged and (only_certain or not _says_no_cuda(line)):
            continue
        if frequencies[_without_numbers(line.text)] < _MIN_REPEATS_OF_A_METRIC:
            yield line


def _says_no_cuda(line: Statement) -> bool:
    """Return whether a line warns that CUDA is unavailable, and no signature explains why.

    This is the only line of a logger that can be the cause.
    """
    return _NO_CUDA.search(line.text) is not None and not match_all(line)


def _position_of_newest_exception(statements: Sequence[Statement]) -> int:
    """Return the position of the newest exception, or -1 if there is none."""
    return max(
        (statement.position for statement in statements if statement.kind == "exception"),
        default=-1,
    )


def _index_of_error_words(text: str, *, only_certain: bool) -> int | None:
    """Return the index of the first pattern in `_WORDS_OF_ERRORS` that matches a line.

    A lower index means a more certain error. Return None if the line is not an error.
    """
    if _NO_ERROR.search(text) or is_progress(text):
        return None
    words_of_errors = _WORDS_OF_ERRORS[:2] if only_certain else _WORDS_OF_ERRORS
    for index, words in enumerate(words_of_errors):
        if words.search(text):
            return index
    return None


def _without_numbers(text: str) -> str:
    """Return a line with each number replaced by ``#``, to compare lines regardless of numbers."""
    return re.sub(r"\d+", "#", text)
