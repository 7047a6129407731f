"""Read objects of the script without calling any of its code.

Even `isinstance` must not be used, because it reads the object's ``__class__``, which may be a
property.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

# Directory of the holdfast package, with a trailing separator. The file name of every frame that
# runs holdfast's code starts with this path.
OWN_FOLDER = str(Path(__file__).parents[2]) + os.sep
_LIBRARY_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARY_FOLDERS = tuple(
    f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in _LIBRARY_PATHS
)
# Names of directories with installed packages. The second one is used by Debian.
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Reference count of a frame's snapshot of its locals if nothing else uses the snapshot. The
# references are those from the frame, from the variable in `locals_of` and from the argument of
# `sys.getrefcount`.
_UNSHARED_REFERENCES = 3


def is_a(candidate: Any, *kinds: type) -> bool:
    """Return whether an object is an instance of one of these classes, without calling its code."""
    return issubclass(type(candidate), kinds)


@functools.lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Return whether a source file is the user's own, rather than part of a package or Python."""
    # A name such as "<string>" is not a file.
    if not file or file.startswith(("<", OWN_FOLDER, *_LIBRARY_FOLDERS)):
        return False
    return not any(folder in file for folder in _PACKAGE_FOLDERS)


def source_file_of(owner: object) -> str:
    """Return the source file of a class, or of a loaded module given by name; empty if unknown."""
    module_name = vars(owner).get("__module__") if is_a(owner, type) else owner
    if not isinstance(module_name, str):
        return ""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file if isinstance(file, str) else ""


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a copy of a frame's locals; empty for a module, whose locals are its globals.

    Before Python 3.13, reading the locals leaves a snapshot in the frame, which would keep the
    objects alive, so the snapshot is emptied. It is left alone if the script has called `locals()`
    itself and uses it.
    """
    if not frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        return {}
    snapshot = frame.f_locals
    copy = dict(snapshot)
    if type(snapshot) is dict and sys.getrefcount(snapshot) <= _UNSHARED_REFERENCES:
        snapshot.clear()
    return copy


def attributes_of(owner: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object, without calling code of its class.

    The result is None if the object has no such dictionary.
    """
    for base in type(owner).__mro__:
        descriptor: Any = vars(base).get("__dict__")
        if is_a(descriptor, types.GetSetDescriptorType):
            attributes = descriptor.__get__(owner, type(owner))
            return attributes if type(attributes) is dict else None
    return None
