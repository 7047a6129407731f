"""`holdfast checkpoints RUN_DIR`: list, verify and export the checkpoints of a guard.

torch is imported only for an export.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.store import Entry, Store
from holdfast.cli.guard_directory import GuardDirectory, open_store
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json, working
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.text import sanitise, size
from holdfast.guard.saving.best import best_in

# If the status of any checkpoint starts with one of these strings, the exit code is 1.
_FAILED_STATUSES = ("damaged:", "cannot be read now")
# Returned by `best_in` if the file that names the best checkpoint cannot be read.
_UNKNOWN_BEST_STEP = -1


def run(
    run_dir: GuardDirectory,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify every byte of every checkpoint.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=("Export the newest weights (for RUN/best/NAME: the best) to a safetensors file."),
        ),
    ] = None,
    export_averaged: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Export the averaged weights to this file.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Export the checkpoint of this step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, newest first, and verify or export them."""
    with failing_clearly(as_json=as_json):
        store = open_store(run_dir)
        # List the checkpoints before exporting any: an export may take a long time, during which an
        # active run may remove checkpoints.
        entries = store.entries()
        best_step = best_in(run_dir)
        if step is not None and export is None and export_averaged is None:
            raise PolicyError(
                "--step without --export",
                limit="--step selects the checkpoint to export",
                fix="add --export.",
                rule="H105",
            )
        step_to_export = best_step if step is None else step
        if export is not None:
            _export(store, step_to_export, export, averaged=False, quiet=as_json)
        if export_averaged is not None:
            _export(store, step_to_export, export_averaged, averaged=True, quiet=as_json)
        rows = _rows(store, entries, verify=verify)
        if best_step is not None:
            for row in rows:
                row["best"] = row["global_step"] == best_step
    if as_json:
        print_json({"run_dir": str(run_dir), "checkpoints": rows})
    else:
        _print_rows(rows)
    if any(row["status"].startswith(_FAILED_STATUSES) for row in rows):
        raise typer.Exit(CHECK_FAILED)


# --- Exporting ------------------------------------------------------------------------------------


def _export(store: Store, step: int | None, path: Path, *, averaged: bool, quiet: bool) -> None:
    """Export the weights of a checkpoint to a file, and print a message unless `quiet` is set.

    If `step` is None, the newest valid checkpoint is exported.
    """
    # This module is imported only for an export, because it imports torch.
    from holdfast.checkpoint.export import export as export_weights

    with working(f"writing {path}"):
        entry = _entry_to_export(store, step)
        export_weights(entry, path, averaged=averaged)
    if not quiet:
        weights = "averaged weights" if averaged else "weights"
        console().print(f"wrote {path}: the {weights} of {entry.path.name}", markup=False)


def _entry_to_export(store: Store, step: int | None) -> Entry:
    """Return the checkpoint of a step, or the newest valid checkpoint if `step` is None.

    Raises:
        PolicyError: H105 if the checkpoint does not exist.
        CheckpointError: If the checkpoint fails verification.
    """
    # `entries` lists the newest checkpoint first. It is reversed, so that if a step has several
    # checkpoints, the newest one replaces the others.
    entry_by_step = {entry.global_step: entry for entry in reversed(store.entries())}
    if step is None:
        entry = store.newest_good()
    else:
        entry = entry_by_step.get(step)
        if entry is not None:
            entry.verify()
    if entry is not None:
        return entry
    missing = "checkpoint"
    if step == _UNKNOWN_BEST_STEP:
        missing = "best checkpoint, because its best.json cannot be read"
    elif step is not None:
        missing = f"checkpoint of step {step}"
    steps = ", ".join(map(str, entry_by_step)) or "none"
    raise PolicyError(
        f"{store.directory} has no {missing}",
        limit=f"steps there: {steps}",
        fix="choose one of these steps with --step.",
        rule="H105",
    )


# --- Listing --------------------------------------------------------------------------------------


def _rows(store: Store, entries: list[Entry], *, verify: bool) -> list[dict[str, Any]]:
    """Return one row per checkpoint; damaged checkpoints that were moved aside come last."""
    row_by_path = {}
    with working("reading") as show:
        for number, entry in enumerate(entries, start=1):
            show(f"reading checkpoint {number} of {len(entries)}: {entry.path.name}")
            row_by_path[entry.path] = _row(entry, verify=verify)
    # A run may have removed a checkpoint or moved it aside since it was read.
    rows = [row for path, row in row_by_path.items() if path.exists()]
    for entry in store.damaged():
        rows.append(_row(entry, verify=False) | {"status": "damaged, moved aside"})
    return rows


def _row(entry: Entry, *, verify: bool) -> dict[str, Any]:
    """Return a checkpoint's name, step and status and, if it can be read, its size and origin.

    Args:
        entry: The checkpoint.
        verify: Whether to verify every byte instead of reading only the manifest.
    """
    row = {"name": entry.path.name, "global_step": entry.global_step}
    try:
        manifest = entry.verify() if verify else read_manifest(entry.path)
    except (RunDirectoryError, CheckpointError) as error:
        return row | {"status": _status_after(error, entry)}
    saved = datetime.fromtimestamp(manifest.unix_seconds, UTC)
    return row | {
        "status": "verified" if verify else "complete",
        "size_bytes": manifest.size_bytes(),
        "saved": saved.isoformat(timespec="seconds"),
        "written_by": manifest.written_by,
    }


def _status_after(error: RunDirectoryError | CheckpointError, entry: Entry) -> str:
    """Return the status of a checkpoint that cannot be read or fails verification."""
    if isinstance(error, CheckpointError):
        reason = error.what.partition(": ")[2] or error.what
        return f"damaged: {reason}"
    if error.rule == "H307":
        return error.what.removeprefix(f"checkpoint {entry.path.name} ")
    return "of a newer holdfast"


def _print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        typer.echo("no checkpoints yet")
        return
    table = Table("checkpoint", "step", "size", "saved (UTC)", "status")
    for row in rows:
        table.add_row(*(Text(sanitise(cell)) for cell in _cells(row)))
    console().print(table)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size_text = size(row["size_bytes"]) if "size_bytes" in row else "?"
    saved = row.get("saved", "?").removesuffix("+00:00").replace("T", " ")
    status = row["status"]
    if row.get("best"):
        status += ", the best"
    return (row["name"], str(row["global_step"]), size_text, saved, status)
