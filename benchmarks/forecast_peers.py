"""Estimates of peers beside the forecast, on the same jobs: the signed error, the time, and where there is no answer.

The truth is the peak of live bytes of a real run on the CPU, as in `forecast_live`: two steps in fp32, everything
that torch's allocator gives out. Estimates:

- the forecast: one trace on the fake CPU,
- parameter arithmetic as ``accelerate estimate-memory`` does it for training with Adam in fp32: four times the bytes
  of the parameters (accelerate 1.15.0, commands/estimate.py, estimate_training_usage),
- parameter arithmetic as DeepSpeed's ``estimate_zero2_model_states_mem_needs`` does it on one GPU without offloading:
  20 bytes for each parameter (runtime/zero/stage_1_and_2.py),
- torch's own MemTracker on fake CPU tensors,
- torch-kitsune 0.7.0 (``predict_memory``), which estimates for CUDA, without the 15 % that it adds for the allocator;
  left out where it cannot be installed.

Seconds are wall time of the estimate in a process that has imported everything; arithmetic takes none to speak of.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.forecast_models import Model, find_models
from benchmarks.forecast_real import run_apart
from benchmarks.peers import find_peer
from benchmarks.results_file import Result, percentile, read_options, without_paths
from holdfast.core.errors import HoldfastError
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.trace.events import live_peak

_ACCELERATE_BYTES, _DEEPSPEED_BYTES = 16, 20  # for each parameter in fp32
_KITSUNE = "torch-kitsune==0.7.0"
_PEER_SECONDS = 600
_UNDER_PERCENT = 5.0
_ROOT = Path(__file__).parents[1]
FORECAST, ACCELERATE, DEEPSPEED = "holdfast", "4 x parameters (accelerate)", "20 bytes x parameters (DeepSpeed)"
MEMTRACKER, KITSUNE = "MemTracker", "torch-kitsune"


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


def estimates_of(model: Model, peers: list[tuple[str, str]], folder: Path) -> list[Estimate]:
    """Return what all of them say of a model.

    Args:
        model: Whose step it is.
        peers: Name in the table and name for `forecast_peer_runs`.
        folder: Where peers are installed.
    """
    size = model.micro_batch_size
    real = run_apart(model, size).peak_bytes

    def against(estimated: float) -> float:
        return round(100 * (estimated / real - 1), 3)

    found = []
    try:
        traced = trace_job(model.request(sizes=(size,), route="cpu"))
    except HoldfastError as error:
        told = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
        found.append(Estimate(model=model.name, estimator=FORECAST, failed=told))
    else:
        seconds = round(traced.build_seconds + traced.trace_seconds[0], 3)
        error_percent = against(live_peak(traced.traces[0], "for-loop"))
        found.append(Estimate(model=model.name, estimator=FORECAST, error_percent=error_percent, seconds=seconds))
        for name, each in ((ACCELERATE, _ACCELERATE_BYTES), (DEEPSPEED, _DEEPSPEED_BYTES)):
            error_percent = against(each * traced.parameters)
            found.append(Estimate(model=model.name, estimator=name, error_percent=error_percent))
    for name, command in peers:
        told = _ask(command, model, folder)
        estimated = told.get("bytes")
        found.append(
            Estimate(
                model=model.name,
                estimator=name,
                error_percent=None if estimated is None else against(estimated),
                seconds=told.get("seconds"),
                failed=told.get("failed", ""),
            )
        )
    return found


def _ask(peer: str, model: Model, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.forecast_peer_runs", peer, model.name, str(model.micro_batch_size)]
    try:
        ended = subprocess.run(
            [*command, str(folder)], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            timeout=_PEER_SECONDS, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        return {"failed": type(error).__name__}
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def _add(result: Result, name: str, rows: list[Estimate], models: int) -> None:
    answered = [row for row in rows if row.error_percent is not None]
    errors = [row.error_percent for row in answered if row.error_percent is not None]
    result.add_count(f"{name}: answered", len(answered), models)
    result.add_samples(f"{name}: signed error", "%", errors, digits=3)
    sizes = sorted(abs(error) for error in errors)
    if sizes:
        result.add_samples(
            f"{name}: 95th percentile of the size of the error", "%", [percentile(sizes, 0.95)], digits=3
        )
    under = sum(error < -_UNDER_PERCENT for error in errors)
    result.add_count(f"{name}: more than {_UNDER_PERCENT:g} % too low", under, len(answered))
    seconds = [row.seconds for row in answered if row.seconds is not None]
    if seconds:
        result.add_samples(f"{name}: time of an estimate", "s", seconds, digits=2)


def main() -> None:
    """Ask everybody and write the result."""
    options = read_options("forecast_peers", __doc__ or "")
    models, notes = find_models(quick=options.quick)
    result = Result(options=options, parameters={"models": len(models), "precision": "fp32"})
    result.notes += notes
    peers = [(MEMTRACKER, "memtracker")]
    with tempfile.TemporaryDirectory() as name:
        found, version = None, "left out: quick"
        if not options.quick:
            found, version = find_peer("kitsune.predict", "predict_memory", _KITSUNE, Path(name))
        result.notes.append(f"{_KITSUNE}: {version}")
        peers += [] if found is None else [(KITSUNE, "kitsune")]
        rows: list[Estimate] = []
        for model in models:
            try:
                of_model = estimates_of(model, peers, Path(name))
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
