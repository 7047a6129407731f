"""A hang under the watchdog, whose processes are forked from the one that watches it and has
loaded torch.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import hang_detection
from tests.prepared import become


class _Forked:
    """As `subprocess.Popen` starts a Python of its own for a case, in a session of its own."""

    def __init__(
        self, command: list[str], *, cwd: Path, env: dict[str, str], stderr: Any, **_: Any
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                nothing = os.open(os.devnull, os.O_RDWR)
                request = {
                    "arguments": command[1:],
                    "cwd": str(cwd),
                    "environment": env,
                    "session": True,
                }
                become(request, [nothing, os.dup(nothing), os.dup(stderr.fileno())])
            finally:
                traceback.print_exc()
                os._exit(1)  # none of them ends

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def row_of(case: str) -> hang_detection.Row:
    if case != "rank has left":  # it would be over before the watchdog has looked once
        hang_detection.subprocess = SimpleNamespace(Popen=_Forked, DEVNULL=None)  # type: ignore[assignment]
    return hang_detection.row_of(case)
