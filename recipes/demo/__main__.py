"""``python -m recipes.demo``: train on real data through real faults.

Each promise is held against its reference.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from holdfast.cli.output import (
    CHECK_FAILED,
    ERROR,
    Json,
    console,
    failing_clearly,
    keep_stdout_for_json,
    print_error,
    print_json,
)
from holdfast.core.errors import PolicyError
from recipes.demo.small_disk import command_with_small_disk

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def run(
    *,
    out: Annotated[Path, typer.Option("--out", help="Directory for the report.")] = Path("demo"),
    seed: Annotated[
        int | None, typer.Option("--seed", help="Repeat the random step and bit of another demo.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a digit classifier through real faults, and check every promise.

    Exit code 1 if one is broken.
    """
    with failing_clearly(as_json=as_json):
        _check_extras()
        started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        report = _campaign(secrets.randbelow(10**6) if seed is None else seed, quiet=as_json)
        (out / "report.json").write_text(json.dumps(report, indent=2))
    held = all(row["held"] for row in report["rows"])
    if as_json:
        print_json({**report, "held": held})
    else:
        _print(report, time.monotonic() - started)
    if not held:
        raise typer.Exit(CHECK_FAILED)


def _check_extras() -> None:
    if find_spec("sklearn") is None:
        raise PolicyError(
            "scikit-learn is not installed",
            limit="the demo trains on its digits",
            fix="pip install scikit-learn",
            rule="H105",
        )


def _campaign(seed: int, *, quiet: bool) -> dict[str, Any]:
    """Run the campaign in a process of its own, with a small disk where one may be mounted."""
    work = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    disk = work / "small-disk"
    disk.mkdir()
    command = [sys.executable, "-m", "recipes.demo.campaign", str(work)]
    mounted = command_with_small_disk(disk, [*command, str(disk), str(seed)])
    # It says what it does
    output = (sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL) if quiet else None
    ended = subprocess.run(mounted or [*command, "", str(seed)], stdout=output, check=False)  # noqa: S603
    report = work / "report.json"
    if ended.returncode != 0 or not report.exists():
        raise OSError(
            f"the demo could not be carried out (exit code {ended.returncode}); its files are in"
            f" {work}"
        )
    found: dict[str, Any] = json.loads(report.read_text())
    shutil.rmtree(work, ignore_errors=True)
    return found


def _print(report: dict[str, Any], seconds: float) -> None:
    table = Table(
        "fault",
        "what happened",
        "remedy",
        "what it promises",
        "held",
        "cost",
        box=SIMPLE,
        show_lines=True,
    )
    for row in report["rows"]:
        cost = f"{row['lost_steps']} steps, {row['seconds']:.1f} s"
        held = (
            f"[green]yes[/]: {row['evidence']}"
            if row["held"]
            else f"[red]NO[/], checked: {row['evidence']}"
        )
        table.add_row(row["fault"], row["happened"], row["remedy"], row["promise"], held, cost)
    out = console()
    out.print(table)
    out.print(
        "bit-identical: equal digests of all weights and momenta after every step\n", style="dim"
    )
    reference, disturbed = report["accuracy"]
    broken = sum(not row["held"] for row in report["rows"])
    out.print(
        f"{len(report['rows']) - broken} of {len(report['rows'])} promises held. Test accuracy: "
        f"{_percent(reference)} undisturbed, {_percent(disturbed)} with all faults."
    )
    out.print(f"{seconds:.0f} s; repeat it with --seed {report['seed']}", style="dim")


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def main() -> None:
    """Run the command line, which fails as those of holdfast do."""
    as_json = "--json" in sys.argv
    if as_json:
        keep_stdout_for_json()
    try:
        status = app(prog_name="python -m recipes.demo", standalone_mode=False)
    except Exception as error:  # noqa: BLE001 - exit code 1 would be an answer
        print_error(error, as_json=as_json)
        status = ERROR
    sys.exit(status)


if __name__ == "__main__":
    main()
