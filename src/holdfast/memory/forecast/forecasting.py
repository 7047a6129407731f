"""A whole forecast: trace a job with each precision, plan for each device, trace once more what is recommended.

Does not: print or draw (``cli.plan``, ``report.memory_page``), or run anything of the user's in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from holdfast.memory.forecast.accumulation import with_accumulation
from holdfast.memory.forecast.devices import Device, known_devices
from holdfast.memory.forecast.extrapolation import NotAlignedError, fit, needed_points
from holdfast.memory.forecast.planning import (
    GRANULE_BYTES,
    Question,
    Row,
    Steps,
    check_row,
    nearest_miss,
    plan_rows,
    recommended,
)
from holdfast.memory.forecast.recomputation import with_recompute
from holdfast.memory.forecast.trace import Assumption, Trace, live_peak
from holdfast.memory.forecast.tracing import Progress, TraceRequest, TraceResult, trace_job

_CHILDREN = 2  # at a time: each takes a core, and for a model of 7 billion parameters half a GiB of memory
_LARGER = 2  # times that batches are doubled; then 8 and 16 samples are traced
_TRIALS = 3  # recommended plans that are traced until one holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be forecast.

    Args:
        factory: ``"module:function"`` or ``"file.py:function"``; see ``jobs`` for what it may return.
        devices: For which to plan.
        precisions: Each ``"fp32"``, ``"bf16"`` or ``"fp16"``; the first is what the job has now.
        global_batch_size: Samples of one optimizer step; None: whatever fits at once.
        longest: Length of the longest sample to plan for; None: as in the sample batch.
        margin_bytes: What to keep free; None for a default by device.
        max_grad_norm: Norm to which gradients are clipped; None: they are not.
        verify: Whether the recommended plan is traced once more.
    """

    factory: str
    devices: tuple[Device, ...]
    precisions: tuple[str, ...] = ("fp32", "bf16")
    global_batch_size: int | None = None
    longest: int | None = None
    margin_bytes: int | None = None
    max_grad_norm: float | None = None
    verify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one more trace, made with the plan's own settings, says.

    Args:
        live_bytes: The most that tensors held at once in it.
        forecast_bytes: What was forecast for the same step.
        fits: Whether it fits the device.
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

    Args:
        question: What was asked of it.
        rows: Every plan.
        best: The one to take; None if none fits.
        trace: The step of `best`, or of the plan that misses least, as memory sees it.
        shown: That plan.
        verification: Of `best`; None if it was not traced.
        would_do: Where none fits: the smallest device of the catalogue that takes the one that misses least.
    """

    question: Question
    rows: tuple[Row, ...]
    best: Row | None
    trace: Trace
    shown: Row
    verification: Verification | None = None
    would_do: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The answer to an `Order`.

    Args:
        order: What was asked.
        traced: What tracing found, by precision.
        plans: One for each device.
        assumptions: What had to be taken for granted, each once.
    """

    order: Order
    traced: dict[str, TraceResult]
    plans: tuple[DevicePlan, ...]
    assumptions: tuple[Assumption, ...]


class Watcher:
    """Is told how far a forecast is; this one ignores it."""

    def traced(self, precision: str, progress: Progress) -> None:
        """A step is being traced."""

    def planned(self, row: Row) -> None:
        """A plan is known."""

    def verifies(self, row: Row) -> None:
        """A plan is being traced once more."""


def make_forecast(order: Order, watcher: Watcher | None = None) -> Forecast:
    """Trace and plan.

    Args:
        order: What to forecast.
        watcher: Told how far it is, from several threads.

    Raises:
        HoldfastError: What `tracing.trace_job` raises; H425 if batches of different sizes do different things.
    """
    watcher = watcher or Watcher()
    with ThreadPoolExecutor(_CHILDREN) as pool:
        found = pool.map(lambda precision: _traced(order, precision, watcher), order.precisions)
        jobs = dict(zip(order.precisions, found, strict=True))
    steps = {precision: step for precision, (_, step) in jobs.items()}
    plans = []
    for device in order.devices:
        plan = plan_device(order, device, steps, watcher)
        plans.append(_verified(order, plan, steps, watcher) if order.verify else plan)
    results = [result for result, _ in jobs.values()]
    said = [one for result in results for one in result.assumptions]
    said += [one for plan in plans for one in plan.trace.assumptions]
    said += [_without_bf16(device) for device in order.devices if "bf16" in steps and not has_bf16(device)]
    return Forecast(
        order=order,
        traced={precision: result for precision, (result, _) in jobs.items()},
        plans=tuple(plans),
        assumptions=tuple(dict.fromkeys(said)),
    )


def _traced(order: Order, precision: str, watcher: Watcher) -> tuple[TraceResult, Steps]:
    """Return what tracing found, and the step at any size."""
    failed: list[NotAlignedError] = []
    for request in _requests(order, precision):
        result = trace_job(request, lambda progress: watcher.traced(precision, progress))
        try:
            scaled = fit(result.traces)
            break
        except NotAlignedError as error:
            failed.append(error)
    else:
        raise failed[0]
    if failed:
        sizes, at = " and ".join(map(str, request.sizes)), f" of length {order.longest}" if request.lengths else ""
        said = f"the forecast is made from {sizes} samples{at}, since otherwise {failed[-1].what}"
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    if order.global_batch_size is not None and not result.accumulates:
        said = (
            f"the step calls backward itself, so that a global batch of {order.global_batch_size} samples is not cut"
            " for it: gradients of earlier micro-batches were not counted"
        )
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    return result, Steps(whole=scaled, accumulates=result.accumulates)


def _requests(order: Order, precision: str) -> Iterator[TraceRequest]:
    """Yield what to trace, and what else if the traces are not alike: one length only, larger batches.

    Kernels go other ways from some size on, so that larger batches may be alike where small ones are not.
    """
    points = needed_points(order.longest)
    request = TraceRequest(
        factory=order.factory,
        precision=precision,
        sizes=tuple(sorted({size for size, _ in points})),
        lengths=tuple(sorted({length for _, length in points if length is not None})),
        max_grad_norm=order.max_grad_norm,
    )
    yield request
    if order.longest is not None:
        request = replace(request, lengths=(order.longest,))
        yield request
    for _ in range(_LARGER):
        request = replace(request, sizes=tuple(2 * size for size in request.sizes))
        yield request


def plan_device(order: Order, device: Device, steps: dict[str, Steps], watcher: Watcher | None = None) -> DevicePlan:
    """Return what fits a device.

    Args:
        order: What is asked.
        device: Of those that are asked about.
        steps: The step by precision.
        watcher: Told of each plan.
    """
    question = Question(
        device=device,
        global_batch_size=order.global_batch_size,
        length=order.longest,
        margin_bytes=order.margin_bytes,
    )
    suited = {name: step for name, step in steps.items() if name != "bf16" or has_bf16(device)} or steps
    rows = tuple(plan_rows(suited, question, (watcher or Watcher()).planned))
    best = recommended(rows)
    shown = best or nearest_miss(rows)
    assert shown is not None, "there is a plan for each precision"
    return DevicePlan(
        question=question,
        rows=rows,
        best=best,
        trace=step_of(shown, steps[shown.precision], question),
        shown=shown,
        would_do=None if best else _find_device(shown, steps[shown.precision], question),
    )


def has_bf16(device: Device) -> bool:
    """Return whether a device computes in bf16: those of NVIDIA do from Ampere on (compute capability 8.0)."""
    return device.capability is None or device.capability >= (8, 0)


def _without_bf16(device: Device) -> Assumption:
    return Assumption(
        what=f"{device.name} has no units for bf16, and computes attention otherwise with it, in more memory: plans"
        " with bf16 are left out for it unless nothing else was asked for; plan with --precision fp16"
    )


def step_of(row: Row, step: Steps, question: Question, global_batch_size: int | None = None) -> Trace:
    """Return the step of a plan as memory sees it.

    Args:
        row: The plan.
        step: At any size.
        question: What the plan answers.
        global_batch_size: In place of that of the question.
    """
    trace = step.whole.at(max(1, row.micro_batch_size), question.length)
    trace = with_recompute(trace, row.modules) if row.modules else trace
    total = global_batch_size or question.global_batch_size
    return with_accumulation(trace, total) if step.accumulates and total is not None else trace


def _find_device(row: Row, step: Steps, question: Question) -> str | None:
    """Return the smallest device of the catalogue that takes one sample by a plan."""
    for device in sorted(known_devices(), key=lambda device: device.available_bytes):
        if device.available_bytes > question.device.available_bytes:
            there = replace(question, device=device)
            fit, _ = check_row(row, step_of(row, step, there), there)
            if fit.fits:
                return device.name
    return None


def _verified(order: Order, plan: DevicePlan, steps: dict[str, Steps], watcher: Watcher) -> DevicePlan:
    """Return the plan with what one more trace says; if that one does not fit, the next best that does."""
    rows: Sequence[Row] = plan.rows
    for _ in range(_TRIALS):
        row = recommended(rows)
        if row is None:
            break
        watcher.verifies(row)
        step = steps[row.precision]
        found = _verify(order, row, step, plan.question)
        plan = replace(plan, best=row, shown=row, trace=step_of(row, step, plan.question), verification=found)
        if found.fits:
            return plan
        rows = [other for other in rows if other is not row]
    return replace(plan, best=None)


def _verify(order: Order, row: Row, step: Steps, question: Question) -> Verification:
    total = question.global_batch_size
    count = 2 if step.accumulates and total is not None and total > row.micro_batch_size else 1
    result = trace_job(
        TraceRequest(
            factory=order.factory,
            precision=row.precision,
            sizes=(row.micro_batch_size,),
            lengths=() if question.length is None else (question.length,),
            recompute=row.modules,
            gradient_accumulation_steps=count,
            max_grad_norm=order.max_grad_norm,
        )
    )
    fits, live_bytes = check_row(row, result.traces[0], question)
    forecast = step_of(row, step, question, count * row.micro_batch_size)
    return Verification(
        live_bytes=live_bytes, forecast_bytes=live_peak(forecast, row.optimizer, GRANULE_BYTES), fits=fits.fits
    )
