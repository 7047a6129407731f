"""Where torchdata's ``StatefulDataLoader`` comes from: the environment, or a folder of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TORCHDATA = "torchdata==0.11.0"


def find_stateful_loader(folder: Path) -> tuple[Callable[..., Any] | None, str]:
    """Return torchdata's loader and its version, installed into a folder of its own if it is not here."""
    try:
        importlib.import_module("torchdata.stateful_dataloader")
    except ImportError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        try:
            subprocess.run([*pip, "--target", str(folder), _TORCHDATA], capture_output=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"left out: it is not installed and cannot be ({type(error).__name__})"
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    try:
        found = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        return None, f"left out: {error}"
    return found, importlib.metadata.version("torchdata")
