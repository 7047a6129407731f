"""`holdfast plan FACTORY --device NAME`.

What fits a GPU, and the fastest plan that does, without having one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json, working
from holdfast.core.durable import replace_file
from holdfast.core.errors import OutOfMemoryError, PolicyError
from holdfast.core.files import SHARED
from holdfast.forecast.devices.catalogue import GIB, Device, bytes_in, find_device
from holdfast.forecast.plan.fit import UNMEASURED_MARGIN_SHARE
from holdfast.forecast.plan.forecasting import (
    DevicePlan,
    Forecast,
    Order,
    Verification,
    has_bf16,
    make_forecast,
)
from holdfast.forecast.plan.planning import Row, with_relative_times
from holdfast.forecast.trace.events import Assumption, shares_of

_PRECISIONS = ("fp32", "bf16", "fp16")
_COLUMNS = ("precision", "recompute", "micro-batch", "peak", "margin", "time")
"""Of the table; the first two are words, the others figures."""

_LEGEND = (
    "micro-batch: the largest that fits, in samples. peak: what the process takes of the device,"
    " context included; the margin is kept free beside it. time: for a sample, as a multiple of the"
    " fastest, from the device's rates."
)

Factory = Annotated[
    str,
    typer.Argument(
        help=(
            'module:function or file.py:function. It returns {"model", "optimizer", "loss_fn",'
            ' "batch"}: loss_fn(batch) or loss_fn(model, batch); or "step" in place of "loss_fn":'
            " step(batch), step(model, batch) or step(guard, batch), with any number of samples."
        )
    ),
]
Devices = Annotated[
    list[str],
    typer.Option(metavar="NAME", help="A GPU such as T4, or a size such as 24GiB; repeatable."),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1, max=2**31, metavar="N", help="Samples of one optimizer step; else what fits at once."
    ),
]
Precisions = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help=(
            "Of fp32, bf16, fp16, what you have now first; else fp32 and bf16, or fp16 where there"
            " is no bf16."
        ),
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help=(
            "What to keep free, such as 1GiB; else 10 % of an H100 SXM or H200, and 22 % of any"
            " other device."
        ),
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE.yaml", help="Write the plan, for Policy.from_yaml.")
]


def run(
    factory: Factory,
    device: Devices,
    global_batch_size: GlobalBatchSize = None,
    precision: Precisions = None,
    margin: Margin = None,
    out: Out = None,
    verify: Annotated[bool, typer.Option(help="Trace the recommended plan once more.")] = True,
    json: Json = False,
) -> None:
    """Say what fits a GPU that you need not have.

    Micro-batch, peak and who owns it, relative time, and what to take.

    Your build() and one step run on tensors without data, in a process of their own. Exit code 0: a
    plan fits each
    device. 1: on one of them nothing does. 2: the forecast could not be made.
    """
    with failing_clearly(as_json=json):
        devices = tuple(find_device(name) for name in device)
        order = Order(
            factory=factory,
            devices=devices,
            precisions=_read_precisions(precision, devices),
            global_batch_size=global_batch_size,
            margin_bytes=_read_margin(margin),
            verify=verify,
        )
        _check_out(out, len(devices))
        with working("holdfast plan: tracing a step") as say:
            forecast = make_forecast(order, lambda text: say(f"holdfast plan: {text}"))
        written = None if forecast.plans[0].best is None else out
        if written is not None:
            replace_file(written, as_yaml(forecast).encode(), SHARED)
    if json:
        print_json(as_json(forecast))
    else:
        print_forecast(forecast)
        if written is not None:
            typer.echo(f"wrote {written}")
    if out is not None and written is None:
        typer.echo(f"{out} was not written: there is no plan to write", err=True)
    if any(plan.best is None for plan in forecast.plans):
        raise typer.Exit(CHECK_FAILED)


def _check_out(out: Path | None, devices: int) -> None:
    """Find out before a minute of work whether the plan can be written, or raise H421 or an
    OSError.
    """
    if out is not None and devices > 1:
        raise _wrong(f"--out for {devices} devices", "a policy is for one", "name one --device.")
    if out is not None and (out.is_dir() or not os.access(out.absolute().parent, os.W_OK)):
        raise PermissionError(f"{out} cannot be written")


def _read_precisions(text: str | None, devices: Iterable[Device]) -> tuple[str, ...]:
    if text is None:
        return ("fp32", "bf16" if any(map(has_bf16, devices)) else "fp16")
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if not names or not set(names) <= set(_PRECISIONS):
        known = ", ".join(_PRECISIONS)
        raise _wrong(
            f"--precision {text!r}", f"it is a list of {known}", "write --precision fp32,bf16."
        )
    return names


def _read_margin(text: str | None) -> int | None:
    size = None if text is None else bytes_in(text)
    if text is not None and size is None:
        raise _wrong(
            f"--margin {text!r}", "it is a number with GiB, GB, MiB or MB", "write --margin 1GiB."
        )
    return size


def _wrong(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(what, limit=limit, fix=fix, rule="H421")


# --- how a forecast is printed: tables for people, JSON for machines, YAML for `Policy.from_yaml`
# -----------


def print_forecast(forecast: Forecast) -> None:
    """Print everything."""
    for plan in forecast.plans:
        _print_table(plan)
    shown = set()
    for plan in forecast.plans:
        step = (_named(plan.shown), plan.shown.micro_batch_size, plan.shown.live_bytes)
        if step not in shown:
            _print_owners(plan)
        shown.add(step)
        _print_plan(plan)
    _print_assumptions(forecast)


def _print_table(plan: DevicePlan) -> None:
    device = plan.question.device
    table = Table(title=f"{device.name}: {_gib(device.usable_bytes)} usable", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:2] else "right")
    for row, relative in with_relative_times(plan.rows):
        style = "bold" if row is plan.best else None if row.fits else "dim"
        table.add_row(*_cells(row, relative), style=style)
    console().print(table)
    typer.echo(f"{_LEGEND}\nfigures of {device.name}: {_sources(plan)}\n")


def _print_owners(plan: DevicePlan) -> None:
    row = plan.shown
    shares = shares_of(plan.trace)
    size = max(1, row.micro_batch_size)
    peak, samples = (
        _gib(sum(shares["owners"].values())),
        "1 sample" if size == 1 else f"{size} samples",
    )
    typer.echo(f"Who owns the peak of {peak} that tensors hold ({_named(row)}, {samples})")
    groups = (("", shares["owners"]), ("modules", shares["modules"]), ("lines", shares["lines"]))
    for title, sizes in groups:
        words = ", ".join(
            f"{name} {_gib(count)}" for name, count in sizes.items() if count >= GIB / 1000
        )
        if words:
            typer.echo(f"  {title + ': ' if title else ''}{words}")
    typer.echo("")


def _print_plan(plan: DevicePlan) -> None:
    row = plan.best
    if row is None:
        typer.echo(_what_is_missing(plan) + "\n")
        return
    policy = ", ".join(f"{name}={value!r}" for name, value in row.policy().items())
    typer.echo(f"Take on {row.device}: {_what_to_take(row)}\n  Policy({policy})")
    for text in (
        _margin_of(plan),
        "" if plan.verification is None else _verified(plan.verification),
    ):
        if text:
            typer.echo(f"  {text}")
    typer.echo("")


def _print_assumptions(forecast: Forecast) -> None:
    typer.echo("What was assumed")
    for text in _assumptions(forecast.assumptions):
        console().print(Text(f"  - {text}"), highlight=False, soft_wrap=True)


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast for machines."""
    order = forecast.order
    return {
        "factory": order.factory,
        "global_batch_size": order.global_batch_size,
        "rows": [
            _row(row, relative)
            for plan in forecast.plans
            for row, relative in with_relative_times(plan.rows)
        ],
        "devices": [_device(plan) for plan in forecast.plans],
        "traced": {
            precision: {
                "route": found.route,
                "parameters": found.parameters,
                "trainable_parameters": found.trainable_parameters,
                "host_bytes": found.host_bytes,
            }
            for precision, found in forecast.traced.items()
        },
        "assumptions": [asdict(one) for one in forecast.assumptions],
    }


def _row(row: Row, relative: float) -> dict[str, Any]:
    return {**asdict(row), "relative_time": relative}


def _device(plan: DevicePlan) -> dict[str, Any]:
    device, best, found = plan.question.device, plan.best, plan.verification
    facts: dict[str, Any] = {
        "device": device.name,
        "usable_bytes": device.usable_bytes,
        "context_bytes": device.context_bytes,
        "sources": dict(device.sources),
        "owners": {name: dict(sizes) for name, sizes in shares_of(plan.trace).items()},
        "recommended": None,
    }
    if best is None:
        return {**facts, "missing_bytes": plan.shown.missing_bytes}
    facts["recommended"] = {**_row(best, 1.0), "policy": best.policy()}
    facts["verified"] = None if found is None else {**asdict(found), "error": found.error}
    return facts


def as_yaml(forecast: Forecast) -> str:
    """Return the first device's plan for `Policy.from_yaml`.

    What it is a plan for stands in comments.
    """
    plan, *_ = forecast.plans
    row = plan.best
    assert row is not None
    lines = [_command_of(forecast.order), f"a forecast: {_what_to_take(row)}"]
    comments = "".join(f"# {' '.join(text.split())}\n" for text in lines)
    return comments + yaml.safe_dump(row.policy(), sort_keys=False)


def _cells(row: Row, relative: float) -> tuple[str, ...]:
    """Return a row of the table, in the order of `_COLUMNS`."""
    return (
        row.precision,
        row.recompute,
        str(row.micro_batch_size) if row.fits else "none",
        _gib(row.process_bytes) if row.fits else f"{_gib(row.missing_bytes)} too few",
        _gib(row.margin_bytes),
        f"{relative:.2f}" if row.fits else "",
    )


def _sources(plan: DevicePlan) -> str:
    """Return where the figures of a device are from."""
    device = plan.question.device
    figures = {
        "usable": f"usable {_gib(device.usable_bytes)}",
        "context": f"context {_gib(device.context_bytes)}",
        "rates": "rates",
    }
    return "; ".join(
        f"{text} ({device.sources[name]})"
        for name, text in figures.items()
        if name in device.sources
    )


def _named(row: Row) -> str:
    """Return a plan in words."""
    return f"{row.precision}, {'all blocks' if row.modules else 'nothing'} recomputed"


def _gib(size: float) -> str:
    """Return a number of bytes in GiB, a small one in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _command_of(order: Order) -> str:
    """Return the command that makes a forecast again."""
    asked = [
        f"holdfast plan {order.factory}",
        *(f'--device "{device.name}"' for device in order.devices),
    ]
    asked.append(f"--precision {','.join(order.precisions)}")
    asked += (
        []
        if order.global_batch_size is None
        else [f"--global-batch-size {order.global_batch_size}"]
    )
    asked += [] if order.margin_bytes is None else [f"--margin {order.margin_bytes / 2**20:g}MiB"]
    return " ".join(asked)


def _margin_of(plan: DevicePlan) -> str:
    """Return what a plan's margin covers.

    Empty where it was asked for, or is what was measured on this device.
    """
    if plan.question.margin_bytes is not None:
        return ""
    covered = []
    if not plan.question.device.is_measured:
        covered.append(
            "no forecast was measured on this device: its margin covers the context of other"
            " drivers and builds, cuDNN, and fragmentation, in all a forecast that is"
            f" {UNMEASURED_MARGIN_SHARE:.0%} too low"
        )
    if plan.trace.uncalibrated_bytes:
        covered.append(
            f"of its margin {_gib(plan.trace.uncalibrated_bytes)} are for what operators may"
            " allocate while they run and no table knows"
        )
    return "; ".join([*covered, "--margin SIZE sets another"]) if covered else ""


def _what_is_missing(plan: DevicePlan) -> str:
    """Return why nothing fits a device, and what would do."""
    row, device = plan.shown, plan.question.device
    if row.fits:
        return _no_plan(
            f"Nothing holds on {device.name}",
            "plans were found, and traced once more none of them fitted",
            "keep more free with --margin.",
        )
    needed = device.usable_bytes + row.missing_bytes
    return _no_plan(
        f"Nothing fits {device.name}, not even one sample",
        f"it has {_gib(device.usable_bytes)}, and what needs least ({_named(row)}) needs"
        f" {_gib(needed)} with its margin, {_gib(row.missing_bytes)} more",
        "take a device with more, a smaller model, an optimizer with less state, or shorter"
        " samples.",
    )


def _no_plan(what: str, limit: str, fix: str) -> str:
    """Return the words of an error that ends a command with an answer: exit code 1, not 2."""
    return str(OutOfMemoryError(what, limit=limit, fix=fix, rule="H420"))


def _assumptions(said: Iterable[Assumption]) -> list[str]:
    """Return sentences, each with the lines of code that it is about.

    Those of every forecast come last.
    """
    lines: dict[str, list[str]] = {}
    for one in said:
        lines.setdefault(one.what, []).extend([one.line] if one.line else [])
    sentences = [
        what + (f" (at {', '.join(dict.fromkeys(where))})" if where else "")
        for what, where in lines.items()
    ]
    return [
        *sentences,
        "the step runs eagerly, on one device; torch.compile would need other memory",
        "the device was not asked: its figures are those above, and nothing else runs on it",
    ]


def _what_to_take(row: Row) -> str:
    """Return the recommended plan in words."""
    samples = "sample" if row.micro_batch_size == 1 else "samples"
    return (
        f"{_named(row)}, micro-batches of {row.micro_batch_size} {samples}:"
        f" {_gib(row.process_bytes)}"
    )


def _verified(found: Verification) -> str:
    """Return what the last trace says."""
    return (
        f"traced once more with these settings: tensors hold {_gib(found.live_bytes)}, the forecast"
        f" said {_gib(found.forecast_bytes)} ({found.error:+.2%})"
    )
