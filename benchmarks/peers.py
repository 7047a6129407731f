"""Where the peers come from that benchmarks measure beside holdfast.

The environment, or a folder of their own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any


def find_peer(module: str, name: str, requirement: str, folder: Path) -> tuple[Any | None, str]:
    """Return something of a peer's and the peer's version, installed into a folder of its own if it
    is not here.

    Args:
        module: Where it lies.
        name: What it is called there.
        requirement: Package and version to install, such as ``"accelerate==1.15.0"``.
        folder: The folder.

    Returns:
        It and the version; or None and why it is left out.
    """
    try:
        importlib.import_module(module)
    except ImportError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        try:
            subprocess.run(
                [*pip, "--target", str(folder), requirement],
                capture_output=True,
                timeout=120,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"left out: it is not installed and cannot be ({type(error).__name__})"
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return None, f"left out: {error}"
    return found, importlib.metadata.version(requirement.partition("==")[0])
