"""A disk of a few MiB that may be filled.

A tmpfs in a mount namespace of its own, so nobody else sees it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

_WAYS = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])
_MOUNT_AND_RUN = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def command_with_small_disk(
    directory: Path, command: Sequence[str], size: str = "16m"
) -> list[str] | None:
    """Return a command that runs another one with a small disk mounted on a directory, for it
    alone.

    None where neither root nor an unprivileged user may mount one.
    """
    for way in _WAYS:
        mounted = [*way, "sh", "-c", _MOUNT_AND_RUN, size, str(directory)]
        try:
            tried = subprocess.run([*mounted, "true"], capture_output=True, timeout=20, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired):
            continue
        if tried.returncode == 0:
            return [*mounted, *command]
    return None
