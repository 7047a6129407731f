"""What the NVIDIA driver's own program says, without torch or a CUDA context."""

from __future__ import annotations

import subprocess
from contextlib import suppress

_SECONDS = 20


def nvidia_smi(query: str, form: str = "") -> list[str]:
    """Return the lines that ``nvidia-smi`` answers; none without that program or a device.

    Args:
        query: The option that names the fields, such as ``"--query-gpu=name"``.
        form: Further words of ``--format``, such as ``",nounits"``.
    """
    command = ["nvidia-smi", query, f"--format=csv,noheader{form}"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(  # noqa: S603 - our own command line
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return answer.stdout.splitlines()
    return []
