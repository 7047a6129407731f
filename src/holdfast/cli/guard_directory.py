"""`holdfast checkpoints` and `holdfast quarantine`: what a guard keeps in its run directory.

Without torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.store import Entry, Store
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json, working
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.text import moment, sanitise, size
from holdfast.explain.runs.recordings import open_recordings
from holdfast.guard.directory import RunDirectory
from holdfast.guard.saving.best import best_in
from holdfast.loader.quarantine import FILE_NAME, Ledger, Quarantined, last_line, plain

_RunDir = Annotated[Path, typer.Argument(help="Directory that was given to Guard.")]


def checkpoints(
    run_dir: _RunDir,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of every checkpoint.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the newest weights (of RUN/best/NAME the best) to a safetensors file."
        ),
    ] = None,
    export_averaged: Annotated[
        Path | None, typer.Option(help="Write its averaged weights to this one.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Export the checkpoint of this step.")] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, newest first; with --verify check them.

    With --export take the weights out.
    """
    with failing_clearly(as_json=as_json):
        store = store_of(run_dir)
        entries = store.entries()
        if step is not None and export is export_averaged is None:
            raise PolicyError(
                "--step without --export",
                limit="nothing is written",
                fix="add --export.",
                rule="H105",
            )
        for path, averaged in ((export, False), (export_averaged, True)):
            if path is not None:
                # Imported here because it loads torch.
                from holdfast.checkpoint.export import export as export_weights

                with working(f"writing {path}"):
                    entry = _to_export(store, best_in(run_dir) if step is None else step)
                    export_weights(entry, path, averaged=averaged)
                if not as_json:
                    what = "averaged weights" if averaged else "weights"
                    console().print(f"wrote {path}: the {what} of {entry.path.name}", markup=False)
        described = []
        with working("reading") as say:
            for number, entry in enumerate(entries, 1):
                say(f"reading checkpoint {number} of {len(entries)}: {entry.path.name}")
                described.append(_checkpoint_row(entry, verify=verify))
        # A run may have removed, or moved aside, what was just listed.
        rows = [row for entry, row in zip(entries, described, strict=True) if entry.path.exists()]
        rows += [
            _checkpoint_row(entry, verify=False, status="damaged, moved aside")
            for entry in store.damaged()
        ]
        if (best := best_in(run_dir)) is not None:
            rows = [{**row, "best": row["global_step"] == best} for row in rows]
    if as_json:
        print_json({"run_dir": str(run_dir), "checkpoints": rows})
    else:
        _print_checkpoints(rows)
    if any(row["status"].startswith(("damaged:", "cannot be read now")) for row in rows):
        raise typer.Exit(CHECK_FAILED)


def _to_export(store: Store, step: int | None) -> Entry:
    """Return the checkpoint of a step, or the newest; it verifies."""
    steps = {each.global_step: each for each in reversed(store.entries())}
    if step in steps:
        steps[step].verify()
    found = store.newest_good() if step is None else steps.get(step)
    if found is None:
        which = (
            ""
            if step is None
            else f" of step {step}"
            if step != -1
            else " that its best.json calls the best"
        )
        what, there = f"{store.directory} has no checkpoint{which}", ", ".join(map(str, steps))
        raise PolicyError(
            what,
            limit=f"steps there: {there or 'none'}",
            fix="name another, by --step.",
            rule="H105",
        )
    return found


def store_of(run_dir: Path) -> Store:
    """Return the checkpoints of a run directory (H731 if it is no guard's)."""
    store = Store(run_dir / "checkpoints")
    if not store.directory.is_dir() and not (run_dir / "recorder").is_dir():
        run = open_recordings(run_dir)
        guards = run.guards(
            [event for folder, _ in run.processes() for event in run.events(folder)]
        )
        there = " or ".join(sorted({shlex.quote(str(folder.parent.parent)) for folder in guards}))
        raise PolicyError(
            f"{run_dir} is a directory of `holdfast run`, not of a Guard",
            limit=(
                "checkpoints and quarantined samples lie in the directory that was given to Guard"
            ),
            fix=(
                f"pass {there}."
                if there
                else f"there was no Guard. `holdfast explain {run_dir}` says how it ended."
            ),
            rule="H731",
        )
    return store


def _checkpoint_row(entry: Entry, *, verify: bool, status: str = "complete") -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": entry.path.name,
        "global_step": entry.global_step,
        "status": status,
    }
    try:
        manifest = entry.verify() if verify else read_manifest(entry.path)
    except RunDirectoryError as error:
        if error.rule != "H307":
            return {**facts, "status": "of a newer holdfast"}
        reason = error.what.removeprefix(f"checkpoint {entry.path.name} ")
        return facts if status != "complete" else {**facts, "status": reason}
    except CheckpointError as error:
        reason = error.what.partition(": ")[2] or error.what
        return facts if status != "complete" else {**facts, "status": f"damaged: {reason}"}
    saved = datetime.fromtimestamp(manifest.unix_seconds, UTC).isoformat(timespec="seconds")
    facts |= {
        "size_bytes": manifest.size_bytes(),
        "saved": saved,
        "written_by": manifest.written_by,
    }
    return {**facts, "status": "verified"} if verify else facts


def _print_checkpoints(rows: list[dict[str, Any]]) -> None:
    table = Table("checkpoint", "step", "size", "saved (UTC)", "status")
    for row in rows:
        written = size(row["size_bytes"]) if "size_bytes" in row else "?"
        saved = row.get("saved", "?").removesuffix("+00:00").replace("T", " ")
        status = row["status"] + ", the best" * row.get("best", False)
        cells = (row["name"], str(row["global_step"]), written, saved, status)
        table.add_row(*(Text(sanitise(cell)) for cell in cells))
    if rows:
        console().print(table)
    else:
        typer.echo("no checkpoints yet")


def quarantine(
    run_dir: _RunDir,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Print all of it, not its last line.")
    ] = False,
    release: Annotated[
        list[str] | None,
        typer.Option("--release", metavar="SAMPLE", help="Release this one; may be repeated."),
    ] = None,
    release_all: Annotated[bool, typer.Option("--release-all", help="Release all.")] = False,
    as_json: Json = False,
) -> None:
    """List the samples that a run has quarantined, with the evidence, and release them.

    The run reads them again.

    Exit code 0: done. 2: it could not be done.
    """
    with failing_clearly(as_json=as_json):
        if not (run_dir / FILE_NAME).exists():
            store_of(run_dir)
        with contextlib.ExitStack() as stack:
            # A live run would write its own ledger over what is released
            if release or release_all:
                directory = RunDirectory(run_dir)
                directory.acquire()
                stack.callback(directory.release)
            # What the run allows does not matter here
            ledger = Ledger(sys.maxsize, None, time.time)
            ledger.keep_in(run_dir / FILE_NAME)
            held = [entry for entry in ledger if not entry.released]
            wanted = (
                [each.index for each in held]
                if release_all
                else _named(held, release or [], run_dir)
            )
            released = [plain(index) for index in ledger.release(wanted)]
    rows = [_sample_row(entry) for entry in ledger]
    if as_json:
        print_json({"run_dir": str(run_dir), "samples": rows, "released": released})
    else:
        _print_samples(rows, released, evidence=evidence)


def _named(held: list[Quarantined], names: list[str], run_dir: Path) -> list[Any]:
    """Return the dataset indices that these names mean; H710 for a name of none."""
    printed = [str(plain(each.index)) for each in held]
    for name in names:
        if name not in printed:
            there = ", ".join(printed[:10]) + (", ..." if len(printed) > 10 else "")
            what, limit = (
                f"sample {name!r} is not quarantined in {run_dir}",
                f"quarantined there: {there or 'none'}",
            )
            fix = f"pass a name as `holdfast quarantine {run_dir}` prints it."
            raise PolicyError(what, limit=limit, fix=fix, rule="H710")
    return [each.index for each, name in zip(held, printed, strict=True) if name in names]


def _sample_row(entry: Quarantined) -> dict[str, Any]:
    row = dataclasses.asdict(entry) | {
        "index": plain(entry.index),
        "found": moment(entry.unix_seconds),
    }
    del row["unix_seconds"]
    return row


def _print_samples(
    rows: list[dict[str, Any]], released: list[int | str], *, evidence: bool
) -> None:
    table = Table("sample", "kind", "from epoch", "found (UTC)", "state", "evidence")
    for row in rows:
        state = "released" if row["released"] else "quarantined"
        cells = [
            str(row["index"]),
            row["kind"],
            str(row["epoch"]),
            row["found"],
            state,
            last_line(row["evidence"]),
        ]
        # Not str: brackets in it are no markup
        table.add_row(*(Text(sanitise(cell)) for cell in cells))
    if rows:
        console().print(table)
    for row in rows if evidence else []:
        text = (
            f"\nsample {row['index']},"
            f" {row['kind']}:\n{textwrap.indent(row['evidence'].strip(), '  ')}"
        )
        typer.echo(sanitise(text, most=10_000, lines=True))
    for name in released:
        typer.echo(sanitise(f"released {name}"))
    gone = sum(row["released"] for row in rows)
    typer.echo(f"{len(rows) - gone} quarantined, {gone} released")
