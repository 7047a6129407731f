"""Estimates of peers beside the forecast, on the same jobs.

The signed error, the time, and where there is no answer.

The truth is the peak of live bytes of a real run on the CPU, as in `forecast_live`: two steps in
fp32, everything that torch's allocator gives out. Estimates:

- the forecast: one trace on the fake CPU,
- parameter arithmetic as ``accelerate estimate-memory`` does it for training with Adam in fp32:
  four times the bytes of the parameters (accelerate 1.15.0, commands/estimate.py,
  estimate_training_usage),
- parameter arithmetic as DeepSpeed's ``estimate_zero2_model_states_mem_needs`` does it on one GPU
  without offloading: 20 bytes for each parameter (runtime/zero/stage_1_and_2.py),
- torch's own MemTracker on fake CPU tensors, in a process of its own:
  ``python -m benchmarks.forecast_peers --memtracker NAME MICRO_BATCH_SIZE``.

Seconds are wall time of the estimate in a process that has imported everything; arithmetic takes
none to speak of.
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.forecast_models import (
    MODELS,
    Model,
    find_models,
    modules_of,
    optimizers_of,
    train_step,
)
from benchmarks.forecast_real import STEPS, run_apart
from benchmarks.results_file import Result, percentile, read_options, without_paths
from holdfast.core.errors import HoldfastError
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.trace.events import live_peak

_PEER_SECONDS = 600
_UNDER_PERCENT = 5.0
_ROOT = Path(__file__).parents[1]
_ASK = "--memtracker"
FORECAST, MEMTRACKER = "holdfast", "MemTracker"
_BYTES_OF_A_PARAMETER = {"4 x parameters (accelerate)": 16, "20 bytes x parameters (DeepSpeed)": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one estimator says of one model.

    Args:
        model: Its name.
        estimator: Who says it.
        error_percent: Against the real run, positive if it says too much; None if it has no answer.
        seconds: Of the estimate; None for arithmetic.
        failed: Why it has no answer.
    """

    model: str
    estimator: str
    error_percent: float | None = None
    seconds: float | None = None
    failed: str = ""


def estimates_of(model: Model) -> list[Estimate]:
    """Return what all of them say of a model."""
    size = model.micro_batch_size
    real = run_apart(model, size).peak_bytes

    def answer(
        estimator: str, estimated: float | None, seconds: float | None = None, failed: str = ""
    ) -> Estimate:
        error = None if estimated is None else round(100 * (estimated / real - 1), 3)
        return Estimate(
            model=model.name,
            estimator=estimator,
            error_percent=error,
            seconds=seconds,
            failed=failed,
        )

    found = []
    try:
        traced = trace_job(model.request(sizes=(size,), route="cpu"))
    except HoldfastError as error:
        failed = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
        found.append(answer(FORECAST, None, failed=failed))
    else:
        seconds = round(traced.build_seconds + traced.trace_seconds[0], 3)
        found.append(answer(FORECAST, live_peak(traced.traces[0]), seconds))
        found += [
            answer(name, each * traced.parameters) for name, each in _BYTES_OF_A_PARAMETER.items()
        ]
    return [*found, answer(MEMTRACKER, **_ask(model.name, size))]


def _ask(name: str, size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.forecast_peers", _ASK, name, str(size)]
    streams: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    try:
        ended = subprocess.run(command, cwd=_ROOT, timeout=_PEER_SECONDS, check=True, **streams)
    except subprocess.SubprocessError as error:
        return {"estimated": None, "failed": type(error).__name__}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def ask_memtracker(model: Model, size: int) -> int:
    """Return the peak that torch's MemTracker sees in two steps on fake CPU tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):  # without it, it fails on more of the jobs
        job = model.build(size)
        batch = [leaf for leaf in tree_leaves(job["batch"]) if isinstance(leaf, torch.Tensor)]
        tracker = MemTracker()
        tracker.track_external(*modules_of(job), *optimizers_of(job), *batch)
        with tracker:
            for number in range(STEPS):
                if number:
                    tracker.reset_mod_stats()
                train_step(model, job, job["batch"])
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _answer_here(name: str, size: int) -> None:
    model = next(model for model in MODELS if model.name == name)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # The first optimizer imports half of torch
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    started = time.perf_counter()
    answer: dict[str, Any]
    try:
        answer = {"estimated": ask_memtracker(model, size)}
    except Exception as error:  # noqa: BLE001 - that it fails, and how, is a result
        failed = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
        answer = {"estimated": None, "failed": failed}
    print(json.dumps({**answer, "seconds": round(time.perf_counter() - started, 3)}))


def _add(result: Result, name: str, rows: list[Estimate], models: int) -> None:
    errors = [row.error_percent for row in rows if row.error_percent is not None]
    result.add_count(f"{name}: answered", len(errors), models)
    result.add_samples(f"{name}: signed error", "%", errors, digits=3)
    sizes = sorted(abs(error) for error in errors)
    if sizes:
        worst = [percentile(sizes, 0.95)]
        result.add_samples(
            f"{name}: 95th percentile of the size of the error", "%", worst, digits=3
        )
    under = sum(error < -_UNDER_PERCENT for error in errors)
    result.add_count(f"{name}: more than {_UNDER_PERCENT:g} % too low", under, len(errors))
    seconds = [
        row.seconds for row in rows if row.error_percent is not None and row.seconds is not None
    ]
    if seconds:
        result.add_samples(f"{name}: time of an estimate", "s", seconds, digits=2)


def main() -> None:
    """Ask everybody and write the result."""
    if sys.argv[1:2] == [_ASK]:
        _answer_here(sys.argv[2], int(sys.argv[3]))
        return
    options = read_options("forecast_peers", __doc__ or "")
    models, notes = find_models(quick=options.quick)
    result = Result(options=options, parameters={"models": len(models), "precision": "fp32"})
    result.notes += notes
    rows: list[Estimate] = []
    for model in models:
        try:
            of_model = estimates_of(model)
        except subprocess.SubprocessError as error:
            result.notes.append(f"{model.name}: the real run failed ({type(error).__name__})")
            continue
        rows += of_model
        print("\n".join(f"  {asdict(row)}" for row in of_model), flush=True)
    for estimator in dict.fromkeys(row.estimator for row in rows):
        _add(result, estimator, [row for row in rows if row.estimator == estimator], len(models))
    result.samples["estimates"] = [asdict(row) for row in rows]
    result.write()


if __name__ == "__main__":
    main()
