"""Parse the tracebacks that Python, rich and launchers print.

This includes chained exceptions ("During handling of ..."), tracebacks inside the messages of
exceptions from loader workers and spawned processes, exception groups, syntax errors and
faulthandler dumps. ``processes`` judges whether an exception was caught.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast.explain.evidence import Frame
from holdfast.explain.logs.lines import CleanLine
from holdfast.explain.logs.progress import is_progress

_MAX_MESSAGE_LINES = 60
# A line shorter than this was probably not wrapped when the log was pasted, so the next line does
# not continue it.
_MIN_WRAPPED_CHARACTERS = 40
# At most this many causes of an exception are kept. Recursive exception handlers may chain a
# thousand exceptions.
_MAX_CAUSES = 40
# Tracebacks inside the messages of other tracebacks are parsed up to this depth.
_MAX_NESTING = 16
# At most this many frames of a traceback are kept, half of them from each end.
_MAX_FRAMES = 60
_MAX_CODE_LINE_CHARACTERS = 200
# The maximum length of a faulthandler dump, in lines.
_MAX_DUMP_LINES = 400
# The line with the exception's class is at most this many lines after the last frame.
_LINES_TO_CLASS = 4

# Sacred leaves out its own frames, and says so in the header.
HEADER = re.compile(
    r"(?:(?:Exception Group |Original )?Traceback"
    r" \(most recent calls? (?:last|WITHOUT Sacred internals)\):?)"
)
_NESTED = re.compile(
    r"\s*(?:Original Traceback|-- Process \d+ terminated with the following error:)"
)
_FRAME = re.compile(r'(\s*)File "([^"]{1,500})", line (\d+)(?:, in (.{1,200}))?$')
# The beginning of a frame that another writer's line break has cut in two.
_CUT_FRAME = re.compile(r'\s*F(?:i?|il|ile ?|ile "[^"]{0,500})$')
_RICH_FRAME = re.compile(r"\s*│\s*(/?\S+?):(\d+) in (\S+)")
_RICH_BOX = re.compile(r"\s*[│╭╰┃┏┗]")
_REPEATED = re.compile(r"\s*\[Previous line repeated \d+ more times?\]")
_LINK = re.compile(
    r"\s*(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)"
)
EXCEPTION = re.compile(
    r"([A-Za-z_]\w*(?:\.(?:<locals>\.)?[A-Za-z_]\w*)*)(?: ?: ?(.*))?$", re.DOTALL
)
# A `raise` statement with a class, possibly wrapped in a function call.
_RAISE = re.compile(r"raise (?:[a-z_][\w.]*\()?([\w.]+)")
# Typical endings of exception class names.
_EXCEPTION_NAME = re.compile(
    r"\w(?:Error|Exception|Interrupt|Exit|Iteration|Timeout|Expired|Group|Failure|Fault|NotFound"
    r"|Invalid|Unavailable|Failed|Exceeded|Conflict|Refused|Resources|Unsupported|DeprecatedEnv)$"
    r"|^Bad\w+File$"
)
# Names of modules in which any class name with a message is taken to be an exception.
_EXCEPTION_MODULES = ("exc", "exceptions", "error", "errors")
_GROUP_SEPARATOR = re.compile(r"\s*\+[-+ \d.]*$")
_GROUP_MARGIN = re.compile(r"^\s*(?:[|] ?|[+] (?=Exception))")
# Lines that never continue the message above them.
_ENDS_MESSAGE = re.compile(
    r"Exception ignored in|Exception in thread |Process [\w-]+:$|Fatal Python error"
    r'|"""$|[=*-]{20,}$|\[W\d{3}|wandb: '
    r"|\S+\.py:\d+: \w*Warning: |[\w/.-]{1,80}\.(?:cc|cu|h|cpp):\d+ "
    r"|terminate called after|Error executing job|slurmstepd|srun: |--- holdfast"
    r"|\s*(?:ERROR|WARNING|CRITICAL):[\w.]+:"
    r"|(?:Killed|Terminated|Hangup)$|(?:Aborted|Segmentation fault|Bus error)\b"
)
_SYNTAX_ERROR = re.compile(r"(?:\w+\.)*(?:SyntaxError|IndentationError|TabError): ")
# Exceptions whose message quotes another exception as Python code, as in ``TypeError("...")``.
# Hydra raises them.
_QUOTING_EXCEPTIONS = frozenset({"InstantiationException", "HydraException"})
_QUOTED_EXCEPTION = re.compile(
    r"^(\w{1,80}(?:Error|Exception))\((['\"])(.{1,4000}?)\2,?\)$", re.MULTILINE
)
_THREAD_OF_DUMP = re.compile(r"\s*(?:Current thread|Thread) 0x")
_OTHER_LINE_OF_DUMP = re.compile(r"\s*(?:<no Python frame>|Extension modules:|\.\.\.|Garbage-coll)")
_BUILTIN_EXCEPTIONS = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


@dataclass(slots=True)
class Raised:
    """An exception that was found in a log, with or without a traceback."""

    # The name of the class, without its module.
    exception: str
    # The message, which may have several lines.
    message: str
    # The frames of the traceback, with the innermost frame last.
    frames: tuple[Frame, ...]
    # The number of the log line that contains the class name.
    number: int
    # The exceptions that led to this exception or that this exception repeats, root cause first.
    # Their own `causes` are empty.
    causes: list[Raised] = field(default_factory=list)
    # The Unix time in the log line that contains the class name, or None if the line has no time.
    unix_seconds: float | None = None
    # Whether it was raised while the newest of `causes` was being handled, and not from it.
    while_handling: bool = False

    def add_causes(self, other: Raised) -> None:
        """Put another exception and its causes before the existing causes of this exception.

        If this makes too many causes, the causes in the middle are dropped. The causes of the other
        exception are moved, so its own list becomes empty.
        """
        causes = [*other.causes, other, *self.causes]
        other.causes = []
        half = _MAX_CAUSES // 2
        if len(causes) > _MAX_CAUSES:
            causes = causes[:half] + causes[-half:]
        self.causes = causes

    def add_causes_in(self, message: Message) -> None:
        """Add the exceptions that this exception's message reports."""
        if message.nested is not None:
            self.add_causes(message.nested)
        match = _QUOTED_EXCEPTION.search(self.message)
        if match is not None and self.exception in _QUOTING_EXCEPTIONS:
            quoted = Raised(
                exception=match[1],
                message=match[3],
                frames=self.frames,
                number=self.number,
                unix_seconds=self.unix_seconds,
            )
            self.add_causes(quoted)

    def from_the_root(self) -> list[Raised]:
        """Return this exception preceded by its causes, with the root cause first."""
        return [*self.causes, self]


class Message(NamedTuple):
    """The message of an exception, and where the message ends."""

    text: str
    # The exception whose traceback is part of the message, or None.
    nested: Raised | None
    # The index of the line after the message.
    next_index: int


def split_quoted_exception(text: str) -> tuple[str, str] | None:
    """Return the class and message of a line such as ``KeyError('Version')``, or None.

    Hydra prints the exception behind its own message in this way.
    """
    match = _QUOTED_EXCEPTION.fullmatch(text.strip())
    return None if match is None else (match[1], match[3])


def split_exception(text: str) -> tuple[str, str] | None:
    """Split ``module.Class: message`` into the dotted class name and the message.

    Return None if the name does not look like the name of an exception class.
    """
    if text.startswith(" ") and not text.startswith("  "):
        # Some loggers insert one space before the message. A deeper indent is not a message.
        text = text.lstrip()
    match = EXCEPTION.match(text)
    if match is None or not _is_exception_name(match[1], has_message=match[2] is not None):
        return None
    return match[1], match[2] or ""


def _is_exception_name(dotted_name: str, *, has_message: bool) -> bool:
    """Return whether a dotted name looks like the name of an exception class."""
    module, _, name = dotted_name.rpartition(".")
    if name.endswith("Warning") or name.startswith("nccl"):
        # NCCL's own errors, such as ncclSystemError, are lines of a message.
        return False
    if _EXCEPTION_NAME.search(name) or name in _BUILTIN_EXCEPTIONS:
        return True
    if name == "Error" and module:
        return True
    return has_message and module.rpartition(".")[2] in _EXCEPTION_MODULES


class TracebackReader:
    """Parses tracebacks in the lines of one process.

    Args:
        lines: The lines, without the margins of exception groups (see `without_margins`).
    """

    def __init__(self, lines: Sequence[CleanLine]) -> None:
        self._lines = lines
        self._text = [line.text for line in lines]
        self._depth = 0

    def read(self, start: int) -> tuple[Raised | None, int]:
        """Parse the traceback that begins at a line.

        Args:
            start: The index of the line.

        Returns:
            The exception, or None if the traceback is cut off, and the index of the line after the
            traceback. For a chain of exceptions, this is the last exception, with the others in
            `Raised.causes`.
        """
        newest: Raised | None = None
        while_handling = False
        self._depth += 1
        while True:
            raised, next_index = self._read_one(start)
            if raised is not None:
                if newest is not None:
                    raised.add_causes(newest)
                    raised.while_handling = while_handling
                newest = raised
            linked = self._linked_traceback(next_index)
            if linked is None:
                self._depth -= 1
                return newest, next_index
            between = self._text[next_index:linked]
            while_handling = any("During handling" in text for text in between)
            start = linked

    def about_to_raise(self, start: int) -> Raised | None:
        """Return the exception of a traceback that is cut off before its last line.

        The returned exception has no message. Return None unless the last frame of the traceback is
        at a ``raise`` statement that names the class.

        Args:
            start: The index of the first line of the traceback.
        """
        frames, next_index = self._frames(self._first_frame(start))
        if not frames:
            return None
        match = _RAISE.match(frames[-1].code)
        if match is None or split_exception(match[1]) is None:
            return None
        return Raised(
            exception=match[1].rpartition(".")[2],
            message="",
            frames=frames,
            number=self._lines[next_index - 1].number,
        )

    def message(self, start: int, first: str, *, bare: bool = False) -> Message:
        """Return the message of an exception, which begins on a line and may continue after it.

        Args:
            start: The index of the line.
            first: The part of the line that is the first line of the message.
            bare: Whether no traceback precedes the message. If so, only indented lines, and lines
                in lower case that continue a wrapped line, are part of the message.
        """
        lines = [first]
        nested: Raised | None = None
        index = start + 1
        while index < len(self._text) and index <= start + _MAX_MESSAGE_LINES:
            exception_and_next = self._nested_exception(index, lines[-1])
            if exception_and_next is not None:
                nested, index = exception_and_next
                break
            if self._ends_message(index) or (bare and not self._continues_line(index)):
                break
            lines.append(self._text[index])
            index += 1
        return Message("\n".join(lines).strip(), nested, index)

    def fatal_error(self, start: int) -> tuple[tuple[Frame, ...], int]:
        """Parse a faulthandler dump.

        Args:
            start: The index of the first line of the dump.

        Returns:
            The frames of the current thread, with the innermost frame last, and the index of the
            line after the dump.
        """
        frames: list[Frame] = []
        in_current_thread = False
        index = start + 1
        while index < len(self._text) and index < start + _MAX_DUMP_LINES:
            text = self._text[index]
            # Faulthandler prints no comma before the function, but `_FRAME` expects one.
            frame = _FRAME.match(re.sub(r"line (\d+) in ", r"line \1, in ", text))
            if frame is not None:
                if in_current_thread:
                    frames.append(_frame_from(frame))
            elif _THREAD_OF_DUMP.match(text):
                in_current_thread = "Current" in text
            elif text.strip() and not _OTHER_LINE_OF_DUMP.match(text):
                break
            index += 1
        # Faulthandler prints the innermost frame first.
        frames.reverse()
        return _without_middle(frames), index

    def _read_one(self, start: int) -> tuple[Raised | None, int]:
        """Return one exception of a chain (None if cut off) and the index of the line after it."""
        if "─" in self._text[start]:
            # The line is the upper edge of a box drawn by rich. The frames start below it.
            frames, after_frames = self._rich_frames(start + 1)
        else:
            frames, after_frames = self._frames(self._first_frame(start))
        last = min(after_frames + _LINES_TO_CLASS, len(self._text))
        for index in range(after_frames, last):
            text = self._text[index].strip()
            if HEADER.search(text):
                return None, index
            match = EXCEPTION.match(text)
            if match is not None and _is_class_after_frames(match):
                return self._exception(index, match, frames)
        return None, after_frames

    def _first_frame(self, start: int) -> int:
        """Return the index of the first frame of a traceback, skipping the header if there is one.

        Syntax errors have no header, and bug reports often omit the header.
        """
        return start + 1 if HEADER.search(self._text[start]) else start

    def _linked_traceback(self, start: int) -> int | None:
        """Return the index of the next traceback in a chain, or None if the chain ends.

        Two tracebacks of a chain are linked by a line such as "During handling of ...".

        Args:
            start: The index of the line after the previous exception.
        """
        # At most three lines that are blank or contain only quotes precede the linking line. The
        # header of the next traceback is at most three lines after the linking line.
        link = start
        while link < min(start + 3, len(self._text)) and not self._text[link].strip(' "'):
            link += 1
        if link >= len(self._text) or not _LINK.match(self._text[link]):
            return None
        for index in range(link + 1, min(link + 4, len(self._text))):
            if HEADER.search(self._text[index]):
                return index
        return None

    def _nested_exception(self, index: int, before: str) -> tuple[Raised | None, int] | None:
        """Return the nested exception that begins at a line of another exception's message.

        A nested exception has a traceback or follows a line such as ``backend='inductor' raised:``.

        Args:
            index: The index of the line.
            before: The previous line of the message.

        Returns:
            The exception (None if its traceback is cut off) and the index of the line after the
            exception; or None if no exception begins at the line.
        """
        start = self._nested_traceback(index)
        if start is not None:
            return self.read(start)
        match = EXCEPTION.match(self._text[index])
        is_introduced = before.endswith(":") and split_exception(self._text[index]) is not None
        if match is not None and is_introduced:
            return self._exception(index, match, ())
        return None

    def _nested_traceback(self, index: int) -> int | None:
        """Return the index of the nested traceback's header that a line introduces, or None."""
        text = self._text[index]
        if not _NESTED.match(text) or self._depth > _MAX_NESTING:
            return None
        if HEADER.search(text):
            return index
        # The header is at most three lines after a line that announces a process's error.
        for start in range(index + 1, min(index + 4, len(self._text))):
            if HEADER.search(self._text[start]):
                return start
        return None

    def _exception(
        self, start: int, match: re.Match[str], frames: tuple[Frame, ...]
    ) -> tuple[Raised, int]:
        """Return the exception whose class name is on a line, and the index after its message.

        Args:
            start: The index of the line.
            match: The match of `EXCEPTION` in the line.
            frames: The frames of the traceback that precedes the line.
        """
        message = self.message(start, match[2] or "")
        line = self._lines[start]
        raised = Raised(
            exception=match[1].rpartition(".")[2],
            # A line break of another writer may have separated the class from its message.
            message=message.text.removeprefix(": "),
            frames=frames,
            number=line.number,
            unix_seconds=line.unix_seconds,
        )
        raised.add_causes_in(message)
        return raised, message.next_index

    def _continues_line(self, index: int) -> bool:
        """Return whether a line is blank or indented, or continues a wrapped line in lower case."""
        text = self._text[index]
        if text[:1] in (" ", "\t", ""):
            return True
        return text[0].islower() and len(self._text[index - 1]) >= _MIN_WRAPPED_CHARACTERS

    def _ends_message(self, index: int) -> bool:
        """Return whether a line is not part of the message above it."""
        line = self._lines[index]
        text = line.text
        time_before = self._lines[index - 1].unix_seconds
        has_other_time = line.unix_seconds not in (None, time_before)
        if line.level is not None or has_other_time:
            return True
        if HEADER.search(text) or _LINK.match(text) or _ENDS_MESSAGE.match(text):
            return True
        if split_exception(text) is not None:
            return True
        if not text.strip():
            return self._message_ends_at_gap(index)
        # The message of a holdfast error continues with the fix, which may look like progress.
        continues = text[0] in " \t" or text.startswith("Fix: ")
        return not continues and is_progress(text)

    def _message_ends_at_gap(self, index: int) -> bool:
        """Return whether a message ends at an empty line.

        The message continues if the next line that is not empty is indented or parenthesized, or
        introduces a nested traceback.
        """
        for following in self._text[index + 1 : index + 3]:
            if following.strip():
                continues = following[0] in " \t(" or _NESTED.match(following) is not None
                return not continues
        return True

    def _frames(self, start: int) -> tuple[tuple[Frame, ...], int]:
        """Return the frames that begin at a line, and the index of the line after the frames."""
        frames: list[Frame] = []
        indent = 0
        index = start
        while index < len(self._text):
            text = self._text[index]
            joined = self._joined_frame(index)
            if joined:
                text = joined
                index += 1
            match = _FRAME.match(text)
            # A traceback that was pasted may have an empty line after the first frame.
            is_gap = bool(frames) and not text.strip() and index == start + 1
            if match is not None:
                indent = len(match[1])
                frames.append(_frame_from(match))
            # A line that is indented more deeply than the frame is the frame's source code.
            elif frames and len(text) - len(text.lstrip()) > indent:
                frames[-1] = _with_code(frames[-1], text.strip())
            elif not is_gap and not _REPEATED.match(text):
                break
            index += 1
        return _without_middle(frames), index

    def _joined_frame(self, index: int) -> str:
        """Return a frame that another writer's line break has cut in two; empty if it is whole."""
        text = self._text[index]
        if not _CUT_FRAME.match(text) or index + 1 >= len(self._text):
            return ""
        joined = text + self._text[index + 1]
        return joined if _FRAME.match(joined) else ""

    def _rich_frames(self, start: int) -> tuple[tuple[Frame, ...], int]:
        """Return the frames in a box drawn by rich, and the index of the line after the box."""
        frames = []
        index = start
        while index < len(self._text) and _RICH_BOX.match(self._text[index]):
            match = _RICH_FRAME.match(self._text[index])
            if match is not None:
                frames.append(Frame(file=match[1], line=int(match[2]), function=match[3]))
            index += 1
        return _without_middle(frames), index


def _is_class_after_frames(match: re.Match[str]) -> bool:
    """Return whether the line after a traceback's frames names an exception.

    Any name with a message is accepted. A name without a message is accepted only if it is dotted
    or is the name of a built-in exception.

    Args:
        match: The match of `EXCEPTION` in the line.
    """
    name, message = match.groups()
    return message is not None or "." in name or name in _BUILTIN_EXCEPTIONS


def _frame_from(match: re.Match[str]) -> Frame:
    return Frame(file=match[2], line=int(match[3]), function=match[4] or "")


def _with_code(frame: Frame, code: str) -> Frame:
    """Return a frame with a line of source code added.

    The frame is returned unchanged if it already has source code, or if `code` is only a marker
    such as ``~~^^``.
    """
    if frame.code or not code.strip("~^ "):
        return frame
    return replace(frame, code=code[:_MAX_CODE_LINE_CHARACTERS])


def _without_middle(frames: list[Frame]) -> tuple[Frame, ...]:
    """Return the frames, omitting the middle if there are too many."""
    if len(frames) <= _MAX_FRAMES:
        return tuple(frames)
    half = _MAX_FRAMES // 2
    return tuple(frames[:half] + frames[-half:])


def is_frame(text: str) -> bool:
    """Return whether a line is a traceback's frame that names a function."""
    match = _FRAME.match(text)
    return match is not None and match[4] is not None


def is_syntax_error(lines: Sequence[CleanLine], start: int) -> bool:
    """Return whether a syntax error begins at a line.

    It begins with a frame that names no function, because a syntax error has no traceback header.
    """
    match = _FRAME.match(lines[start].text)
    if match is None or match[4] is not None:
        return False
    # Between the frame and the class name, there are a few lines of source code and markers.
    return any(_SYNTAX_ERROR.match(line.text) for line in lines[start + 1 : start + 6])


def without_margins(lines: Sequence[CleanLine]) -> list[CleanLine]:
    """Return the lines without the left margin that Python prints in exception groups.

    Lines that separate the exceptions of a group become empty.
    """
    plain_lines = []
    in_group = False
    for line in lines:
        continues_group = in_group and re.match(r"\s*[|+]", line.text) is not None
        in_group = continues_group or "Exception Group Traceback" in line.text
        if in_group:
            is_separator = _GROUP_SEPARATOR.match(line.text) is not None
            text = "" if is_separator else _GROUP_MARGIN.sub("", line.text)
            line = replace(line, text=text, shown=text)
        plain_lines.append(line)
    return plain_lines
