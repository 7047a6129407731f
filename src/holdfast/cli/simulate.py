"""`holdfast simulate RUN_DIR --mtbf 3.1h`: how much of its time would a long run train, at which interval?

What a save costs and how often the run makes one is read from its recording; options replace what was read. The
formulas are in ``checkpoint.goodput``. Needs no torch, so it is quick.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from holdfast.checkpoint.goodput import effective_training_time_ratio, optimal_interval_seconds, parse_seconds
from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.events.event import Event
from holdfast.core.text import duration
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import read_events, read_steps


def run(
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Mean time between failures of the job, such as 3.1h.")],
    run_dir: Annotated[Path | None, typer.Argument(help="Directory that was given to Guard.")] = None,
    save_seconds: Annotated[float | None, typer.Option(help="What a save takes; else as recorded.")] = None,
    restart_seconds: Annotated[float, typer.Option(help="From a failure until training goes on.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Print which share of its time a long run would train, and where the rest goes."""
    with failing_clearly(as_json=as_json):
        recorded = Recorded() if run_dir is None else _recorded(run_dir)
        between = parse_seconds(mtbf)
        costs = _costs(recorded, save_seconds, restart_seconds)
        rows = [
            _row(name, seconds, recorded.step_seconds, between, costs)
            for name, seconds in _intervals(recorded, between, costs)
        ]
    facts = {
        "run_dir": None if run_dir is None else str(run_dir),
        "mean_seconds_between_failures": between,
        **costs,
        "recorded": asdict(recorded),
        "intervals": rows,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recording of a run says about its saves, in seconds; None for what it does not say."""

    saves: int = 0
    save_seconds: float | None = None
    stall_seconds: float | None = None
    step_seconds: float | None = None
    interval_seconds: float | None = None


def _recorded(run_dir: Path) -> Recorded:
    """Read a recording. Medians throughout: the first step compiles, and one save may meet a busy disk."""
    place = run_dir / "recorder" / "rank0"
    if not place.is_dir():
        raise PolicyError(
            f"{run_dir} is no run directory",
            limit="it holds no recording of a Guard",
            fix="pass the directory that was given to Guard, or no directory and --save-seconds.",
            rule="H701",
        )
    saves = [event for event in read_events(place) if event.kind == "checkpoint_saved" and "seconds" in event.data]
    committed = [record for record in read_steps(place) if record.mark is StepMark.COMMITTED]
    step_seconds = _median(
        later.unix_seconds - earlier.unix_seconds
        for earlier, later in itertools.pairwise(committed)
        if later.global_step == earlier.global_step + 1
    )
    gaps = [gap for a, b in itertools.pairwise(saves) if (gap := b.global_step - a.global_step) > 0]
    # The loop waits for the first and the last save: where others were made beside the training, those count.
    usual = [save for save in saves if _stall(save) < save.data["seconds"]] or saves
    costs = [save.data["save_costs_seconds"] for save in saves if save.data.get("save_costs_seconds") is not None]
    return Recorded(
        saves=len(saves),
        save_seconds=_median(save.data["seconds"] for save in usual),
        # The newest cost is already a median, of all that was measured: it is what the run chose its interval by.
        stall_seconds=costs[-1] if costs else _median(_stall(save) for save in usual),
        step_seconds=step_seconds,
        # Of two, the longer: the last save of a run comes early.
        interval_seconds=statistics.median_high(gaps) * step_seconds if gaps and step_seconds else None,
    )


def _stall(save: Event) -> float:
    return float(save.data.get("stall_seconds", save.data["seconds"]))


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median_low(known) if known else None


def _costs(recorded: Recorded, save: float | None, restart: float) -> dict[str, float]:
    taken = recorded.save_seconds if save is None else save
    if taken is None:
        raise PolicyError(
            "the time that a save takes is unknown",
            limit="there is no run directory, or its recording has no finished save",
            fix="pass the directory of a run that has saved, or --save-seconds.",
            rule="H708",
        )
    if not 0 < taken < math.inf:
        raise PolicyError(
            f"save_seconds={taken:g}", limit="a save takes some time", fix="pass --save-seconds.", rule="H706"
        )
    stall = taken if recorded.stall_seconds is None else min(recorded.stall_seconds, taken)
    return {"save_seconds": taken, "stall_seconds": stall, "restart_seconds": restart}


def _intervals(recorded: Recorded, between: float, costs: dict[str, float]) -> list[tuple[str, float]]:
    """Return the intervals to compare. None is shorter than the writer takes, the optimal one than a step either."""
    stall, recorded_seconds = costs["stall_seconds"], recorded.interval_seconds
    writer = costs["save_seconds"] - stall
    best = optimal_interval_seconds(stall, between, costs["restart_seconds"]) - stall
    mine = [] if recorded_seconds is None else [("this run's", max(recorded_seconds, writer))]
    return [*mine, ("optimal", max(best, writer, recorded.step_seconds or 0.0))]


def _row(name: str, seconds: float, step: float | None, between: float, costs: dict[str, float]) -> dict[str, Any]:
    """Return the shares of the time that are trained, and lost by each cause; they add to 1."""
    stall, restart = costs["stall_seconds"], costs["restart_seconds"]
    ratio = effective_training_time_ratio(seconds, costs["save_seconds"], between, restart, stall_seconds=stall)
    saving, restarting = ratio * stall / seconds, -math.expm1(-restart / between)
    return {
        "name": name,
        "interval_seconds": seconds,
        "interval_steps": None if not step else max(1, round(seconds / step)),
        "ratio": ratio,
        "saving": saving,
        "lost_work": max(0.0, 1 - ratio - saving - restarting),
        "restarting": restarting,
    }


def _print(facts: dict[str, Any]) -> None:
    table = Table("interval", "", "steps", "training", "saving", "lost work", "restarts")
    for row in facts["intervals"]:
        table.add_row(
            row["name"],
            duration(row["interval_seconds"]),
            str(row["interval_steps"] or "?"),
            *(f"{row[share]:.2%}" for share in ("ratio", "saving", "lost_work", "restarting")),
        )
    typer.echo(
        f"a failure every {_time(facts['mean_seconds_between_failures'])}; "
        f"a save takes {_time(facts['save_seconds'])} and costs the training {_time(facts['stall_seconds'])}; "
        f"a restart takes {_time(facts['restart_seconds'])}"
    )
    console().print(table)
    typer.echo("Shares of the wall-clock time.")


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"
