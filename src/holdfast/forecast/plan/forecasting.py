"""Make a complete forecast: trace a job, plan for each device, and verify the recommended plan.

A job is traced in each requested precision. If a recommended plan does not fit when it is traced,
the margin is raised and the planning is repeated. No user code runs in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast.core.errors import HoldfastError
from holdfast.forecast.devices.catalogue import GIB, Device
from holdfast.forecast.job.tracing import TraceRequest, TraceResult, trace_job
from holdfast.forecast.plan.planning import (
    GRANULE_BYTES,
    MemoryPlan,
    Target,
    TracedStep,
    check_trace,
    find_plans,
    nearest_miss,
    recommend,
)
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.extrapolation import (
    FITTED_SIZES,
    NotAlignedError,
    ScaledTrace,
    extrapolate,
)

OnProgress = Callable[[str], object]

# The most recommended plans that are traced until one fits.
_MOST_VERIFICATIONS = 3
# Multiples of `FITTED_SIZES` that are traced until two traces agree. Some code changes its path at
# a certain size, so larger batches may agree although small ones do not.
_SIZE_MULTIPLES = (1, 2, 4)
_OWN_PRECISION = (
    "this job sets its own precision with autocast: only that precision is planned for, and"
    ' "fp32" means that no autocast was added'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """A job and devices to forecast.

    Args:
        factory: ``"module:function"`` or ``"file.py:function"``; see `job.building` for what it may
            return.
        devices: The devices to plan for.
        precisions: Each ``"fp32"``, ``"bf16"`` or ``"fp16"``; the first is what the job uses now.
        global_batch_size: Samples per optimizer step; None for as many as fit at once.
        margin_bytes: Memory to keep free; None for the device's default.
        verify: Whether the recommended plan is traced once more with its own settings.
    """

    factory: str
    devices: tuple[Device, ...]
    precisions: tuple[str, ...] = ("fp32", "bf16")
    global_batch_size: int | None = None
    margin_bytes: int | None = None
    verify: bool = True

    def target(self, device: Device) -> Target:
        """Return the planning target for a device."""
        return Target(
            device=device,
            global_batch_size=self.global_batch_size,
            margin_bytes=self.margin_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A recommended plan, traced once more with its own settings.

    Args:
        live_bytes: Peak of the live bytes in that trace.
        forecast_bytes: The forecast for the same step.
        fits: Whether that trace fits the device.
    """

    live_bytes: int
    forecast_bytes: int
    fits: bool

    @property
    def error(self) -> float:
        """The relative error of the forecast; negative if it was too low."""
        return self.forecast_bytes / self.live_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """What fits one device.

    Args:
        target: What was planned for.
        rows: All plans.
        best: The recommended plan; None if none fits.
        shown: The plan whose memory is shown: the best, or the one that misses by least.
        trace: The step of the plan that is shown.
        verification: The verification of the best plan, or of the last plan that was tried and did
            not fit.
    """

    target: Target
    rows: tuple[MemoryPlan, ...]
    best: MemoryPlan | None
    shown: MemoryPlan
    trace: Trace
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The answer to a `ForecastRequest`.

    Args:
        request: The request.
        traced: The result of tracing, by precision.
        plans: The plans for each device, in the order of `ForecastRequest.devices`.
        assumptions: The assumptions of the forecast.
    """

    request: ForecastRequest
    traced: dict[str, TraceResult]
    plans: tuple[DeviceForecast, ...]
    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedJob:
    """A job in one precision: what the child reported, and the step at any size."""

    result: TraceResult
    step: ScaledTrace


def make_forecast(request: ForecastRequest, on_progress: OnProgress = lambda _: None) -> Forecast:
    """Trace a job and plan for each device.

    Args:
        request: The job and the devices.
        on_progress: Called with a description of each stage.

    Raises:
        HoldfastError: Whatever `trace_job` raises.
    """
    return Forecaster(request, on_progress).forecast()


def plan_target(target: Target, steps: Mapping[str, TracedStep]) -> DeviceForecast:
    """Return the plans for a device, from the job's step in each precision.

    Only precisions that the device computes in are planned for, or all if it computes in none.
    """
    if not target.device.has_bf16:
        without_bf16 = {name: step for name, step in steps.items() if name != "bf16"}
        steps = without_bf16 or steps
    plans = tuple(find_plans(steps, target))
    best = recommend(plans)
    shown = best or nearest_miss(plans)
    assert shown is not None, "there is a plan for each precision"
    return DeviceForecast(
        target=target,
        rows=plans,
        best=best,
        shown=shown,
        trace=_step_in_memory(shown, steps[shown.precision], target.global_batch_size),
    )


def _step_in_memory(plan: MemoryPlan, step: TracedStep, global_batch_size: int | None) -> Trace:
    """Return the step of a plan as the allocator sees it.

    If the global batch is larger than the micro-batch, gradients of earlier micro-batches are
    alive.
    """
    trace = step.with_recompute(plan.modules).at(max(1, plan.micro_batch_size))
    if global_batch_size is None or not step.plain.accumulates:
        return trace
    return with_accumulation(trace, global_batch_size)


class Forecaster:
    """Answers one request.

    Args:
        request: The job and the devices.
        on_progress: Called with a description of each stage.

    Attributes:
        assumptions: Collects the assumptions of the answer.
    """

    def __init__(self, request: ForecastRequest, on_progress: OnProgress) -> None:
        self.assumptions: list[Assumption] = []
        self._request = request
        self._on_progress = on_progress

    def forecast(self) -> Forecast:
        """Return the answer. See `make_forecast`."""
        jobs = self._trace_precisions()
        steps = {
            precision: TracedStep(
                plain=job.step,
                recomputed=functools.cache(
                    functools.partial(self._trace_recomputed, precision, job.step)
                ),
            )
            for precision, job in jobs.items()
        }
        plans = []
        for device in self._request.devices:
            self._on_progress(f"planning for {device.name}")
            plan = plan_target(self._request.target(device), steps)
            if self._request.verify:
                plan = self.verify_plan(plan, steps)
            plans.append(plan)
        for job in jobs.values():
            self.assumptions += job.result.assumptions
        for plan in plans:
            self.assumptions += plan.trace.assumptions
        for device in self._request.devices:
            if "bf16" in steps and not device.has_bf16:
                self._assume(
                    f"{device.name} has no bf16 units, so plans in other precisions are preferred"
                )
        return Forecast(
            request=self._request,
            traced={precision: job.result for precision, job in jobs.items()},
            plans=tuple(plans),
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _assume(self, what: str) -> None:
        self.assumptions.append(Assumption(what=what))

    # Tracing.

    def _trace_precisions(self) -> dict[str, _TracedJob]:
        """Return the job in each precision in which its step runs.

        Raises:
            HoldfastError: If the step runs in no precision; the error of the first one.
        """
        jobs: dict[str, _TracedJob] = {}
        errors: dict[str, HoldfastError] = {}
        # They are traced one after another, because build() may open a port or write a file.
        for precision in self._request.precisions:
            try:
                jobs[precision] = self._trace(precision)
            except HoldfastError as error:
                errors[precision] = error
                continue
            if jobs[precision].result.casts:
                # The job's own autocast overrides any precision that we add, so all plans would be
                # the same run.
                self._assume(_OWN_PRECISION)
                if "fp32" in jobs:
                    return {"fp32": jobs["fp32"]}
                return {"fp32": self._trace("fp32")}
        if not jobs:
            _raise_first(errors)
        for precision, reason in errors.items():
            self._assume(
                f"{precision} was left out because the step fails in it: {_on_one_line(reason)}"
            )
        return jobs

    def _trace_recomputed(self, precision: str, plain: ScaledTrace) -> ScaledTrace | None:
        """Return the step with all blocks recomputed; None if there are none, or it fails."""
        blocks = plain.template.blocks
        if not blocks:
            return None
        try:
            job = self._trace(precision, recompute=blocks)
        except HoldfastError as error:
            self._assume(
                f"no plan in {precision} recomputes blocks: with recomputation,"
                f" {_on_one_line(error)}"
            )
            return None
        self.assumptions += job.result.assumptions
        return job.step

    def _trace(self, precision: str, recompute: tuple[str, ...] = ()) -> _TracedJob:
        """Trace a job at two sizes, and return its step at any size.

        Raises:
            NotAlignedError: If its traces differ at all sizes that are tried; the first difference.
            HoldfastError: Whatever `trace_job` raises.
        """
        differences: list[NotAlignedError] = []
        for multiple in _SIZE_MULTIPLES:
            sizes = tuple(multiple * size for size in FITTED_SIZES)
            result = trace_job(
                TraceRequest(
                    factory=self._request.factory,
                    precision=precision,
                    sizes=sizes,
                    recompute=recompute,
                ),
                self._on_progress,
            )
            try:
                step = extrapolate(result.traces)
            except NotAlignedError as error:
                differences.append(error)
                continue
            assumed = list(result.assumptions)
            if differences:
                names = " and ".join(map(str, sizes))
                what = (
                    f"the forecast is extrapolated from {names} samples and not from fewer:"
                    f" {differences[-1].what}"
                )
                assumed.append(Assumption(what=what))
            if self._request.global_batch_size is not None and not result.accumulates:
                what = (
                    "the step calls backward itself, so it receives the global batch of"
                    f" {self._request.global_batch_size} samples unsplit: gradients of earlier"
                    " micro-batches are not counted"
                )
                assumed.append(Assumption(what=what))
            return _TracedJob(
                result=replace(result, assumptions=tuple(assumed)),
                step=replace(step, accumulates=result.accumulates),
            )
        raise differences[0]

    # Verification.

    def verify_plan(self, plan: DeviceForecast, steps: Mapping[str, TracedStep]) -> DeviceForecast:
        """Trace the recommended plan with its own settings, and return the plan with the result.

        If it does not fit, plan again with a larger margin, a few times. Rejected plans are added
        to the assumptions.

        Raises:
            HoldfastError: If the step does not run with the settings of the plan.
        """
        # Each trace has to fit with the user's margin, not with the raised one.
        target = plan.target
        for _ in range(_MOST_VERIFICATIONS):
            best = plan.best
            if best is None:
                return plan
            self._on_progress(
                f"tracing the plan for {target.device.name} with micro-batches of"
                f" {best.micro_batch_size}"
            )
            step = steps[best.precision]
            verification = self._verify(best, step, target)
            plan = replace(
                plan,
                trace=_step_in_memory(best, step, target.global_batch_size),
                verification=verification,
            )
            if verification.fits:
                return plan
            margin_bytes = _raised_margin(best, verification, target.device)
            self._assume(_why_refused(best, margin_bytes, target.device))
            self._on_progress(f"planning for {target.device.name}")
            next_plan = plan_target(replace(target, margin_bytes=margin_bytes), steps)
            if next_plan.best is None:
                break
            plan = next_plan
        return replace(plan, best=None)

    def _verify(self, plan: MemoryPlan, step: TracedStep, target: Target) -> Verification:
        total = target.global_batch_size
        micro_batches = 1
        if step.plain.accumulates and total is not None and total > plan.micro_batch_size:
            # All micro-batches after the first are alike, so two represent any number.
            micro_batches = 2
        result = trace_job(
            TraceRequest(
                factory=self._request.factory,
                precision=plan.precision,
                sizes=(plan.micro_batch_size,),
                recompute=plan.modules,
                gradient_accumulation_steps=micro_batches,
            )
        )
        (trace,) = result.traces
        forecast = _step_in_memory(plan, step, micro_batches * plan.micro_batch_size)
        return Verification(
            live_bytes=live_peak(trace, GRANULE_BYTES),
            forecast_bytes=live_peak(forecast, GRANULE_BYTES),
            fits=check_trace(trace, target).fits,
        )


def _raised_margin(plan: MemoryPlan, verification: Verification, device: Device) -> int:
    """Return a margin that covers the share by which the forecast was too low.

    If the forecast was right and only the layout in memory differs, the margin is doubled.
    """
    too_low = 1 - verification.forecast_bytes / verification.live_bytes
    missing_bytes = int(too_low * (device.available_bytes - plan.margin_bytes))
    return plan.margin_bytes + max(plan.margin_bytes, missing_bytes)


def _why_refused(plan: MemoryPlan, margin_bytes: int, device: Device) -> str:
    settings = f"micro-batches of {plan.micro_batch_size} in {plan.precision}"
    if plan.modules:
        settings += f" with {len(plan.modules)} modules recomputed"
    return (
        f"left out for {device.name}: {settings} did not fit when traced, so the margin was raised"
        f" to {margin_bytes / GIB:.2f} GiB"
    )


def _raise_first(errors: Mapping[str, HoldfastError]) -> None:
    """Raise the first error, with the precision that was added if any."""
    precision, error = next(iter(errors.items()))
    if precision == "fp32":
        raise error
    what = f"{error.what} (in {precision}, under autocast)"
    raise type(error)(what, limit=error.limit, fix=error.fix, rule=error.rule) from error


def _on_one_line(error: HoldfastError) -> str:
    return " ".join(error.what.split())
