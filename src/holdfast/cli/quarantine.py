"""`holdfast quarantine RUN_DIR`: list and release the samples that a guard has quarantined.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.guard_directory import GuardDirectory, open_store
from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.text import listed, moment, sanitise
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, Quarantined, QuarantineLedger, last_line, plain

# Maximum number of samples to name in an error message.
_MOST_NAMED = 10
_MOST_CHARACTERS_OF_EVIDENCE = 10_000


def run(
    run_dir: GuardDirectory,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Print all evidence instead of only its last line.")
    ] = False,
    release: Annotated[
        list[str] | None,
        typer.Option("--release", metavar="SAMPLE", help="Release this sample. May be repeated."),
    ] = None,
    release_all: Annotated[
        bool, typer.Option("--release-all", help="Release all samples.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the samples that a run has quarantined, with the evidence, or release them.

    The run will read released samples again.

    Exit code 0: success. 2: an error.
    """
    with failing_clearly(as_json=as_json):
        if not (run_dir / FILE_NAME).exists():
            # This raises an error if the directory was not written by a guard.
            open_store(run_dir)
        with contextlib.ExitStack() as stack:
            if release or release_all:
                stack.enter_context(_locked(run_dir))
            # This command quarantines nothing, so the limit on quarantined samples does not matter.
            ledger = QuarantineLedger(sys.maxsize, None, time.time)
            ledger.keep_in(run_dir / FILE_NAME)
            held = [sample for sample in ledger if not sample.released]
            if release_all:
                indices = [sample.index for sample in held]
            else:
                indices = _indices_named(release or [], held, run_dir)
            released = [plain(index) for index in ledger.release(indices)]
    rows = [_row(sample) for sample in ledger]
    if as_json:
        print_json({"run_dir": str(run_dir), "samples": rows, "released": released})
    else:
        _print_samples(rows, released, evidence=evidence)


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Context manager that holds the lock of a run directory.

    Without the lock, a run that is still active would overwrite the ledger, and the releases would
    be lost.

    Raises:
        RunDirectoryError: H301 if a run holds the lock.
    """
    directory = RunDirectory(run_dir)
    directory.acquire()
    try:
        yield
    finally:
        directory.release()


def _indices_named(names: list[str], held: list[Quarantined], run_dir: Path) -> list[Any]:
    """Return the dataset indices of the quarantined samples with the given names.

    Raises:
        PolicyError: H710 if a name matches no quarantined sample.
    """
    held_names = [_name(sample) for sample in held]
    for name in names:
        if name not in held_names:
            raise PolicyError(
                f"sample {name!r} is not quarantined in {run_dir}",
                limit=f"quarantined there: {listed(held_names, most=_MOST_NAMED) or 'none'}",
                fix=f"pass a name from the output of `holdfast quarantine {run_dir}`.",
                rule="H710",
            )
    return [sample.index for sample in held if _name(sample) in names]


def _name(sample: Quarantined) -> str:
    """Return the name that identifies a sample in the output and in ``--release``."""
    return str(plain(sample.index))


# --- Printing -------------------------------------------------------------------------------------


def _row(sample: Quarantined) -> dict[str, Any]:
    """Return the fields of a sample, with the index and the time in printable form."""
    row = dataclasses.asdict(sample)
    row["index"] = plain(sample.index)
    row["found"] = moment(sample.unix_seconds)
    del row["unix_seconds"]
    return row


def _print_samples(
    rows: list[dict[str, Any]], released: list[int | str], *, evidence: bool
) -> None:
    if rows:
        table = Table("sample", "kind", "from epoch", "found (UTC)", "state", "evidence")
        for row in rows:
            # Use `Text`, because brackets in a plain string would be interpreted as markup.
            table.add_row(*(Text(sanitise(cell)) for cell in _cells(row)))
        console().print(table)
    if evidence:
        for row in rows:
            _print_evidence(row)
    for name in released:
        typer.echo(sanitise(f"released {name}"))
    num_released = sum(1 for row in rows if row["released"])
    typer.echo(f"{len(rows) - num_released} quarantined, {num_released} released")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    state = "released" if row["released"] else "quarantined"
    return (
        str(row["index"]),
        row["kind"],
        str(row["epoch"]),
        row["found"],
        state,
        last_line(row["evidence"]),
    )


def _print_evidence(row: dict[str, Any]) -> None:
    indented = textwrap.indent(row["evidence"].strip(), "  ")
    text = f"\nsample {row['index']}, {row['kind']}:\n{indented}"
    typer.echo(sanitise(text, most=_MOST_CHARACTERS_OF_EVIDENCE, lines=True))
