"""What a run was started with.

Command, machine and versions, as its supervisor and each of its guards keep them.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.control_groups import fields_of
from holdfast.core.files import read_file
from holdfast.core.raised import printable
from holdfast.core.secrets import without_secrets
from holdfast.core.version import __version__

START_FILE = "start.json"  # beside the recording of a guard
_COMMIT = re.compile("[0-9a-f]{40,64}")
_VERSIONS_OF = ("torch", "numpy", "transformers", "accelerate", "lightning")


def facts_of_start(command: Sequence[str], started: float) -> dict[str, Any]:
    """Return JSON values, with what looks like a secret in the command hidden.

    No program is run, some 2 ms.
    """
    return {
        "argv": without_secrets(list(map(printable, command))),
        "cwd": str(Path.cwd()),
        "python": sys.executable,
        "hostname": socket.gethostname(),
        "started": started,
        **_machine(),
        "versions": {"holdfast": __version__, "python": platform.python_version(), **_versions()},
        **({"git": git} if (git := _commit(Path.cwd())) else {}),
    }


def _commit(folder: Path) -> dict[str, str]:
    """Return commit and branch by the files of git.

    What was changed since then takes git itself.
    """
    with suppress(OSError, ValueError, LookupError, StopIteration):
        git = next(each / ".git" for each in (folder, *folder.parents) if (each / ".git").exists())
        if git.is_file():  # of a worktree or a submodule
            git = git.parent / _text(git).removeprefix("gitdir: ")
        common = git / _text(git / "commondir") if (git / "commondir").exists() else git
        commit = ref = _text(git / "HEAD").removeprefix("ref: ")
        if not _COMMIT.fullmatch(ref):
            packed = "" if (common / ref).exists() else _text(common / "packed-refs")
            known = [line.split()[0] for line in packed.splitlines() if line.endswith(f" {ref}")]
            commit = known[0] if packed else _text(common / ref)
        if _COMMIT.fullmatch(commit):  # nothing else that a file may hold is shown
            branch = "(detached)" if commit == ref else ref.removeprefix("refs/heads/")
            return {
                "commit": commit,
                "branch": branch,
                "changed": "not looked for, which `holdfast run` does",
            }
    return {}


def _text(path: Path) -> str:
    return read_file(path).decode().strip()


def _machine() -> dict[str, Any]:
    """Return what the machine is, from files of the kernel.

    A program of the driver's takes a second.
    """
    found: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    with suppress(OSError, ValueError, IndexError):
        found["memory_bytes"] = 1024 * fields_of(Path("/proc/meminfo"))["MemTotal"]
        driver = Path("/proc/driver/nvidia")
        texts = [each.read_text() for each in sorted(driver.glob("gpus/*/information"))]
        found["gpus"] = [model[1] for text in texts if (model := re.search(r"Model:\s*(.*)", text))]
        found["gpu_driver"] = (driver / "version").read_text().split("Module", 1)[1].split()[0]
    return found


def _versions() -> dict[str, str]:
    """Return versions of packages by the folders that pip leaves.

    Ten times faster than ``importlib.metadata``.
    """
    found = {}
    for entry in reversed(sys.path):  # the first on the path counts
        with suppress(OSError):
            for each in os.listdir(entry):  # noqa: PTH208 - of hundreds
                name, _, version = each.removesuffix(".dist-info").partition("-")
                if name in _VERSIONS_OF and each.endswith(".dist-info"):
                    found[name] = version
    return found
