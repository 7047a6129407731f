"""Find the source line of the script that makes a named object grow.

The statements of a file, as `ast.unparse` writes them, are matched against patterns: calls that add
to an object, assignments to a part of it, and assignments that extend what a name holds.
"""

from __future__ import annotations

import ast
import functools
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.text import sanitise
from holdfast.supervise.leaks.introspection import is_users_file
from holdfast.supervise.leaks.references import HOOK_TABLE, Link

_MAX_FILE_BYTES = 4 << 20
_MAX_FILES = 500
_MAX_CODE_LENGTH = 160
_MODULE = "<module>"
# Functions in which objects are created or reset, so lines in other functions are preferred.
_STARTING_FUNCTIONS = (_MODULE, "__init__", "reset", "clear")

_SUBSCRIPT = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
# Matches access to a part of what a name holds: subscripts, attributes, and calls that return a
# part.
_PART = rf"(?:{_SUBSCRIPT}|\.\w+(?:\((?:[^()]|\([^()]*\))*\))?)*"
_ADDING_CALL = (
    r"\.(?:add|append|appendleft|emit|extend|extendleft|insert|put|put_nowait|push|setdefault"
    r"|update|write|register_\w+|add_module|\w*[a-z]_)\("
)
_HOOK_REGISTRATION = r"\bregister_\w*hook\w*\("
_OPERATOR = r"(?:[-+*/%@&|^]|//|\*\*|<<|>>)"
# Matches initial values: None, a number, a string, or an empty container.
_EMPTY_VALUE = re.compile(
    r"[\[\](){}, ]*|None|-?[\d.e]+|'.*'"
    r"|(?:list|dict|set|deque|tuple|OrderedDict|Counter|object)\(\)"
)
# Pattern for what may precede a name, by the kind of the link; the default is a word boundary.
_BEFORE_NAME = {
    "attribute": r"\.",
    "entry": r"\.",
    "local": r"(?<![\w.])",
    "default": r"(?<![\w.])",
}


@dataclass(frozen=True, slots=True)
class _Change:
    """A statement that may change what a name holds.

    Args:
        line: Its line.
        builds: Whether it extends what the name already holds.
    """

    line: int
    builds: bool


class _Source:
    """The statements and functions of a file; none if it cannot be read or is not Python."""

    def __init__(self, file: str) -> None:
        self.lines: list[str] = []
        nodes: list[ast.AST] = []
        # The parser repeats the warnings that it gave when the script was loaded.
        show_warning = warnings.showwarning
        warnings.showwarning = lambda *_, **__: None
        try:
            with tokenize.open(file) as opened:
                text = opened.read(_MAX_FILE_BYTES)
            self.lines = text.splitlines()
            nodes = list(ast.walk(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        finally:
            warnings.showwarning = show_warning
        self._functions = [
            node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        # Only statements without a block, such as assignments and calls.
        self._statements = [
            node for node in nodes if isinstance(node, ast.stmt) and not hasattr(node, "body")
        ]

    def function_at(self, line: int) -> str:
        """Return the name of the innermost function around a line."""
        # `ast.walk` visits outer functions first.
        name = _MODULE
        for function in self._functions:
            if function.lineno <= line <= (function.end_lineno or 0):
                name = function.name
        return name

    def code_at(self, line: int) -> str:
        """Return the text of a line, shortened; empty if there is no such line."""
        text = "".join(self.lines[line - 1 : line]).strip()
        return sanitise(text, most=_MAX_CODE_LENGTH)

    def find_changes(self, link: Link) -> Iterator[_Change]:
        """Yield the statements that change what a name holds."""
        # Skip most statements by their text: unparsing is slow.
        word = "register_" if HOOK_TABLE.match(link.name) else link.name
        for statement in self._statements:
            if not _may_use_name(link, statement.lineno):
                continue
            lines = self.lines[statement.lineno - 1 : statement.end_lineno]
            if not any(word in line for line in lines):
                continue
            text = ast.unparse(statement)
            if _builds_on_name(link, text):
                yield _Change(statement.lineno, builds=True)
            elif _binds_name(link, text):
                yield _Change(statement.lineno, builds=False)


def _may_use_name(link: Link, line: int) -> bool:
    """Return whether a name is visible at a line: a local only exists in its function."""
    if link.kind not in ("local", "default") or link.lines == (0, 0):
        return True
    first, last = link.lines
    return first <= line <= last


def _name_pattern(link: Link) -> str:
    before = _BEFORE_NAME.get(link.kind, r"\b")
    return before + re.escape(link.name) + r"\b"


def _builds_on_name(link: Link, statement: str) -> bool:
    """Return whether a statement adds to what a name holds."""
    if HOOK_TABLE.match(link.name):
        return re.search(_HOOK_REGISTRATION, statement) is not None
    name = _name_pattern(link)
    patterns = (
        rf"{name}{_PART}{_ADDING_CALL}",
        rf"setattr\(.*, '{re.escape(link.name)}', ",
        rf"{name}{_PART}{_SUBSCRIPT} {_OPERATOR}?= ",
        rf"{name} {_OPERATOR}= ",
    )
    if re.search("|".join(patterns), statement):
        return True
    value = _bound_value(link, statement)
    return value is not None and re.search(name, value) is not None


def _binds_name(link: Link, statement: str) -> bool:
    """Return whether a statement binds a name to something other than an initial value."""
    if HOOK_TABLE.match(link.name):
        return False
    value = _bound_value(link, statement)
    return value is not None and _EMPTY_VALUE.fullmatch(value) is None


def _bound_value(link: Link, statement: str) -> str | None:
    """Return the expression that a statement binds to a name; None if it does not bind it."""
    name = _name_pattern(link)
    bound = re.match(rf"\(?[^=(]*?{name}(?:[,:)][^=]*)? = (?P<value>.+)", statement, re.DOTALL)
    return None if bound is None else bound["value"]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A line that may make memory grow. The one with the largest `rank` is the most likely."""

    rank: tuple[bool, bool, int, bool, int, int]
    file: str
    line: int


class SourceLines:
    """Finds lines in the script's files; each file is read once.

    Args:
        user_files: The script's files; the main script first.
    """

    def __init__(self, user_files: Iterable[str]) -> None:
        self._user_files = tuple(user_files)[:_MAX_FILES]
        self._source = functools.cache(_Source)

    def find_keeping_line(self, links: Sequence[Link]) -> str:
        """Return the line that most likely makes the object at the end of a path grow.

        In order of preference: statements of the script over those of a library, statements that
        extend what a name holds over those that only bind it, and names closer to the object over
        more distant ones.

        Args:
            links: The path from an object to the name that holds it, innermost link first.

        Returns:
            File, line number, function and code as one string; empty if there is no such line.
        """
        for link in links:
            if link.kind == "cache" and link.file:
                # Link to the cached function itself.
                return self._describe(link.file, link.lines[0])
        candidates: list[_Candidate] = []
        named = [link for link in _without_exceptions(links) if _is_usable_name(link)]
        # Try entries last: their names are keys, which rarely appear in the source text.
        named.sort(key=lambda link: link.kind == "entry")
        for order, link in enumerate(named):
            candidates += self._candidates_for(link, order)
        if not candidates:
            return ""
        best = max(candidates, key=lambda candidate: (candidate.rank, candidate.file))
        return self._describe(best.file, best.line)

    def _candidates_for(self, link: Link, order: int) -> Iterator[_Candidate]:
        """Yield lines that change what a name holds; `order` is its distance from the object."""
        files = [link.file]
        if link.kind not in ("local", "default"):
            files += self._user_files
        for place, file in enumerate(dict.fromkeys(filter(None, files))):
            source = self._source(file)
            for change in source.find_changes(link):
                function = source.function_at(change.line)
                # A name that a module binds only once does not grow.
                if not change.builds and function == _MODULE:
                    continue
                rank = (
                    is_users_file(file),
                    change.builds,
                    -order,
                    function not in _STARTING_FUNCTIONS,
                    -place,
                    -change.line,
                )
                yield _Candidate(rank, file, change.line)

    def _describe(self, file: str, line: int) -> str:
        source = self._source(file)
        code = source.code_at(line)
        return f"{file}:{line} in {source.function_at(line)}: {code}" if code else ""


def _without_exceptions(links: Sequence[Link]) -> Sequence[Link]:
    """Return the links after the last traceback: names in an exception's frames do not hold it."""
    last = -1
    for index, link in enumerate(links):
        if link.kind == "traceback":
            last = index
    return links[last + 1 :] or links


def _is_usable_name(link: Link) -> bool:
    return link.name.isidentifier() and link.kind != "other"
