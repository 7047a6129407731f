"""Query ``nvidia-smi``, which needs neither torch nor a CUDA context."""

from __future__ import annotations

import subprocess

# Unless another process keeps the driver loaded, its initialization takes seconds per device.
_TIMEOUT_SECONDS = 20


def nvidia_smi(query: str, format_options: str = "") -> list[str]:
    """Return the output lines of ``nvidia-smi``, or an empty list if it is missing or fails.

    Args:
        query: The option that selects the fields, such as ``"--query-gpu=name"``.
        format_options: Additional values for ``--format``, such as ``",nounits"``.
    """
    command = ["nvidia-smi", query, f"--format=csv,noheader{format_options}"]
    try:
        answer = subprocess.run(  # noqa: S603 - a known command line
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()
