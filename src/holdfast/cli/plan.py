"""`holdfast plan FACTORY --device NAME`: what fits a GPU, and the fastest plan that does, without having one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.output import CHECK_FAILED, Json, failing_clearly, print_json
from holdfast.cli.plan_text import as_json, as_yaml, print_forecast
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError
from holdfast.forecast.devices.catalogue import Device, bytes_in, find_device
from holdfast.forecast.plan.forecasting import Order, has_bf16, make_forecast

_PRECISIONS = ("fp32", "bf16", "fp16")

Factory = Annotated[
    str,
    typer.Argument(
        help='module:function or file.py:function. It returns {"model", "optimizer", "loss_fn", "batch"}:'
        ' loss_fn(batch) or loss_fn(model, batch); or "step" in place of "loss_fn": step(batch), step(model, batch)'
        " or step(guard, batch), with any number of samples."
    ),
]
Devices = Annotated[
    list[str],
    typer.Option(metavar="NAME", help="A GPU such as T4, a size such as 24GiB, or a file of calibrate; repeatable."),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(min=1, max=2**31, metavar="N", help="Samples of one optimizer step; else what fits at once."),
]
Precisions = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Of fp32, bf16, fp16, what you have now first; else fp32 and bf16, or fp16 where there is no bf16.",
    ),
]
Lengths = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lengths of your samples, one a line: plans for the longest.")
]
Margin = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="What to keep free, such as 1GiB; else 4 % of a calibrated device, 10 % of others."
    ),
]
MaxGradNorm = Annotated[float | None, typer.Option(min=0, help="If you clip gradients, at which norm.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the plan, for Policy.from_yaml.")]


def run(
    factory: Factory,
    device: Devices,
    global_batch_size: GlobalBatchSize = None,
    precision: Precisions = None,
    lengths: Lengths = None,
    margin: Margin = None,
    max_grad_norm: MaxGradNorm = None,
    out: Out = None,
    verify: Annotated[bool, typer.Option(help="Trace the recommended plan once more.")] = True,
    json: Json = False,
) -> None:
    """Say what fits a GPU that you need not have: micro-batch, peak and who owns it, relative time, and what to take.

    Your build() and one step run on tensors without data, in a process of their own. Exit code 0: a plan fits each
    device. 1: on one of them nothing does. 2: the forecast could not be made.
    """
    with failing_clearly(as_json=json):
        devices = tuple(find_device(name) for name in device)
        order = Order(
            factory=factory,
            devices=devices,
            precisions=_read_precisions(precision, devices),
            global_batch_size=global_batch_size,
            longest=None if lengths is None else max(read_lengths(lengths)),
            margin_bytes=_read_margin(margin),
            max_grad_norm=max_grad_norm,
            verify=verify,
        )
        _check_out(out, len(devices))
        with _progress(quiet=json) as say:
            forecast = make_forecast(order, say)
        written = None if forecast.plans[0].best is None else out
        if written is not None:
            replace_file(written, as_yaml(forecast).encode())
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
    """Find out before a minute of work whether the plan can be written, or raise H421 or an OSError."""
    if out is not None and devices > 1:
        raise _wrong(f"--out for {devices} devices", "a policy is for one", "name one --device.")
    if out is not None and (out.is_dir() or not os.access(out.absolute().parent, os.W_OK)):
        raise PermissionError(f"{out} cannot be written")


def read_lengths(path: Path) -> list[int]:
    """Return the lengths in a file: whole numbers, one a line.

    Raises:
        PolicyError: It holds none, or something else (H419).
    """
    found, wrong = [], ""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        lines, wrong = [], "it is no text"
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not re.fullmatch(r"0*[1-9]\d{0,17}", line, re.ASCII):
            wrong = f"line {number} is {line[:40]!r}"
            break
        found += [int(line)] if line else []
    if found and not wrong:
        return found
    raise PolicyError(
        f"lengths file {path}: {wrong or 'it is empty'}",
        limit="whole numbers above 0 are needed, one a line: the lengths of your samples",
        fix="write one length a line, in the unit of the batch's second dimension (tokens, frames).",
        rule="H419",
    )


def _read_precisions(text: str | None, devices: Iterable[Device]) -> tuple[str, ...]:
    if text is None:
        return ("fp32", "bf16" if any(map(has_bf16, devices)) else "fp16")
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if not names or not set(names) <= set(_PRECISIONS):
        known = ", ".join(_PRECISIONS)
        raise _wrong(f"--precision {text!r}", f"it is a list of {known}", "write --precision fp32,bf16.")
    return names


def _read_margin(text: str | None) -> int | None:
    size = None if text is None else bytes_in(text)
    if text is not None and size is None:
        raise _wrong(f"--margin {text!r}", "it is a number with GiB, GB, MiB or MB", "write --margin 1GiB.")
    return size


def _wrong(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(what, limit=limit, fix=fix, rule="H421")


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what says what is being done: in a spinner on a terminal, else in lines, each once, unless `quiet`."""
    terminal, said = Console(stderr=True), set[str]()
    with terminal.status("starting") if terminal.is_terminal else contextlib.nullcontext() as status:

        def say(text: str) -> None:
            if status is not None:
                status.update(text)
            elif not quiet and text not in said:
                said.add(text)
                typer.echo(f"holdfast plan: {text}", err=True)

        yield say
