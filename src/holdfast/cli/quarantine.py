"""`holdfast quarantine RUN_DIR`: list the quarantined samples, release them. Needs no torch, so it is quick."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.checkpoints import store_of
from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.text import moment, sanitise
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, Ledger, Quarantined, last_line, plain


def run(
    run_dir: Annotated[Path, typer.Argument(help="Directory that was given to Guard.")],
    evidence: Annotated[bool, typer.Option("--evidence", help="Print all of it, not its last line.")] = False,
    release: Annotated[
        list[str] | None, typer.Option("--release", metavar="SAMPLE", help="Release this one; may be repeated.")
    ] = None,
    release_all: Annotated[bool, typer.Option("--release-all", help="Release all.")] = False,
    as_json: Json = False,
) -> None:
    """List the samples that a run has quarantined, with the evidence, and release them: the run reads them again.

    Exit code 0: done. 2: it could not be done.
    """
    with failing_clearly(as_json=as_json):
        if not (run_dir / FILE_NAME).exists():
            store_of(run_dir)
        with contextlib.ExitStack() as stack:
            if release or release_all:  # a live run would write its own ledger over what is released
                directory = RunDirectory(run_dir)
                directory.acquire()
                stack.callback(directory.release)
            ledger = Ledger(sys.maxsize, None, time.time)  # what the run allows does not matter here
            ledger.keep_in(run_dir / FILE_NAME)
            held = [entry for entry in ledger if not entry.released]
            wanted = [each.index for each in held] if release_all else _named(held, release or [], run_dir)
            released = [plain(index) for index in ledger.release(wanted)]
    rows = [_described(entry) for entry in ledger]
    if as_json:
        print_json({"run_dir": str(run_dir), "samples": rows, "released": released})
    else:
        _print(rows, released, evidence=evidence)


def _named(held: list[Quarantined], names: list[str], run_dir: Path) -> list[Any]:
    """Return the dataset indices that these names mean; H710 for a name of none."""
    printed = [str(plain(each.index)) for each in held]
    for name in names:
        if name not in printed:
            there = ", ".join(printed[:10]) + (", ..." if len(printed) > 10 else "")
            what, limit = f"sample {name!r} is not quarantined in {run_dir}", f"quarantined there: {there or 'none'}"
            fix = f"pass a name as `holdfast quarantine {run_dir}` prints it."
            raise PolicyError(what, limit=limit, fix=fix, rule="H710")
    return [each.index for each, name in zip(held, printed, strict=True) if name in names]


def _described(entry: Quarantined) -> dict[str, Any]:
    row = dataclasses.asdict(entry) | {"index": plain(entry.index), "found": moment(entry.unix_seconds)}
    del row["unix_seconds"]
    return row


def _print(rows: list[dict[str, Any]], released: list[int | str], *, evidence: bool) -> None:
    table = Table("sample", "kind", "from epoch", "found (UTC)", "state", "evidence")
    for row in rows:
        state = "released" if row["released"] else "quarantined"
        cells = [str(row["index"]), row["kind"], str(row["epoch"]), row["found"], state, last_line(row["evidence"])]
        table.add_row(*(Text(sanitise(cell)) for cell in cells))  # not str: brackets in it are no markup
    if rows:
        console().print(table)
    for row in rows if evidence else []:
        text = f"\nsample {row['index']}, {row['kind']}:\n{textwrap.indent(row['evidence'].strip(), '  ')}"
        typer.echo(sanitise(text, most=10_000, lines=True))
    for name in released:
        typer.echo(sanitise(f"released {name}"))
    gone = sum(row["released"] for row in rows)
    typer.echo(f"{len(rows) - gone} quarantined, {gone} released")
