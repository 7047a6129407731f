"""Every host with every loader, killed at every step and at every distance after a resume.

Results are the same.

Equal to the undisturbed training are final weights, optimizer state, number of steps, and the
batches that every life trained: which samples, and what they were augmented to.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.prepared import FRAMEWORKS, run_prepared

_NEEDS = {name: name for name in ("accelerate", "lightning", "speechbrain")} | {
    "trainer": "transformers"
}
_COLUMNS = [
    ("guard", "ours", 1),
    ("guard", "torch", 1),
    ("loop", "ours", 1),
    ("counting_loop", "ours", 1),
    ("accelerate", "ours", 1),
    ("accelerate", "torch", 2),
    ("trainer", "ours", 2),
    ("trainer", "torch", 1),
    ("lightning", "ours", 2),
    ("lightning", "torch", 1),
    ("speechbrain", "ours", 2),
    ("speechbrain", "torch", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("kills", ["once", "twice"])
@pytest.mark.parametrize(("host", "loader", "accumulate"), _COLUMNS)
def test_a_training_that_is_killed_anywhere_ends_as_if_it_had_not_been(
    tmp_path: Path, host: str, loader: str, accumulate: int, kills: str
) -> None:
    """Three epochs of three steps, saved every second step.

    In the middle of an epoch, and once at its end.
    """
    if host in _NEEDS and importlib.util.find_spec(_NEEDS[host]) is None:
        pytest.skip(f"{_NEEDS[host]} is not installed here")
    program = Path(__file__).with_name("kill_matrix.py")
    arguments = [program, tmp_path, host, loader, 3 * accumulate, accumulate, 2, kills]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if kills == "twice":
        environment["HOLDFAST_CHECK_SPLIT"] = "false"
    found = run_prepared(arguments, timeout=600, env=environment, loaded=FRAMEWORKS)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout[-3000:] + found.stderr[-3000:]
