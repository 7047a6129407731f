"""The words of a forecast that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.errors import OutOfMemoryError
from holdfast.forecast.devices.catalogue import GIB
from holdfast.forecast.plan.forecasting import DevicePlan, Forecast, Order, Verification
from holdfast.forecast.plan.planning import Row
from holdfast.forecast.trace.events import Assumption

COLUMNS = ("precision", "optimizer", "recompute", "allocator", "micro-batch", "peak", "margin", "time")
"""Of the table; the first four are words, the others figures."""

LEGEND = (
    "micro-batch: the largest that fits, in samples. peak: what the process takes of the device, context included;"
    " the margin is kept free beside it. time: for a sample, as a multiple of the fastest, from the device's rates."
)


def cells(row: Row, relative: float) -> tuple[str, ...]:
    """Return a row of the table, in the order of `COLUMNS`."""
    return (
        row.precision,
        row.optimizer,
        _blocks(row) if row.recompute == "some" else row.recompute,
        row.allocator.removesuffix(":True").replace("_", " ") or "default",
        str(row.micro_batch_size) if row.fits else "none",
        gib(row.process_bytes) if row.fits else f"{gib(row.missing_bytes)} too few",
        gib(row.margin_bytes),
        f"{relative:.2f}" if row.fits else "",
    )


def sources(plan: DevicePlan) -> str:
    """Return where the figures of a device are from."""
    device = plan.question.device
    if device.measured:
        return "measured by holdfast calibrate"
    figures = {
        "usable": f"usable {gib(device.usable_bytes)}",
        "context": f"context {gib(device.context_bytes)}",
        "rates": "rates",
    }
    return "; ".join(f"{text} ({device.sources[name]})" for name, text in figures.items() if name in device.sources)


def named(row: Row) -> str:
    """Return a plan in words."""
    recomputed = {"none": "nothing", "some": _blocks(row), "all": "all blocks"}[row.recompute]
    parts = [row.precision, row.optimizer, f"{recomputed} recomputed", row.allocator]
    return ", ".join(part for part in parts if part)


def _blocks(row: Row) -> str:
    return "1 block" if len(row.modules) == 1 else f"{len(row.modules)} blocks"


def gib(size: float) -> str:
    """Return a number of bytes in GiB, a small one in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def beside_the_policy(forecast: Forecast, row: Row) -> Iterable[str]:
    """Yield what a plan needs that is no field of a policy."""
    keyword = row.optimizer_keyword()
    if keyword:
        names = sorted(set(forecast.traced[row.precision].optimizers.values()))
        yield f"{' and '.join(names)}(..., {keyword})"
    if setting := row.allocator:
        yield f"export PYTORCH_ALLOC_CONF={setting}"


def command_of(order: Order) -> str:
    """Return the command that makes a forecast again; of a file of lengths only the longest is known."""
    asked = [f"holdfast plan {order.factory}", *(f'--device "{device.name}"' for device in order.devices)]
    asked.append(f"--precision {','.join(order.precisions)}")
    asked += [] if order.global_batch_size is None else [f"--global-batch-size {order.global_batch_size}"]
    asked += [] if order.margin_bytes is None else [f"--margin {order.margin_bytes / 2**20:g}MiB"]
    asked += [] if order.max_grad_norm is None else [f"--max-grad-norm {order.max_grad_norm:g}"]
    asked += [] if order.longest is None else [f"--lengths FILE (the longest: {order.longest})"]
    return " ".join(asked)


def margin_of(plan: DevicePlan) -> str:
    """Return what a plan's margin is made of; empty where it is only what no forecast can know."""
    open_bytes = 0 if plan.question.margin_bytes is not None else plan.trace.uncalibrated_bytes
    if not open_bytes:
        return ""
    return (
        f"of its margin {gib(open_bytes)} are for what operators may allocate while they run and no table knows;"
        " --margin SIZE sets another"
    )


def what_is_missing(plan: DevicePlan) -> str:
    """Return why nothing fits a device, and what would do."""
    row, device = plan.shown, plan.question.device
    if row.fits:
        return _no_plan(
            f"Nothing holds on {device.name}",
            "plans were found, and traced once more none of them fitted",
            "keep more free with --margin.",
        )
    needed = device.usable_bytes + row.missing_bytes
    larger = plan.would_do or "none of the catalogue"
    return _no_plan(
        f"Nothing fits {device.name}, not even one sample",
        f"it has {gib(device.usable_bytes)}, and what needs least ({named(row)}) needs {gib(needed)} with its "
        f"margin, {gib(row.missing_bytes)} more",
        f"the smallest device that would do: {larger}; or a smaller model, an optimizer with less state, or shorter "
        "samples.",
    )


def _no_plan(what: str, limit: str, fix: str) -> str:
    """Return the words of an error that ends a command with an answer: exit code 1, not 2."""
    return str(OutOfMemoryError(what, limit=limit, fix=fix, rule="H420"))


def assumptions(said: Iterable[Assumption]) -> list[str]:
    """Return sentences, each with the lines of code that it is about; those of every forecast come last."""
    lines: dict[str, list[str]] = {}
    for one in said:
        lines.setdefault(one.what, []).extend([one.line] if one.line else [])
    sentences = [
        what + (f" (at {', '.join(dict.fromkeys(where))})" if where else "") for what, where in lines.items()
    ]
    return [
        *sentences,
        "the step runs eagerly, on one device; torch.compile would need other memory",
        "the device was not asked: its figures are those above, and nothing else runs on it",
    ]


def what_to_take(row: Row) -> str:
    """Return the recommended plan in words."""
    samples = "sample" if row.micro_batch_size == 1 else "samples"
    return f"{named(row)}, micro-batches of {row.micro_batch_size} {samples}: {gib(row.process_bytes)}"


def to_paste(forecast: Forecast, row: Row) -> list[str]:
    """Return what carries a plan out: a policy, and what is beside it."""
    fields = ", ".join(f"{name}={value!r}" for name, value in row.policy().items())
    return [f"Policy({fields})", *beside_the_policy(forecast, row)]


def verified(found: Verification) -> str:
    """Return what the last trace says."""
    return (
        f"traced once more with these settings: tensors hold {gib(found.live_bytes)}, the forecast said"
        f" {gib(found.forecast_bytes)} ({found.error:+.2%})"
    )
