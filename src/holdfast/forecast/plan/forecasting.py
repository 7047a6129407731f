"""A whole forecast: trace a job with each precision, plan for each device, trace once more what is recommended.

Does not: print or draw (``cli.plan``, ``report.memory_page``), or run anything of the user's in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.job.tracing import TraceRequest, TraceResult, trace_job
from holdfast.forecast.plan.device_plans import (
    DevicePlan,
    Order,
    Watcher,
    has_bf16,
    one_line,
    plan_device,
    verified,
    without_bf16,
)
from holdfast.forecast.plan.planning import MOST_SAMPLES, Steps
from holdfast.forecast.trace.events import Assumption
from holdfast.forecast.trace.extrapolation import NotAlignedError, ScaledTrace, fit, needed_points
from holdfast.forecast.trace.traced_sizes import TracedSizes, has_a_tensor_for_each_sample, sizes_to_trace

_OWN_PRECISION = (
    'this job sets its own precision by an autocast in its code: no other is planned for, and "fp32" means that'
    " nothing is added to it"
)
_LARGER = 2  # times that batches are doubled; then 8 and 16 samples are traced


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


def make_forecast(order: Order, watcher: Watcher | None = None) -> Forecast:
    """Trace and plan.

    Args:
        order: What to forecast.
        watcher: Told how far it is.

    Raises:
        HoldfastError: What `tracing.trace_job` raises.
    """
    watcher = watcher or Watcher()
    _check_place(order.factory)
    jobs, said = _all_traced(order, watcher)
    steps = {precision: step for precision, (_, step) in jobs.items()}
    plans = []
    for device in order.devices:
        plan = plan_device(order, device, steps, watcher)
        plans.append(verified(order, plan, steps, watcher, said) if order.verify else plan)
    results = [result for result, _ in jobs.values()]
    said += [one for result in results for one in result.assumptions]
    said += [one for plan in plans for one in plan.trace.assumptions]
    largest = max(row.micro_batch_size for plan in plans for row in plan.rows)
    if order.global_batch_size is None and largest == MOST_SAMPLES:
        said.append(Assumption(what=f"micro-batches of more than {MOST_SAMPLES} samples were not looked for"))
    said += [without_bf16(device) for device in order.devices if "bf16" in steps and not has_bf16(device)]
    return Forecast(
        order=order,
        traced={precision: result for precision, (result, _) in jobs.items()},
        plans=tuple(plans),
        assumptions=tuple(dict.fromkeys(said)),
    )


def _check_place(factory: str) -> None:
    """Find out whether a file is there at all, before a process is started to import it.

    Raises:
        PolicyError: H411.
    """
    place, _, _ = factory.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise PolicyError(
            f"{place} is not there",
            limit=f"the function of {factory!r} is read from that file",
            fix="write file.py:function with the file's path from here, or package.module:function.",
            rule="H411",
        )


_Traced = tuple[TraceResult, Steps]


def _all_traced(order: Order, watcher: Watcher) -> tuple[dict[str, _Traced], list[Assumption]]:
    """Return the step in each precision in which it runs, and what is said of the others.

    Raises:
        HoldfastError: It runs in none; that of the first.
    """
    jobs: dict[str, _Traced] = {}
    errors: dict[str, HoldfastError] = {}
    for precision in order.precisions:  # one after another: build() may open a port, or write a file, that it needs
        try:
            jobs[precision] = _traced(order, precision, watcher)
        except HoldfastError as error:
            errors[precision] = error
        if precision in jobs and jobs[precision][0].casts:
            own = jobs["fp32"] if "fp32" in jobs else _traced(order, "fp32", watcher)
            return {"fp32": own}, [Assumption(what=_OWN_PRECISION)]
    if not jobs:
        precision, first = next(iter(errors.items()))
        if precision == "fp32":
            raise first
        what = f"{first.what} (in {precision}, under autocast)"
        raise type(first)(what, limit=first.limit, fix=first.fix, rule=first.rule) from first
    left_out = (f"{precision} was left out, since there {one_line(error)}" for precision, error in errors.items())
    return jobs, [Assumption(what=what) for what in left_out]


def _traced(order: Order, precision: str, watcher: Watcher) -> _Traced:
    """Return what tracing found, and the step at any size."""
    whole: ScaledTrace | TracedSizes | None = None
    failed: list[NotAlignedError] = []
    for request in _requests(order, precision):
        result = trace_job(request, lambda progress: watcher.traced(precision, progress))
        try:
            whole = fit(result.traces)
            break
        except NotAlignedError as error:
            failed.append(error)
            if has_a_tensor_for_each_sample(result.traces):
                break
    if whole is None:
        lengths = () if order.longest is None else (order.longest,)
        request = replace(request, sizes=sizes_to_trace(order.global_batch_size), lengths=lengths)
        result = trace_job(request, lambda progress: watcher.traced(precision, progress))
        whole = TracedSizes(traces=result.traces)
        result = replace(result, assumptions=whole.template.assumptions)  # each size says the same of other counts
    if failed:
        traced = sorted({one.micro_batch_size for one in result.traces})  # more than was asked for, if few do not run
        sizes, at = " and ".join(map(str, traced)), f" of length {order.longest}" if request.lengths else ""
        only = " and planned for no others" if isinstance(whole, TracedSizes) else ""
        said = f"the forecast is made from {sizes} samples{at}{only}, since otherwise {failed[-1].what}"
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    if order.global_batch_size is not None and not result.accumulates:
        said = (
            f"the step calls backward itself, so that a global batch of {order.global_batch_size} samples is not cut"
            " for it: gradients of earlier micro-batches were not counted"
        )
        result = replace(result, assumptions=(*result.assumptions, Assumption(what=said)))
    return result, Steps(whole=whole, accumulates=result.accumulates, answers=result.answers)


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
