"""The frames of the script on the stack, and access to their local variables."""

from __future__ import annotations

import ctypes
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

# Folders with these names contain installed packages, wherever they are.
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
# Since Python 3.13, an assignment to ``frame.f_locals`` changes the variable itself (PEP 667).
_LOCALS_ARE_WRITTEN_THROUGH = sys.version_info >= (3, 13)


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python's standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    folders.add(str(Path(torch.__file__).parent))
    # holdfast's own package, which may be installed in editable mode.
    folders.add(str(Path(__file__).parents[2]))
    folders.update(entry for entry in sys.path if _has_installed_packages(entry))
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _has_installed_packages(folder: str) -> bool:
    """Return whether pip has installed packages into a folder on ``sys.path``."""
    return folder != "" and any(Path(folder).glob("*.dist-info"))


_LIBRARY_FOLDERS = _library_folders()
# Names in `sys.modules` that are known not to belong to the script. A program with torch has about
# 2,000 of them, and they are searched after each epoch.
_library_modules: set[str] = set()


@lru_cache(maxsize=4096)
def is_script_file(filename: str) -> bool:
    """Return whether a file belongs to the user's script, and not to an installed package."""
    if filename.startswith("<frozen"):
        return False
    path = os.path.realpath(filename)
    if path.startswith(_LIBRARY_FOLDERS):
        return False
    return not _PACKAGE_FOLDERS & set(Path(path).parts)


def is_script_module(module: object) -> bool:
    """Return whether a module belongs to the user's script."""
    filename = getattr(module, "__file__", None)
    if filename is None:
        # The script itself has no file if it is run with ``python -c``.
        return getattr(module, "__name__", None) == "__main__"
    return isinstance(filename, str) and _is_module_file(filename)


@cache
def _is_module_file(filename: str) -> bool:
    # The `__file__` of some torch modules, such as `torch.ops`, is not the path of a file.
    return is_script_file(filename) and Path(filename).is_file()


def is_script_class(cls: type) -> bool:
    """Return whether a class is defined in the user's script."""
    module = sys.modules.get(cls.__module__)
    return module is not None and is_script_module(module)


def frames_of_script(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the script, from the given frame outward."""
    frames = []
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def modules_of_script() -> Iterator[ModuleType]:
    """Yield the modules of the script that have been imported, in the order of their imports."""
    for name, module in list(sys.modules.items()):
        if name in _library_modules:
            continue
        if isinstance(module, ModuleType) and is_script_module(module):
            yield module
        else:
            _library_modules.add(name)


def is_module_level(frame: FrameType) -> bool:
    """Return whether a frame runs the body of a module."""
    return frame.f_locals is frame.f_globals


def write_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Assign values to local variables of a function that is running.

    Args:
        frame: The frame of the function.
        values: The new values by name. Names that are not variables of the function are ignored.
    """
    # Up to Python 3.12, `f_locals` of a function is a copy, and each access overwrites it with the
    # actual values. So it must be read only once here.
    variables = frame.f_locals
    variables.update(values)
    if variables is frame.f_globals or _LOCALS_ARE_WRITTEN_THROUGH:
        return
    # Copy the values back into the function. Debuggers change variables in the same way.
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
