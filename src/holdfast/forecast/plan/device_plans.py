"""What fits one device: its table of plans, the one to take, and one more trace of that.

A plan that does not fit when it is traced raises the margin, and everything is planned again with that.

Does not: trace a job for the first time (``forecasting``), or search for one plan (``planning``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.errors import HoldfastError
from holdfast.forecast.devices.catalogue import GIB, Device, known_devices
from holdfast.forecast.job.tracing import Progress, TraceRequest, trace_job
from holdfast.forecast.plan.planning import (
    GRANULE_BYTES,
    Question,
    Row,
    Steps,
    check_row,
    nearest_miss,
    plan_rows,
    recommended,
)
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.recomputation import with_recompute

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


class Watcher:
    """Is told how far a forecast is; this one ignores it."""

    def traced(self, precision: str, progress: Progress) -> None:
        """A step is being traced."""

    def planned(self, row: Row) -> None:
        """A plan is known."""

    def verifies(self, row: Row) -> None:
        """A plan is being traced once more."""


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


def without_bf16(device: Device) -> Assumption:
    """Return what is to be said of a device that has no bf16."""
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


def verified(
    order: Order, plan: DevicePlan, steps: dict[str, Steps], watcher: Watcher, said: list[Assumption]
) -> DevicePlan:
    """Return the plan with what one more trace says; if that one does not fit or run, another that does.

    Args:
        order: What was asked.
        plan: For a device.
        steps: The step by precision.
        watcher: Told of each plan that is traced.
        said: Plans that were refused are added.

    Raises:
        HoldfastError: None of those that were tried runs; that of the first.
    """
    question, device = plan.question, plan.question.device  # a trace has to fit with the margin that was asked for
    failed: list[HoldfastError] = []
    useless: list[Row] = []
    for _ in range(_TRIALS):
        plan = replace(plan, rows=tuple(row for row in plan.rows if not any(_like(row, one) for one in useless)))
        row = recommended(plan.rows)
        if row is None:
            break
        watcher.verifies(row)
        step = steps[row.precision]
        try:
            found = _verify(order, row, step, question)
        except HoldfastError as error:
            failed.append(error)
            useless.append(row)
            why = f"could not be traced: {one_line(error)}"
        else:
            plan = replace(plan, best=row, shown=row, trace=step_of(row, step, question), verification=found)
            if found.fits:
                return plan
            # By the share by which it was wrong, and where that is none (its blocks lie otherwise) as much again.
            wrong = (1 - found.forecast_bytes / found.live_bytes) * (device.available_bytes - row.margin_bytes)
            margin = row.margin_bytes + max(row.margin_bytes, int(wrong))
            order = replace(order, margin_bytes=margin)
            why = f"did not fit when it was traced, so that {margin / GIB:.2f} GiB were kept free"
            refused, plan = plan, plan_device(order, device, steps, watcher)
            if plan.best is None:
                plan = replace(refused, rows=plan.rows)
        said.append(Assumption(what=f"left out for {device.name}: {_described(row)} {why}"))
    if failed and plan.verification is None:
        raise failed[0]
    return replace(plan, best=None)


def _like(other: Row, row: Row) -> bool:
    """Return whether a plan would fail as another one that did not run: with the same modules, or the same size."""
    if row.modules:
        return other.modules == row.modules
    return other.micro_batch_size == row.micro_batch_size


def _described(row: Row) -> str:
    recomputed = f", {len(row.modules)} modules recomputed" if row.modules else ""
    return f"micro-batches of {row.micro_batch_size} in {row.precision}, {row.optimizer}{recomputed}"


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
            answers=step.answers,
        )
    )
    fits, live_bytes = check_row(row, result.traces[0], question)
    forecast = step_of(row, step, question, count * row.micro_batch_size)
    return Verification(
        live_bytes=live_bytes, forecast_bytes=live_peak(forecast, row.optimizer, GRANULE_BYTES), fits=fits.fits
    )


def one_line(error: HoldfastError) -> str:
    """Return what an error says, on one line."""
    return " ".join(error.what.split())
