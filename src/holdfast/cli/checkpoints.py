"""`holdfast checkpoints RUN_DIR`: list, verify, prune. Needs no torch, so it is quick."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from holdfast.checkpoint.seal import read_manifest
from holdfast.checkpoint.store import Entry, Store
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.text import size
from holdfast.guard.directory import RunDirectory


def run(
    run_dir: Annotated[Path, typer.Argument(help="Directory that was given to Guard.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every checkpoint.")] = False,
    prune: Annotated[
        int | None, typer.Option("--prune", min=1, metavar="K", help="Keep the newest K, and the last good one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, newest first; with --verify check them, with --prune delete old ones."""
    with failing_clearly(as_json=as_json):
        store = store_of(run_dir)
        removed = [] if prune is None else _prune(run_dir, store, prune)
        entries = store.entries()
        described = [_describe(entry, verify=verify) for entry in entries]
        # A run may have removed, or moved aside, what was just listed.
        rows = [row for entry, row in zip(entries, described, strict=True) if entry.path.exists()]
        rows += [_describe(entry, verify=False, status="damaged, moved aside") for entry in store.damaged()]
    if as_json:
        print_json({"run_dir": str(run_dir), "checkpoints": rows, "removed": [path.name for path in removed]})
    else:
        _print(rows, removed)
    if any(row["status"].startswith(("damaged:", "cannot be read now")) for row in rows):
        raise typer.Exit(CHECK_FAILED)


def store_of(run_dir: Path) -> Store:
    """Return the checkpoints of a run directory.

    Raises:
        PolicyError: H701 if it is none.
    """
    store = Store(run_dir / "checkpoints")
    if not store.directory.is_dir() and not (run_dir / "recorder").is_dir():
        raise PolicyError(
            f"{run_dir} is no run directory",
            limit="it holds neither checkpoints nor a recording",
            fix="pass the directory that was given to Guard.",
            rule="H701",
        )
    return store


def _prune(run_dir: Path, store: Store, keep: int) -> list[Path]:
    directory = RunDirectory(run_dir)
    directory.acquire()  # never delete under a run that trains
    try:
        return store.prune(keep)
    finally:
        directory.release()


def _describe(entry: Entry, *, verify: bool, status: str = "complete") -> dict[str, Any]:
    facts: dict[str, Any] = {"name": entry.path.name, "global_step": entry.global_step, "status": status}
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
    facts |= {"size_bytes": manifest.size_bytes(), "saved": saved, "written_by": manifest.written_by}
    return {**facts, "status": "verified"} if verify else facts


def _print(rows: list[dict[str, Any]], removed: list[Path]) -> None:
    table = Table("checkpoint", "step", "size", "saved (UTC)", "status")
    for row in rows:
        written = size(row["size_bytes"]) if "size_bytes" in row else "?"
        saved = row.get("saved", "?").removesuffix("+00:00").replace("T", " ")
        table.add_row(row["name"], str(row["global_step"]), written, saved, row["status"])
    if rows:
        console().print(table)
    else:
        typer.echo("no checkpoints yet")
    for path in removed:
        typer.echo(f"removed {path.name}")
