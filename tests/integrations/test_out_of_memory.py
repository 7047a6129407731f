"""Real limits of memory under each framework.

The run ends as the one that was never short, as far as is promised.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.prepared import FRAMEWORKS, run_prepared

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "short_of_memory.py"
SAME = ("weights", "optimizer", "steps", "rate", "order")


@cache
def train(host: str, place: str) -> dict[str, Any]:
    if host != "loop":
        pytest.importorskip(
            {"lightning": "lightning.pytorch"}.get(host, host), exc_type=ImportError
        )
    with TemporaryDirectory() as folder:
        ended = run_prepared([PROGRAM, host, place, folder], timeout=300, loaded=FRAMEWORKS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("host", ["loop", "accelerate", "transformers", "lightning"])
def test_a_step_that_is_short_of_memory_changes_nothing(host: str, place: str) -> None:
    """Weights, optimizer state, schedule and order of the data are bit for bit those of a run
    that had enough.
    """
    undisturbed, short = train(host, "nowhere"), train(host, place)
    assert undisturbed["events"] == []
    promises = {promise for kind, promise in short["events"] if kind != "out_of_memory"}
    assert promises == {"bit-exact"}, short
    assert {name: short.get(name) for name in SAME} == {name: undisturbed[name] for name in SAME}


@pytest.mark.parametrize("host", ["loop", "accelerate", "transformers", "lightning"])
def test_an_optimizer_that_is_short_of_memory_is_never_left_half_way(host: str) -> None:
    """The step is undone, or the run ends and says why.

    In neither case are half-changed weights trained on.
    """
    short = train(host, "optimizer")
    assert short["short"]
    if "error" in short:
        assert "H402" in short["error"], short
        return
    ((kind, promise),) = short["events"]
    assert kind == "roll_back"
    rewound = promise == "equal up to rounding"  # the steps since the checkpoint were made again
    assert rewound or promise == "changes training"
    assert (short["steps"] == train(host, "nowhere")["steps"]) is rewound
