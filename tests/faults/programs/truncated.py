"""Run the program of docs/how-to/truncated-backpropagation.md with a fault in one step, after its
state has advanced.

    python truncated.py batch|time none|memory|split|kill|nan STEP

Prints JSON with what it ended with: weights, hidden state, steps, and the promises of its retries
and splits.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import holdfast

PAGE = Path(__file__).parents[3] / "docs/how-to/truncated-backpropagation.md"
order, fault, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
source = PAGE.read_text().split('```python title="truncated.py"\n')[1].split("```")[0]
if order == "time":
    for was, now in (
        (", batch_first=True", ""),
        (
            "series[:, t : t + CHUNK], target[:, t : t + CHUNK]",
            "series[t : t + CHUNK], target[t : t + CHUNK]",
        ),
        ("torch.randn(STREAMS, 60, 3).cumsum(1)", "torch.randn(60, STREAMS, 3).cumsum(0)"),
        ("series.roll(-1, 1)", "series.roll(-1, 0)"),
        ("    loader=chunks,\n", "    loader=chunks,\n    split=(1, 1, 0, 0),\n"),
    ):
        assert was in source
        source = source.replace(was, now)
undisturbed = holdfast.Guard.step
fired: list[int] = []


def step(self: holdfast.Guard, batch: Any, loss_fn: Any, **named: Any) -> Any:
    """Make a step whose loss function fails in the end."""

    def failing(part: Any) -> Any:
        loss = loss_fn(part)
        here = self.global_step == at
        if here and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and fault == "memory" and not fired:
            fired.append(1)
            torch.empty(2**50, dtype=torch.uint8)
        if self.global_step >= at and fault == "split" and len(part[2]) > 3:
            torch.empty(2**50, dtype=torch.uint8)
        if here and fault == "nan" and not fired:
            fired.append(1)
            return loss * math.nan
        return loss

    result = undisturbed(self, batch, failing, **named)
    return undisturbed(self, batch, failing, **named) if result.skipped else result


holdfast.Guard.step = step  # type: ignore[method-assign]
space: dict[str, Any] = {}
exec(compile(source, str(PAGE), "exec"), space)
events = space["guard"].events()
kinds = ("retry", "split", "not_restored", "skip_step")
print(
    json.dumps(
        {
            "weights": [value.tolist() for value in space["model"].state_dict().values()],
            "hidden": [value.tolist() for value in space["carried"].state_dict().values()],
            "steps": space["guard"].global_step,
            "events": [
                [event.kind, event.data.get("promise")] for event in events if event.kind in kinds
            ],
            "resumed": space["guard"].resumed_from is not None,
        }
    )
)
