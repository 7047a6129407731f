"""Make a complete forecast: trace a job, plan for each device, and verify the recommended plans.

The job is traced in each requested precision. The plan recommended for each device is then verified
by tracing the job with the plan's settings. If that trace does not fit the device, the margin is
raised and planning is repeated. User code runs only in child processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.devices.catalogue import GIB, Device
from holdfast.forecast.job.tracing import Argument, TraceRequest, TraceResult, trace_job
from holdfast.forecast.plan.planning import (
    GRANULE_BYTES,
    MemoryPlan,
    Target,
    TracedStep,
    Variation,
    check_trace,
    find_plans,
    nearest_miss,
    recommend,
)
from holdfast.forecast.plan.sharding import Sharding, StateShare, state_shares
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.extrapolation import (
    FITTED_SIZES,
    NotAlignedError,
    ScaledTrace,
    extrapolate,
    extrapolate_parameter,
)

OnProgress = Callable[[str], object]

# At most this many plans are verified per device. Planning stops at the first plan that fits.
_MOST_VERIFICATIONS = 3
# The two sizes in `FITTED_SIZES` are multiplied by each of these numbers in turn until the traces
# at both sizes have the same events. Some code takes another path below a certain batch size, so
# the traces may match at larger sizes even if they differ at small ones.
_SIZE_MULTIPLES = (1, 2, 4)
_OWN_PRECISION = (
    "this job sets its own precision with autocast, so plans use only that precision;"
    ' "fp32" means that the forecast added no autocast'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """The job to forecast, and the devices to plan for.

    Args:
        factory: The factory, as ``"module:function"`` or ``"file.py:function"``. `job.building`
            describes what it may return.
        devices: The devices to plan for.
        arguments: Arguments for the factory, keyed by the name of the parameter.
        precisions: The precisions to try: ``"fp32"``, ``"bf16"`` or ``"fp16"``. Begin with the one
            that the job uses now: among equally fast plans, earlier precisions are preferred.
        global_batch_size: The number of samples per optimizer step on all devices together, or None
            for one micro-batch per step.
        micro_batch_size: The fixed number of samples per micro-batch, or None to find the largest.
        variation: The parameter of the factory whose largest value is found, or None. It requires a
            fixed `micro_batch_size`.
        margin_bytes: How many bytes to keep free, or None for the device's default.
        sharding: How the step is distributed over GPUs, or None for a single one. Their number must
            divide the global batch size.
        verify: Whether to trace each recommended plan with its own settings.
    """

    factory: str
    devices: tuple[Device, ...]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    variation: Variation | None = None
    margin_bytes: int | None = None
    sharding: Sharding | None = None
    verify: bool = True

    def target(self, device: Device) -> Target:
        """Return the target for planning on a device with the settings of this request."""
        device_batch_size = self.global_batch_size
        if device_batch_size is not None and self.sharding is not None:
            assert device_batch_size % self.sharding.gpus == 0
            device_batch_size //= self.sharding.gpus
        return Target(
            device=device,
            global_batch_size=device_batch_size,
            micro_batch_size=self.micro_batch_size,
            variation=self.variation,
            margin_bytes=self.margin_bytes,
            sharding=self.sharding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationForecast:
    """The memory for evaluating one batch while the training state is on the device.

    Args:
        samples: The number of samples in the batch.
        live_bytes: The peak size of the tensors that are alive during the evaluation, in bytes.
        process_bytes: The device memory of the whole process in bytes, including the CUDA context
            and the allocator's cache.
        margin_bytes: How many bytes are kept free.
        fits: Whether the evaluation fits the device.
    """

    samples: int
    live_bytes: int
    process_bytes: int
    margin_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of tracing a recommended plan with its own settings.

    Args:
        live_bytes: The peak size of the tensors that are alive in this trace, in bytes.
        forecast_bytes: The peak size that was forecast for the tensors in the same step, in bytes.
        fits: Whether this trace fits the device.
        evaluation: The memory for the evaluation, or None if the factory returns no evaluation.
    """

    live_bytes: int
    forecast_bytes: int
    fits: bool
    evaluation: EvaluationForecast | None = None

    @property
    def error(self) -> float:
        """The relative error of the forecast; negative if it was too low."""
        return self.forecast_bytes / self.live_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """The plans for one device.

    Args:
        target: The device and the settings to plan for.
        rows: All plans for the device.
        best: The recommended plan, or None if no plan fits.
        shown: The plan whose memory is shown in detail: `best` or, if no plan fits, the plan that
            lacks the least memory.
        trace: The trace of the step under the plan in `shown`.
        state_shares: The model states of that step on each of several GPUs; empty for a single one.
        verification: The verification of the recommended plan. If no plan passed verification, this
            is the verification of the last plan that was tried. None if no plan was verified.
    """

    target: Target
    rows: tuple[MemoryPlan, ...]
    best: MemoryPlan | None
    shown: MemoryPlan
    trace: Trace
    state_shares: tuple[StateShare, ...] = ()
    verification: Verification | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan fits the device, and the evaluation too if there is one."""
        if self.best is None:
            return False
        evaluation = None if self.verification is None else self.verification.evaluation
        return evaluation is None or evaluation.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The answer to a `ForecastRequest`.

    Args:
        request: The request that this forecast answers.
        traced: The results of tracing the job, keyed by precision.
        plans: The plans for each device, in the order of `ForecastRequest.devices`.
        assumptions: All assumptions behind the forecast.
    """

    request: ForecastRequest
    traced: dict[str, TraceResult]
    plans: tuple[DeviceForecast, ...]
    assumptions: tuple[Assumption, ...]

    @property
    def only_evaluates(self) -> bool:
        """Whether the job trains nothing, so that the plans are for evaluating a batch."""
        return any(result.only_evaluates for result in self.traced.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedJob:
    """The result of tracing a job in one precision."""

    # What the child process returned: the traces, and facts about the job.
    result: TraceResult
    # The job's step, which can be scaled to any micro-batch size.
    step: ScaledTrace


def make_forecast(request: ForecastRequest, on_progress: OnProgress = lambda _: None) -> Forecast:
    """Trace a job and plan for each device.

    Args:
        request: The job and the devices.
        on_progress: Called with a description of each stage of the work when it begins.

    Raises:
        HoldfastError: Any error that `trace_job` raises, or H425 if the step runs different
            operations at different batch sizes.
    """
    return Forecaster(request, on_progress).forecast()


def plan_target(target: Target, steps: Mapping[str, TracedStep]) -> DeviceForecast:
    """Find the plans for a device.

    On a device without bf16 units, bf16 is ignored unless it is the only precision.

    Args:
        target: The device and the settings to plan for.
        steps: The job's step in each precision, keyed by precision.
    """
    if not target.device.has_bf16:
        without_bf16 = {name: step for name, step in steps.items() if name != "bf16"}
        steps = without_bf16 or steps
    plans = tuple(find_plans(steps, target))
    best = recommend(plans)
    shown = best or nearest_miss(plans)
    assert shown is not None, "there is a plan for each precision"
    step = steps[shown.precision]
    trace = step.with_recompute(shown.modules).at(shown.described_size)
    return DeviceForecast(
        target=target,
        rows=plans,
        best=best,
        shown=shown,
        trace=_step_in_memory(shown, step, target),
        state_shares=() if target.sharding is None else state_shares(trace, target.sharding),
    )


def _step_in_memory(plan: MemoryPlan, step: TracedStep, target: Target) -> Trace:
    """Return the trace of the step under a plan, with all memory that the step needs."""
    trace = step.with_recompute(plan.modules).at(plan.described_size)
    return target.in_memory(trace, accumulates=step.plain.accumulates)


class Forecaster:
    """Makes one forecast; see `make_forecast`.

    Args:
        request: The job and the devices.
        on_progress: Called with a description of each stage.

    Attributes:
        assumptions: The assumptions collected so far.
    """

    def __init__(self, request: ForecastRequest, on_progress: OnProgress) -> None:
        self.assumptions: list[Assumption] = []
        self._request = request
        self._on_progress = on_progress

    def forecast(self) -> Forecast:
        """Trace the job and plan for each device; see `make_forecast`."""
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
        """Trace the job in each precision. Precisions in which the step fails are left out.

        Raises:
            HoldfastError: If the step fails in every precision. This is the error from the first
                precision.
        """
        jobs: dict[str, _TracedJob] = {}
        errors: dict[str, HoldfastError] = {}
        # Trace only one precision at a time, because build() may open a port or file that two
        # processes cannot use at once.
        for precision in self._request.precisions:
            try:
                jobs[precision] = self._trace(precision)
            except HoldfastError as error:
                errors[precision] = error
                continue
            if jobs[precision].result.casts:
                # The job's own autocast overrides any autocast that the forecast adds, so the step
                # would be the same in all precisions.
                self._assume(_OWN_PRECISION)
                if "fp32" in jobs:
                    return {"fp32": jobs["fp32"]}
                return {"fp32": self._trace("fp32")}
        if not jobs:
            _raise_first(errors)
        for precision, reason in errors.items():
            self._assume(
                f"{precision} was left out because the step fails in {precision}:"
                f" {_on_one_line(reason)}"
            )
        return jobs

    def _trace_recomputed(self, precision: str, plain: ScaledTrace) -> ScaledTrace | None:
        """Trace the job with the activations of all blocks recomputed.

        Returns:
            The scalable step, or None if the model has no blocks or if the step fails with
            recomputation.
        """
        blocks = plain.template.blocks
        if not blocks:
            return None
        try:
            job = self._trace(precision, recompute=blocks)
        except HoldfastError as error:
            self._assume(
                f"no plan in {precision} recomputes activations, because tracing failed with"
                f" recomputation: {_on_one_line(error)}"
            )
            return None
        self.assumptions += job.result.assumptions
        return job.step

    def _trace(self, precision: str, recompute: tuple[str, ...] = ()) -> _TracedJob:
        """Trace the job at several sizes, from which the step at any size can be computed.

        Args:
            precision: The precision to trace in.
            recompute: Paths of the modules whose activations are recomputed.

        Raises:
            NotAlignedError: If the traces differ at every pair of batch sizes, or at the values of
                the varied parameter. The error describes the first difference.
            HoldfastError: Any error that `trace_job` raises.
        """
        request = TraceRequest(
            factory=self._request.factory,
            arguments=dict(self._request.arguments),
            precision=precision,
            recompute=recompute,
        )
        if self._request.variation is None:
            result, step = self._trace_batch_sizes(request)
        else:
            result, step = self._trace_values(request, self._request.variation)
        assumed = list(result.assumptions)
        if result.only_evaluates:
            self._check_evaluation_options()
        elif self._request.global_batch_size is not None and not result.accumulates:
            what = (
                "the step calls backward itself, so its batch was not split: the step receives"
                f" the global batch of {self._request.global_batch_size} samples at once, and"
                " no accumulated gradients are counted"
            )
            assumed.append(Assumption(what=what))
        return _TracedJob(
            result=replace(result, assumptions=tuple(assumed)),
            step=replace(step, accumulates=result.accumulates),
        )

    def _check_evaluation_options(self) -> None:
        """Refuse options that only a training step has, for a job that trains nothing (H421)."""
        option = ""
        if self._request.global_batch_size is not None:
            option = "--global-batch-size"
        if self._request.sharding is not None:
            option = "--gpus"
        if option:
            raise PolicyError(
                f"{option} for a job without an optimizer",
                limit="nothing is trained, so there is no step to divide",
                fix=f"leave out {option}, or return an optimizer and a loss_fn from build().",
                rule="H421",
            )

    def _trace_batch_sizes(self, request: TraceRequest) -> tuple[TraceResult, ScaledTrace]:
        """Trace the job at two micro-batch sizes; see `_trace`."""
        differences: list[NotAlignedError] = []
        for multiple in _SIZE_MULTIPLES:
            sizes = tuple(multiple * size for size in FITTED_SIZES)
            result = trace_job(replace(request, sizes=sizes), self._on_progress)
            try:
                step = extrapolate(result.traces)
            except NotAlignedError as error:
                differences.append(error)
                continue
            if not differences:
                return result, step
            names = " and ".join(map(str, sizes))
            what = (
                f"the forecast is extrapolated from {names} samples, because smaller batches"
                f" could not be compared: {differences[-1].what}"
            )
            assumptions = (*result.assumptions, Assumption(what=what))
            return replace(result, assumptions=assumptions), step
        raise differences[0]

    def _trace_values(
        self, request: TraceRequest, variation: Variation
    ) -> tuple[TraceResult, ScaledTrace]:
        """Trace the job at three values of a parameter of its factory; see `_trace`."""
        assert self._request.micro_batch_size is not None
        results = {}
        for value in variation.traced_values:
            self._on_progress(f"tracing with {variation.name}={value}")
            results[value] = trace_job(
                replace(
                    request,
                    arguments={**request.arguments, variation.name: value},
                    sizes=(self._request.micro_batch_size,),
                )
            )
        step = extrapolate_parameter(
            variation.name, {value: result.traces[0] for value, result in results.items()}
        )
        return results[variation.traced_values[0]], step

    # Verification.

    def verify_plan(self, plan: DeviceForecast, steps: Mapping[str, TracedStep]) -> DeviceForecast:
        """Verify the recommended plan by tracing it with its own settings.

        If the trace does not fit, the margin is raised and the next recommended plan is verified,
        up to `_MOST_VERIFICATIONS` times. Each rejected plan is recorded as an assumption.

        Args:
            plan: The plans for a device.
            steps: The job's step in each precision, keyed by precision.

        Returns:
            The plans, with the verification added. `best` is None if no plan passed.

        Raises:
            HoldfastError: If the step fails with the plan's settings.
        """
        # A trace must only fit with the original margin. Raised margins are used for planning only.
        target = plan.target
        for _ in range(_MOST_VERIFICATIONS):
            best = plan.best
            if best is None:
                return plan
            self._on_progress(
                f"verifying the plan for {target.device.name} with {_size_of(best, target)}"
            )
            step = steps[best.precision]
            try:
                verification = self._verify(best, step, target)
            except HoldfastError as error:
                if target.variation is None:
                    raise
                raise _failed_with_value(error, target.variation.name, best) from error
            plan = replace(
                plan,
                trace=_step_in_memory(best, step, target),
                verification=verification,
            )
            if verification.fits:
                return plan
            margin_bytes = _raised_margin(best, verification, target.device)
            self._assume(_why_refused(best, margin_bytes, target))
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
            # All micro-batches after the first one need the same memory, so a step with two
            # micro-batches represents a step with any larger number.
            micro_batches = 2
        arguments = dict(self._request.arguments)
        if target.variation is not None:
            arguments[target.variation.name] = plan.described_size
        result = trace_job(
            TraceRequest(
                factory=self._request.factory,
                arguments=arguments,
                precision=plan.precision,
                sizes=(plan.micro_batch_size,),
                recompute=plan.modules,
                gradient_accumulation_steps=micro_batches,
                traces_evaluation=True,
            )
        )
        trace = target.sharded(result.traces[0])
        traced_target = replace(target, global_batch_size=micro_batches * plan.micro_batch_size)
        forecast = _step_in_memory(plan, step, traced_target)
        return Verification(
            live_bytes=live_peak(trace, GRANULE_BYTES),
            forecast_bytes=live_peak(forecast, GRANULE_BYTES),
            fits=check_trace(trace, target).fits,
            evaluation=_evaluation_in_memory(result.evaluation, target),
        )


def _evaluation_in_memory(trace: Trace | None, target: Target) -> EvaluationForecast | None:
    """Return the memory that a traced evaluation needs, or None if there is no evaluation."""
    if trace is None:
        return None
    trace = target.sharded(trace)
    fit = check_trace(trace, target)
    return EvaluationForecast(
        samples=trace.micro_batch_size,
        live_bytes=live_peak(trace, GRANULE_BYTES),
        process_bytes=fit.process_bytes,
        margin_bytes=fit.margin_bytes,
        fits=fit.fits,
    )


def _raised_margin(plan: MemoryPlan, verification: Verification, device: Device) -> int:
    """Return the margin plus the amount by which the forecast was too low, or double the margin.

    The larger of the two is returned. Doubling the margin helps if the forecast was right, but the
    traced order of allocations causes more fragmentation than the extrapolated one.
    """
    too_low = 1 - verification.forecast_bytes / verification.live_bytes
    missing_bytes = int(too_low * (device.available_bytes - plan.margin_bytes))
    return plan.margin_bytes + max(plan.margin_bytes, missing_bytes)


def _size_of(plan: MemoryPlan, target: Target) -> str:
    text = f"micro-batches of {plan.micro_batch_size}"
    if target.variation is None:
        return text
    return f"{target.variation.name}={plan.value} and {text}"


def _why_refused(plan: MemoryPlan, margin_bytes: int, target: Target) -> str:
    settings = f"{_size_of(plan, target)} in {plan.precision}"
    if plan.modules:
        settings += f" with {len(plan.modules)} modules recomputed"
    return (
        f"a plan for {target.device.name} was rejected: {settings} did not fit when traced, so the"
        f" margin was raised to {margin_bytes / GIB:.2f} GiB"
    )


def _failed_with_value(error: HoldfastError, name: str, plan: MemoryPlan) -> HoldfastError:
    """Return the error for a step that fails with a value that would fit the device.

    Many models have a largest value, such as the number of positions in a table.
    """
    return type(error)(
        f"{name}={plan.value} would fit {plan.device}, but the step fails with it: {error.what}",
        limit=error.limit,
        fix=(
            f"if the model limits {name}, plan with that limit, which needs less memory:"
            f" --set {name}=LIMIT instead of --vary {name}. Otherwise, make the model work with any"
            f" {name}."
        ),
        rule=error.rule,
    )


def _raise_first(errors: Mapping[str, HoldfastError]) -> None:
    """Raise the first error. If the forecast added autocast, the message mentions autocast."""
    precision, error = next(iter(errors.items()))
    if precision == "fp32":
        raise error
    what = f"{error.what} (in {precision}, under autocast)"
    raise type(error)(what, limit=error.limit, fix=error.fix, rule=error.rule) from error


def _on_one_line(error: HoldfastError) -> str:
    return " ".join(error.what.split())
