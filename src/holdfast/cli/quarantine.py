"""`holdfast quarantine RUN_DIR`: list the quarantined samples, read them again, release them.

Needs torch only to read them again. Each is read in a forked copy of this process with a time limit, since it may
hang or kill whoever reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.checkpoints import store_of
from holdfast.cli.factories import unusable_factory
from holdfast.cli.loader import make_loader
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.text import moment, sanitise
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, FOUND_BY_READING, Ledger, Quarantined, last_line, plain

_Verdict = tuple[str, str]  # "good", "bad" or "unclear", and why


def run(
    run_dir: Annotated[Path, typer.Argument(help="Directory that was given to Guard.")],
    evidence: Annotated[bool, typer.Option("--evidence", help="Print all of it, not its last line.")] = False,
    retest: Annotated[
        str | None,
        typer.Option(
            "--retest",
            metavar="FACTORY",
            help="Read each sample again; module:function or file.py:function that returns a dataset or loader.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds that a sample may take.")
    ] = 60.0,
    release: Annotated[
        list[str] | None, typer.Option("--release", metavar="SAMPLE", help="Release this one; may be repeated.")
    ] = None,
    release_good: Annotated[
        bool, typer.Option("--release-good", help="With --retest: release those that are good now.")
    ] = False,
    release_all: Annotated[bool, typer.Option("--release-all", help="Release all.")] = False,
    as_json: Json = False,
) -> None:
    """List the samples that a run has quarantined, with the evidence; read them again; release them.

    Exit code 0: done. 1: a sample that was read again is still bad. 2: it could not be done.
    """
    with failing_clearly(as_json=as_json):
        if release_good and retest is None:
            fix = "pass --retest module:function, or name samples with --release."
            what, limit = "--release-good without --retest", "nothing shows which samples are good"
            raise PolicyError(what, limit=limit, fix=fix, rule="H105")
        if not (run_dir / FILE_NAME).exists():
            store_of(run_dir)
        with contextlib.ExitStack() as stack:
            if release or release_good or release_all:  # a live run would write its own ledger over what is released
                directory = RunDirectory(run_dir)
                directory.acquire()
                stack.callback(directory.release)
            ledger = Ledger(sys.maxsize, None, time.time)  # what the run allows does not matter here
            ledger.keep_in(run_dir / FILE_NAME)
            held = [entry for entry in ledger if not entry.released]
            wanted = [each.index for each in held] if release_all else _named(held, release or [], run_dir)
            verdicts = {} if retest is None else _retest(retest, held, timeout)
            good = [index for index, (verdict, _) in verdicts.items() if verdict == "good"]
            released = [plain(index) for index in ledger.release(wanted + good if release_good else wanted)]
    rows = [_described(entry, verdicts.get(entry.index)) for entry in ledger]
    if as_json:
        print_json({"run_dir": str(run_dir), "samples": rows, "released": released})
    else:
        _print(rows, released, retested=retest is not None, evidence=evidence)
    if any(verdict == "bad" for verdict, _ in verdicts.values()):
        raise typer.Exit(CHECK_FAILED)


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


def _retest(factory: str, held: list[Quarantined], timeout_seconds: float) -> dict[Any, _Verdict]:
    """Read samples again, with the random numbers that they had if the factory returns the run's loader."""
    made = make_loader(factory, 1)
    from torch.utils.data import IterableDataset  # here, since torch takes seconds to import

    from holdfast.core.forked import NoAnswer, in_a_copy_of_this_process
    from holdfast.loader.loader import DataLoader
    from holdfast.loader.seeds import SampleSeeds

    if isinstance(made.dataset, IterableDataset) or not hasattr(made.dataset, "__getitem__"):
        raise unusable_factory(factory, "its samples have no index", "return the run's loader or dataset.")
    seed, checks = (made.seed, made._check_finite) if isinstance(made, DataLoader) else (0, False)
    verdicts, seeds = {}, SampleSeeds(seed)
    for entry in held:
        finite = checks or entry.kind == "non-finite" or entry.kind not in FOUND_BY_READING
        sample_seed = seeds.of(entry.epoch, entry.index)
        read = functools.partial(_read_again, made.dataset, entry.index, sample_seed, finite=finite)
        try:
            why = in_a_copy_of_this_process(read, timeout_seconds=timeout_seconds)["why"]
        except NoAnswer as error:
            why = str(error)
        verdict = ("good", "") if why is None else ("bad", why)
        if why is None and entry.kind not in FOUND_BY_READING:
            verdict = "unclear", f"it can be read, which does not answer why it was quarantined ({entry.kind})"
        verdicts[entry.index] = verdict
        typer.echo(f"sample {plain(entry.index)}: {verdict[0]}{why and ', '}{last_line(verdict[1])}", err=True)
    return verdicts


def _read_again(dataset: Any, index: Any, seed: int, *, finite: bool) -> dict[str, Any]:
    """Return why a sample cannot be used, None if it can: in two tries with the same random numbers, as in a run."""
    from holdfast.loader.random_state import seed_cpu
    from holdfast.loader.workers.fetch import find_nonfinite

    why = None
    for _ in range(2):
        seed_cpu(seed)
        try:
            sample = dataset[index]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the answer
            why = "".join(traceback.format_exception(error)).strip()
        else:
            why = find_nonfinite(sample) if finite else None
            if why is None:
                break
    return {"why": why}


def _described(entry: Quarantined, verdict: _Verdict | None) -> dict[str, Any]:
    row = dataclasses.asdict(entry) | {"index": plain(entry.index), "found": moment(entry.unix_seconds)}
    del row["unix_seconds"]
    return row if verdict is None else {**row, "now": verdict[0], "why": verdict[1]}


def _print(rows: list[dict[str, Any]], released: list[int | str], *, retested: bool, evidence: bool) -> None:
    table = Table("sample", "kind", "from epoch", "found (UTC)", "state", "evidence")
    if retested:
        table.add_column("read again")
    for row in rows:
        state = "released" if row["released"] else "quarantined"
        cells = [str(row["index"]), row["kind"], str(row["epoch"]), row["found"], state, last_line(row["evidence"])]
        if retested:
            cells.append(f"{row['now']} {last_line(row['why'])}".strip() if "now" in row else "-")
        table.add_row(*(Text(sanitise(cell)) for cell in cells))  # not str: brackets in it are no markup
    if rows:
        console().print(table)
    for row in rows if evidence else []:
        text = f"\nsample {row['index']}, {row['kind']}:\n{textwrap.indent(row['evidence'].strip(), '  ')}"
        if row.get("why"):
            text += f"\n  read again: {row['now']}\n{textwrap.indent(row['why'], '  ')}"
        typer.echo(sanitise(text, most=10_000, lines=True))
    for name in released:
        typer.echo(sanitise(f"released {name}"))
    gone = sum(row["released"] for row in rows)
    typer.echo(f"{len(rows) - gone} quarantined, {gone} released")
