"""The output of `holdfast plan`: tables, JSON, and YAML for `Policy.from_yaml`.

`plan` parses the options and makes the forecast.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import console
from holdfast.core.errors import OutOfMemoryError
from holdfast.core.text import counted
from holdfast.forecast.devices.catalogue import GIB, Device
from holdfast.forecast.plan.fit import UNMEASURED_MARGIN_SHARE
from holdfast.forecast.plan.forecasting import (
    DeviceForecast,
    EvaluationForecast,
    Forecast,
    ForecastRequest,
)
from holdfast.forecast.plan.planning import MOST_SAMPLES, MemoryPlan, Target, with_relative_times
from holdfast.forecast.plan.sharding import IMPLEMENTATIONS, Sharding
from holdfast.forecast.trace.events import Assumption, shares_of

_MIB = 1 << 20
# Modules and source lines that hold less memory than this at the peak are not shown.
_MIN_SHOWN_BYTES = GIB / 1000

_PEAK_AND_TIME = (
    "peak: device memory that the process takes, including the CUDA context but not the margin,"
    " which is kept free. time: per sample, as a multiple of the fastest plan, estimated from the"
    " device's compute and memory rates."
)
_LEGEND = f"micro-batch: the largest that fits, in samples. {_PEAK_AND_TIME}"
_LEGEND_IF_FIXED = (
    f"micro-batch: the requested one, in samples; none: it does not fit. {_PEAK_AND_TIME}"
)
_LEGEND_IF_VARIED = (
    f"{_PEAK_AND_TIME} Plans with different values do different amounts of work per sample."
)


# --- tables ---------------------------------------------------------------------------


def print_forecast(forecast: Forecast) -> None:
    """Print the plans for each device, what owns the memory at the peak, and the recommended plan.

    The assumptions of the forecast follow.
    """
    for plan in forecast.plans:
        _print_table(plan)
    shown = set()
    for plan in forecast.plans:
        # The forecasts for several devices are often based on the same step, so print its memory
        # only once.
        step = (_settings(plan.shown), plan.shown.micro_batch_size, plan.shown.live_bytes)
        if step not in shown:
            _print_owners(plan)
            _print_shares(plan)
        shown.add(step)
        _print_recommendation(plan, trains=not forecast.only_evaluates)
    typer.echo("Assumptions")
    for text in _assumption_texts(forecast.assumptions):
        console().print(Text(f"  - {text}"), highlight=False, soft_wrap=True)


def print_overview(forecast: Forecast) -> None:
    """Print one line per device: whether a step fits, and the largest size that does."""
    table = Table(title=_overview_title(forecast), title_justify="left")
    for name in ("device", "fits"):
        table.add_column(name)
    table.add_column(f"largest {_searched(forecast.request)}", justify="right")
    for name in ("precision", "recompute"):
        table.add_column(name)
    for name in ("peak", "usable"):
        table.add_column(name, justify="right")
    for plan in forecast.plans:
        device = plan.target.device
        usable = _size(device.usable_bytes)
        best = plan.best
        if best is None:
            missing = f"{_size(plan.shown.missing_bytes)} short"
            table.add_row(device.name, "no", "", "", "", missing, usable, style="dim")
        else:
            cells = [_largest(best), best.precision, best.recompute, _size(best.process_bytes)]
            table.add_row(device.name, "yes", *cells, usable)
    console().print(table)
    typer.echo("Each line is the fastest plan that fits. For its details, pass --device NAME.")


def _overview_title(forecast: Forecast) -> str:
    request = forecast.request
    step = "an evaluation" if forecast.only_evaluates else "a training step"
    if request.micro_batch_size is not None:
        step += f" with micro-batches of {counted(request.micro_batch_size, 'sample')}"
    if request.sharding is not None:
        step += f" on {request.sharding.gpus} GPUs ({request.sharding.kind})"
    return f"Does {step} fit?"


def _searched(request: ForecastRequest) -> str:
    """Return the name of the number whose largest value was sought."""
    if request.variation is None:
        return "micro-batch"
    return request.variation.name


def _largest(row: MemoryPlan) -> str:
    """Return the largest value that fits, as text for a table."""
    if row.value is not None:
        return str(row.value)
    if row.micro_batch_size == MOST_SAMPLES and not row.is_fixed:
        return f"{MOST_SAMPLES} or more"
    return str(row.micro_batch_size)


def _print_table(plan: DeviceForecast) -> None:
    device = plan.target.device
    variation = plan.target.variation
    title = f"{device.name}: {_size(device.usable_bytes)} usable"
    table = Table(title=title, title_justify="left")
    for name in ("precision", "recompute"):
        table.add_column(name)
    if variation is not None:
        table.add_column(f"largest {variation.name}", justify="right")
    for name in ("micro-batch", "peak", "margin", "time"):
        table.add_column(name, justify="right")
    for row, relative_time in with_relative_times(plan.rows):
        style = None
        if row is plan.best:
            style = "bold"
        elif not row.fits:
            style = "dim"
        table.add_row(*_cells(row, relative_time), style=style)
    console().print(table)
    legend = _LEGEND
    if variation is not None:
        legend = _LEGEND_IF_VARIED
    elif plan.target.micro_batch_size is not None:
        legend = _LEGEND_IF_FIXED
    typer.echo(f"{legend}\nfigures of {device.name}: {_sources(device)}\n")


def _cells(row: MemoryPlan, relative_time: float) -> tuple[str, ...]:
    """Return the cells of a table row: the text columns, then the number columns."""
    largest = str(row.micro_batch_size)
    peak = _size(row.process_bytes)
    time = f"{relative_time:.2f}"
    if not row.fits:
        largest = "none"
        peak = f"{_size(row.missing_bytes)} short"
        time = ""
    numbers = (largest, peak, _size(row.margin_bytes), time)
    if row.value is None:
        return (row.precision, row.recompute, *numbers)
    value = str(row.value) if row.fits else "none"
    return (row.precision, row.recompute, value, str(row.micro_batch_size), *numbers[1:])


def _sources(device: Device) -> str:
    """Return text that lists the device figures used by the forecast, with their sources."""
    figures = {
        "usable": f"usable {_size(device.usable_bytes)}",
        "context": f"context {_size(device.context_bytes)}",
        "rates": "rates",
    }
    return "; ".join(
        f"{figure} ({device.sources[name]})"
        for name, figure in figures.items()
        if name in device.sources
    )


def _print_owners(plan: DeviceForecast) -> None:
    shares = shares_of(plan.trace)
    peak = _size(sum(shares["owners"].values()))
    samples = counted(max(1, plan.shown.micro_batch_size), "sample")
    if plan.target.variation is not None:
        samples += f", {plan.target.variation.name}={plan.shown.value}"
    typer.echo(f"Tensors hold {peak} at the peak ({_settings(plan.shown)}, {samples})")
    for title, sizes in (
        ("", shares["owners"]),
        ("modules: ", shares["modules"]),
        ("lines: ", shares["lines"]),
    ):
        shown = [
            f"{name} {_size(size_bytes)}"
            for name, size_bytes in sizes.items()
            if size_bytes >= _MIN_SHOWN_BYTES
        ]
        if shown:
            typer.echo(f"  {title}{', '.join(shown)}")
    typer.echo("")


def _print_shares(plan: DeviceForecast) -> None:
    """Print which part of the model states each of several GPUs holds."""
    sharding = plan.target.sharding
    if sharding is None:
        return
    typer.echo(f"Each of {sharding.gpus} GPUs holds ({IMPLEMENTATIONS[sharding.kind]})")
    for share in plan.state_shares:
        text = _size(share.gpu_bytes)
        if share.gpu_bytes != share.whole_bytes:
            text += f" (1/{sharding.gpus} of {_size(share.whole_bytes)})"
        if share.buffer_bytes:
            text += f" and {_size(share.buffer_bytes)} of buffers"
        typer.echo(f"  {share.state}: {text}")
    typer.echo("")


def _print_recommendation(plan: DeviceForecast, *, trains: bool) -> None:
    """Print the recommended settings, and as a policy if the job trains."""
    best = plan.best
    if best is None:
        typer.echo(f"{_explain_no_fit(plan)}\n")
        return
    policy = ", ".join(f"{name}={value!r}" for name, value in best.policy().items())
    typer.echo(f"Recommended for {best.device}: {_summary(best, plan.target)}")
    if trains and has_policy(plan.target.sharding):
        typer.echo(f"  Policy({policy})")
    margin = _explain_margin(plan)
    if margin:
        typer.echo(f"  {margin}")
    verification = plan.verification
    if verification is not None:
        typer.echo(
            "  traced again with these settings: tensors hold"
            f" {_size(verification.live_bytes)}; the forecast was"
            f" {_size(verification.forecast_bytes)} ({verification.error:+.2%})"
        )
        if verification.evaluation is not None:
            typer.echo(f"  {_compare_evaluation(verification.evaluation, plan)}")
    typer.echo("")


def has_policy(sharding: Sharding | None) -> bool:
    """Return whether a `Guard` can put a plan into effect.

    It does not split the batches of a sharded model, and refuses sharded optimizer states.
    """
    return sharding is None or sharding.kind == "ddp"


def _compare_evaluation(evaluation: EvaluationForecast, plan: DeviceForecast) -> str:
    """Return text that compares the memory used by the evaluation and by the training step."""
    assert plan.best is not None
    device = plan.target.device
    samples = counted(evaluation.samples, "sample")
    if not evaluation.fits:
        return (
            f"the evaluation of {samples} does not fit: its tensors hold"
            f" {_size(evaluation.live_bytes)}, the CUDA context {_size(device.context_bytes)}, and"
            f" {_size(evaluation.margin_bytes)} of {_size(device.usable_bytes)} are kept free as"
            " margin. Evaluate fewer samples at a time, or with"
            " guard.evaluate_batches, which splits a batch that does not fit"
        )
    peak = f"the evaluation of {samples} takes {_size(evaluation.process_bytes)}"
    if evaluation.process_bytes > plan.best.process_bytes:
        return f"{peak}, more than the training step: it is the peak of the run"
    return f"{peak}; the training step is the peak of the run"


def _explain_margin(plan: DeviceForecast) -> str:
    """Return text that says what the margin covers and how to change it.

    The text is empty if the user has set the margin, or if it does not cover anything unusual.
    """
    if plan.target.margin_bytes is not None:
        return ""
    covered = []
    if plan.target.sharding is not None:
        covered.append(
            "no forecast was compared with a real run on several GPUs, so the margin also covers"
            " the memory of NCCL, buffers that are not computed, and fragmentation; the plan still"
            f" fits if its forecast is up to {UNMEASURED_MARGIN_SHARE:.0%} too low"
        )
    elif not plan.target.device.is_measured:
        covered.append(
            "no forecast was compared with a real run on this device, so the margin also covers"
            " the CUDA context of other drivers and builds, cuDNN and fragmentation; the plan still"
            f" fits if its forecast is up to {UNMEASURED_MARGIN_SHARE:.0%} too low"
        )
    if plan.trace.uncalibrated_bytes:
        covered.append(
            f"{_size(plan.trace.uncalibrated_bytes)} of the margin is for operators whose scratch"
            " memory is not known exactly"
        )
    if not covered:
        return ""
    return "; ".join([*covered, "change it with --margin SIZE"])


def _explain_no_fit(plan: DeviceForecast) -> str:
    """Return text that says why nothing fits a device, and what to do about it.

    The text reads like an error, but the forecast itself succeeded: the exit code is 1, not 2.
    """
    device = plan.target.device
    row = plan.shown
    if row.fits:
        error = OutOfMemoryError(
            f"No plan fits {device.name} when traced",
            limit="some plans fit according to the forecast, but none of them fit when traced",
            fix="keep more memory free with --margin.",
            rule="H420",
        )
        return str(error)
    needed = _size(device.usable_bytes + row.missing_bytes)
    smaller = "shorter samples"
    if plan.target.variation is not None:
        smaller = f"a smaller step in --vary {plan.target.variation.name}=STEP"
    elif row.is_fixed and row.micro_batch_size > 1:
        smaller = "smaller micro-batches"
    error = OutOfMemoryError(
        f"Nothing fits {device.name}, not even {_smallest(plan)}",
        limit=(
            f"it has {_size(device.usable_bytes)}; the smallest plan ({_settings(row)}) needs"
            f" {needed} with its margin, {_size(row.missing_bytes)} more"
        ),
        fix=(
            "use a device with more memory, a smaller model, an optimizer with less state, or"
            f" {smaller}."
        ),
        rule="H420",
    )
    return str(error)


def _smallest(plan: DeviceForecast) -> str:
    """Describe the smallest size that was tried, for a message that it does not fit."""
    row = plan.shown
    if not row.is_fixed:
        return "one sample"
    samples = f"one micro-batch of {counted(row.micro_batch_size, 'sample')}"
    if plan.target.variation is None:
        return samples
    return f"{samples} with {plan.target.variation.name}={row.value}"


def _assumption_texts(assumptions: Iterable[Assumption]) -> list[str]:
    """Return the assumptions with their source lines, then those that apply to every forecast."""
    lines_by_text: dict[str, list[str]] = {}
    for assumption in assumptions:
        lines = lines_by_text.setdefault(assumption.what, [])
        if assumption.line and assumption.line not in lines:
            lines.append(assumption.line)
    texts = []
    for text, lines in lines_by_text.items():
        texts.append(f"{text} (at {', '.join(lines)})" if lines else text)
    return [
        *texts,
        "the step runs in eager mode; torch.compile would change its memory use",
        "no device was queried; the figures above apply, and no other process uses device memory",
    ]


# --- text --------------------------------------------------------------------------------------


def _settings(row: MemoryPlan) -> str:
    recomputed = "all blocks recomputed" if row.modules else "nothing recomputed"
    return f"{row.precision}, {recomputed}"


def _summary(row: MemoryPlan, target: Target) -> str:
    size = f"micro-batches of {counted(row.micro_batch_size, 'sample')}"
    if target.variation is not None:
        size = f"{target.variation.name}={row.value}, {size}"
    return f"{_settings(row)}, {size}: {_size(row.process_bytes)}"


def _size(size_bytes: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is less than 0.1 GiB."""
    if size_bytes >= GIB / 10:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / _MIB:.1f} MiB"


# --- JSON and YAML ------------------------------------------------------------------


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON-serializable values."""
    request = forecast.request
    rows = []
    for plan in forecast.plans:
        for row, relative_time in with_relative_times(plan.rows):
            rows.append(_row_as_json(row, relative_time))
    return {
        "factory": request.factory,
        "only_evaluates": forecast.only_evaluates,
        "arguments": dict(request.arguments),
        "varied": None if request.variation is None else request.variation.name,
        "micro_batch_size": request.micro_batch_size,
        "global_batch_size": request.global_batch_size,
        "sharding": None if request.sharding is None else asdict(request.sharding),
        "rows": rows,
        "devices": [_device_as_json(plan) for plan in forecast.plans],
        "traced": {
            precision: {
                "route": result.route,
                "parameters": result.parameters,
                "trainable_parameters": result.trainable_parameters,
                "host_bytes": result.host_bytes,
            }
            for precision, result in forecast.traced.items()
        },
        "assumptions": [asdict(assumption) for assumption in forecast.assumptions],
    }


def _row_as_json(row: MemoryPlan, relative_time: float) -> dict[str, Any]:
    return {**asdict(row), "relative_time": relative_time}


def _device_as_json(plan: DeviceForecast) -> dict[str, Any]:
    device = plan.target.device
    facts: dict[str, Any] = {
        "device": device.name,
        "usable_bytes": device.usable_bytes,
        "context_bytes": device.context_bytes,
        "sources": dict(device.sources),
        "owners": {name: dict(sizes) for name, sizes in shares_of(plan.trace).items()},
        "state_shares": [asdict(share) for share in plan.state_shares],
        "recommended": None,
    }
    if plan.best is None:
        facts["missing_bytes"] = plan.shown.missing_bytes
        return facts
    policy = plan.best.policy() if has_policy(plan.target.sharding) else None
    facts["recommended"] = {**_row_as_json(plan.best, 1.0), "policy": policy}
    facts["verified"] = None
    if plan.verification is not None:
        facts["verified"] = {**asdict(plan.verification), "error": plan.verification.error}
    return facts


def as_yaml(forecast: Forecast) -> str:
    """Return the first device's recommended plan as YAML.

    Comments at the top contain the command and a summary of the plan.
    """
    best = forecast.plans[0].best
    assert best is not None
    summary = _summary(best, forecast.plans[0].target)
    lines = [_command(forecast.request), f"a forecast: {summary}"]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return comments + yaml.safe_dump(best.policy(), sort_keys=False)


def _command(request: ForecastRequest) -> str:
    """Return the command that repeats a forecast."""
    words = [f"holdfast plan {request.factory}"]
    words += [f'--device "{device.name}"' for device in request.devices]
    words.append(f"--precision {','.join(request.precisions)}")
    if request.micro_batch_size is not None:
        words.append(f"--micro-batch-size {request.micro_batch_size}")
    if request.global_batch_size is not None:
        words.append(f"--global-batch-size {request.global_batch_size}")
    words += [
        f"--set {shlex.quote(f'{name}={value}')}" for name, value in request.arguments.items()
    ]
    if request.variation is not None:
        words.append(f"--vary {request.variation.name}={request.variation.step}")
    if request.sharding is not None:
        words.append(f"--gpus {request.sharding.gpus} --shard {request.sharding.kind}")
    if request.margin_bytes is not None:
        words.append(f"--margin {request.margin_bytes / _MIB:g}MiB")
    return " ".join(words)
