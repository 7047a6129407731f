"""What the code around a question wants to hear: no exception, and the end of a loop that waits for a tensor.

Python says which expression is being evaluated, so the syntax tree says what each answer leads to.

Does not: know values.
"""

from __future__ import annotations

import ast
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the code wants to hear.

    Args:
        answer: The answer.
        loops: Whether it is the condition of a ``while`` loop, for which this is the answer that enters it.
    """

    answer: bool
    loops: bool


def find_wish(frame: FrameType) -> Wish | None:
    """Return which answer raises no exception and ends a loop, or None if the code does not say.

    A ``while`` is entered once and left; a ``for`` runs to its end.

    Args:
        frame: Whose current expression is the question.
    """
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    tree = _tree_of(frame.f_code.co_filename)
    if position is None or tree is None or None in position:
        return None
    path = _path_to(tree, position)
    if isinstance(path[-1], (ast.If, ast.While, ast.Assert)):  # a jump belongs to the whole statement
        path += _last_operand(path[-1].test)
    for depth in range(len(path) - 1, 0, -1):
        node = path[depth - 1]
        if isinstance(node, (ast.stmt, ast.IfExp, ast.Lambda)):
            if isinstance(node, (ast.If, ast.While, ast.Assert)) and path[depth] is node.test:
                negated = sum(isinstance(p, ast.UnaryOp) and isinstance(p.op, ast.Not) for p in path[depth:]) % 2 == 1
                loop = next((p for p in reversed(path[: depth - 1]) if isinstance(p, (ast.For, ast.While))), None)
                return _wish_of(node, negated=negated, loop=loop)
            return None
    return None


def _last_operand(test: ast.expr) -> list[ast.AST]:
    path: list[ast.AST] = [test]
    while isinstance(test, (ast.UnaryOp, ast.BoolOp)):
        test = test.operand if isinstance(test, ast.UnaryOp) else test.values[-1]
        path.append(test)
    return path


def _wish_of(
    node: ast.If | ast.While | ast.Assert, *, negated: bool, loop: ast.For | ast.While | None
) -> Wish | None:
    if not isinstance(node, ast.If):
        return Wish(answer=not negated, loops=isinstance(node, ast.While))
    leaves: tuple[type[ast.stmt], ...] = (ast.Break, ast.Return) if isinstance(loop, ast.While) else (ast.Break,)
    for kinds, wanted in ((ast.Raise, False), (leaves, isinstance(loop, ast.While))):
        ends = [bool(branch) and isinstance(branch[-1], kinds) for branch in (node.body, node.orelse)]
        if ends[0] != ends[1]:
            return Wish(answer=(ends[0] == wanted) != negated, loops=False)
    return None


@functools.cache
def _tree_of(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


Position = tuple[int | None, int | None, int | None, int | None]


def _path_to(tree: ast.Module, position: Position) -> list[ast.AST]:
    """Return the nodes from the tree's root to the innermost that covers a position."""
    path: list[ast.AST] = [tree]
    while True:
        inner = next((child for child in ast.iter_child_nodes(path[-1]) if _covers(child, position)), None)
        if inner is None:
            return path
        path.append(inner)


def _covers(node: ast.AST, position: Position) -> bool:
    first, last, column, end = position
    if not isinstance(node, (ast.stmt, ast.expr)) or None in position:
        return False
    start = (node.lineno, node.col_offset)
    stop = (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= (first, column) and (last, end) <= stop
