"""`holdfast quarantine RUN_DIR`: list the samples that are set aside, read them again, take them back.

Needs torch only to read them again. Each is read in a forked copy of this process with a time limit, since it may
hang or kill whoever reads it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
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
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, FOUND_BY_READING, Ledger, Quarantined, last_line

_Verdict = tuple[str, str]  # "good", "bad" or "unclear", and why


def run(
    run_dir: Annotated[Path, typer.Argument(help="Directory that was given to Guard.")],
    evidence: Annotated[bool, typer.Option("--evidence", help="Print all of it, not its last line.")] = False,
    retest: Annotated[
        str | None,
        typer.Option(
            "--retest",
            metavar="FACTORY",
            help="Read each sample again; module:function or file.py:function, which returns a dataset or a loader.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds that a sample may take.")
    ] = 60.0,
    release: Annotated[
        list[str] | None, typer.Option("--release", metavar="SAMPLE", help="Take this one back; may be repeated.")
    ] = None,
    release_good: Annotated[
        bool, typer.Option("--release-good", help="With --retest: take back those that are good now.")
    ] = False,
    release_all: Annotated[bool, typer.Option("--release-all", help="Take all back.")] = False,
    as_json: Json = False,
) -> None:
    """List the samples that a run has set aside, with the evidence; read them again; take them back.

    Exit code 0: done. 1: a sample that was read again is still bad. 2: it could not be done.
    """
    with failing_clearly(as_json=as_json):
        if release_good and retest is None:
            raise PolicyError(
                "--release-good without --retest",
                limit="nothing tells which samples are good",
                fix="pass --retest module:function, or name samples with --release.",
                rule="H105",
            )
        if not (run_dir / FILE_NAME).exists():
            store_of(run_dir)
        with _held(run_dir) if release or release_good or release_all else contextlib.nullcontext():
            ledger = Ledger(sys.maxsize, None, time.time)  # what the run allows does not matter here
            ledger.keep_in(run_dir / FILE_NAME)
            aside = [entry for entry in ledger if not entry.released]
            wanted = [each.index for each in aside] if release_all else _named(aside, release or [], run_dir)
            verdicts = {} if retest is None else _retest(retest, aside, timeout)
            good = [index for index, (verdict, _) in verdicts.items() if verdict == "good"]
            released = ledger.release(wanted + good if release_good else wanted)
    rows = [_describe(entry, verdicts.get(entry.index)) for entry in ledger]
    if as_json:
        print_json({"run_dir": str(run_dir), "samples": rows, "released": [_plain(index) for index in released]})
    else:
        _print(rows, [str(_plain(index)) for index in released], retested=retest is not None, evidence=evidence)
    if any(verdict == "bad" for verdict, _ in verdicts.values()):
        raise typer.Exit(CHECK_FAILED)


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    """Hold the lock: a live run would write its own ledger over what is released.

    Raises:
        RunDirectoryError: H301, if a run holds it.
    """
    directory = RunDirectory(run_dir)
    directory.acquire()
    try:
        yield
    finally:
        directory.release()


def _plain(index: Any) -> int | str:
    """Return a dataset index as it is printed, and as it is named with --release."""
    return index if isinstance(index, (int, str)) else repr(index)


def _named(aside: list[Quarantined], names: list[str], run_dir: Path) -> list[Any]:
    """Return the dataset indices that these names mean.

    Raises:
        PolicyError: H710 for a name of none.
    """
    printed = [str(_plain(each.index)) for each in aside]
    for name in names:
        if name not in printed:
            there = ", ".join(printed[:10]) + (", ..." if len(printed) > 10 else "")
            raise PolicyError(
                f"sample {name!r} is not set aside in {run_dir}",
                limit=f"set aside there: {there or 'none'}",
                fix=f"pass a name as `holdfast quarantine {run_dir}` prints it.",
                rule="H710",
            )
    return [each.index for each, name in zip(aside, printed, strict=True) if name in names]


def _retest(factory: str, aside: list[Quarantined], timeout_seconds: float) -> dict[Any, _Verdict]:
    """Read samples again, with the random numbers that they had if the factory returns the run's loader.

    Raises:
        PolicyError: H703 for a factory that returns nothing to read from.
    """
    made = make_loader(factory, 1)
    from torch.utils.data import IterableDataset  # here, since torch takes seconds to import

    from holdfast.loader.loader import DataLoader
    from holdfast.loader.seeds import SampleSeeds

    if isinstance(made.dataset, IterableDataset) or not hasattr(made.dataset, "__getitem__"):
        raise unusable_factory(
            factory,
            f"the samples of a {type(made.dataset).__name__} have no index",
            "return the run's loader or dataset.",
        )
    seed, checks = (made.seed, made._check_finite) if isinstance(made, DataLoader) else (0, False)
    verdicts, seeds = {}, SampleSeeds(seed)
    for entry in aside:
        finite = checks or entry.kind == "non-finite" or entry.kind not in FOUND_BY_READING
        read = functools.partial(
            _read_again, made.dataset, entry.index, seeds.of(entry.epoch, entry.index), finite=finite
        )
        verdict, why = verdicts[entry.index] = _judge(entry, read, timeout_seconds)
        typer.echo(f"sample {_plain(entry.index)}: {verdict}{why and ', '}{last_line(why)}", err=True)
    return verdicts


def _judge(entry: Quarantined, read: Callable[[], dict[str, Any]], timeout_seconds: float) -> _Verdict:
    from holdfast.core.forked import NoAnswer, in_a_copy_of_this_process

    if entry.stands_for:
        return "unclear", f"the ledger cannot hold the {entry.stands_for} that it is read by; read it yourself"
    try:
        why = in_a_copy_of_this_process(read, timeout_seconds=timeout_seconds)["why"]
    except NoAnswer as error:
        why = str(error)
    if why is not None:
        return "bad", why
    if entry.kind in FOUND_BY_READING:
        return "good", ""
    return "unclear", f"it can be read, which does not answer why it was set aside ({entry.kind})"


def _read_again(dataset: Any, index: Any, seed: int, *, finite: bool) -> dict[str, Any]:
    """Return why a sample cannot be used, None if it can: in two tries with the same random numbers, as in a run."""
    from holdfast.loader.inspection import find_nonfinite
    from holdfast.loader.random_state import seed_cpu

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


def _describe(entry: Quarantined, verdict: _Verdict | None) -> dict[str, Any]:
    row = {
        "index": _plain(entry.index),
        "kind": entry.kind,
        "epoch": entry.epoch,
        "found": datetime.fromtimestamp(entry.unix_seconds, UTC).isoformat(timespec="seconds"),
        "evidence": entry.evidence,
        "released": entry.released,
    }
    return row if verdict is None else {**row, "now": verdict[0], "why": verdict[1]}


def _printable(text: str) -> str:
    """Return a text without what no terminal takes: half characters, as in a broken file name."""
    return text.encode(errors="backslashreplace").decode()


def _print(rows: list[dict[str, Any]], released: list[str], *, retested: bool, evidence: bool) -> None:
    table = Table("sample", "kind", "from epoch", "found (UTC)", "state", "evidence")
    if retested:
        table.add_column("read again")
    for row in rows:
        found = row["found"].removesuffix("+00:00").replace("T", " ")
        state = "released" if row["released"] else "set aside"
        cells = [str(row["index"]), row["kind"], str(row["epoch"]), found, state, last_line(row["evidence"])]
        if retested:
            cells.append(f"{row['now']} {last_line(row['why'])}".strip() if "now" in row else "-")
        table.add_row(*(Text(_printable(cell)) for cell in cells))  # not str: brackets in it are no markup
    if rows:
        console().print(table)
    for row in rows if evidence else []:
        told = f"\nsample {row['index']}, {row['kind']}:\n{textwrap.indent(row['evidence'].strip(), '  ')}"
        if row.get("why"):
            told += f"\n  read again: {row['now']}\n{textwrap.indent(row['why'], '  ')}"
        typer.echo(_printable(told))
    for name in released:
        typer.echo(_printable(f"released {name}"))
    gone = sum(row["released"] for row in rows)
    typer.echo(f"{len(rows) - gone} set aside, {gone} released")
