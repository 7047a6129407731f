"""The variables of the script, by the function or module that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

from holdfast.guard.unchanged.stack import is_module_level, modules_of_script


def namespaces(frames: Iterable[FrameType]) -> dict[str, dict[str, Any]]:
    """Return the variables of the script, by the name of the function or module.

    The name of a function begins with its depth on the stack, because it may be there repeatedly.

    Args:
        frames: The frames of the script on the stack, from the innermost one outward.
    """
    outward = list(frames)
    spaces: dict[str, dict[str, Any]] = {}
    functions = [frame for frame in outward if not is_module_level(frame)]
    for depth, frame in enumerate(reversed(functions)):
        spaces[f"{depth} {frame.f_code.co_qualname}"] = frame.f_locals
    # The module of a script that another one runs with `runpy` may not be in `sys.modules`.
    modules = [frame.f_globals for frame in reversed(outward)]
    modules += [vars(module) for module in modules_of_script()]
    unique = {id(variables): variables for variables in modules}
    for variables in unique.values():
        name = str(variables.get("__name__"))
        while name in spaces:
            name += "'"
        spaces[name] = variables
    return spaces
