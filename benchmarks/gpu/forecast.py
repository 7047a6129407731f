"""The forecast on a CUDA device: its error, and its verdict.

How: every job of `forecast_models` is forecast in fp32 and bf16, in processes beside this one and
without the device: traces at 2 and 4 samples give the largest power of two of samples that stays
below 3 GiB, and a trace of that many the forecast, as with ``holdfast plan``. Then it really trains
for three steps, and ``max_memory_allocated`` and what the process takes of the device (all that is
taken, so nobody else may use it) are compared with the forecast.

Verdict: the job runs once more with no more memory for torch's allocator than it has on the
smallest device that `check_fit` says it fits, with the default margin for a device of that size: it
must run. And once more with 90 % of the forecast of ``max_memory_allocated``: it must not.

All forecasts are made first, then all runs, in fp32 first. The script ends after 4 minutes; what
was not reached by then is said. Jobs that make their own step run in fp32 only.

To reach: no job that is said to fit does not; error of ``max_memory_allocated`` for transformers at
most 1.5 % in the median and 5 % in the 95th percentile, for CNNs and RNNs 10 % in the 95th.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.forecast_models import Model, find_models
from benchmarks.gpu.forecast_jobs import Outcome, Plan, model_named, run
from benchmarks.results_file import Result, percentile, read_options, without_paths
from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.devices.catalogue import GIB, Device, find_device
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.plan.fit import check_fit
from holdfast.forecast.trace.events import Trace, first_products, live_peak, repeat_steps
from holdfast.forecast.trace.extrapolation import extrapolate

_SECONDS, _SECONDS_TO_FORECAST = 240.0, 130.0
_TARGET_BYTES = 3 * GIB
_PRECISIONS = ("fp32", "bf16")
_TRACED = (2, 4)
_MOST_SAMPLES = 1 << 16  # beyond it kernels meet limits of their own that are not memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one job.

    Args:
        model: Its name.
        family: Of the model.
        precision: Of its steps.
        plan: How it ran.
        outcome: What it needed.
        failed: Why there is no forecast, or no run.
    """

    model: str
    family: str
    precision: str
    plan: Plan | None = None
    outcome: Outcome | None = None
    failed: str = ""

    def error_percent(self, what: str) -> float:
        """Return the signed error of ``"allocated_bytes"`` or ``"process_bytes"``."""
        return 100 * (float(getattr(self.plan, what)) / getattr(self.outcome, what) - 1)


def jobs_of(models: list[Model], precisions: tuple[str, ...]) -> Iterator[tuple[Model, str]]:
    """Yield each job with the precisions that it can run in."""
    for precision in precisions:
        for model in models:
            if precision == "fp32" or not model.own_step:
                yield model, precision


def device_here() -> Device:
    """Return what the forecast knows of the device of this machine.

    Its entry, or that of a device of its size.
    """
    try:
        found = find_device(torch.cuda.get_device_name())
    except PolicyError:
        return find_device(f"{torch.cuda.get_device_properties(0).total_memory / GIB:.4f}GiB")
    return found


def predict(name: str, precision: str, device: Device) -> Plan | str:
    """Return a run of a job that needs about `_TARGET_BYTES`, with its forecast.

    A text says why there is none.
    """
    try:
        scaled = extrapolate(
            trace_job(model_named(name).request(precision=precision, sizes=_TRACED)).traces
        )
        size = _TRACED[0]
        while 2 * size <= _MOST_SAMPLES and live_peak(scaled.at(2 * size)) <= _TARGET_BYTES:
            size *= 2
        # As `plan` does
        traced = trace_job(model_named(name).request(precision=precision, sizes=(size,))).traces[0]
    except HoldfastError as error:
        return without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
    found = check_fit(
        *repeat_steps(traced, 3), device, products=first_products(traced), margin_bytes=0
    )
    return Plan(
        model=name,
        precision=precision,
        micro_batch_size=size,
        allocated_bytes=found.replay.peak_allocated_bytes,
        process_bytes=found.process_bytes,
        enough_bytes=smallest_fitting(traced, device).available_bytes,
    )


def smallest_fitting(traced: Trace, device: Device) -> Device:
    """Return the smallest device, of the kind of another and to 1 MiB, that a trace is said to
    fit.
    """
    trace, products = repeat_steps(traced, 3), first_products(traced)
    too_small, enough = 0, device.usable_bytes
    while enough - too_small > GIB >> 10:
        middle = (too_small + enough) // 2
        if check_fit(*trace, replace(device, usable_bytes=middle), products=products).fits:
            enough = middle
        else:
            too_small = middle
    return replace(device, usable_bytes=enough)


def measure(
    device: Device,
    pool: ProcessPoolExecutor,
    models: list[Model],
    precisions: tuple[str, ...],
    started: float,
) -> list[Row]:
    """Forecast all jobs, then run them."""
    jobs = list(jobs_of(models, precisions))
    forecasts = [pool.submit(predict, model.name, precision, device) for model, precision in jobs]
    wait(forecasts, timeout=_SECONDS_TO_FORECAST)
    print(
        f"  {sum(map(Future.done, forecasts))} of {len(jobs)} forecast in"
        f" {time.monotonic() - started:.0f} s"
    )
    rows: list[Row] = []
    for (model, precision), forecast in zip(jobs, forecasts, strict=True):
        if forecast.done() and time.monotonic() - started < _SECONDS:
            rows.append(_row(model, precision, forecast.result()))
            print(f"  {_told(rows[-1])}", flush=True)
        else:
            rows.append(
                Row(
                    model=model.name,
                    family=model.family,
                    precision=precision,
                    failed="no time was left",
                )
            )
    return rows


def _row(model: Model, precision: str, plan: Plan | str) -> Row:
    named = {"model": model.name, "family": model.family, "precision": precision}
    if isinstance(plan, str):
        return Row(**named, failed=f"no forecast: {plan}")
    outcome = run(plan)
    failed = "" if outcome.ended == "done" else f"no run: {outcome.ended}"
    return Row(**named, plan=plan, outcome=outcome, failed=failed)


def _told(row: Row) -> str:
    named = f"{row.model} {row.precision}"
    if row.failed or row.plan is None or row.outcome is None:
        return f"{named}: {row.failed}"
    return (
        f"{named}, {row.plan.micro_batch_size} samples: {row.outcome.allocated_bytes / GIB:.3f}"
        f" GiB, error {row.error_percent('allocated_bytes'):+.2f} %, process"
        f" {row.error_percent('process_bytes'):+.2f} %; with enough: {row.outcome.with_enough},"
        f" with too little: {row.outcome.with_too_little}"
    )


def add_errors(every: list[Row], result: Result) -> None:
    """Add the figures of all jobs."""
    rows = [row for row in every if not row.failed]
    result.add_count("forecast and run", len(rows), len(every), expected=len(every))
    outcomes = [row.outcome for row in rows if row.outcome is not None]
    wrong = [outcome for outcome in outcomes if outcome.with_enough != "done"]
    result.add_count(
        "said to fit, with the default margin, and does not", len(wrong), len(outcomes), expected=0
    )
    ended = [outcome.with_too_little for outcome in outcomes]
    result.add_count(
        "out of memory with 90 % of the forecast",
        ended.count("out of memory"),
        len(ended),
        expected=len(ended),
    )
    for family, median, p95 in (
        ("transformer", 1.5, 5.0),
        ("CNN", None, 10.0),
        ("RNN", None, 10.0),
        ("other", None, None),
    ):
        of_family = [row for row in rows if row.family == family]
        for what, title in (
            ("allocated_bytes", "max_memory_allocated"),
            ("process_bytes", "process total"),
        ):
            errors = [row.error_percent(what) for row in of_family]
            result.add_samples(f"{family}: signed error of {title}", "%", errors, digits=3)
            sizes = sorted(map(abs, errors))
            if sizes:
                goals = (median, p95) if what == "allocated_bytes" else (None, None)
                result.add_samples(
                    f"{family}: median error of {title}",
                    "%",
                    [statistics.median(sizes)],
                    at_most=goals[0],
                    digits=3,
                )
                result.add_samples(
                    f"{family}: 95th percentile of the error of {title}",
                    "%",
                    [percentile(sizes, 0.95)],
                    at_most=goals[1],
                    digits=3,
                )
    result.samples["jobs"] = [asdict(row) for row in every]


def main() -> None:
    """Measure and write the result."""
    options = read_options("gpu_forecast", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    models, notes = find_models(quick=options.quick)
    precisions = _PRECISIONS[:1] if options.quick else _PRECISIONS
    device = device_here()
    parameters = {"models": len(models), "precisions": precisions, "device": device.name}
    result = Result(options=options, parameters=parameters)
    result.notes += notes
    started, workers = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    os.environ["OMP_NUM_THREADS"] = "1"  # of those that forecast
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        # The first step loads kernels, makes workspaces
        run(Plan(model="mlp", precision="fp32", micro_batch_size=2))
        rows = measure(device, pool, models, precisions, started)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # What they still compute, nobody will ask for
        for child in multiprocessing.active_children():
            child.terminate()
    add_errors(rows, result)
    result.write()


if __name__ == "__main__":
    main()
