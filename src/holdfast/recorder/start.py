"""Collect the command, machine and package versions of a run when it starts.

The supervisor and each Guard record this information.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from holdfast.core.control_groups import read_fields
from holdfast.core.files import read_file
from holdfast.core.raised import printable
from holdfast.core.secrets import without_secrets
from holdfast.core.version import __version__

# The file in a Guard's recording directory in which the Guard stores this information.
START_FILE = "start.json"
_COMMIT = re.compile("[0-9a-f]{40,64}")
_PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning")


def facts_of_start(command: Sequence[str], started: float) -> dict[str, Any]:
    """Return the command, machine and versions of a run as values that can be stored as JSON.

    No other program is executed to obtain this information.

    Args:
        command: The command that started the run. Arguments that look like secrets are masked.
        started: The Unix time at which the run started.
    """
    facts = {
        "argv": without_secrets([printable(word) for word in command]),
        "cwd": str(Path.cwd()),
        "python": sys.executable,
        "hostname": socket.gethostname(),
        "started": started,
        **_machine(),
        "versions": {
            "holdfast": __version__,
            "python": platform.python_version(),
            **_package_versions(),
        },
    }
    git = _git(Path.cwd())
    if git:
        facts["git"] = git
    return facts


def _git(folder: Path) -> dict[str, str]:
    """Return the git commit and branch of a folder, or an empty dictionary if there is none.

    The commit and branch are read from the files in ``.git``. Finding uncommitted changes would
    require running git.
    """
    with suppress(OSError, ValueError, LookupError):
        git = _git_directory(folder)
        if git is None:
            return {}
        head = _text(git / "HEAD").removeprefix("ref: ")
        is_detached = _COMMIT.fullmatch(head) is not None
        commit = head if is_detached else _commit_of(git, head)
        # Ignore anything that is not a commit hash, because the file may contain arbitrary text.
        if _COMMIT.fullmatch(commit):
            return {
                "commit": commit,
                "branch": "(detached)" if is_detached else head.removeprefix("refs/heads/"),
                "changed": "unknown; only `holdfast run` checks for uncommitted changes",
            }
    return {}


def _git_directory(folder: Path) -> Path | None:
    """Return the git directory of the repository that contains a folder, or None."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_file():
            # In a worktree or a submodule, .git is a file that contains the git directory's path.
            return parent / _text(git).removeprefix("gitdir: ")
        if git.exists():
            return git
    return None


def _commit_of(git: Path, ref: str) -> str:
    """Return the commit of a branch, or an empty string if the commit is not found.

    Args:
        git: The git directory.
        ref: The full name of the branch, such as ``"refs/heads/main"``. Its commit is in the file
            of this name or in ``packed-refs``.
    """
    # The git directory of a worktree names the directory that all worktrees share, which contains
    # the branches.
    shared = git
    if (git / "commondir").exists():
        shared = git / _text(git / "commondir")
    if (shared / ref).exists():
        return _text(shared / ref)
    for line in _text(shared / "packed-refs").splitlines():
        if line.endswith(f" {ref}"):
            return line.split()[0]
    return ""


def _text(path: Path) -> str:
    return read_file(path).decode().strip()


def _machine() -> dict[str, Any]:
    """Return the CPU count, memory and GPUs of the machine.

    This information is read from kernel files, because running ``nvidia-smi`` would take a second.
    """
    facts: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    with suppress(OSError, ValueError, IndexError):
        facts["memory_bytes"] = 1024 * read_fields(Path("/proc/meminfo"))["MemTotal"]
        driver = Path("/proc/driver/nvidia")
        facts["gpus"] = _gpu_models(driver)
        version = (driver / "version").read_text()
        facts["gpu_driver"] = version.split("Module", 1)[1].split()[0]
    return facts


def _gpu_models(driver: Path) -> list[str]:
    models = []
    for path in sorted(driver.glob("gpus/*/information")):
        match = re.search(r"Model:\s*(.*)", path.read_text())
        if match:
            models.append(match[1])
    return models


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        # The package may not be installed, or its metadata may be damaged.
        with suppress(Exception):
            versions[package] = metadata.version(package)
    return versions
