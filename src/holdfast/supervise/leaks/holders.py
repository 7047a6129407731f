"""From an object to the name that holds it, against the direction of references, and to the line
that makes it grow.

Nothing of the script is called: not even `isinstance`, which asks the object. Lines come from the
    text of its files.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import os
import re
import sys
import sysconfig
import time
import tokenize
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.text import sanitise

OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(
    f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in _LIBRARIES
)
_MOST_LEVELS, _MOST_WIDE, _MOST_TEXT = 40, 24, 200
_CACHE = "_lru_cache_wrapper"
_OF_TENSORS = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks", "grad"})
_MOST_BYTES, _MOST_CODE, _MOST_FILES = 4 * 2**20, 160, 500
# As `ast.unparse` writes statements. A part of what a name holds: subscripts, attributes, calls
# that return one.
_SUBSCRIPT = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_PART = rf"(?:{_SUBSCRIPT}|\.\w+(?:\((?:[^()]|\([^()]*\))*\))?)*"
_ADDS = (
    r"\.(?:add|append|appendleft|emit|extend|extendleft|insert|put|put_nowait|push|setdefault|update|write"
    r"|register_\w+|add_module|\w*[a-z]_)\("
)
_HOOK = r"\bregister_\w*hook\w*\("
_OPERATOR = r"(?:[-+*/%@&|^]|//|\*\*|<<|>>)"
HOOKS = re.compile(r"_\w*hooks\w*$")  # tables of hooks of torch
_EMPTY = re.compile(
    r"[\[\](){},"
    r" ]*|None|-?[\d.e]+|'.*'|(?:list|dict|set|deque|tuple|OrderedDict|Counter|object)\(\)"
)


def is_a(each: Any, *kinds: type) -> bool:
    """Return whether an object is of some class, without asking the object."""
    return issubclass(type(each), kinds)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a source file belongs to the script, as far as its place shows."""
    # Debian's
    packaged = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return bool(file) and not packaged and not file.startswith(("<", OURS, *_INSTALLED))


def file_of(owner: object) -> str:
    """Return the source file of a class, or of a loaded module by its name.

    An empty text if it is not known.
    """
    name = vars(owner).get("__module__") if is_a(owner, type) else owner
    file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    return file if isinstance(file, str) else ""


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a copy of the locals of a function, and leave no snapshot in its frame that would
    keep them alive.
    """
    if not frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        return {}
    snapshot = frame.f_locals
    found = dict(snapshot)
    # Before Python 3.13 it is kept in the frame. If the script has called locals(), it holds it
    # too, and keeps it.
    if type(snapshot) is dict and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return found


def object_dict(holder: Any) -> dict[str, Any] | None:
    """Return the attributes of an object without calling code of its class."""
    described = (vars(base).get("__dict__") for base in type(holder).__mro__)
    own: Any = next((each for each in described if is_a(each, types.GetSetDescriptorType)), None)
    found = None if own is None else own.__get__(holder, type(holder))
    return found if type(found) is dict else None


@dataclass(frozen=True, slots=True)
class Step:
    """One link on the way from a name to an object."""

    # Global, local, cell, default, attribute, entry (of a container), traceback, cache or other
    kind: str
    name: str = ""  # the identifier or key
    owner: str = ""  # module, function or class that it belongs to
    file: str = ""
    lines: tuple[int, int] = (0, 0)


def _steps_of(chain: list[Any]) -> list[Step]:
    """Return the steps of a chain of references.

    The object first, then what refers to it, and so on.
    """
    if len(chain) < 2:
        return []
    used, step = _read(chain)
    return [step, *_steps_of(chain[used:])]


def _read(chain: list[Any]) -> tuple[int, Step]:
    """Return how many links the beginning of a chain is, and what it is to a program."""
    held, holder, above, function = (*chain[:4], None, None)[:4]
    if is_a(holder, types.CellType) and is_a(function, types.FunctionType):
        code = function.__code__
        return 3, _of_code(
            "cell", _name(zip(code.co_freevars, function.__closure__, strict=False), holder), code
        )
    if is_a(above, types.FunctionType) and is_a(holder, tuple, dict):
        code, defaults = above.__code__, above.__defaults__ or ()
        named = zip(
            code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount],
            defaults,
            strict=False,
        )
        if name := _name([*named, *(above.__kwdefaults__ or {}).items()], held):
            return 2, _of_code("default", name, code)
    if is_a(holder, dict) and (is_a(above, type) or object_dict(above) is holder):
        return 2, _of_class(above if is_a(above, type) else type(above), _name(holder, held))
    return (
        (2, _single(above, holder))
        if type(above).__name__ == _CACHE
        else (1, _single(holder, held))
    )


def _single(holder: Any, held: Any) -> Step:
    kind = type(holder)
    if kind.__name__ == _CACHE:
        code = getattr(getattr(holder, "__wrapped__", None), "__code__", None)
        return (
            _of_code("cache", code.co_name, code)
            if isinstance(code, types.CodeType)
            else Step("cache")
        )
    if is_a(holder, dict, list, tuple, set, frozenset) or kind.__name__ == "deque":
        return Step("entry", _name(holder, held) if is_a(holder, dict) else "", kind.__name__)
    if is_a(holder, types.TracebackType, BaseException):
        return Step("traceback", owner=kind.__name__)
    frame: Any = holder.gi_frame if is_a(holder, types.GeneratorType) else holder
    if is_a(frame, types.FrameType):
        return _of_code("local", _name(locals_of(frame), held), frame.f_code)
    if is_a(holder, type):
        return _of_class(holder, _name(list(vars(holder).items()), held))
    for name, member in [pair for base in kind.__mro__ for pair in vars(base).items()]:
        if name in _OF_TENSORS or is_a(member, types.MemberDescriptorType):
            try:
                if member.__get__(holder, kind) is held:
                    return _of_class(kind, name)
            except (AttributeError, TypeError):
                continue
    name = _name(object_dict(holder) or {}, held)
    return _of_class(kind, name) if name else Step("other", owner=kind.__name__, file=file_of(kind))


def _of_class(kind: type, name: str) -> Step:
    return Step("attribute", name, kind.__name__, file_of(kind))


def _of_code(kind: str, name: str, code: types.CodeType) -> Step:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return Step(kind, name, code.co_name, code.co_filename, (code.co_firstlineno, last))


def _name(pairs: Any, held: Any) -> str:
    pairs = list(dict.items(pairs)) if is_a(pairs, dict) else pairs
    return next((name for name, each in pairs if each is held and type(name) is str), "")


def text_of(steps: Iterable[Step]) -> str:
    """Return the steps of a path as a program would write it, such as ``holder.losses[...]``."""
    text = ""
    for step in reversed([*steps]):
        # Its entries are attributes to a script
        if step.kind == "attribute" and step.name != "_modules":
            text = f"{text or step.owner or '?'}.{step.name}"
        elif step.kind == "entry":
            text += f"[{step.name!r}]" if step.name else "[...]"
        elif step.kind in ("global", "local", "cell", "default"):
            where = {
                "cell": f" (closure of {step.owner})",
                "default": f" (default of {step.owner})",
            }
            text += f"{text and ' '}{step.name}{where.get(step.kind, '')}"
        elif step.kind in ("cache", "traceback") and not text.endswith("(traceback)"):
            text += f"cache of {step.name}" if step.kind == "cache" else " (traceback)"
    return sanitise(text, most=_MOST_TEXT)


class Holders:
    """Follows objects back to what holds them, at one moment.

    Nothing may be imported or run in between.

    `frames` are those of running functions, which are no referrers to the collector before Python
    3.12; `until` is when to give up, on the clock of `time.thread_time`.
    """

    def __init__(self, frames: Sequence[types.FrameType], until: float) -> None:
        self._until = until
        names = [*sys.modules, "__main__"]  # a script may be known under two names
        self._modules = {
            id(vars(sys.modules[name])): name
            for name in names
            if is_a(sys.modules[name], types.ModuleType)
        }
        self._running = {id(frame) for frame in frames}
        self._locals: dict[int, tuple[str, types.CodeType]] = {}
        # The script's names win
        for frame in sorted(frames, key=lambda each: not is_users(each.f_code.co_filename)):
            for name, each in locals_of(frame).items():
                if name.isidentifier():
                    self._locals.setdefault(id(each), (name, frame.f_code))

    def path_of(
        self, target: object, own: set[int], growing: frozenset[int]
    ) -> tuple[str, tuple[Step, ...]]:
        """Return where the shortest path to an object begins, and its steps, the innermost first.

        It begins at a ``"name"``; nowhere, in a ``"cycle"`` that nothing outside refers to; at a
        ``"container"`` that is known to grow; or it is ``"unknown"``. `own` and `growing` are ids:
        of what of ours holds the object, and of such containers.
        """
        # From the target to each object that was met
        chains: dict[int, list[Any]] = {id(target): [target]}
        closing: list[list[Any]] = []  # chains that lead back to what was met before
        frontier, cut = [target], False
        for _ in range(_MOST_LEVELS):
            for each in frontier:
                if each is not target and id(each) in growing:
                    return "container", ()
                if steps := self._at_root(chains[id(each)]):
                    return "name", tuple(steps)
            below, frontier = frontier, []
            ours = (below, frontier, chains, closing, self._locals, *chains.values(), *closing)
            for holder, held in self._referrers(below, own | set(map(id, ours))):
                if id(holder) in chains:
                    closing.append([*chains[id(held)], holder])
                elif len(frontier) < _MOST_WIDE:
                    chains[id(holder)] = [*chains[id(held)], holder]
                    frontier.append(holder)
                else:
                    cut = True
            if not frontier or time.thread_time() > self._until:
                break
        if frontier or cut or not closing:
            return "unknown", ()
        starts = [
            next(index for index, each in enumerate(chain) if each is chain[-1])
            for chain in closing
        ]
        circles = [
            tuple(_steps_of(chain[start:])) for start, chain in zip(starts, closing, strict=True)
        ]
        return "cycle", max(circles, key=lambda steps: sum(bool(step.name) for step in steps))

    def _at_root(self, chain: list[Any]) -> list[Step]:
        """Return the steps of a chain if it ends where a walk does.

        At a local, a module, a function or a class.
        """
        last = chain[-1]
        if named := self._locals.get(id(last)):
            return [*_steps_of(chain), _of_code("local", *named)]
        module = self._modules.get(id(last))
        is_function = is_a(last, types.FunctionType) and "<locals>" not in last.__qualname__
        is_root = module or is_function or is_a(last, type) or type(last).__name__ == _CACHE
        steps = _steps_of(chain) if is_root and len(chain) > 1 else []
        if module is not None and steps:
            steps[-1] = Step("global", steps[-1].name, module, file_of(module))
        return steps if any(step.name for step in steps) else []

    def _referrers(self, below: list[Any], ours: set[int]) -> list[tuple[Any, Any]]:
        """Return what refers to some objects, each with the one that it refers to."""
        found, by_id = [], {id(each): each for each in below}
        for holder in gc.get_referrers(*below):
            known = holder is by_id or id(holder) in ours or id(holder) in self._running
            of_ours = is_a(holder, types.FrameType) and holder.f_code.co_filename.startswith(OURS)
            held = next((each for each in gc.get_referents(holder) if id(each) in by_id), None)
            if held is not None and not (known or of_ours or is_a(holder, types.ModuleType)):
                found.append((holder, held))
        return found


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
        self.functions = [
            node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        self._statements = [
            node for node in nodes if isinstance(node, ast.stmt) and not hasattr(node, "body")
        ]

    def function_at(self, number: int) -> str:
        """Return the name of the function around a line."""
        around = [
            each.name for each in self.functions if each.lineno <= number <= (each.end_lineno or 0)
        ]
        return around[-1] if around else "<module>"

    def changes(self, step: Step) -> Iterator[tuple[int, bool]]:
        """Yield statements that change a name.

        Line, and whether it builds on what the name holds.
        """
        own = step.kind in ("local", "default") and step.lines != (0, 0)
        word = "register_" if HOOKS.match(step.name) else step.name
        for node in self._statements:
            inside = not own or step.lines[0] <= node.lineno <= step.lines[1]
            if inside and any(
                word in line for line in self.lines[node.lineno - 1 : node.end_lineno]
            ):
                text = ast.unparse(node)
                if (builds := _builds_on(step, text)) is not None:
                    yield node.lineno, builds


class Lines:
    """Finds lines in files of the script, the script itself first; each is read once."""

    def __init__(self, users: Iterable[str]) -> None:
        self._users = tuple(users)[:_MOST_FILES]
        self._source = functools.cache(_Source)

    def keeping(self, steps: Sequence[Step]) -> str:
        """Return the line that most likely makes grow what the names on a path hold, or an empty
        text.

        A statement of the script comes before one of a library, one that builds on a name before
        one that only binds it, and a name nearer to the object before one further away.
        """
        for step in steps:
            if step.kind == "cache" and step.file:
                return self._describe(step.file, step.lines[0])
        last = max(
            (index for index, step in enumerate(steps) if step.kind == "traceback"), default=-1
        )
        steps = steps[last + 1 :] or steps  # the names in the frames of an exception do not hold it
        found: list[tuple[tuple[Any, ...], str, int]] = []
        named = [step for step in steps if step.name.isidentifier() and step.kind != "other"]
        for order, step in enumerate(sorted(named, key=lambda step: step.kind == "entry")):
            files = (step.file, *(() if step.kind in ("local", "default") else self._users))
            for place, file in enumerate(dict.fromkeys(filter(None, files))):
                source = self._source(file)
                for line, builds in source.changes(step):
                    function = source.function_at(line)
                    if builds or function != "<module>":
                        works = function not in ("__init__", "<module>", "reset", "clear")
                        found.append(
                            ((is_users(file), builds, -order, works, -place, -line), file, line)
                        )
        return self._describe(*max(found)[1:]) if found else ""

    def _describe(self, file: str, number: int) -> str:
        source = self._source(file)
        code = sanitise("".join(source.lines[number - 1 : number]).strip(), most=_MOST_CODE)
        return f"{file}:{number} in {source.function_at(number)}: {code}" if code else ""


def _builds_on(step: Step, text: str) -> bool | None:
    """Return whether a statement builds on a name (True), binds it to something (False), or
    neither (None).
    """
    if HOOKS.match(step.name):
        return re.search(_HOOK, text) is not None or None
    before = {"attribute": r"\.", "entry": r"\.", "local": r"(?<![\w.])", "default": r"(?<![\w.])"}
    name = before.get(step.kind, r"\b") + re.escape(step.name) + r"\b"
    builds = (
        rf"{name}{_PART}{_ADDS}",
        rf"setattr\(.*, '{re.escape(step.name)}', ",
        rf"{name}{_PART}{_SUBSCRIPT} {_OPERATOR}?= ",
        rf"{name} {_OPERATOR}= ",
    )
    if re.search("|".join(builds), text):
        return True
    bound = re.match(rf"\(?[^=(]*?{name}(?:[,:)][^=]*)? = (?P<value>.+)", text, re.DOTALL)
    if bound is None:
        return None
    return (
        True
        if re.search(name, bound["value"])
        else None
        if _EMPTY.fullmatch(bound["value"])
        else False
    )
