"""Which line of the script makes grow what a name holds: calls that add to it, assignments that build on it.

From the text of files that the process has loaded itself. Does not: run anything, look at objects.
"""

from __future__ import annotations

import ast
import re
import time
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from holdfast.core.text import sanitise
from holdfast.supervise.leaks.holders import Step, is_users

_MOST_BYTES, _MOST_CODE = 4 * 2**20, 160
# As `ast.unparse` writes statements. A part of what a name holds: subscripts, attributes, calls that return one.
_SUBSCRIPT = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_PART = rf"(?:{_SUBSCRIPT}|\.\w+(?:\((?:[^()]|\([^()]*\))*\))?)*"
_ADDS = (
    r"\.(?:add|append|appendleft|emit|extend|extendleft|insert|put|put_nowait|push|setdefault|update|write"
    r"|register_\w+|add_module|\w*[a-z]_)\("
)
_ADDS_TO_FIRST = r"\b(?:heappush|insort\w*|setitem|iadd|iconcat|setattr)\([\w.]*?"
_HOOK = r"\bregister_\w*hook\w*\("
_OPERATOR = r"(?:[-+*/%@&|^]|//|\*\*|<<|>>)"
HOOKS = re.compile(r"_\w*hooks\w*$")  # tables of hooks of torch
_EMPTY = re.compile(r"[\[\](){}, ]*|None|-?[\d.e]+|'.*'|(?:list|dict|set|deque|tuple|OrderedDict|Counter|object)\(\)")


class _Source:
    """The statements and functions of a file; none if it cannot be read or is no Python."""

    def __init__(self, file: str) -> None:
        shown, nodes, self.lines = warnings.showwarning, list[ast.AST](), list[str]()
        warnings.showwarning = lambda *_, **__: None  # of a parser, as when the script was loaded
        try:
            with tokenize.open(file) as opened:
                text = opened.read(_MOST_BYTES)
            self.lines, nodes = text.splitlines(), list(ast.walk(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        finally:
            warnings.showwarning = shown
        self.functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self._statements = [node for node in nodes if isinstance(node, ast.stmt) and not hasattr(node, "body")]

    def function_at(self, number: int) -> str:
        """Return the name of the function around a line."""
        around = [each.name for each in self.functions if each.lineno <= number <= (each.end_lineno or 0)]
        return around[-1] if around else "<module>"

    def changes(self, step: Step) -> Iterator[tuple[int, str, bool]]:
        """Yield statements that change a name: line, text, and whether it builds on what the name holds."""
        own = step.kind in ("local", "default") and step.lines != (0, 0)
        word = "register_" if HOOKS.match(step.name) else step.name
        for node in self._statements:
            inside = not own or step.lines[0] <= node.lineno <= step.lines[1]
            if inside and any(word in line for line in self.lines[node.lineno - 1 : node.end_lineno]):
                text = ast.unparse(node)
                if (builds := _builds_on(step, text)) is not None:
                    yield node.lineno, text, builds


class Lines:
    """Finds lines in files of the script, the script itself first; each is read once, until a `time.thread_time`."""

    def __init__(self, users: Iterable[str], until: float) -> None:
        self._users, self._until = tuple(users), until
        self._sources: dict[str, _Source] = {}

    def _source(self, file: str) -> _Source:
        if file not in self._sources:
            if time.thread_time() > self._until:
                return _Source("")
            self._sources[file] = _Source(file)
        return self._sources[file]

    def keeping(self, steps: Sequence[Step]) -> str:
        """Return the line that most likely makes grow what the names on a path hold, or an empty text.

        A statement of the script comes before one of a library, one that builds on a name before one that only binds
        it, and a name nearer to the object before one further away.
        """
        for step in steps:
            if step.kind == "cache" and step.file:
                return self._describe(step.file, step.lines[0])
        last = max((index for index, step in enumerate(steps) if step.kind == "traceback"), default=-1)
        steps = steps[last + 1 :] or steps  # the names in the frames of an exception do not hold it
        keys = [repr(step.name) for step in steps if step.kind == "entry" and step.name]
        found: list[tuple[tuple[Any, ...], str, int]] = []
        named = [step for step in steps if step.name.isidentifier() and step.kind != "other"]
        for order, step in enumerate(sorted(named, key=lambda step: step.kind == "entry")):
            files = (step.file, *(() if step.kind in ("local", "default") else self._users))
            for place, file in enumerate(dict.fromkeys(filter(None, files))):
                source = self._source(file)
                for line, text, builds in source.changes(step):
                    function, has_key = source.function_at(line), any(key in text for key in keys)
                    sets_up = function in ("__init__", "<module>", "reset", "clear")
                    if builds or function != "<module>":
                        found.append(
                            ((is_users(file), builds, -order, has_key, not sets_up, -place, -line), file, line)
                        )
        return self._describe(*max(found)[1:]) if found else ""

    def _describe(self, file: str, number: int) -> str:
        source = self._source(file)
        code = sanitise("".join(source.lines[number - 1 : number]).strip(), most=_MOST_CODE)
        return f"{file}:{number} in {source.function_at(number)}: {code}" if code else ""


def _builds_on(step: Step, text: str) -> bool | None:
    """Return whether a statement builds on a name (True), binds it to something (False), or neither (None)."""
    if HOOKS.match(step.name):
        return re.search(_HOOK, text) is not None or None
    before = {"attribute": r"\.", "entry": r"\.", "local": r"(?<![\w.])", "default": r"(?<![\w.])"}
    name = before.get(step.kind, r"\b") + re.escape(step.name) + r"\b"
    builds = (
        rf"{name}{_PART}{_ADDS}", rf"{_ADDS_TO_FIRST}{name}", rf"setattr\(.*, '{re.escape(step.name)}', ",
        rf"{name}{_PART}{_SUBSCRIPT} {_OPERATOR}?= ", rf"{name} {_OPERATOR}= ",
    )  # fmt: skip
    if re.search("|".join(builds), text):
        return True
    bound = re.match(rf"\(?[^=(]*?{name}(?:[,:)][^=]*)? = (?P<value>.+)", text, re.DOTALL)
    if bound is None:
        return None
    return True if re.search(name, bound["value"]) else None if _EMPTY.fullmatch(bound["value"]) else False
