"""`holdfast calibrate`: measure this machine's GPU, so that plans for it rest on its own figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json, failing_clearly, print_json, working
from holdfast.forecast.devices.catalogue import save_device


def run(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Where to write; else here, under the device's name."),
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Which of this machine's devices.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure memory, workspaces and rates of a CUDA device, in under a minute, and write them to a file.

    Take the file to a machine without a GPU and plan there: `holdfast plan … --device FILE.json`.
    """
    with failing_clearly(as_json=as_json):
        from holdfast.forecast.devices.calibration import calibrate  # here, since torch takes seconds to import

        with working("measuring the device"):
            device = calibrate(index)
        path = Path(f"{re.sub('[^a-z0-9.]+', '-', device.name.lower())}.json") if out is None else out
        save_device(device, path)
        if as_json:
            print_json({"file": str(path), "device": device.name})
        else:
            typer.echo(f"{device.name}: written to {path}")
