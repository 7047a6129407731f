"""Where accelerate's ``find_executable_batch_size`` comes from: the environment, or a folder of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ACCELERATE = "accelerate==1.15.0"


def find_accelerate(folder: Path) -> tuple[Callable[..., Any] | None, str]:
    """Return accelerate's decorator and its version, installed into a folder of its own if it is not here."""
    try:
        importlib.import_module("accelerate.utils.memory")
    except ImportError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        try:
            subprocess.run([*pip, "--target", str(folder), _ACCELERATE], capture_output=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"left out: it is not installed and cannot be ({type(error).__name__})"
        sys.path.append(str(folder))
    try:
        found = importlib.import_module("accelerate.utils.memory").find_executable_batch_size
    except ImportError as error:
        return None, f"left out: {error}"
    return found, importlib.metadata.version("accelerate")
