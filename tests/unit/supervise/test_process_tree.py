"""The processes of a command are found by the mark in their environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from holdfast.supervise.process_tree import MARK_VARIABLE, marked_processes

_MARK = "4711.mark"
# A program that starts itself again and again, in the same process.
_RESTARTING_PROGRAM = """\
count=$1
[ "$count" = 0 ] || exec sh "$0" $((count - 1))
exec sleep 60
"""


def test_a_process_is_found_while_it_starts_a_program(tmp_path):
    """During ``execve`` the kernel shows no environment, yet the process keeps its mark."""
    script = tmp_path / "restarting.sh"
    script.write_text(_RESTARTING_PROGRAM)
    process = subprocess.Popen(["sh", script, "1000"], env={MARK_VARIABLE: _MARK, "PATH": "/bin"})
    try:
        while "sleep" not in _command_line(process.pid):
            assert marked_processes(_MARK, []) >= {process.pid}
    finally:
        process.kill()
        process.wait()


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
