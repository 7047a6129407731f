"""Find the source line of the script that makes a named object grow.

Each statement of the script is classified by its effect on the name. A statement may extend the
object that the name refers to, by calling a method that adds to the object or by assigning to a
part of it. Or the statement may bind the name to another object.
"""

from __future__ import annotations

import ast
import functools
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from holdfast.core.text import sanitise
from holdfast.supervise.leaks.holder_links import HOOK_TABLE, HolderLink
from holdfast.supervise.leaks.introspection import is_users_file

_MAX_FILE_BYTES = 4 << 20
_MAX_FILES = 500
_MAX_CODE_LENGTH = 160
_MODULE = "<module>"
# Objects are created or reset in these functions, so lines in other functions are preferred.
_STARTING_FUNCTIONS = (_MODULE, "__init__", "reset", "clear")
# Names of methods that add to their object. A method whose name ends with an underscore changes a
# tensor in place.
_ADDING_METHOD = re.compile(
    r"add|append|appendleft|emit|extend|extendleft|insert|put|put_nowait|push|setdefault|update"
    r"|write|register_\w+|add_module|\w*[a-z]_"
)
_HOOK_REGISTRATION = re.compile(r"register_\w*hook\w*")
# Classes whose instances are empty when created without arguments.
_CONTAINERS = ("list", "dict", "set", "deque", "tuple", "OrderedDict", "Counter", "object")

# Effect of a statement: it extends the object that a name refers to, or binds the name to another
# object.
_Effect: TypeAlias = Literal["extends", "binds"]


@dataclass(frozen=True, slots=True)
class _KeepingLine:
    """A source line that may make memory grow.

    Args:
        rank: Sort key, which is largest for the most likely line. See `SourceLines._lines_for`.
        file: File that contains the line.
        line: Line number.
    """

    rank: tuple[bool, bool, int, bool, int, int]
    file: str
    line: int


class SourceLines:
    """Finds lines in the script's files. Each file is read only once.

    Args:
        user_files: The script's files, beginning with the main script.
    """

    def __init__(self, user_files: Iterable[str]) -> None:
        self._user_files = tuple(user_files)[:_MAX_FILES]
        self._parse = functools.cache(_ParsedFile)

    def find_keeping_line(self, links: Sequence[HolderLink]) -> str:
        """Return the line that most likely makes an object grow.

        Statements in the script are preferred to those in a library, then statements that extend an
        object to those that bind a name, and then names close to the object to distant names.

        Args:
            links: The path from an object to the name that holds it, innermost link first.

        Returns:
            File, line number, function and code as one string; empty if no line was found.
        """
        for link in links:
            if link.kind == "cache" and link.file:
                # For a cache, return the line of the cached function itself.
                return self._describe(link.file, link.lines[0])
        named = [
            link
            for link in _without_exceptions(links)
            if link.name.isidentifier() and link.kind != "other"
        ]
        # Try entries last, because their names are keys, which rarely appear in the source code.
        named.sort(key=lambda link: link.kind == "entry")
        lines: list[_KeepingLine] = []
        for distance, link in enumerate(named):
            lines += self._lines_for(link, distance)
        if not lines:
            return ""
        best = max(lines, key=lambda line: (line.rank, line.file))
        return self._describe(best.file, best.line)

    def _lines_for(self, link: HolderLink, distance: int) -> Iterator[_KeepingLine]:
        """Yield the lines that extend the object that a name refers to, or that bind the name.

        Args:
            link: The link that has the name.
            distance: Number of links between the object and this link.
        """
        files = [link.file]
        if link.kind not in ("local", "default"):
            files += self._user_files
        for place, file in enumerate(dict.fromkeys(filter(None, files))):
            parsed = self._parse(file)
            for line, effect in parsed.find_effects(link):
                function = parsed.function_at(line)
                # Module-level code runs only once, so a name that is bound in it does not grow.
                if effect == "binds" and function == _MODULE:
                    continue
                # The most important criterion comes first. Larger is better.
                rank = (
                    is_users_file(file),
                    effect == "extends",
                    -distance,
                    function not in _STARTING_FUNCTIONS,
                    -place,
                    -line,
                )
                yield _KeepingLine(rank, file, line)

    def _describe(self, file: str, line: int) -> str:
        parsed = self._parse(file)
        code = parsed.code_at(line)
        return f"{file}:{line} in {parsed.function_at(line)}: {code}" if code else ""


def _without_exceptions(links: Sequence[HolderLink]) -> Sequence[HolderLink]:
    """Return the links after the last traceback, or all links if there is none.

    An exception's frames are not the cause of a leak; whatever keeps the exception alive is.
    """
    last = -1
    for index, link in enumerate(links):
        if link.kind == "traceback":
            last = index
    return links[last + 1 :] or links


class _ParsedFile:
    """The statements and functions of a source file; empty if it cannot be read or parsed."""

    def __init__(self, file: str) -> None:
        self._lines: list[str] = []
        nodes: list[ast.AST] = []
        # Hide the parser's warnings, which Python has already shown when it loaded the script.
        show_warning = warnings.showwarning
        warnings.showwarning = lambda *_, **__: None
        try:
            with tokenize.open(file) as opened:
                text = opened.read(_MAX_FILE_BYTES)
            self._lines = text.splitlines()
            nodes = list(ast.walk(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        finally:
            warnings.showwarning = show_warning
        self._functions = [
            node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        # The statements that can extend an object or bind a name.
        self._statements = [
            node
            for node in nodes
            if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return))
        ]

    def function_at(self, line: int) -> str:
        """Return the name of the innermost function that contains a line."""
        # `ast.walk` visits outer functions first, so the last match is the innermost function.
        name = _MODULE
        for function in self._functions:
            if function.lineno <= line <= (function.end_lineno or 0):
                name = function.name
        return name

    def code_at(self, line: int) -> str:
        """Return the text of a line, shortened; empty if the line does not exist."""
        # Line numbers start at 1. A slice, unlike an index, may be out of range.
        text = "".join(self._lines[line - 1 : line]).strip()
        return sanitise(text, most=_MAX_CODE_LENGTH)

    def find_effects(self, link: HolderLink) -> Iterator[tuple[int, _Effect]]:
        """Yield the line number and the effect of each statement that affects the link's name."""
        # Search the text for the word first, because walking the syntax tree of every statement
        # would be slow.
        word = "register_" if HOOK_TABLE.match(link.name) else link.name
        for statement in self._statements:
            if not _may_use_name(link, statement.lineno):
                continue
            lines = self._lines[statement.lineno - 1 : statement.end_lineno]
            if not any(word in line for line in lines):
                continue
            effect = _effect_of(statement, link)
            if effect is not None:
                yield statement.lineno, effect


def _may_use_name(link: HolderLink, line: int) -> bool:
    """Return whether a line can use a name. A local variable exists only in its function."""
    if link.kind not in ("local", "default") or link.lines == (0, 0):
        return True
    first, last = link.lines
    return first <= line <= last


def _effect_of(statement: ast.stmt, link: HolderLink) -> _Effect | None:
    """Return the effect of a statement on the name of a link; None if it has none."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    # A dictionary of hooks is private to torch. Scripts change it only by registering a hook.
    if HOOK_TABLE.match(link.name):
        registers = any(_HOOK_REGISTRATION.fullmatch(_name_of_function(call)) for call in calls)
        return "extends" if registers else None
    if any(_adds_to(link, call) for call in calls):
        return "extends"
    for target in _targets_of(statement):
        if isinstance(target, ast.Subscript) and _is_part_of(link, target):
            return "extends"
        if _is_name_of(link, target):
            return _effect_of_binding(statement, link)
    return None


def _effect_of_binding(statement: ast.stmt, link: HolderLink) -> _Effect | None:
    """Return the effect of an assignment to the name itself; None for an initial value."""
    value = getattr(statement, "value", None)
    if value is None:
        return None
    builds_on_itself = any(_is_name_of(link, node) for node in ast.walk(value))
    if isinstance(statement, ast.AugAssign) or builds_on_itself:
        return "extends"
    return None if _is_initial_value(value) else "binds"


def _adds_to(link: HolderLink, call: ast.Call) -> bool:
    """Return whether a call, such as ``x[0].append(1)``, adds to the object of a link's name."""
    if isinstance(call.func, ast.Attribute):
        is_adding = _ADDING_METHOD.fullmatch(call.func.attr) is not None
        return is_adding and _is_part_of(link, call.func.value)
    if _name_of_function(call) == "setattr" and len(call.args) == 3:
        name = call.args[1]
        return isinstance(name, ast.Constant) and name.value == link.name
    return False


def _name_of_function(call: ast.Call) -> str:
    """Return the name of the called function or method; empty if it has no name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _targets_of(statement: ast.stmt) -> list[ast.expr]:
    """Return the targets of an assignment; a tuple is replaced by its elements."""
    if isinstance(statement, ast.Assign):
        remaining = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        remaining = [statement.target]
    else:
        return []
    targets = []
    while remaining:
        target = remaining.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            remaining += target.elts
        elif isinstance(target, ast.Starred):
            remaining.append(target.value)
        else:
            targets.append(target)
    return targets


def _is_part_of(link: HolderLink, expression: ast.expr) -> bool:
    """Return whether an expression is a name or a part of its object, as in ``x[0].values()``."""
    while not _is_name_of(link, expression):
        if isinstance(expression, ast.Call):
            # The result of a method counts as a part of its object.
            expression = expression.func
            if not isinstance(expression, ast.Attribute):
                return False
        if not isinstance(expression, (ast.Attribute, ast.Subscript)):
            return False
        expression = expression.value
    return True


def _is_name_of(link: HolderLink, node: ast.AST) -> bool:
    """Return whether a syntax node is the name of a link.

    A local is a plain name, and an attribute follows a dot. A global may be either, because other
    modules read it as an attribute of its module.
    """
    if isinstance(node, ast.Name):
        return node.id == link.name and link.kind not in ("attribute", "entry")
    if isinstance(node, ast.Attribute):
        return node.attr == link.name and link.kind not in ("local", "default")
    return False


def _is_initial_value(value: ast.expr) -> bool:
    """Return whether an expression is an initial value: a constant or an empty container."""
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_initial_value(element) for element in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        return _name_of_function(value) in _CONTAINERS and not (value.args or value.keywords)
    return isinstance(value, ast.Constant)
