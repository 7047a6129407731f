"""A whole forecast.

Trace a job in each precision, plan for each device, trace once more what is recommended.

A plan that does not fit when it is traced raises the margin, and everything is planned again with
that. Nothing of the user's runs in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.core.errors import HoldfastError
from holdfast.forecast.devices.catalogue import GIB, Device
from holdfast.forecast.job.tracing import TraceRequest, TraceResult, trace_job
from holdfast.forecast.plan.planning import (
    GRANULE_BYTES,
    Question,
    Row,
    Step,
    check_trace,
    nearest_miss,
    plan_rows,
    recommended,
)
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.extrapolation import FITTED_SIZES, NotAlignedError, ScaledTrace, fit

_TRIALS = 3  # recommended plans that are traced until one holds
_OWN_PRECISION = (
    "this job sets its own precision by an autocast in its code: no other is planned for, and"
    ' "fp32" means that nothing is added to it'
)
# The sizes that are traced. Kernels go other ways from some size on: larger batches may be alike
# where small are not.
_TIMES = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be forecast.

    Args:
        factory: ``"module:function"`` or ``"file.py:function"``; see ``jobs`` for what it may
            return.
        precisions: Each ``"fp32"``, ``"bf16"`` or ``"fp16"``; the first is what the job has now.
        margin_bytes: What to keep free; None for a default by device.
    """

    factory: str
    devices: tuple[Device, ...]
    precisions: tuple[str, ...] = ("fp32", "bf16")
    global_batch_size: int | None = None
    margin_bytes: int | None = None
    verify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one more trace, made with the plan's own settings, says beside what was forecast for
    the same step.
    """

    live_bytes: int
    forecast_bytes: int
    fits: bool

    @property
    def error(self) -> float:
        """Return by what share the forecast was too high; below 0: too low."""
        return self.forecast_bytes / self.live_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What fits a device.

    Every plan, the `best` (None if none fits), and the one whose step `trace` is.

    `verification` is of the best, or of the last that was tried and did not hold.
    """

    question: Question
    rows: tuple[Row, ...]
    best: Row | None
    trace: Trace
    shown: Row
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The answer to an `Order`.

    What was traced by precision, a plan for each device, what was taken for granted.
    """

    order: Order
    traced: dict[str, TraceResult]
    plans: tuple[DevicePlan, ...]
    assumptions: tuple[Assumption, ...]


def make_forecast(order: Order, say: Callable[[str], object] = lambda _: None) -> Forecast:
    """Trace and plan; `say` is called with what is being done.

    Raises what `tracing.trace_job` raises.
    """
    jobs, said = _all_traced(order, say)
    steps = {
        precision: Step(
            plain=step,
            recomputed=functools.cache(
                functools.partial(_recomputed, order, precision, step, say, said)
            ),
        )
        for precision, (_, step) in jobs.items()
    }
    plans = []
    for device in order.devices:
        plan = plan_device(order, device, steps, say)
        plans.append(verified(order, plan, steps, say, said) if order.verify else plan)
    results = [result for result, _ in jobs.values()]
    said += [one for result in results for one in result.assumptions]
    said += [one for plan in plans for one in plan.trace.assumptions]
    slow = [device.name for device in order.devices if "bf16" in steps and not has_bf16(device)]
    said += [
        Assumption(what=f"{name} has no units for bf16: other plans are preferred to those in it")
        for name in slow
    ]
    return Forecast(
        order=order,
        traced={precision: result for precision, (result, _) in jobs.items()},
        plans=tuple(plans),
        assumptions=tuple(dict.fromkeys(said)),
    )


_Traced = tuple[TraceResult, ScaledTrace]


def _all_traced(
    order: Order, say: Callable[[str], object]
) -> tuple[dict[str, _Traced], list[Assumption]]:
    """Return the step in each precision in which it runs, and what is said of the others.

    If it runs in none, the error of the first is raised.
    """
    jobs: dict[str, _Traced] = {}
    errors: dict[str, HoldfastError] = {}
    # One after another: build() may open a port, or write a file, that it needs
    for precision in order.precisions:
        try:
            jobs[precision] = _traced(order, precision, say)
        except HoldfastError as error:
            errors[precision] = error
        if precision in jobs and jobs[precision][0].casts:
            own = jobs["fp32"] if "fp32" in jobs else _traced(order, "fp32", say)
            return {"fp32": own}, [Assumption(what=_OWN_PRECISION)]
    if not jobs:
        precision, first = next(iter(errors.items()))
        if precision == "fp32":
            raise first
        what = f"{first.what} (in {precision}, under autocast)"
        raise type(first)(what, limit=first.limit, fix=first.fix, rule=first.rule) from first
    left_out = (
        f"{precision} was left out, since there {one_line(error)}"
        for precision, error in errors.items()
    )
    return jobs, [Assumption(what=what) for what in left_out]


def _recomputed(
    order: Order,
    precision: str,
    plain: ScaledTrace,
    say: Callable[[str], object],
    said: list[Assumption],
) -> tuple[ScaledTrace, tuple[str, ...]] | None:
    """Return the step with all its blocks recomputed, and their names.

    None without any, or if it does not run so.
    """
    blocks = plain.template.blocks
    if not blocks:
        return None
    try:
        result, step = _traced(order, precision, say, recompute=blocks)
    except HoldfastError as error:
        what = f"no plan in {precision} recomputes blocks, since then {one_line(error)}"
        said.append(Assumption(what=what))
        return None
    said += result.assumptions
    return step, blocks


def _traced(
    order: Order, precision: str, say: Callable[[str], object], recompute: tuple[str, ...] = ()
) -> _Traced:
    """Return what tracing found, and the step at any size."""
    failed: list[NotAlignedError] = []
    for times in _TIMES:
        request = TraceRequest(
            factory=order.factory,
            precision=precision,
            sizes=tuple(times * size for size in FITTED_SIZES),
            recompute=recompute,
        )
        result = trace_job(request, say)
        try:
            whole = fit(result.traces)
            break
        except NotAlignedError as error:
            failed.append(error)
    else:
        raise failed[0]
    if failed:
        sizes = " and ".join(map(str, request.sizes))
        said = f"the forecast is made from {sizes} samples, since otherwise {failed[-1].what}"
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    if order.global_batch_size is not None and not result.accumulates:
        said = (
            f"the step calls backward itself, so that a global batch of {order.global_batch_size}"
            " samples is not cut for it: gradients of earlier micro-batches were not counted"
        )
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    return result, replace(whole, accumulates=result.accumulates)


def plan_device(
    order: Order,
    device: Device,
    steps: dict[str, Step],
    say: Callable[[str], object] = lambda _: None,
) -> DevicePlan:
    """Return what fits a device."""
    question = Question(
        device=device, global_batch_size=order.global_batch_size, margin_bytes=order.margin_bytes
    )
    suited = {
        name: step for name, step in steps.items() if name != "bf16" or has_bf16(device)
    } or steps
    say(f"planning for {device.name}")
    rows = tuple(plan_rows(suited, question))
    best = recommended(rows)
    shown = best or nearest_miss(rows)
    assert shown is not None, "there is a plan for each precision"
    return DevicePlan(
        question=question,
        rows=rows,
        best=best,
        trace=step_of(shown, steps[shown.precision], question),
        shown=shown,
    )


def has_bf16(device: Device) -> bool:
    """Return whether a device computes in bf16.

    Those of NVIDIA do from Ampere on (compute capability 8.0).
    """
    return device.capability is None or device.capability >= (8, 0)


def step_of(
    row: Row, step: Step, question: Question, global_batch_size: int | None = None
) -> Trace:
    """Return the step of a plan as memory sees it."""
    trace = step.of(row.modules).at(max(1, row.micro_batch_size))
    total = global_batch_size or question.global_batch_size
    return (
        with_accumulation(trace, total) if step.plain.accumulates and total is not None else trace
    )


def verified(
    order: Order,
    plan: DevicePlan,
    steps: dict[str, Step],
    say: Callable[[str], object],
    said: list[Assumption],
) -> DevicePlan:
    """Return the plan with what one more trace says.

    If that one does not fit, one with a larger margin that does.

    What is said of plans that were refused is added to `said`. One that does not run when it is
    traced is an error.
    """
    # A trace has to fit with the margin that was asked for
    question, device = plan.question, plan.question.device
    for _ in range(_TRIALS):
        row = plan.best
        if row is None:
            return plan
        say(f"tracing micro-batches of {row.micro_batch_size} for {device.name} once more")
        step = steps[row.precision]
        found = _verify(order, row, step, question)
        plan = replace(plan, trace=step_of(row, step, question), verification=found)
        if found.fits:
            return plan
        # By the share by which it was wrong, and where that is none (its blocks lie otherwise) as
        # much again.
        wrong = (1 - found.forecast_bytes / found.live_bytes) * (
            device.available_bytes - row.margin_bytes
        )
        margin = row.margin_bytes + max(row.margin_bytes, int(wrong))
        why = f"did not fit when it was traced, so that {margin / GIB:.2f} GiB were kept free"
        recomputed = f", {len(row.modules)} modules recomputed" if row.modules else ""
        which = f"micro-batches of {row.micro_batch_size} in {row.precision}{recomputed}"
        said.append(Assumption(what=f"left out for {device.name}: {which} {why}"))
        order = replace(order, margin_bytes=margin)
        following = plan_device(order, device, steps, say)
        if following.best is None:
            break
        plan = following
    return replace(plan, best=None)


def _verify(order: Order, row: Row, step: Step, question: Question) -> Verification:
    total = question.global_batch_size
    count = (
        2 if step.plain.accumulates and total is not None and total > row.micro_batch_size else 1
    )
    result = trace_job(
        TraceRequest(
            factory=order.factory,
            precision=row.precision,
            sizes=(row.micro_batch_size,),
            recompute=row.modules,
            gradient_accumulation_steps=count,
        )
    )
    fits, live_bytes = check_trace(result.traces[0], question)
    forecast = step_of(row, step, question, count * row.micro_batch_size)
    return Verification(
        live_bytes=live_bytes, forecast_bytes=live_peak(forecast, GRANULE_BYTES), fits=fits.fits
    )


def one_line(error: HoldfastError) -> str:
    """Return what an error says, on one line."""
    return " ".join(error.what.split())
