"""`holdfast trial FACTORY --b lr=*0.1`: is a change better, from one snapshot, on the same batches, beyond noise?"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from holdfast.cli.factories import load_factory
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.policy_sources import parse_value

if TYPE_CHECKING:
    from holdfast.run.comparison import Arm, Comparison


def run(
    factory: Annotated[
        str, typer.Argument(help="module:function or file.py:function; it returns Guard's arguments.")
    ],
    b: Annotated[list[str], typer.Option("--b", metavar="NAME=VALUE", help="What B changes: lr=*0.1, or a field.")],
    a: Annotated[
        list[str] | None, typer.Option("--a", metavar="NAME=VALUE", help="What A changes; else none.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Start from this run's newest checkpoint.")
    ] = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps of each arm.")] = 100,
    seeds: Annotated[int, typer.Option(min=3, max=10, help="Pairs of arms.")] = 3,
    smallest_gain: Annotated[float, typer.Option(min=0, help="Share of A's score that is worth a change.")] = 0.01,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="If B is better, write it into a new checkpoint of RUN_DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train A and B from one snapshot on the same batches, and say whether B is better beyond noise.

    Exit code 0: B is better. 1: keep A. 2: the trial could not be made.
    """
    with failing_clearly(as_json=as_json):
        if adopt and run_dir is None:
            raise PolicyError(
                "--adopt without --from", limit="there is no run to change", fix="pass --from RUN_DIR.", rule="H105"
            )
        if adopt and run_dir is not None:
            _check_free(run_dir)
        build, changes_a, changes_b = load_factory(factory), _changes(a or []), _changes(b)
        from holdfast.run import comparison  # here, since torch takes seconds to import

        with _quiet():
            found = comparison.compare(
                build,
                changes_a,
                changes_b,
                run_dir=run_dir,
                steps=steps,
                seeds=seeds,
                smallest_gain=smallest_gain,
                on_arm=lambda name, number, arm: typer.echo(
                    f"seed {number} {name}: {len(arm.losses)} steps", err=True
                ),
            )
        facts = _describe(found, changes_a, changes_b)
        if not as_json:
            _print_table(found)
        if adopt and run_dir is not None and found.is_better:
            facts["adopted"] = _adopt(comparison.adopt, build, changes_b, run_dir, facts)
    if as_json:
        print_json(facts)
    else:
        _print_end(found, facts)
    if not found.is_better:
        raise typer.Exit(CHECK_FAILED)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log of the arms to themselves: one may fail, and that is a result here."""
    log = logging.getLogger("holdfast")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _check_free(run_dir: Path) -> None:
    """Find out whether the run directory can be written, before anything is trained.

    Raises:
        RunDirectoryError: H301, if a run holds it.
    """
    from holdfast.run.directory import RunDirectory

    if run_dir.is_dir():
        directory = RunDirectory(run_dir)
        directory.acquire()
        directory.release()


def _adopt(
    write: Callable[..., Path | None], build: Any, changes: dict[str, Any], run_dir: Path, facts: Any
) -> str | None:
    written = write(build, changes, run_dir, {"gains": facts["gains"], "noise": facts["noise"]})
    return None if written is None else written.name


def _changes(given: list[str]) -> dict[str, Any]:
    found = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise PolicyError(f"{each!r}", limit="a change has a name and a value", fix="write lr=*0.1.", rule="H704")
        name = name.strip().replace("-", "_")
        found[name] = text.strip() if text.strip().startswith("*") else parse_value(name, name, text)
    return found


def _told(arm: Arm) -> str:
    if arm.error is not None:
        return f"ended after {len(arm.losses)} steps: {arm.error.splitlines()[0]}"
    return f"{arm.judged_by} {arm.score:.6g} after {len(arm.losses)} steps" + (
        f", {arm.skipped_steps} skipped" if arm.skipped_steps else ""
    )


def _describe(found: Comparison, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "better": found.is_better,
        "gains": [_finite(gain) for gain in found.gains],
        "noise": _finite(found.noise),
        "smallest_gain": found.smallest_gain,
        "seeds": [{name: _arm(arm) for name, arm in zip("ab", pair, strict=True)} for pair in found.pairs],
    }


def _arm(arm: Arm) -> dict[str, Any]:
    facts = dataclasses.asdict(arm)
    return {**facts, "score": _finite(arm.score), "losses": [_finite(loss) for loss in arm.losses]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _print_table(found: Comparison) -> None:
    table = Table("seed", "A", "B", "gain")
    for number, ((a, b), gain) in enumerate(zip(found.pairs, found.gains, strict=True)):
        table.add_row(str(number), _told(a), _told(b), f"{gain:.6g}")
    console().print(table)
    if found.is_better:
        typer.echo("B is better in every seed, beyond noise.")
    else:
        typer.echo("Keep A: B is not better in every seed, beyond noise, and by enough.")
    typer.echo(
        f"mean gain {statistics.fmean(found.gains):.6g}; noise reaches {found.noise:.6g} (one-sided 95 %); "
        f"a gain below {found.smallest_gain:.3g} of A's score is not worth a change"
    )


def _print_end(found: Comparison, facts: dict[str, Any]) -> None:
    if found.is_better:
        from holdfast.run.changes import policy_changes

        policy = policy_changes(facts["b"])
        if facts.get("adopted"):
            typer.echo(f"adopted: checkpoint {facts['adopted']}")
        elif len(policy) < len(facts["b"]):
            typer.echo("Nothing was changed; --from RUN_DIR --adopt writes it into a checkpoint of the run.")
        if policy:
            typer.echo("policy fields belong into your program:")
            for name, value in policy.items():
                typer.echo(f"  {name}: {value}")
