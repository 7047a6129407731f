"""Which line of a source file changes a name: calls that add to it, and assignments that build on what it was.

From the text of files that the process has loaded itself. Does not: run anything, look at objects.
"""

from __future__ import annotations

import ast
import math
import re
import time
import tokenize
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_ADDS = frozenset(
    {
        "add", "append", "appendleft", "emit", "extend", "extendleft", "insert", "put", "put_nowait", "push",
        "setdefault", "update", "write", "__setitem__",
    }
)  # fmt: skip
_ADDS_TO_FIRST = frozenset({"heappush", "insort", "insort_left", "insort_right", "setitem", "iadd", "iconcat"})
_REGISTER = {
    "_buffers": ("register_buffer",),
    "_parameters": ("register_parameter",),
    "_modules": ("register_module", "add_module"),
}
_GIVES_A_PART = frozenset({"setdefault", "get", "__getitem__", "__getattribute__"})
_REGISTERS = re.compile(r"register_\w*hook\w*$")
_LOOKED_AT = (
    ast.Call, ast.AugAssign, ast.Assign, ast.AnnAssign, ast.NamedExpr,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
)  # fmt: skip
_WORD = re.compile(r"\w+")
_ATTRIBUTE = re.compile(r"\.[\s\\]*(\w+)")
_MOST_BYTES = 4 * 2**20
_MOST_CODE = 160
_MOST_CALLS = 3  # from the function that has a name for it to the one that adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name that memory is held by.

    Args:
        name: The identifier.
        files: Where it is looked for, the most likely first.
        scope: ``"variable"`` also in other functions, ``"local"`` within `within` only, ``"attribute"`` behind a
            dot, ``"hooks"``: a table of hooks of torch.
        within: First and last line of the function or class that it belongs to; (0, 0) if unknown.
    """

    name: str
    files: tuple[str, ...]
    scope: str = "variable"
    within: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of code.

    Args:
        file: Path.
        line: Number, from 1.
        function: It stands in, ``"<module>"`` outside of any.
        code: The line, without indent, cut.
    """

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


_Placed = tuple[ast.AST, tuple[ast.AST, ...], bool]  # a node, the functions around it, whether it stands in a loop


@dataclass(frozen=True, slots=True)
class _Change:
    """A node that changes a name; strong: by building on what it was."""

    node: ast.AST
    functions: tuple[ast.AST, ...]
    strong: bool
    in_loop: bool


class _Source:
    """A file: it is read at once, and parsed when something in it is asked for."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self._text = text
        normal = unicodedata.normalize("NFKC", text)  # as identifiers are compared
        self._words = frozenset(_WORD.findall(normal))
        self._attributes = frozenset(_ATTRIBUTE.findall(normal))

    @cached_property
    def tree(self) -> ast.Module | None:
        """What is written in it; None if it is no Python."""
        shown = warnings.showwarning
        # A parser warns of what it finds in the script; it did so when the script was loaded.
        warnings.showwarning = lambda *_, **__: None
        try:
            return ast.parse(self._text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        finally:
            warnings.showwarning = shown

    @cached_property
    def nodes(self) -> list[_Placed]:
        """Calls, assignments, functions and classes."""
        walked = () if self.tree is None else _walk(self.tree)
        return [each for each in walked if isinstance(each[0], _LOOKED_AT)]

    def may_change(self, name: Name) -> bool:
        """Return whether it is worth parsing: most files of a large script have not a word of what is looked for."""
        if name.scope == "hooks":
            return any(_REGISTERS.match(word) for word in self._words)
        if not self._words.isdisjoint(_REGISTER.get(name.name, ())):
            return True
        if name.scope == "attribute":
            return name.name in self._attributes or "setattr" in self._words
        return name.name in self._words


class Sources:
    """Reads and parses files, each once.

    Args:
        until: When to read no further file, on the clock of `time.thread_time`: a script may have a thousand.
    """

    def __init__(self, until: float = math.inf) -> None:
        self._until = until
        self._read: dict[str, _Source | None] = {}

    def _source(self, file: str) -> _Source | None:
        if file not in self._read:
            if time.thread_time() > self._until:
                return None
            self._read[file] = _read(file)
        return self._read[file]

    def describe(self, file: str, number: int) -> Line | None:
        """Return a line with the function around it, or None if there is no source."""
        source = self._source(file)
        if source is None or source.tree is None or not 0 < number <= len(source.lines):
            return None
        around = [
            node
            for node, _, _ in source.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.lineno <= number <= (node.end_lineno or 0)
        ]
        inner = max(around, key=lambda node: node.lineno, default=None)
        return self._line(file, number, "<module>" if inner is None else inner.name)

    def _line(self, file: str, number: int, function: str) -> Line:
        source = self._source(file)
        text = source.lines[number - 1].strip() if source is not None else ""
        code = "".join(letter if letter.isprintable() else "?" for letter in text)
        return Line(file=file, line=number, function=function, code=code[:_MOST_CODE])

    def retaining_line(
        self, name: Name, *, ran: frozenset[tuple[str, int]] = frozenset(), mere: bool = True
    ) -> Line | None:
        """Return the line that most likely makes what a name holds grow.

        Args:
            name: The name.
            ran: Files and lines that are known to have run: of several lines that change it, these come first.
            mere: Whether a line counts that only binds the name to something else, where none builds on what it was.
        """
        found = []
        for place, file in enumerate(dict.fromkeys(name.files)):
            if time.thread_time() > self._until:
                break
            source = self._source(file)
            if source is None or not source.may_change(name):
                continue
            found += [(self._worth(each, name, file, place, ran), each, file) for each in _changes(source, name)]
            if place == 0 and not found:
                found += [(value, each, file) for value, each in self._by_argument(name, file, ran)]
        found = [each for each in found if each[1].strong or (mere and (each[1].in_loop or each[1].functions))]
        if not found:
            return None
        _, change, file = max(found, key=lambda each: (each[0], -getattr(each[1].node, "lineno", 0)))
        return self._line(file, getattr(change.node, "lineno", 1), _name_of(change.functions))

    def _worth(
        self, change: _Change, name: Name, file: str, place: int, ran: frozenset[tuple[str, int]]
    ) -> tuple[int, ...]:
        line, last = getattr(change.node, "lineno", 0), getattr(change.node, "end_lineno", 0) or 0
        inside = name.within[0] <= line <= name.within[1] and place == 0
        has_run = any((file, number) in ran for number in range(line, last + 1))
        sets_up = _name_of(change.functions) in ("__init__", "<module>", "reset", "clear") and not change.in_loop
        return (change.strong, has_run, inside, not sets_up, -place, change.in_loop)

    def _by_argument(
        self, name: Name, file: str, ran: frozenset[tuple[str, int]]
    ) -> Iterator[tuple[tuple[int, ...], _Change]]:
        """Follow a name into the functions of the same file that it is handed to."""
        source = self._source(file)
        todo, seen = [(name, 0)], {name}
        while source is not None and todo:
            current, depth = todo.pop()
            for inner in _parameters(source, current):
                if inner in seen or depth >= _MOST_CALLS:
                    continue
                seen.add(inner)
                todo.append((inner, depth + 1))
                for change in _changes(source, inner):
                    if change.strong:
                        yield self._worth(change, inner, file, 0, ran), change


def _read(file: str) -> _Source | None:
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        with tokenize.open(file) as opened:
            return _Source(opened.read())
    except (OSError, SyntaxError, ValueError, MemoryError):
        return None


def _name_of(functions: Sequence[ast.AST]) -> str:
    return str(getattr(functions[-1], "name", "<lambda>")) if functions else "<module>"


def _walk(node: ast.AST, functions: tuple[ast.AST, ...] = (), *, in_loop: bool = False) -> Iterator[_Placed]:
    """Yield every node with the functions around it, and whether it stands in a loop of the innermost."""
    for child in ast.iter_child_nodes(node):
        yield child, functions, in_loop
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _walk(child, (*functions, child))
        else:
            loops = in_loop or isinstance(child, (ast.For, ast.AsyncFor, ast.While))
            yield from _walk(child, functions, in_loop=loops)


def _changes(source: _Source, name: Name) -> Iterator[_Change]:
    for node, functions, in_loop in source.nodes:
        strength = _strength(node, name)
        if strength is None or (name.scope == "local" and not _is_within(node, name.within)):
            continue
        yield _Change(node, functions, strength, in_loop)


def _is_within(node: ast.AST, lines: tuple[int, int]) -> bool:
    return lines == (0, 0) or lines[0] <= getattr(node, "lineno", 0) <= lines[1]


def _strength(node: ast.AST, name: Name) -> bool | None:
    """Return whether a node builds on a name (True), binds it to something (False), or neither (None)."""
    if isinstance(node, ast.Call):
        return True if _call_adds(node, name) else None
    if isinstance(node, ast.AugAssign):
        return True if _is(_base(node.target), name) or _is(node.target, name) else None
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in _single(targets):
            if isinstance(target, ast.Subscript) and _is(_base(target), name):
                return True
            if _is(target, name):
                return True if any(_is(each, name) for each in ast.walk(node.value)) else _weakly(node.value)
    if isinstance(node, ast.FunctionDef) and node.name == name.name and name.scope == "cell":
        return False
    return None


def _weakly(value: ast.expr) -> bool | None:
    """Return False for an assignment of something, None for that of nothing, such as ``[]`` or ``dict()``."""
    if isinstance(value, ast.Constant):
        return None
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)) and not value.elts:
        return None
    if isinstance(value, ast.Dict) and not value.keys:
        return None
    if isinstance(value, ast.Call) and not value.args and not value.keywords:
        return None if isinstance(value.func, ast.Name) and value.func.id in _EMPTY else False
    return False


_EMPTY = frozenset({"list", "dict", "set", "deque", "tuple", "OrderedDict", "Counter", "object"})


def _call_adds(node: ast.Call, name: Name) -> bool:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name.scope == "hooks":
        return _REGISTERS.match(method) is not None
    if isinstance(node.func, ast.Attribute):
        in_place = method.endswith("_") and not method.endswith("__")
        if (method in _ADDS or in_place) and _is(_base(node.func.value), name):
            return True
    if method == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
        return name.scope == "attribute" and node.args[1].value == name.name
    if method == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.JoinedStr):
        return name.scope == "attribute" and _fits(node.args[1], name.name)
    if method in _REGISTER.get(name.name, ()):
        return True
    return method in _ADDS_TO_FIRST and bool(node.args) and _is(_base(node.args[0]), name)


def _fits(text: ast.JoinedStr, name: str) -> bool:
    """Return whether a name can come from an f-string."""
    parts = [re.escape(str(each.value)) if isinstance(each, ast.Constant) else ".*" for each in text.values]
    return re.fullmatch("".join(parts), name, re.DOTALL) is not None


def _base(node: ast.expr) -> ast.expr:
    """Return what a subscript, or a call that gives a part, is of."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GIVES_A_PART:
            node = node.func.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "vars"):
            node = node.args[0] if node.args else ast.Constant(None)
        else:
            return node


def _is(node: ast.AST, name: Name) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == name.name and name.scope in ("attribute", "variable")
    return isinstance(node, ast.Name) and node.id == name.name and name.scope in ("variable", "local")


def _single(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _single(target.elts)
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _parameters(source: _Source, name: Name) -> Iterator[Name]:
    """Yield the parameters under which functions of the same file get what a name holds."""
    named: dict[str, list[ast.FunctionDef]] = {}
    for node, _, _ in source.nodes:
        if isinstance(node, ast.FunctionDef):
            named.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            named.setdefault(node.name, []).extend(
                each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            )
    for node, _, _ in source.nodes:
        if not isinstance(node, ast.Call) or (name.scope == "local" and not _is_within(node, name.within)):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for function in named.get(called, ()):
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            handed = [*zip(names, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            for parameter, value in handed:
                if parameter is not None and _is(_base(value), name):
                    yield Name(
                        name=parameter, files=name.files[:1], scope="local",
                        within=(function.lineno, function.end_lineno or function.lineno),
                    )  # fmt: skip
