"""Which line of the user's code an operation comes from, by a look at Python's stack."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.autograd.function import FunctionCtx

_TORCH = str(Path(torch.__file__).parent)
_HOLDFAST = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"]
_ENGINE = "_engine_run_backward"  # the frame that waits while autograd runs
_CHECKPOINT = str(Path("torch") / "utils" / "checkpoint.py")
_FURTHER = 6  # frames beyond the innermost one in which a custom Function is looked for in the forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who called an operation.

    Args:
        line: Such as ``"model.py:12 in forward"``; empty if no line of the user's is on the stack.
        function: Class of the custom ``autograd.Function`` whose forward or backward runs.
        inside_backward: Whether Python code runs inside the backward pass, and not only torch's own.
        recomputing: Whether a checkpointed block runs its forward again.
    """

    line: str = ""
    function: str = ""
    inside_backward: bool = False
    recomputing: bool = False


def find_caller(frame: FrameType | None, *, in_backward: bool) -> Caller:
    """Return who called, seen from a frame outwards to the autograd engine.

    Args:
        frame: Where to begin.
        in_backward: Whether an autograd node runs, so that the engine is further out.

    The innermost frame of the user's code counts: not torch, not holdfast, not the standard library.
    """
    line, function, recomputing, inside, beyond = "", "", False, True, 0
    while frame is not None and (in_backward or beyond <= _FURTHER):
        code = frame.f_code
        if code.co_name == _ENGINE:
            inside = inside and bool(line)
            break
        recomputing = recomputing or code.co_filename.endswith(_CHECKPOINT)
        if _is_users(code):
            line = line or f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            function = function or _function_class(frame)
        beyond += bool(line)
        frame = frame.f_back
    return Caller(line=line, function=function, inside_backward=inside and bool(line), recomputing=recomputing)


@functools.lru_cache(maxsize=4096)
def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (standard or file.startswith((_TORCH, _HOLDFAST, "<")))


def _function_class(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_name not in ("forward", "backward") or not code.co_argcount or code.co_varnames[0] == "self":
        return ""
    context = frame.f_locals.get(code.co_varnames[0])
    return type(context).__name__.removesuffix("Backward") if isinstance(context, FunctionCtx) else ""
