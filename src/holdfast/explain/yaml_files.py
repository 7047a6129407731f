"""Read the YAML files that lie beside the modules of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(file: Path) -> Any:
    """Return what a file says; by libyaml where PyYAML has it, which is ten times as fast."""
    import yaml  # here: a process that only asks for the id of a leak does not need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(file.read_bytes(), loader)  # noqa: S506 - both are safe loaders
