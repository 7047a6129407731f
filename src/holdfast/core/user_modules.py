"""Import user modules and files that are named on the command line.

They are imported as if the user ran them, and their exceptions are passed on; the commands turn
these into errors for the user.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_user_module(place: str) -> ModuleType:
    """Import a module by its dotted name, or a file by its path, from the current directory.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If there is no such module; or whatever else the user's code raises.
    """
    if place.endswith(".py"):
        return _import_file(Path(place))
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(place)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module, so that its classes and functions can be pickled for workers.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
