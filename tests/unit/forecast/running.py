"""Runs the programs beside this file in processes of their own: what they change of torch cannot be changed back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@cache
def run_emulation() -> dict[str, Any]:
    """What attention, recurrent layers and packing do on a fake device."""
    return _run("emulation_program.py")


def _run(name: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(_HERE / name)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
