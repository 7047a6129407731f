"""The variables of the script, by the function or module that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

from holdfast.guard.unchanged.frames import is_module_level, modules_of_script


def namespaces(frames: Sequence[FrameType]) -> dict[str, dict[str, Any]]:
    """Return the variables of the script by namespace: the name of a function or of a module.

    Args:
        frames: The frames of the script on the stack, from the innermost one outward.
    """
    variables_by_name: dict[str, dict[str, Any]] = {
        name: frame.f_locals for name, frame in functions_by_namespace(frames).items()
    }
    # The module of a script that another one runs with `runpy` may not be in `sys.modules`.
    modules = [frame.f_globals for frame in reversed(frames)]
    modules += [vars(module) for module in modules_of_script()]
    unique_modules = {id(variables): variables for variables in modules}
    for variables in unique_modules.values():
        name = str(variables.get("__name__"))
        while name in variables_by_name:
            name += "'"
        variables_by_name[name] = variables
    return variables_by_name


def namespace_of(frame: FrameType, frames: Sequence[FrameType]) -> str | None:
    """Return the name under which `namespaces` returns the local variables of a frame.

    Args:
        frame: One of `frames`.
        frames: The frames of the script on the stack, from the innermost one outward.
    """
    # From Python 3.13 on, each access to `f_locals` of a function returns another object, so only
    # frames can be compared.
    for name, function in functions_by_namespace(frames).items():
        if function is frame:
            return name
    for name, variables in namespaces(frames).items():
        if variables is frame.f_globals:
            return name
    return None


def functions_by_namespace(frames: Sequence[FrameType]) -> dict[str, FrameType]:
    """Return the frames of the script's functions by namespace, without those of modules.

    The name of a function begins with its depth on the stack, because it may be there repeatedly.

    Args:
        frames: The frames of the script on the stack, from the innermost one outward.
    """
    functions = [frame for frame in reversed(frames) if not is_module_level(frame)]
    return {f"{depth} {frame.f_code.co_qualname}": frame for depth, frame in enumerate(functions)}
