"""`holdfast plan FACTORY --device NAME`: forecast what fits a GPU, and recommend settings.

`forecast.plan.forecasting` computes the forecast. This module parses the options, and
`plan_output` prints the forecast.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import (
    CHECK_FAILED,
    Json,
    check_writable,
    failing_clearly,
    print_json,
    working,
)
from holdfast.cli.plan_output import (
    as_json,
    as_yaml,
    has_policy,
    print_forecast,
    print_overview,
)
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError
from holdfast.core.files import SHARED
from holdfast.forecast.devices.catalogue import Device, bytes_in, find_device
from holdfast.forecast.job.tracing import Argument
from holdfast.forecast.plan.forecasting import Forecast, ForecastRequest, make_forecast
from holdfast.forecast.plan.planning import Variation
from holdfast.forecast.plan.sharding import KINDS, Sharding

# Builds a model from a config.json of Hugging Face. The integration is named, not imported, because
# only the process that traces the step needs it.
_CONFIG_FACTORY = "holdfast.integrations.forecast_from_config:build"
_PRECISIONS = ("fp32", "bf16", "fp16")
# Parameters of a factory that receive the micro-batch size, which has an option of its own.
_SIZE_PARAMETERS = ("micro_batch_size", "batch_size")
# If the user names no step, multiples of this number are tried as values of a varied parameter. The
# backward pass of flash attention rounds the sequence length up to such a multiple (see
# `forecast.kernels.scratch`).
_DEFAULT_STEP = 128

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
            ' and perhaps an "evaluation_batch", the evaluation is forecast too;'
            " without an optimizer, only the evaluation. Or the config.json"
            " of a Hugging Face model, whose task, seq_len, lora_r, dtype and optimizer you can set"
            " with --set."
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
MicroBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        metavar="N",
        help=(
            "Samples per forward and backward pass. Default: the largest number that fits; with"
            " --vary, 1."
        ),
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Call FACTORY with this argument, such as context=2048. May be repeated.",
        show_default=False,
    ),
]
Vary = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[=STEP]",
        help=(
            "Find the largest value of this parameter of FACTORY, such as seq_len, among the"
            f" multiples of STEP, by default {_DEFAULT_STEP}. Default: find the largest"
            " micro-batch."
        ),
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        metavar="N",
        help=(
            "Samples per optimizer step. If they are more than a micro-batch, gradients are"
            " accumulated. Default: one micro-batch."
        ),
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=2**20,
        metavar="N",
        help=(
            "Plan for one of N GPUs that train together. Default: a single GPU. The global batch is"
            " divided among them."
        ),
        show_default=False,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help=(
            "What is divided among --gpus: nothing (ddp), optimizer states (zero1), gradients too"
            " (zero2), or parameters too (full). Default: ddp."
        ),
        show_default=False,
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
            "Device memory to keep free, such as 1GiB. Default: 10 % on a single H100 SXM or H200,"
            " 22 % on any other device and with --gpus."
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
    micro_batch_size: MicroBatchSize = None,
    global_batch_size: GlobalBatchSize = None,
    setting: Settings = None,
    vary: Vary = None,
    gpus: Gpus = None,
    shard: Shard = None,
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
    code 0: a plan fits on every device that is named, and so does the evaluation; or a plan fits on
    at least one device of the overview, which does not check the evaluation. 1: it does not fit. 2:
    the forecast failed.
    """
    with failing_clearly(as_json=json):
        _check_torch()
        devices = tuple(find_device(name) for name in device or COMMON_DEVICES)
        arguments = _read_settings(setting or ())
        if factory.endswith(".json"):
            arguments = _with_config(arguments, factory)
            factory = _CONFIG_FACTORY
        variation = _read_vary(vary, arguments)
        if variation is not None and micro_batch_size is None:
            micro_batch_size = 1
        sharding = _read_sharding(gpus, shard)
        _check_batch_sizes(micro_batch_size, global_batch_size, gpus or 1)
        request = ForecastRequest(
            factory=factory,
            devices=devices,
            arguments=arguments,
            precisions=_read_precisions(precision, devices),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            variation=variation,
            margin_bytes=_read_margin(margin),
            sharding=sharding,
            # The overview recommends no plan, so there is none to verify.
            verify=verify and bool(device),
        )
        _check_out(out, len(devices), sharding)
        with working("holdfast plan: tracing a step") as show_progress:
            forecast = make_forecast(request, lambda text: show_progress(f"holdfast plan: {text}"))
        is_written = _write(forecast, out)
    _show(forecast, is_overview=not device, as_json_only=json)
    if out is not None:
        _report_written(out, is_written=is_written, as_json_only=json)
    if not _fits_enough(forecast, is_overview=not device):
        raise typer.Exit(CHECK_FAILED)


def _fits_enough(forecast: Forecast, *, is_overview: bool) -> bool:
    """Return whether a plan fits each named device, or at least one device of the overview."""
    fits = [plan.fits for plan in forecast.plans]
    return any(fits) if is_overview else all(fits)


def _write(forecast: Forecast, out: Path | None) -> bool:
    """Write the recommended plan to a file, if there is one, and return whether it was written."""
    if out is None or forecast.plans[0].best is None:
        return False
    if forecast.only_evaluates:
        raise _invalid_option(
            "--out for a job without an optimizer",
            "a policy describes a training run",
            "leave out --out, or return an optimizer and a loss_fn from build().",
        )
    replace_file(out, as_yaml(forecast).encode(), SHARED)
    return True


def _show(forecast: Forecast, *, is_overview: bool, as_json_only: bool) -> None:
    if as_json_only:
        print_json(as_json(forecast))
    elif is_overview:
        print_overview(forecast)
    else:
        print_forecast(forecast)


def _report_written(out: Path, *, is_written: bool, as_json_only: bool) -> None:
    if not is_written:
        typer.echo(f"{out} was not written, because no plan fits", err=True)
    elif not as_json_only:
        typer.echo(f"wrote {out}")


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


def _check_out(out: Path | None, devices: int, sharding: Sharding | None) -> None:
    """Check that the plan can be written, before spending time on the forecast.

    Raises:
        PolicyError: H421 if there are several devices or no policy describes the plan, H704 if the
            file cannot be written.
    """
    if out is None:
        return
    if devices > 1:
        raise _invalid_option(
            f"--out for {devices} devices",
            "a policy describes one device",
            "pass a single --device.",
        )
    if sharding is not None and not has_policy(sharding):
        raise _invalid_option(
            f"--out with --shard {sharding.kind}",
            "a Guard does not split the batches of a sharded model, so no policy describes this",
            "leave out --out, and set the batch size of the loader to the recommended one.",
        )
    check_writable(out)


def _check_batch_sizes(
    micro_batch_size: int | None, global_batch_size: int | None, gpus: int
) -> None:
    if global_batch_size is None:
        return
    if global_batch_size % gpus:
        raise _invalid_option(
            f"--global-batch-size {global_batch_size} with --gpus {gpus}",
            "each GPU gets the same number of samples",
            "pass a global batch size that is a multiple of the number of GPUs.",
        )
    most = global_batch_size // gpus
    if micro_batch_size is not None and micro_batch_size > most:
        raise _invalid_option(
            f"--micro-batch-size {micro_batch_size} with --global-batch-size {global_batch_size}",
            f"a micro-batch is a part of the global batch of a GPU, which is {most}",
            f"pass --micro-batch-size {most} or less.",
        )


def _read_sharding(gpus: int | None, kind: str | None) -> Sharding | None:
    if gpus is None and kind is None:
        return None
    if gpus is None:
        raise _invalid_option(
            f"--shard {kind} without --gpus",
            "the parts depend on the number of GPUs",
            "add, for example, --gpus 8.",
        )
    for known in KINDS:
        if known == (kind or "ddp"):
            return Sharding(gpus=gpus, kind=known)
    raise _invalid_option(
        f"--shard {kind!r}",
        f"it must be one of {', '.join(KINDS)}",
        "write --shard full for fully sharded data parallelism (FSDP, ZeRO-3).",
    )


def _read_settings(texts: Sequence[str]) -> dict[str, Argument]:
    """Return the arguments for the factory that `--set` names."""
    arguments: dict[str, Argument] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise _invalid_option(
                f"--set {text!r}",
                "an argument is the name of a parameter, an equals sign and a value",
                "write, for example, --set context=2048.",
            )
        _check_sets_no_size("--set", name)
        arguments[name] = _read_value(value)
    return arguments


def _with_config(arguments: Mapping[str, Argument], path: str) -> dict[str, Argument]:
    """Return the arguments for the factory of Hugging Face models, with the path of the config."""
    if "config" in arguments:
        raise _invalid_option(
            "--set config with a config.json",
            "the file is the first argument of the command",
            "leave out --set config.",
        )
    return {**arguments, "config": path}


def _read_value(text: str) -> Argument:
    """Convert text to a bool or a number if it looks like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        # "nan" and "inf" are more likely names, and JSON has no such numbers.
        return number if math.isfinite(number) else text
    return text


def _read_vary(text: str | None, arguments: Iterable[str]) -> Variation | None:
    if text is None:
        return None
    name, _, step = text.partition("=")
    step = step or str(_DEFAULT_STEP)
    if not name.isidentifier() or not step.isdecimal() or int(step) == 0:
        raise _invalid_option(
            f"--vary {text!r}",
            "it takes the name of a parameter, or a name, an equals sign and a positive number",
            "write, for example, --vary seq_len or --vary seq_len=64.",
        )
    _check_sets_no_size("--vary", name)
    if name in arguments:
        raise _invalid_option(
            f"--vary {name} with --set {name}",
            "a parameter is either set or varied",
            "leave one of them out.",
        )
    return Variation(name=name, step=int(step))


def _check_sets_no_size(option: str, name: str) -> None:
    if name not in _SIZE_PARAMETERS:
        return
    raise _invalid_option(
        f"{option} {name}",
        "the micro-batch size has its own option, and without it the largest one is found",
        "use --micro-batch-size N, or leave the option out.",
    )


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
