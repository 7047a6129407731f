"""`holdfast plan FACTORY --device NAME`: forecast what fits a GPU, and recommend settings.

`forecast.plan.forecasting` computes the forecast. This module parses the options and outputs the
forecast as tables, as JSON, and as YAML for `Policy.from_yaml`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import (
    CHECK_FAILED,
    Json,
    check_writable,
    console,
    failing_clearly,
    print_json,
    working,
)
from holdfast.core.durable import replace_file
from holdfast.core.errors import OutOfMemoryError, PolicyError
from holdfast.core.files import SHARED
from holdfast.core.text import counted
from holdfast.forecast.devices.catalogue import GIB, Device, bytes_in, find_device
from holdfast.forecast.plan.fit import UNMEASURED_MARGIN_SHARE
from holdfast.forecast.plan.forecasting import (
    DeviceForecast,
    EvaluationForecast,
    Forecast,
    ForecastRequest,
    make_forecast,
)
from holdfast.forecast.plan.planning import MOST_SAMPLES, MemoryPlan, with_relative_times
from holdfast.forecast.trace.events import Assumption, shares_of

_PRECISIONS = ("fp32", "bf16", "fp16")
_MIB = 1 << 20
# Modules and source lines that hold less memory than this at the peak are not shown.
_MIN_SHOWN_BYTES = GIB / 1000

_LEGEND = (
    "micro-batch: the largest that fits, in samples. peak: device memory that the process takes,"
    " including the CUDA context but not the margin, which is kept free. time: per sample, as a"
    " multiple of the fastest plan, estimated from the device's compute and memory rates."
)

# The devices of the overview, from the smallest to the largest.
COMMON_DEVICES = (
    "T4",
    "V100-16GB",
    "A10G",
    "L4",
    "RTX 4090",
    "A100-40GB",
    "A100-80GB",
    "H100-SXM",
    "H200",
)

Factory = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY",
        help=(
            'module:function or file.py:function. It returns {"model", "optimizer", "loss_fn",'
            ' "batch"} with loss_fn(batch) or loss_fn(model, batch); or, instead of "loss_fn", a'
            ' "step": step(batch), step(model, batch) or step(guard, batch). Both must work with'
            ' any number of samples. With an "evaluate", evaluate(batch) or evaluate(model, batch),'
            ' and perhaps an "evaluation_batch", the evaluation is forecast too.'
        ),
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=(
            "A GPU such as T4, or a memory size such as 24GiB. May be repeated. Default: an"
            " overview of common GPUs."
        ),
        show_default=False,
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        metavar="N",
        help="Samples per optimizer step. Default: the largest micro-batch that fits.",
    ),
]
Precisions = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help=(
            "One or more of fp32, bf16, fp16, separated by commas. List the precision that you use"
            " now first."
            " Default: fp32,bf16, or fp32,fp16 if no device supports bf16."
        ),
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help=(
            "Device memory to keep free, such as 1GiB. Default: 10 % on H100 SXM and H200, 22 % on"
            " any other device."
        ),
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml", help="Write the recommended plan to this file, for Policy.from_yaml."
    ),
]


def run(
    factory: Factory,
    device: Devices = None,
    global_batch_size: GlobalBatchSize = None,
    precision: Precisions = None,
    margin: Margin = None,
    out: Out = None,
    verify: Annotated[
        bool, typer.Option(help="Trace the recommended plan again to verify it.")
    ] = True,
    json: Json = False,
) -> None:
    """Forecast whether a training step fits a GPU. Works without a GPU.

    Show the largest micro-batch, the peak memory and its owners, relative times, and the
    recommended settings.

    Your factory and a few training steps run on tensors without data, in a separate process. Exit
    code 0: a plan fits on every device that is named, or on at least one of the overview, and so
    does the evaluation. 1: it does not fit. 2: the forecast failed.
    """
    with failing_clearly(as_json=json):
        _check_torch()
        devices = tuple(find_device(name) for name in device or COMMON_DEVICES)
        request = ForecastRequest(
            factory=factory,
            devices=devices,
            precisions=_read_precisions(precision, devices),
            global_batch_size=global_batch_size,
            margin_bytes=_read_margin(margin),
            # The overview recommends no plan, so there is none to verify.
            verify=verify and bool(device),
        )
        _check_out(out, len(devices))
        with working("holdfast plan: tracing a step") as show_progress:
            forecast = make_forecast(request, lambda text: show_progress(f"holdfast plan: {text}"))
        is_written = out is not None and forecast.plans[0].best is not None
        if out is not None and is_written:
            replace_file(out, as_yaml(forecast).encode(), SHARED)
    if json:
        print_json(as_json(forecast))
    elif device:
        print_forecast(forecast)
    else:
        print_overview(forecast)
    if is_written and not json:
        typer.echo(f"wrote {out}")
    if out is not None and not is_written:
        typer.echo(f"{out} was not written, because no plan fits", err=True)
    enough = all if device else any
    if not enough(plan.fits for plan in forecast.plans):
        raise typer.Exit(CHECK_FAILED)


# --- options ------------------------------------------------------------------------------------


def _check_torch() -> None:
    """Raise H742 if torch is not installed, before anything is imported from the factory."""
    if importlib.util.find_spec("torch") is None:
        raise PolicyError(
            "torch is not installed",
            limit="a forecast traces a step of your model with torch",
            fix="run this in the environment that you train in, or install torch there.",
            rule="H742",
        )


def _check_out(out: Path | None, devices: int) -> None:
    """Check that the plan can be written, before spending time on the forecast.

    Raises:
        PolicyError: H421 if there are several devices, H704 if the file cannot be written.
    """
    if out is None:
        return
    if devices > 1:
        raise _invalid_option(
            f"--out for {devices} devices",
            "a policy describes one device",
            "pass a single --device.",
        )
    check_writable(out)


def _read_precisions(text: str | None, devices: Iterable[Device]) -> tuple[str, ...]:
    if text is None:
        has_bf16 = any(device.has_bf16 for device in devices)
        return ("fp32", "bf16" if has_bf16 else "fp16")
    names = [name.strip().lower() for name in text.split(",")]
    precisions = tuple(dict.fromkeys(name for name in names if name))
    if not precisions or not set(precisions) <= set(_PRECISIONS):
        raise _invalid_option(
            f"--precision {text!r}",
            f"precisions are a list of {', '.join(_PRECISIONS)}",
            "write, for example, --precision fp32,bf16.",
        )
    return precisions


def _read_margin(text: str | None) -> int | None:
    if text is None:
        return None
    margin_bytes = bytes_in(text)
    if margin_bytes is None:
        raise _invalid_option(
            f"--margin {text!r}",
            "a margin is a number followed by GiB, GB, MiB or MB",
            "write --margin 1GiB.",
        )
    return margin_bytes


def _invalid_option(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(what, limit=limit, fix=fix, rule="H421")


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
        shown.add(step)
        _print_recommendation(plan)
    typer.echo("Assumptions")
    for text in _assumption_texts(forecast.assumptions):
        console().print(Text(f"  - {text}"), highlight=False, soft_wrap=True)


def print_overview(forecast: Forecast) -> None:
    """Print one line per device: whether a step fits, and the largest micro-batch that does."""
    table = Table(title="Does a training step fit?", title_justify="left")
    for name in ("device", "fits"):
        table.add_column(name)
    table.add_column("largest micro-batch", justify="right")
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
            fits = "yes" if plan.fits else "training only"
            samples = str(best.micro_batch_size)
            if best.micro_batch_size == MOST_SAMPLES:
                samples = f"{MOST_SAMPLES} or more"
            peak = _size(best.process_bytes)
            table.add_row(device.name, fits, samples, best.precision, best.recompute, peak, usable)
    console().print(table)
    if not all(plan.fits or plan.best is None for plan in forecast.plans):
        typer.echo("training only: the evaluation needs more memory than the device has")
    typer.echo("Each line is the fastest plan that fits. For its details, pass --device NAME.")


def _print_table(plan: DeviceForecast) -> None:
    device = plan.target.device
    title = f"{device.name}: {_size(device.usable_bytes)} usable"
    table = Table(title=title, title_justify="left")
    for name in ("precision", "recompute"):
        table.add_column(name)
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
    typer.echo(f"{_LEGEND}\nfigures of {device.name}: {_sources(device)}\n")


def _cells(row: MemoryPlan, relative_time: float) -> tuple[str, ...]:
    """Return the cells of a table row: the text columns, then the number columns."""
    if not row.fits:
        missing = f"{_size(row.missing_bytes)} short"
        return (row.precision, row.recompute, "none", missing, _size(row.margin_bytes), "")
    return (
        row.precision,
        row.recompute,
        str(row.micro_batch_size),
        _size(row.process_bytes),
        _size(row.margin_bytes),
        f"{relative_time:.2f}",
    )


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


def _print_recommendation(plan: DeviceForecast) -> None:
    best = plan.best
    if best is None:
        typer.echo(f"{_explain_no_fit(plan)}\n")
        return
    policy = ", ".join(f"{name}={value!r}" for name, value in best.policy().items())
    typer.echo(f"Recommended for {best.device}: {_summary(best)}")
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
    if not plan.target.device.is_measured:
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
    error = OutOfMemoryError(
        f"Nothing fits {device.name}, not even one sample",
        limit=(
            f"it has {_size(device.usable_bytes)}; the smallest plan ({_settings(row)}) needs"
            f" {needed} with its margin, {_size(row.missing_bytes)} more"
        ),
        fix=(
            "use a device with more memory, a smaller model, an optimizer with less state, or"
            " shorter samples."
        ),
        rule="H420",
    )
    return str(error)


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
        "the step runs in eager mode on one device; torch.compile would change its memory use",
        "no device was queried; the figures above apply, and no other process uses device memory",
    ]


# --- text --------------------------------------------------------------------------------------


def _settings(row: MemoryPlan) -> str:
    recomputed = "all blocks recomputed" if row.modules else "nothing recomputed"
    return f"{row.precision}, {recomputed}"


def _summary(row: MemoryPlan) -> str:
    samples = counted(row.micro_batch_size, "sample")
    return f"{_settings(row)}, micro-batches of {samples}: {_size(row.process_bytes)}"


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
        "global_batch_size": request.global_batch_size,
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
        "recommended": None,
    }
    if plan.best is None:
        facts["missing_bytes"] = plan.shown.missing_bytes
        return facts
    facts["recommended"] = {**_row_as_json(plan.best, 1.0), "policy": plan.best.policy()}
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
    lines = [_command(forecast.request), f"a forecast: {_summary(best)}"]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return comments + yaml.safe_dump(best.policy(), sort_keys=False)


def _command(request: ForecastRequest) -> str:
    """Return the command that repeats a forecast."""
    words = [f"holdfast plan {request.factory}"]
    words += [f'--device "{device.name}"' for device in request.devices]
    words.append(f"--precision {','.join(request.precisions)}")
    if request.global_batch_size is not None:
        words.append(f"--global-batch-size {request.global_batch_size}")
    if request.margin_bytes is not None:
        words.append(f"--margin {request.margin_bytes / _MIB:g}MiB")
    return " ".join(words)
