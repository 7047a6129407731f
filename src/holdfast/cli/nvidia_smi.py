"""What the NVIDIA driver's own program reports, without torch or a CUDA context."""

from __future__ import annotations

import subprocess

# Unless a process keeps the driver loaded, it is initialized first, which takes seconds per device.
_TIMEOUT_SECONDS = 20


def nvidia_smi(query: str, format_options: str = "") -> list[str]:
    """Return the lines that ``nvidia-smi`` prints, or none without that program or a device.

    Args:
        query: The option that names the fields, such as ``"--query-gpu=name"``.
        format_options: Further values of ``--format``, such as ``",nounits"``.
    """
    command = ["nvidia-smi", query, f"--format=csv,noheader{format_options}"]
    try:
        answer = subprocess.run(  # noqa: S603 - our own command line
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()
