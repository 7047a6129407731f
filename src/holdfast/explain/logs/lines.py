"""One line of a log as people would read it.

Without escape sequences, and without what stands before the message.

Launchers and loggers put ranks, times and levels before a line; they are taken off and used. Does
not: join lines to messages (see ``text``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.explain.logs.keeping import LogLine
from holdfast.explain.logs.progress import is_progress_bar

_MOST_CHARACTERS = 8_192
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]"
)
# Control characters, and those that turn the direction of writing: a log line may be hostile.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)

_RANK = re.compile(r"\[rank(\d+)\]:? ?")  # torch >= 2.2, on every line of a traceback
# torchrun --tee: [default0]:, with [trainer0|0]: of older ones, and train/0 [default0]: of torchx
_TEE = re.compile(r"(?:[\w.-]{1,60}/\d{1,5} )?\[[A-Za-z_]\w{0,30}?(\d{1,5})(?:\|\d{1,5})?\]:")
_MPI = re.compile(r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?")  # horovod leaves out the job
_SRUN = re.compile(r"\s{0,4}(\d{1,5}): ")  # srun --label
# Of Ray: (RayTrainWorker pid=4711, ip=10.0.0.2), of SkyPilot: (task, rank=1, pid=4711), and of
# pytest.
_TEST_OR_RAY = re.compile(
    r"\([\w.:-]{0,60}(?:, rank=\d{1,5})?,? ?pid=\d{1,10}(?:, ip=[\w.:-]{1,40})?\) "
    r"|E {3,7}(?=[\w.]*(?:Error|Exception)\b)"
)
_KUBERNETES = re.compile(r"(\d{4}-\d\d-\d\dT\S{8,30}) std(?:out|err) [FP] ")
_GLOG = re.compile(r"([IWEFVC])(\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+) +\d+ [^\]\s]{1,300}\] ?")
_DATE = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_TIME = re.compile(rf"\[?({_DATE})\]?(?:\s*[-|:,] |[ \t]|(?=\[)|$)")
_AMERICAN = re.compile(r"\[?(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d)\]?(?:\s*[-|:,] |[ \t])")
_CLOCK = re.compile(r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\]?[ \t]{1,2}(?=\S|[ \t]+\S)")
_LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|SUCCESS|TRACE"
_LEVEL = re.compile(
    rf"(?:[\w.<>/-]{{1,80}} [-|] |\[[\w.<>:/ -]{{1,80}}\]\s?){{0,2}}[\[(]?({_LEVELS})[\])]?"
    r"(?:\s*[-|:]\s*|\s+|(?=\[)|$)"
    r"(?:[\w.<>/]{1,80}(?::[\w.<>]{1,80}){0,2}\s+[-|]\s+|[\w.]{1,80}:(?=\S)|\[[\w.:/]{1,80}\]\s?)?"
)
_JSON_TRACEBACKS = (
    "exception",
    "exc_info",
    "exc_text",
    "stack_trace",
    "traceback",
    "error.stack_trace",
    "stack",
)
# Another writer's line
_BEHIND_BAR = re.compile(r"(\|\s{0,20}\d{1,18}/\d{1,18} \[\d[^\]]{1,60}\])(?=[/\[A-Za-z])")
# Of the lines that must begin like srun --label before their numbers are taken for ranks
_SHARE_LABELLED = 0.6


@dataclass(frozen=True, slots=True)
class CleanLine:
    """One line, or one part of it between carriage returns, without what stands before the
    message.
    """

    number: int  # of the line in the log
    text: str  # the message
    shown: str  # the same with the level and the name of the logger
    rank: int | None = None
    unix_seconds: float | None = None
    level: str | None = None  # of a logger, upper case, or None


def clean_lines(lines: Iterable[LogLine]) -> list[CleanLine]:
    """Return the lines without escape sequences, progress bars that were overwritten, ranks,
    times and levels.
    """
    parts = [(line.number, part) for line in lines for part in _parts(line.data)]
    filled = [text for _, text in parts if text.strip()]
    labelled = sum(1 for text in filled if _SRUN.match(text)) >= max(
        3, _SHARE_LABELLED * len(filled)
    )
    return [_without_prefixes(number, text, labelled=labelled) for number, text in parts]


def plain_text(text: str) -> str:
    """Return a text without escape sequences and control characters; line ends and tabs stay."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def _parts(data: bytes) -> list[str]:
    text = data.decode("utf-8", errors="replace").rstrip("\r\n")
    if text.startswith('{"'):
        inner = _inside_json(text)
        if inner is not None:
            return [_shortened(plain_text(line)) for line in inner.splitlines()]
    text = _BEHIND_BAR.sub("\\1\r", text) if "|" in text else text
    pieces = [plain_text(piece) for piece in text.split("\r")]
    if len(pieces) > 1:
        last = len(pieces) - 1
        pieces = [
            piece
            for index, piece in enumerate(pieces)
            if piece.strip() and (index == last or not is_progress_bar(piece))
        ] or [""]
    return [_shortened(piece) for piece in pieces]


def _inside_json(text: str) -> str | None:
    """Return the line inside a line of docker, or the traceback inside one of a logger that
    writes JSON, or None.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found.get("log"), str):
        return str(found["log"]).rstrip("\n")
    values = [found.get(key) for key in _JSON_TRACEBACKS]
    return next(
        (value for value in values if isinstance(value, str) and "Traceback (" in value), None
    )


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _without_prefixes(number: int, text: str, *, labelled: bool) -> CleanLine:
    rank: int | None = None
    seconds: float | None = None
    printed_by = _TEST_OR_RAY.match(text)
    text = text[printed_by.end() :] if printed_by is not None else text
    patterns = (_RANK, _TEE, _MPI, _SRUN) if labelled else (_RANK, _TEE, _MPI)
    for _ in range(6):
        if not text or (text[0] in " \t" and not labelled):
            break
        found = next((found for pattern in patterns if (found := pattern.match(text))), None)
        if found is not None:
            rank = int(found[1]) if rank is None or found.re is _RANK else rank
        else:
            found = _KUBERNETES.match(text) or _TIME.match(text) or _AMERICAN.match(text)
            if found is not None:
                seconds = seconds or _seconds(found[1])
            else:
                found = _CLOCK.match(text)
            if found is None:
                break
        text = text[found.end() :]
    shown = text.rstrip()
    named = _GLOG.match(shown) or _LEVEL.match(shown)
    if named is None:
        return CleanLine(number, shown, shown, rank, seconds)
    return CleanLine(
        number, shown[named.end() :], shown, rank, seconds, _GLOG_LEVELS.get(named[1], named[1])
    )


_GLOG_LEVELS = {
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "FATAL",
    "V": "INFO",
    "C": "CRITICAL",
}


def _seconds(written: str) -> float | None:
    """Return the Unix time of a date.

    Without a zone it counts as UTC, which keeps the order within a log.
    """
    try:
        if written[2] == "/":
            return datetime.strptime(written, "%m/%d/%Y %H:%M:%S").replace(tzinfo=UTC).timestamp()
        digits = re.sub(r"([.,]\d{1,6})\d*", r"\1", written.replace("/", "-").replace(",", "."))
        found = datetime.fromisoformat(digits)
    except (ValueError, OverflowError, IndexError):
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
