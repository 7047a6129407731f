"""Modules and files of the user's that a command is given by name.

Imported as the user would run them.

Does not: say in an error of ours why that failed; whatever is raised is the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_user_module(place: str) -> ModuleType:
    """Import a module by its dotted name, or a file by its path, from where the user stands.

    FileNotFoundError if there is no such file, ImportError, or whatever the user's code raises.
    """
    if not place.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what is in it can be pickled for workers
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
