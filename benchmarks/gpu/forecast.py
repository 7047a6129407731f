"""The forecast on a CUDA device: its error, and whether its plans hold.

How: every job of `forecast_models` is forecast in fp32, bf16 and fp16 from traces at 2 and 4 samples, in processes
beside this one and without the device, for the largest power of two of samples that stays below 3 GiB. Then

- it really trains for three steps, and ``max_memory_allocated`` and what the process takes of the device (all that
  is taken, so nobody else may use it) are compared with the forecast;
- for some jobs plans are chosen for devices that give the allocator 8 to 80 GiB, emulated by
  ``set_per_process_memory_fraction``: the plan must come through, and with a ninth more samples memory should run
  out.

The script ends after 9 minutes at most; what was not reached by then is said. Jobs that make their own step run in
fp32 only.

To reach: error of ``max_memory_allocated`` for transformers at most 1.5 % in the median and 5 % in the 95th
percentile, for CNNs and RNNs 10 % in the 95th; at most 1 % of the plans run out of memory, and 90 % of them reach
90 % of what really fits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.forecast_models import Model, find_models
from benchmarks.gpu.forecast_decisions import GIB, Prediction, Verdict, judge, predict
from benchmarks.gpu.forecast_jobs import Outcome, Plan, run
from benchmarks.results_file import Result, percentile, read_options
from holdfast.core.errors import PolicyError
from holdfast.forecast.devices.catalogue import Device, find_device

_SECONDS = 9 * 60.0
_SECONDS_LEFT_TO_WRITE = 20.0
_SHARE_FOR_ERRORS = 0.5  # of the time; the rest is for decisions
_TARGET_BYTES = 3 * GIB
_CAPS_GIB = (8, 16, 24, 40, 80)
_PRECISIONS = ("fp32", "bf16", "fp16")
_DECIDED = (
    "llama_sdpa", "resnet", "encoder", "pegasus", "unet", "tacotron", "bert", "vae", "gpt2", "lstm", "vit",
    "whisper", "llama_eager", "t5",
)  # fmt: skip


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


@dataclass(slots=True, kw_only=True)
class Session:
    """What is known while the script runs.

    Args:
        device: The catalogue's entry, or a calibrated one.
        started: By the monotonic clock.
        rows: Of all jobs so far.
        verdicts: Of all plans so far.
    """

    device: Device
    started: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def seconds_left(self) -> float:
        """Return what is left of the time."""
        return self.started + _SECONDS - _SECONDS_LEFT_TO_WRITE - time.monotonic()


def jobs_of(models: list[Model], precisions: tuple[str, ...]) -> Iterator[tuple[Model, str]]:
    """Yield each job with the precisions that it can run in."""
    for precision in precisions:
        for model in models:
            if precision == "fp32" or not model.own_step:
                yield model, precision


def device_here() -> Device:
    """Return what the forecast knows of the device of this machine: its entry, or that of a device of its size."""
    try:
        found = find_device(torch.cuda.get_device_name())
    except PolicyError:
        return find_device(f"{torch.cuda.get_device_properties(0).total_memory / GIB:.4f}GiB")
    return found


def measure_errors(
    session: Session, pool: ProcessPoolExecutor, models: list[Model], precisions: tuple[str, ...]
) -> None:
    """Forecast and run all jobs, each as soon as its forecast is there."""
    waiting: dict[Future[Prediction], tuple[Model, str]] = {
        pool.submit(predict, model.name, precision, session.device, _TARGET_BYTES): (model, precision)
        for model, precision in jobs_of(models, precisions)
    }
    until = max(1.0, session.seconds_left() * _SHARE_FOR_ERRORS)
    with contextlib.suppress(TimeoutError):
        for done in as_completed(list(waiting), timeout=until):
            session.rows.append(_row(*waiting.pop(done), done.result()))
            print(f"  {_told(session.rows[-1])}", flush=True)
    for future, (model, precision) in waiting.items():
        future.cancel()
        row = Row(model=model.name, family=model.family, precision=precision, failed="no time was left")
        session.rows.append(row)


def _row(model: Model, precision: str, prediction: Prediction) -> Row:
    named = {"model": model.name, "family": model.family, "precision": precision}
    if prediction.plan is None:
        return Row(**named, failed=f"no forecast: {prediction.failed}")
    outcome = run(prediction.plan)
    failed = "" if outcome.ended == "done" else f"no run: {outcome.ended}"
    return Row(**named, plan=prediction.plan, outcome=outcome, failed=failed)


def _told(row: Row) -> str:
    named = f"{row.model} {row.precision}"
    if row.failed or row.plan is None or row.outcome is None:
        return f"{named}: {row.failed}"
    return (
        f"{named}, {row.plan.micro_batch_size} samples: {row.outcome.allocated_bytes / GIB:.3f} GiB, error "
        f"{row.error_percent('allocated_bytes'):+.2f} %, process {row.error_percent('process_bytes'):+.2f} %"
    )


def measure_decisions(session: Session, pool: ProcessPoolExecutor, names: tuple[str, ...]) -> None:
    """Choose plans and run them until the time is over."""
    total = torch.cuda.get_device_properties(0).total_memory
    caps = tuple(cap * GIB for cap in _CAPS_GIB if cap * GIB < total - session.device.context_bytes)
    waiting = [
        pool.submit(predict, name, precision, session.device, _TARGET_BYTES, caps)
        for precision in _PRECISIONS[:2]
        for name in names
    ]
    with contextlib.suppress(TimeoutError):
        for done in as_completed(waiting, timeout=max(1.0, session.seconds_left())):
            for cap, plan in done.result().chosen.items():
                if plan is None or session.seconds_left() < 0:
                    continue
                session.verdicts.append(judge(plan, cap, run))
                print(f"  {cap // GIB} GiB {session.verdicts[-1]}", flush=True)
    for future in waiting:
        future.cancel()


def add_errors(session: Session, result: Result) -> None:
    """Add the figures of all jobs."""
    rows = [row for row in session.rows if not row.failed]
    result.add_count("forecast and run", len(rows), len(session.rows), expected=len(session.rows))
    for family, median, p95 in (
        ("transformer", 1.5, 5.0),
        ("CNN", None, 10.0),
        ("RNN", None, 10.0),
        ("other", None, None),
    ):
        of_family = [row for row in rows if row.family == family]
        for what, title in (("allocated_bytes", "max_memory_allocated"), ("process_bytes", "process total")):
            errors = [row.error_percent(what) for row in of_family]
            result.add_samples(f"{family}: signed error of {title}", "%", errors, digits=3)
            sizes = sorted(map(abs, errors))
            if sizes:
                goals = (median, p95) if what == "allocated_bytes" else (None, None)
                result.add_samples(
                    f"{family}: median error of {title}", "%", [statistics.median(sizes)], at_most=goals[0], digits=3
                )
                result.add_samples(
                    f"{family}: 95th percentile of the error of {title}", "%", [percentile(sizes, 0.95)],
                    at_most=goals[1], digits=3,
                )  # fmt: skip
    result.samples["jobs"] = [asdict(row) for row in session.rows]


def add_decisions(session: Session, result: Result) -> None:
    """Add the figures of all plans."""
    verdicts = session.verdicts
    if not verdicts:
        result.notes.append("no plan was tried: no time was left")
        return
    share = 100 * sum(verdict.ran_out for verdict in verdicts) / len(verdicts)
    result.add_count("plans tried", len(verdicts), len(verdicts))
    result.add_count("plans that came through", sum(verdict.ended == "done" for verdict in verdicts), len(verdicts))
    result.add_samples("plans that ran out of memory", "%", [share], at_most=1.0)
    known = [verdict.close for verdict in verdicts if verdict.close is not None]
    if known:
        result.add_samples(
            "plans below 90 % of what really fits", "%", [100 * known.count(False) / len(known)], at_most=10.0
        )
    result.samples["plans"] = [asdict(verdict) for verdict in verdicts]


def main() -> None:
    """Measure and write the result."""
    options = read_options("gpu_forecast", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    models, notes = find_models(quick=options.quick)
    precisions = _PRECISIONS[:1] if options.quick else _PRECISIONS
    session = Session(device=device_here())
    parameters = {
        "models": len(models),
        "precisions": precisions,
        "caps_gib": _CAPS_GIB,
        "device": session.device.name,
    }
    result = Result(options=options, parameters=parameters)
    result.notes += notes
    workers = max(1, (os.cpu_count() or 2) - 2)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        run(Plan(model="mlp", precision="fp32", micro_batch_size=2))  # the first step loads kernels, makes workspaces
        measure_errors(session, pool, models, precisions)
        if not options.quick:
            names = {model.name for model in models}
            measure_decisions(session, pool, tuple(name for name in _DECIDED if name in names))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # what they still compute, nobody will ask for
            child.terminate()
    add_errors(session, result)
    add_decisions(session, result)
    result.write()


if __name__ == "__main__":
    main()
