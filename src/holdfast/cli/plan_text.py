"""How a forecast is printed: tables for people, JSON for machines, YAML for `Policy.from_yaml`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import console
from holdfast.forecast.devices.catalogue import GIB
from holdfast.forecast.plan.forecasting import DevicePlan, Forecast
from holdfast.forecast.plan.planning import Row, with_relative_times
from holdfast.forecast.trace.shares import shares_of
from holdfast.report.forecast_words import (
    COLUMNS,
    LEGEND,
    assumptions,
    beside_the_policy,
    cells,
    command_of,
    gib,
    margin_of,
    named,
    sources,
    to_paste,
    verified,
    what_is_missing,
    what_to_take,
)


def print_forecast(forecast: Forecast) -> None:
    """Print everything."""
    for plan in forecast.plans:
        _print_table(plan)
    shown = set()
    for plan in forecast.plans:
        step = (named(plan.shown), plan.shown.micro_batch_size, plan.shown.live_bytes)
        if step not in shown:
            _print_owners(plan)
        shown.add(step)
        _print_plan(forecast, plan)
    _print_assumptions(forecast)


def _print_table(plan: DevicePlan) -> None:
    device = plan.question.device
    table = Table(title=f"{device.name}: {gib(device.usable_bytes)} usable", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:4] else "right")
    for row, relative in with_relative_times(plan.rows):
        style = "bold" if row is plan.best else None if row.fits else "dim"
        table.add_row(*cells(row, relative), style=style)
    console().print(table)
    typer.echo(f"{LEGEND}\nfigures of {device.name}: {sources(plan)}\n")


def _print_owners(plan: DevicePlan) -> None:
    row = plan.shown
    shares = shares_of(plan.trace, row.optimizer)
    size = max(1, row.micro_batch_size)
    peak, samples = gib(sum(shares.owners.values())), "1 sample" if size == 1 else f"{size} samples"
    typer.echo(f"Who owns the peak of {peak} that tensors hold ({named(row)}, {samples})")
    groups = (("", shares.owners), ("modules", shares.modules), ("lines", shares.lines))
    for title, sizes in groups:
        words = ", ".join(f"{name} {gib(count)}" for name, count in sizes.items() if count >= GIB / 1000)
        if words:
            typer.echo(f"  {title + ': ' if title else ''}{words}")
    typer.echo("")


def _print_plan(forecast: Forecast, plan: DevicePlan) -> None:
    row = plan.best
    if row is None:
        typer.echo(what_is_missing(plan) + "\n")
        return
    typer.echo("\n  ".join([f"Take on {row.device}: {what_to_take(row)}", *to_paste(forecast, row)]))
    for text in (margin_of(plan), "" if plan.verification is None else verified(plan.verification)):
        if text:
            typer.echo(f"  {text}")
    typer.echo("")


def _print_assumptions(forecast: Forecast) -> None:
    typer.echo("What was assumed")
    for text in assumptions(forecast.assumptions):
        console().print(Text(f"  - {text}"), highlight=False, soft_wrap=True)


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast for machines."""
    order = forecast.order
    return {
        "factory": order.factory,
        "global_batch_size": order.global_batch_size,
        "longest": order.longest,
        "rows": [_row(row, relative) for plan in forecast.plans for row, relative in with_relative_times(plan.rows)],
        "devices": [_device(plan) for plan in forecast.plans],
        "traced": {
            precision: {
                "route": found.route,
                "weights": found.weights,
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
        "owners": {name: dict(sizes) for name, sizes in asdict(shares_of(plan.trace, plan.shown.optimizer)).items()},
        "recommended": None,
    }
    if best is None:
        return {**facts, "missing_bytes": plan.shown.missing_bytes, "would_do": plan.would_do}
    facts["recommended"] = {
        **_row(best, 1.0),
        "policy": best.policy(),
        "optimizer_keyword": best.optimizer_keyword(),
        "PYTORCH_ALLOC_CONF": best.allocator,
    }
    facts["verified"] = None if found is None else {**asdict(found), "error": found.error}
    return facts


def as_yaml(forecast: Forecast) -> str:
    """Return the first device's plan for `Policy.from_yaml`; what is no field of a policy stands in comments."""
    (plan, *_) = forecast.plans
    row = plan.best
    assert row is not None
    lines = [command_of(forecast.order), f"a forecast: {what_to_take(row)}", *beside_the_policy(forecast, row)]
    comments = "".join(f"# {' '.join(text.split())}\n" for text in lines)
    return comments + yaml.safe_dump(row.policy(), sort_keys=False)
