"""Tracebacks as Python, rich and launchers print them.

Found in lines and read into statements, the root first.

Knows chains ("During handling of ..."), the nested tracebacks of loader workers and of spawned
processes, groups of
exceptions, the form of syntax errors, and the dumps of faulthandler. Does not: judge what was
    caught.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.explain.evidence import Frame
from holdfast.explain.logs.lines import CleanLine
from holdfast.explain.logs.progress import is_progress

_MOST_MESSAGE_LINES = 60
_LEAST_WRAPPED = 40  # characters of a line after which people or their forms wrap it
_MOST_CHAIN = 40  # exceptions kept that led to one: a recursion inside handlers links a thousand
_MOST_NESTED = 16  # tracebacks inside the message of another, one in the other
_MOST_FRAMES = 60  # kept of one traceback: the outermost and the innermost half

HEADER = re.compile(r"(?:(?:Exception Group |Original )?Traceback \(most recent call last\):?)")
_NESTED = re.compile(
    r"\s*(?:Original Traceback|-- Process \d+ terminated with the following error:)"
)
_FRAME = re.compile(r'(\s*)File "([^"]{1,500})", line (\d+)(?:, in (.{1,200}))?$')
_RICH_FRAME = re.compile(r"\s*│\s*(/?\S+?):(\d+) in (\S+)")
_RICH = re.compile(r"\s*[│╭╰┃┏┗]")
_REPEATED = re.compile(r"\s*\[Previous line repeated \d+ more times?\]")
_LINK = re.compile(
    r"\s*(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)"
)
EXCEPTION = re.compile(
    r"([A-Za-z_]\w*(?:\.(?:<locals>\.)?[A-Za-z_]\w*)*)(?: ?: ?(.*))?$", re.DOTALL
)
# Of a class, or of what a function makes of it
_RAISE = re.compile(r"raise (?:[a-z_][\w.]*\()?([\w.]+)")
_NAMED = re.compile(
    r"\w(?:Error|Exception|Interrupt|Exit|Iteration|Timeout|Expired|Group|Failure|Fault|NotFound|Invalid|Unavailable"
    r"|Failed|Exceeded|Conflict|Refused|Resources|Unsupported|DeprecatedEnv)$|^Bad\w+File$"
)
_SEPARATOR = re.compile(r"\s*\+[-+ \d.]*$")
_ENDS_MESSAGE = re.compile(
    r"Exception ignored in|Exception in thread |Process [\w-]+:$|Fatal Python"
    r' error|"""$|[=*-]{20,}$|\[W\d{3}|wandb: '
    r"|\S+\.py:\d+: \w*Warning: |[\w/.-]{1,80}\.(?:cc|cu|h|cpp):\d+ "
    r"|terminate called after|Error executing job|slurmstepd|srun: |--- holdfast"
    r"|(?:Killed|Terminated|Hangup)$|(?:Aborted|Segmentation fault|Bus error)\b"
)
_BUILTINS = {
    name
    for name, each in vars(builtins).items()
    if isinstance(each, type) and issubclass(each, BaseException)
}


@dataclass(slots=True)
class Raised:
    """One exception as a traceback shows it."""

    exception: str  # bare name of its class
    message: str  # may have several lines
    frames: tuple[Frame, ...]  # innermost last
    number: int  # line of the log with the name of the class
    # those that it only repeats or that led to it, the root first; they have none of their own
    wrapped: list[Raised] = field(default_factory=list)
    unix_seconds: float | None = None  # of its line, or None

    def take(self, others: list[Raised]) -> None:
        """Put others, and all that led to them, before what led to this.

        Of too many, those in the middle go.
        """
        found = [each for other in others for each in (*other.wrapped, other)] + self.wrapped
        for each in others:
            each.wrapped = []
        half = _MOST_CHAIN // 2
        self.wrapped = found if len(found) <= _MOST_CHAIN else found[:half] + found[-half:]

    def from_the_root(self) -> list[Raised]:
        """Return the exception with all that led to it, the root first."""
        return [*self.wrapped, self]


def split_exception(text: str) -> tuple[str, str] | None:
    """Return the dotted class and the message of ``Class: message``.

    None if it is no exception by its name.
    """
    found = EXCEPTION.match(text.lstrip() if text[:1] == " " and text[1:2] != " " else text)
    if found is None:
        return None
    name = found[1].rpartition(".")[2]
    module = found[1].rpartition(".")[0].rpartition(".")[2]
    known = _NAMED.search(name) or name in _BUILTINS or (name == "Error" and "." in found[1])
    known = known or (module in ("exc", "exceptions", "error", "errors") and found[2] is not None)
    if known and not name.endswith("Warning"):
        return found[1], found[2] or ""
    return None


class TracebackReader:
    """Read tracebacks from the lines of one process.

    Those of a group of exceptions come `without_margins`.
    """

    def __init__(self, lines: Sequence[CleanLine]) -> None:
        self._lines = lines
        self._text = [line.text for line in lines]
        self._depth = 0

    def read(self, at: int) -> tuple[Raised | None, int]:
        """Return the exception whose traceback begins at a line, and the index of the line after
        it.

        Of a chain it is the last, with the others in `Raised.wrapped`; None: the traceback is cut
        off.
        """
        newest: Raised | None = None
        self._depth += 1
        while True:
            raised, at = self._one(at)
            if raised is not None:
                raised.take([newest] if newest is not None else [])
                newest = raised
            following = self._after_link(at)
            if following is None:
                self._depth -= 1
                return newest, at
            at = following

    def about_to_raise(self, at: int) -> Raised | None:
        """Return the exception, without its message, at whose ``raise`` the traceback that
        begins at a line ends.
        """
        frames, after = self._frames(at + 1 if HEADER.search(self._text[at]) else at)
        found = _RAISE.match(frames[-1].code) if frames else None
        if found is None or split_exception(found[1]) is None:
            return None
        return Raised(found[1].rpartition(".")[2], "", frames, self._lines[after - 1].number)

    def _after_link(self, at: int) -> int | None:
        """Return where the traceback begins that is linked to the one that ended before this
        line.
        """
        place = at
        while place < len(self._text) and place < at + 3 and self._text[place].strip(' "') == "":
            place += 1
        if place >= len(self._text) or not _LINK.match(self._text[place]):
            return None
        for index in range(place + 1, min(place + 4, len(self._text))):
            if HEADER.search(self._text[index]):
                return index
        return None

    def _one(self, at: int) -> tuple[Raised | None, int]:
        header = self._text[at]
        if "─" in header:
            frames, at = self._rich_frames(at + 1)
        else:
            # A syntax error has no header: then the frame itself is the first line.
            frames, at = self._frames(at + 1 if HEADER.search(header) else at)
        for index in range(at, min(at + 4, len(self._text))):
            text = self._text[index].strip()
            if HEADER.search(text):
                return None, index
            found = EXCEPTION.match(text)
            known = found is not None and (
                found[2] is not None or "." in found[1] or found[1] in _BUILTINS
            )
            if known and found is not None:
                return self._exception(index, found, frames)
        return None, at

    def _exception(
        self, at: int, found: re.Match[str], frames: tuple[Frame, ...]
    ) -> tuple[Raised, int]:
        message, nested, after = self.message(at, found[2] or "")
        raised = Raised(
            found[1].rpartition(".")[2],
            message,
            frames,
            self._lines[at].number,
            [],
            self._lines[at].unix_seconds,
        )
        raised.take([nested] if nested is not None else [])
        return raised, after

    def message(self, at: int, first: str, *, bare: bool = False) -> tuple[str, Raised | None, int]:
        """Return a message that begins with `first` in a line, the exception nested in it, and the
        index after it.

        `bare`: there was no traceback before it; then only lines that are indented belong to it, or
            that go on in
        small letters where a long line was wrapped.
        """
        kept = [first]
        index = at + 1
        while index < len(self._text) and index <= at + _MOST_MESSAGE_LINES:
            text = self._text[index]
            if _NESTED.match(text) and self._depth <= _MOST_NESTED:
                start = index if HEADER.search(text) else index + 1
                while (
                    start < len(self._text)
                    and start < index + 3
                    and not HEADER.search(self._text[start])
                ):
                    start += 1
                if start < len(self._text) and HEADER.search(self._text[start]):
                    nested, index = self.read(start)
                    return "\n".join(kept).strip(), nested, index
            inner = (
                EXCEPTION.match(text)
                if kept[-1].endswith(":") and split_exception(text) is not None
                else None
            )
            if inner is not None:  # "backend='inductor' raised:"
                nested, index = self._exception(index, inner, ())
                return "\n".join(kept).strip(), nested, index
            wrapped = text[:1].islower() and len(self._text[index - 1]) >= _LEAST_WRAPPED
            if self._ends_message(index) or (bare and not (text[:1] in " \t" or wrapped)):
                break
            kept.append(text)
            index += 1
        return "\n".join(kept).strip(), None, index

    def _ends_message(self, index: int) -> bool:
        line = self._lines[index]
        text = line.text
        if (
            HEADER.search(text)
            or _LINK.match(text)
            or _ENDS_MESSAGE.match(text)
            or line.level is not None
        ):
            return True
        if (
            line.unix_seconds is not None
            and line.unix_seconds != self._lines[index - 1].unix_seconds
        ):
            return True
        if split_exception(text) is not None or (text[:1] not in " \t" and is_progress(text)):
            return True
        if not text.strip():
            following = next(
                (each for each in self._text[index + 1 : index + 3] if each.strip()), ""
            )
            return not (following[:1] in " \t(" or _NESTED.match(following)) or not following
        return False

    def _frames(self, at: int) -> tuple[tuple[Frame, ...], int]:
        frames: list[Frame] = []
        indent = 0
        index = at
        while index < len(self._text):
            text = self._text[index]
            found = _FRAME.match(text)
            if found is not None:
                indent = len(found[1])
                frames.append(Frame(file=found[2], line=int(found[3]), function=found[4] or ""))
            elif frames and len(text) - len(text.lstrip()) > indent:
                code = text.strip()
                if not frames[-1].code and code.strip("~^ "):
                    frames[-1] = Frame(
                        file=frames[-1].file,
                        line=frames[-1].line,
                        function=frames[-1].function,
                        code=code[:200],
                    )
            elif not _REPEATED.match(text) and not (
                frames and not text.strip() and index == at + 1
            ):
                break
            index += 1
        return _bounded(frames), index

    def _rich_frames(self, at: int) -> tuple[tuple[Frame, ...], int]:
        frames = []
        index = at
        while index < len(self._text) and _RICH.match(self._text[index]):
            found = _RICH_FRAME.match(self._text[index])
            if found is not None:
                frames.append(Frame(file=found[1], line=int(found[2]), function=found[3]))
            index += 1
        return _bounded(frames), index

    def fatal_error(self, at: int) -> tuple[tuple[Frame, ...], int]:
        """Return the frames of a dump of faulthandler, innermost last, and the index of the line
        after it.
        """
        index = at + 1
        frames: list[Frame] = []
        current = False
        while index < len(self._text) and index < at + 400:
            text = self._text[index]
            found = _FRAME.match(re.sub(r"line (\d+) in ", r"line \1, in ", text))
            if found is not None:
                if current:
                    frames.append(Frame(file=found[2], line=int(found[3]), function=found[4] or ""))
            elif re.match(r"\s*(?:Current thread|Thread) 0x", text):
                current = "Current" in text
            elif text.strip() and not re.match(
                r"\s*(?:<no Python frame>|Extension modules:|\.\.\.|Garbage-coll)", text
            ):
                break
            index += 1
        return _bounded(frames[::-1]), index


def _bounded(frames: list[Frame]) -> tuple[Frame, ...]:
    half = _MOST_FRAMES // 2
    return tuple(frames if len(frames) <= _MOST_FRAMES else frames[:half] + frames[-half:])


def is_frame(text: str) -> bool:
    """Return whether a line is a frame of a traceback, with the name of a function."""
    found = _FRAME.match(text)
    return found is not None and found[4] is not None


def is_syntax_error(lines: Sequence[CleanLine], at: int) -> bool:
    """Return whether a line begins a syntax error, which has no header."""
    found = _FRAME.match(lines[at].text)
    if found is None or found[4] is not None:
        return False
    return any(
        re.match(r"(?:\w+\.)*(?:SyntaxError|IndentationError|TabError): ", line.text)
        for line in lines[at + 1 : at + 6]
    )


def without_margins(lines: Sequence[CleanLine]) -> list[CleanLine]:
    """Return lines without the margin that a group of exceptions is drawn with."""
    found: list[CleanLine] = []
    inside = False
    for line in lines:
        text = line.text
        inside = (
            inside and re.match(r"\s*[|+]", text) is not None
        ) or "Exception Group Traceback" in text
        if inside:
            text = (
                ""
                if _SEPARATOR.match(text)
                else re.sub(r"^\s*(?:[|] ?|[+] (?=Exception))", "", text)
            )
            line = replace(line, text=text, shown=text)
        found.append(line)
    return found
