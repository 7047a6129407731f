"""What the forecast says of each job, and whether a plan that it chose holds on a device: without a device itself.

`predict` runs in worker processes beside the one that trains. `judge` asks a machine for two runs: the plan itself
must come through, and with a ninth more samples than it has the machine should run out of memory: then the plan
reaches 90 % of what really fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.forecast_jobs import OUT_OF_MEMORY, Outcome, Plan, model_named
from benchmarks.results_file import without_paths
from holdfast.core.errors import HoldfastError
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.plan.fit import check_fit
from holdfast.forecast.plan.planning import Question, Row, Steps, plan_rows, recommended
from holdfast.forecast.trace.events import live_peak, played, variants_played
from holdfast.forecast.trace.extrapolation import ScaledTrace, fit

GIB = 1 << 30
TRACED = (2, 4)
MOST_SAMPLES = 1 << 16  # beyond it kernels meet limits of their own that are not memory
_STEPS = 3
_SHARE_OF_LARGEST = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the forecast says of a job.

    Args:
        plan: A run of about the size that was asked for; None if there is no forecast.
        chosen: The recommended plan by cap in bytes; None where none fits.
        failed: Why there is no forecast.
    """

    plan: Plan | None = None
    chosen: dict[int, Plan | None] = dataclasses.field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a chosen plan holds.

    Args:
        plan: It.
        cap_bytes: What torch's allocator was allowed.
        ended: How its run ended.
        bigger_ended: How the run with a ninth more samples ended; empty if there was none, since something else than
            memory limits the plan.
    """

    plan: Plan
    cap_bytes: int
    ended: str
    bigger_ended: str = ""

    @property
    def ran_out(self) -> bool:
        """Whether the plan ran out of memory."""
        return self.ended == OUT_OF_MEMORY

    @property
    def close(self) -> bool | None:
        """Whether it reaches 90 % of what fits; None if that was not found out."""
        if self.ended != "done" or self.bigger_ended not in ("done", OUT_OF_MEMORY):
            return None
        return self.bigger_ended == OUT_OF_MEMORY


def predict(
    name: str, precision: str, device: Device, target_bytes: int, caps_bytes: tuple[int, ...] = ()
) -> Prediction:
    """Forecast a job.

    Args:
        name: Of the job.
        precision: Of its steps.
        device: Where it will run.
        target_bytes: About how much it shall need; decides the micro-batch.
        caps_bytes: What the allocator is allowed, for each plan to choose.
    """
    try:
        scaled = fit(trace_job(model_named(name).request(precision=precision, sizes=TRACED)).traces)
    except HoldfastError as error:
        return Prediction(failed=without_paths(f"{type(error).__name__}: {error}".splitlines()[0]))
    chosen = {cap: choose(name, precision, scaled, device, cap) for cap in caps_bytes}
    return Prediction(plan=_plan_of_size(name, precision, scaled, device, target_bytes), chosen=chosen)


def _plan_of_size(name: str, precision: str, scaled: ScaledTrace, device: Device, target_bytes: int) -> Plan:
    size = TRACED[0]
    while 2 * size <= MOST_SAMPLES and live_peak(scaled.at(2 * size)) <= target_bytes:
        size *= 2
    trace = scaled.at(size)
    found = check_fit(*played(trace, _STEPS), device, margin_bytes=0)
    return Plan(
        model=name,
        precision=precision,
        micro_batch_size=size,
        optimizer=next((variant.name for variant in variants_played(trace)), ""),
        allocated_bytes=found.replay.peak_allocated_bytes,
        process_bytes=found.process_bytes,
    )


def choose(name: str, precision: str, scaled: ScaledTrace, device: Device, cap_bytes: int) -> Plan | None:
    """Return what is recommended for a device of which the allocator may take this much; None if nothing fits.

    Only plans with torch's default allocator are taken: the other one cannot be set while a process runs.
    """
    capped = dataclasses.replace(device, usable_bytes=cap_bytes + device.context_bytes)
    rows = plan_rows({precision: Steps(whole=scaled)}, Question(device=capped, global_batch_size=MOST_SAMPLES))
    best = recommended([row for row in rows if not row.allocator])
    return None if best is None else _as_plan(name, best)


def _as_plan(name: str, row: Row) -> Plan:
    return Plan(
        model=name,
        precision=row.precision,
        micro_batch_size=row.micro_batch_size,
        optimizer=row.optimizer,
        modules=row.modules,
        allocated_bytes=row.live_bytes,
        process_bytes=row.process_bytes,
    )


def judge(plan: Plan, cap_bytes: int, run: Callable[[Plan, int], Outcome]) -> Verdict:
    """Find out whether a plan holds.

    Args:
        plan: As chosen.
        cap_bytes: What the allocator is allowed.
        run: Trains under that cap.
    """
    ended = run(plan, cap_bytes).ended
    verdict = Verdict(plan=plan, cap_bytes=cap_bytes, ended=ended)
    bigger = int(plan.micro_batch_size / _SHARE_OF_LARGEST) + 1
    if ended != "done" or bigger > MOST_SAMPLES:
        return verdict
    more = run(dataclasses.replace(plan, micro_batch_size=bigger), cap_bytes)
    return dataclasses.replace(verdict, bigger_ended=more.ended)
