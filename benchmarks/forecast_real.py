"""One job of `forecast_models`, really trained on the CPU.

How many bytes live at once, as torch's allocator counts.

    python -m benchmarks.forecast_real NAME MICRO_BATCH_SIZE

The profiler writes down every allocation and free of the allocator, those inside of operations too,
from before the job is built until two steps are made. One JSON line is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.forecast_models import MODELS, Model, train_step

STEPS = 2
_ROOT = Path(__file__).parents[1]
_MARK = "holdfast step"
_TIMEOUT_SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """What a real run needed.

    Args:
        peak_bytes: Most that lived at once during the steps.
        resident_bytes: What lived when the first of them began.
        events: Allocations and frees in the steps.
        cpu_seconds: Of the steps, with the profiler.
    """

    peak_bytes: int
    resident_bytes: int
    events: int
    cpu_seconds: float


def run_apart(model: Model, micro_batch_size: int) -> Real:
    """Run a job in a process of its own.

    Raises:
        subprocess.SubprocessError: It failed.
    """
    command = [sys.executable, "-m", "benchmarks.forecast_real", model.name, str(micro_batch_size)]
    ended = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_SECONDS
    )
    return Real(**json.loads(ended.stdout.splitlines()[-1]))


def run_here(model: Model, micro_batch_size: int) -> Real:
    """Run a job in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job = model.build(micro_batch_size)
        started = time.process_time()
        for _ in range(STEPS):
            with record_function(_MARK):
                train_step(model, job, job["batch"])
        seconds = time.process_time() - started
    assert profiler.profiler is not None
    return _measure(profiler.profiler.kineto_results.events(), seconds)


def _measure(events: list[Any], cpu_seconds: float) -> Real:
    """Add up what the allocator said."""
    begins = min(event.start_ns() for event in events if event.name() == _MARK)
    changes = [
        event
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    changes.sort(key=lambda event: event.start_ns())
    live = peak = resident = counted = 0
    for event in changes:
        if event.start_ns() < begins:
            resident = live = live + event.nbytes()
            continue
        live += event.nbytes()
        peak = max(peak, live)
        counted += 1
    return Real(
        peak_bytes=max(peak, resident),
        resident_bytes=resident,
        events=counted,
        cpu_seconds=round(cpu_seconds, 3),
    )


def main() -> None:
    """Run the job that the command line names."""
    name, size = sys.argv[1:]
    model = next(model for model in MODELS if model.name == name)
    print(json.dumps(asdict(run_here(model, int(size)))))


if __name__ == "__main__":
    main()
