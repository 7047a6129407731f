"""Where code and objects come from: the script and its own modules, installed packages, or us. Calls nothing."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = tuple(
    str(Path(path)) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_a(each: Any, *kinds: type) -> bool:
    """Return whether an object is of some class; `isinstance` would ask the object, which may be the script's."""
    return issubclass(type(each), kinds)


@functools.lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Return whether a file belongs to holdfast."""
    return file.startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file belongs to the script, as far as its place tells."""
    packages = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))  # Debian's
    installed = packages or file.startswith(_INSTALLED)
    return bool(file) and not file.startswith("<") and not installed and not is_ours(file)


def file_of_module(name: str) -> str:
    """Return the source file of a loaded module, or an empty text."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file if isinstance(file, str) else ""


def file_of_class(kind: type) -> str:
    """Return the source file of the module that defines a class, or an empty text."""
    module = vars(kind).get("__module__")
    return file_of_module(module) if isinstance(module, str) else ""


def user_files() -> list[str]:
    """Return the source files of the loaded modules that belong to the script, the script itself first."""
    names = ["__main__", *(name for name in list(sys.modules) if name != "__main__")]
    files = dict.fromkeys(file_of_module(name) for name in names)
    return [file for file in files if is_users(file)]
