"""The documented pattern of truncated backpropagation survives out-of-memory, a split, a skip
and a kill.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepared import run_prepared

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "truncated.py"


def run(place: Path, order: str, fault: str, at: int, ends: int = 0) -> dict[str, Any]:
    place.mkdir(exist_ok=True)
    ended = run_prepared([PROGRAM, order, fault, at], timeout=300, cwd=place)
    assert ended.returncode == ends, ended.stderr[-3000:]
    return json.loads(ended.stdout) if ends == 0 else {}


@pytest.mark.parametrize(
    ("order", "short_at", "killed_at"),
    [("batch", (0, 7), (0, 3, 4, 7, 11, 17)), ("time", (7,), (4, 11))],
)
def test_carried_state_is_that_of_the_undisturbed_run(tmp_path, order, short_at, killed_at):
    """Weights and hidden state are bit-identical after a retry, a skip and kills.

    To rounding after a split.
    """
    whole = run(tmp_path / "whole", order, "none", 0)
    assert whole["steps"] == 18
    for fault, at in (*(("memory", at) for at in short_at), ("nan", 7)):
        found = run(tmp_path / f"{fault}-{at}", order, fault, at)
        assert found["hidden"] == whole["hidden"], fault
        assert found["weights"] == whole["weights"], fault
        assert found["events"] == [
            ["retry", "bit-exact"] if fault == "memory" else ["skip_step", "changes training"]
        ]
    split = run(tmp_path / "split", order, "split", 5)
    assert ["split", "equal up to rounding"] in split["events"]
    for name in ("weights", "hidden"):
        for one, other in zip(split[name], whole[name], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)
    place = tmp_path / "killed"
    for at in killed_at:
        run(place, order, "kill", at, ends=-9)
    found = run(place, order, "none", 0)
    assert found["resumed"]
    assert found["hidden"] == whole["hidden"]
    assert found["weights"] == whole["weights"]
