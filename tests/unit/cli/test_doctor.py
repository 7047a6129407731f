"""`holdfast doctor` under real limits.

What will go wrong is marked, with its fix, and the exit code stays 0.
"""

from __future__ import annotations

import json
import subprocess

from tests.unit.cli.test_habits import CLI


def test_limits_that_will_bite_are_named_with_the_fix() -> None:
    """Few descriptors, an address space that is limited, and a run directory in memory."""
    words = ["doctor", "--run-dir", "/dev/shm/runs", "--json"]
    script = 'ulimit -Sn 256; ulimit -Sv 8000000; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *CLI, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    assert rows["open files"]["value"] == "256 at most"
    assert rows["open files"]["fix"].startswith("ulimit -n ")
    assert "allocations fail" in rows["memory"]["value"]
    assert "ulimit -v unlimited" in rows["memory"]["fix"]
    assert "tmpfs" in rows["disk of runs"]["value"]
    assert rows["disk of runs"]["fix"]
    assert {"processors", "shared memory", "clock", "GPU", "stacks"} <= set(rows)
