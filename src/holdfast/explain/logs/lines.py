"""Clean log lines: separate each message from the prefixes that launchers and loggers add.

Escape sequences are removed. The rank, time and logging level in a prefix become fields of a
`CleanLine`. ``tracebacks`` joins lines into messages of several lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from holdfast.explain.logs.excerpt import LogLine
from holdfast.explain.logs.progress import is_progress_bar

_MAX_CHARACTERS = 8_192
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]"
)
# Control characters and characters that change the text direction. A malicious line may use them to
# hide its content.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)

# --- Prefixes with a rank.

# torch 2.2 and newer print this prefix before each line of a traceback.
_TORCH_RANK = re.compile(r"\[rank(\d+)\]:? ?")
# torchrun --tee writes "[default0]:" (older versions "[trainer0|0]:"). torchx writes
# "train/0 [default0]:".
_TEE_RANK = re.compile(r"(?:[\w.-]{1,60}/\d{1,5} )?\[[A-Za-z_]\w{0,30}?(\d{1,5})(?:\|\d{1,5})?\]:")
# mpirun writes "[1,0]<stdout>:"; Horovod omits the job number.
_MPI_RANK = re.compile(r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?")
# srun --label writes " 0: ".
_SRUN_RANK = re.compile(r"\s{0,4}(\d{1,5}): ")
_RANKS = (_TORCH_RANK, _TEE_RANK, _MPI_RANK)
# Numbers at the beginning of lines are ranks from srun only if at least this fraction of the lines,
# and at least this many lines, begin with such a number.
_MIN_LABELLED_SHARE = 0.6
_MIN_LABELLED_LINES = 3

# Ray writes "(RayTrainWorker pid=4711, ip=10.0.0.2) ", SkyPilot writes "(task, rank=1, pid=4711) ",
# and pytest puts "E" in the margin.
_RAY_OR_PYTEST = re.compile(
    r"\([\w.:-]{0,60}(?:, rank=\d{1,5})?,? ?pid=\d{1,10}(?:, ip=[\w.:-]{1,40})?\) "
    r"|E {3,7}(?=[\w.]*(?:Error|Exception)\b)"
)

# --- Prefixes with a time.

_KUBERNETES_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\S{8,30}) std(?:out|err) [FP] ")
_DATE = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_TIME = re.compile(rf"\[?({_DATE})\]?(?:\s*[-|:,] |[ \t]|(?=\[)|$)")
_AMERICAN_TIME = re.compile(r"\[?(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d)\]?(?:\s*[-|:,] |[ \t])")
_TIMES = (_KUBERNETES_TIME, _TIME, _AMERICAN_TIME)
_CLOCK = re.compile(r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\]?[ \t]{1,2}(?=\S|[ \t]+\S)")
# At most this many prefixes are removed from a line.
_MAX_PREFIXES = 6

_GLOG = re.compile(r"([IWEFVC])(\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+) +\d+ [^\]\s]{1,300}\] ?")
_GLOG_LEVELS = {
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "FATAL",
    "V": "INFO",
    "C": "CRITICAL",
}
_LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|SUCCESS|TRACE"
_LEVEL = re.compile(
    rf"(?:[\w.<>/-]{{1,80}} [-|] |\[[\w.<>:/ -]{{1,80}}\]\s?){{0,2}}[\[(]?({_LEVELS})[\])]?"
    r"(?:\s*[-|:]\s*|\s+|(?=\[)|$)"
    r"(?:[\w.<>/]{1,80}(?::[\w.<>]{1,80}){0,2}\s+[-|]\s+|[\w.]{1,80}:(?=\S)|\[[\w.:/]{1,80}\]\s?)?"
)

# The fields in which JSON loggers store a traceback.
_JSON_TRACEBACKS = (
    "exception",
    "exc_info",
    "exc_text",
    "stack_trace",
    "traceback",
    "error.stack_trace",
    "stack",
)
# A progress bar that is followed by another writer's line without a line terminator in between.
# The bar has no total if the length of the loop is unknown: "29948it [35:34,  7.00s/it]".
_LINE_BEHIND_BAR = re.compile(
    r"((?:\|\s{0,20}\d{1,18}/\d{1,18}|\dit) \[\d[^\]]{1,60}\])(?=[/\[A-Za-z])"
)


@dataclass(frozen=True, slots=True)
class CleanLine:
    """One log line, or a part of a log line between carriage returns, without its prefixes."""

    # The line number in the log.
    number: int
    # The message without any prefix.
    text: str
    # The message with the logging level and the logger's name, as it is shown to the user.
    shown: str
    rank: int | None = None
    unix_seconds: float | None = None
    # The logging level in upper case, or None if the line has no level.
    level: str | None = None


def clean_lines(lines: Iterable[LogLine]) -> list[CleanLine]:
    """Return the lines without escape sequences, overwritten progress bars and prefixes.

    One log line can yield several clean lines, for example if it contains carriage returns.
    """
    parts = [(line.number, part) for line in lines for part in _parts(line.data)]
    labelled = _are_labelled_by_srun([text for _, text in parts if text.strip()])
    return [_without_prefixes(number, text, labelled=labelled) for number, text in parts]


def plain_text(text: str) -> str:
    """Return a text without escape sequences and control characters, keeping newlines and tabs."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def _are_labelled_by_srun(texts: list[str]) -> bool:
    """Return whether enough lines begin with a number to conclude that srun added their ranks."""
    labelled = sum(1 for text in texts if _SRUN_RANK.match(text))
    return labelled >= max(_MIN_LABELLED_LINES, _MIN_LABELLED_SHARE * len(texts))


def _parts(data: bytes) -> list[str]:
    """Return the lines of text that a terminal would show for a log line.

    A log line that contains carriage returns or JSON can yield several lines of text.
    """
    text = data.decode("utf-8", errors="replace").rstrip("\r\n")
    if text.startswith('{"'):
        inner = _text_inside_json(text)
        if inner is not None:
            return [_shortened(plain_text(line)) for line in inner.splitlines()]
    if "|" in text or "it [" in text:
        text = _LINE_BEHIND_BAR.sub("\\1\r", text)
    pieces = [plain_text(piece) for piece in text.split("\r")]
    if len(pieces) > 1:
        pieces = _without_overwritten(pieces)
    return [_shortened(piece) for piece in pieces]


def _without_overwritten(pieces: list[str]) -> list[str]:
    """Return the pieces between carriage returns, without overwritten progress bars.

    The newest progress bar of the line is kept even if other text follows it, because it may
    contain the newest loss.
    """
    shown = [piece for piece in pieces if piece.strip()]
    newest_bar = next((piece for piece in reversed(shown) if is_progress_bar(piece)), None)
    visible = [
        piece
        for index, piece in enumerate(shown)
        if index == len(shown) - 1 or piece is newest_bar or not is_progress_bar(piece)
    ]
    return visible or [""]


def _text_inside_json(text: str) -> str | None:
    """Return the log line or traceback inside a line of JSON, or None if there is none.

    Docker wraps whole log lines in JSON, and JSON loggers store tracebacks in a field.
    """
    try:
        entry: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return None
    line = entry.get("log")
    if isinstance(line, str):
        return line.rstrip("\n")
    for key in _JSON_TRACEBACKS:
        value = entry.get(key)
        if isinstance(value, str) and "Traceback (" in value:
            return value
    return None


def _shortened(text: str) -> str:
    """Return a text, without its middle if it is too long."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


class _Prefix(NamedTuple):
    """A prefix of a line, with the rank or time that the prefix contains."""

    length: int
    rank: int | None = None
    # Whether torch wrote the rank, which then takes precedence over a rank that a launcher wrote.
    rank_is_certain: bool = False
    unix_seconds: float | None = None


def _without_prefixes(number: int, text: str, *, labelled: bool) -> CleanLine:
    """Return a line without its prefixes.

    Args:
        number: The line number.
        text: The line.
        labelled: Whether srun added ranks at the beginning of the log's lines.
    """
    printed_by = _RAY_OR_PYTEST.match(text)
    if printed_by is not None:
        text = text[printed_by.end() :]
    rank: int | None = None
    seconds: float | None = None
    for prefix in _prefixes(text, labelled=labelled):
        if prefix.rank is not None and (rank is None or prefix.rank_is_certain):
            rank = prefix.rank
        if seconds is None:
            seconds = prefix.unix_seconds
        text = text[prefix.length :]
    shown = text.rstrip()
    named = _GLOG.match(shown) or _LEVEL.match(shown)
    if named is None:
        return CleanLine(number, shown, shown, rank, seconds)
    level = _GLOG_LEVELS.get(named[1], named[1])
    return CleanLine(number, shown[named.end() :], shown, rank, seconds, level)


def _prefixes(text: str, *, labelled: bool) -> Iterator[_Prefix]:
    """Yield the prefixes with a rank or a time at the beginning of a line, in order."""
    for _ in range(_MAX_PREFIXES):
        # An indented line continues a message and has no prefix.
        if not text or (text[0] in " \t" and not labelled):
            return
        prefix = _find_prefix(text, labelled=labelled)
        if prefix is None:
            return
        yield prefix
        text = text[prefix.length :]


def _find_prefix(text: str, *, labelled: bool) -> _Prefix | None:
    """Return the prefix with a rank or a time at the beginning of a line, or None."""
    for pattern in (*_RANKS, _SRUN_RANK) if labelled else _RANKS:
        match = pattern.match(text)
        if match is not None:
            is_certain = pattern is _TORCH_RANK
            return _Prefix(match.end(), rank=int(match[1]), rank_is_certain=is_certain)
    for pattern in _TIMES:
        match = pattern.match(text)
        if match is not None:
            return _Prefix(match.end(), unix_seconds=_unix_seconds(match[1]))
    match = _CLOCK.match(text)
    return _Prefix(match.end()) if match is not None else None


def _unix_seconds(date: str) -> float | None:
    """Return the Unix time of a date, or None if the date cannot be parsed.

    A date without a time zone is interpreted as UTC, which keeps the order of the lines in a log.
    """
    try:
        if date[2] == "/":
            parsed = datetime.strptime(date, "%m/%d/%Y %H:%M:%S").replace(tzinfo=UTC)
            return parsed.timestamp()
        # `fromisoformat` accepts at most six fractional digits.
        iso_date = date.replace("/", "-").replace(",", ".")
        parsed = datetime.fromisoformat(re.sub(r"(\.\d{1,6})\d*", r"\1", iso_date))
    except (ValueError, OverflowError, IndexError):
        return None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=UTC)
    return parsed.timestamp()
