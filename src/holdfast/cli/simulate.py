"""`holdfast simulate [RUN_DIR] --gpus 16384 --failures 419/54d`: how much of the time would train, at which interval?

What a save costs and how often the run makes one is read from its recording; options replace what was read. A
directory of `holdfast run` leads to that of the Guard in it. Needs no torch, so it is quick.

The formulas and the simulation are in ``checkpoint.goodput`` and ``checkpoint.simulation``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from holdfast.checkpoint.goodput import (
    check_interval,
    check_stall,
    effective_training_time_ratio,
    optimal_interval_seconds,
    parse_failures,
    parse_seconds,
    young_interval_seconds,
)
from holdfast.checkpoint.simulation import simulate_run
from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError
from holdfast.core.events import Event
from holdfast.core.text import duration, size
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import StepRecord, read_events, read_steps
from holdfast.report.sources import find_sources, guard_run_of

# An assumption, and printed as one: a process on one machine is back in seconds, a large job on a slow store in 20
# minutes. It is used where no restart was recorded and none was given.
_RESTART_SECONDS = 300.0
_RECORDING = Path("recorder", "rank0")
_LONGEST_SECONDS = 1e12  # 30,000 years: beyond it, a rate is a slip of the pen


def run(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Directory that was given to Guard, or of `holdfast run`; --save-seconds needs none."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=10**9, help="Devices of the job that is simulated.")] = 1,
    failures: Annotated[
        str | None, typer.Option(metavar="RATE", help="419/54d of a whole job, or 6.5/1000 node-days.")
    ] = None,
    failures_gpus: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Devices of the job that had --failures; else as many as --gpus."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=10**6, help="For a rate in node-days.")] = 8,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the job, such as 3.1h.")
    ] = None,
    save_seconds: Annotated[float | None, typer.Option(help="Until a checkpoint counts; else as recorded.")] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(help="What a save costs the training; else as recorded, or all of the save.")
    ] = None,
    restart_seconds: Annotated[
        float | None, typer.Option(help="From a failure until training goes on; else as recorded, or 300.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME", help="Training between two saves, such as 10min; else as recorded.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated failures.")] = 0,
    as_json: Json = False,
) -> None:
    """Print which share of its time a long run would train, by formula and by simulation, and where the rest goes."""
    with failing_clearly(as_json=as_json):
        used = None if run_dir is None else _of_guard(run_dir)
        recorded = Recorded() if used is None else _recorded(used)
        between = _between_failures(failures, mtbf, gpus, failures_gpus, gpus_per_node)
        costs = _costs(recorded, save_seconds, stall_seconds, restart_seconds)
        given = None if interval is None else _interval(interval, costs)
        rows = [
            _row(name, seconds, recorded.step_seconds, between, costs, seed)
            for name, seconds in _intervals(recorded, given, between, costs)
        ]
    facts = {
        "run_dir": None if used is None else str(used),
        "gpus": gpus,
        "mean_seconds_between_failures": between,
        **costs,
        "recorded": asdict(recorded),
        "seed": seed,
        "intervals": rows,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recording of a run says about its saves; None for what it does not say.

    `save_seconds` pass until a checkpoint counts, `stall_seconds` are what a save takes from the training.
    `restarts` counts failures after which training went on, `restart_seconds` after the last sign of life.
    """

    saves: int = 0
    save_seconds: float | None = None
    stall_seconds: float | None = None
    size_bytes: float | None = None
    step_seconds: float | None = None
    interval_seconds: float | None = None
    restarts: int = 0
    restart_seconds: float | None = None


def _of_guard(run_dir: Path) -> Path:
    """Return where the Guard of a supervised run recorded, if there was just one; else `run_dir` itself."""
    if (run_dir / _RECORDING).is_dir():
        return run_dir
    events = [event for source in find_sources(run_dir) for event in read_events(source.directory)]
    guards = {guard for event in events if (guard := guard_run_of(event)) and (guard / _RECORDING).is_dir()}
    return guards.pop() if len(guards) == 1 else run_dir


def _recorded(run_dir: Path) -> Recorded:
    """Read a recording. Medians throughout: the first step compiles, and one save may meet a busy disk.

    Raises:
        PolicyError: H701 if there is no recording.
        RunDirectoryError: H305 if it cannot be read by this holdfast.
    """
    place = run_dir / _RECORDING
    if not place.is_dir():
        raise PolicyError(
            f"{run_dir} is no run directory",
            limit="it holds no recording of a Guard, and leads to none, or to several",
            fix="pass the directory that was given to Guard, or no directory and --save-seconds.",
            rule="H701",
        )
    events, steps = read_events(place), read_steps(place)
    saves = [event for event in events if event.kind == "checkpoint_saved" and _number(event, "seconds") is not None]
    committed = [record for record in steps if record.mark is StepMark.COMMITTED]
    step_seconds = _median(
        [
            later.unix_seconds - earlier.unix_seconds
            for earlier, later in itertools.pairwise(committed)
            if later.global_step == earlier.global_step + 1
        ]
    )
    gaps = [later.global_step - earlier.global_step for earlier, later in itertools.pairwise(saves)]
    gaps = [gap for gap in gaps if gap > 0]
    restarts = _restarts(events, steps)
    # The loop waits for the first and the last save: where others were made beside the training, those count.
    usual = [save for save in saves if _was_beside(save)] or saves
    costs = [cost for save in saves if (cost := _number(save, "save_costs_seconds")) is not None]
    return Recorded(
        saves=len(saves),
        save_seconds=_median([_number(save, "seconds") for save in usual]),
        # The newest cost is already a median, of all that was measured: it is what the run chose its interval by.
        stall_seconds=costs[-1] if costs else _median([_number(save, "stall_seconds", "seconds") for save in usual]),
        size_bytes=_median([_number(save, "size_bytes") for save in saves]),
        step_seconds=step_seconds,
        # Of two, the longer: the last save of a run comes early.
        interval_seconds=statistics.median_high(gaps) * step_seconds if gaps and step_seconds else None,
        restarts=len(restarts),
        restart_seconds=_median(restarts),
    )


def _restarts(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[float]:
    """Return the seconds from each failure until training went on.

    A failure comes within a step, or loses some. A run that was stopped on purpose has ended and saved its last step,
    and how long it then lay still says nothing.
    """
    found = []
    for event in events:
        if event.kind == "resumed":
            before = [record for record in steps if record.unix_seconds < event.unix_seconds]
            after = [record for record in steps if record.unix_seconds >= event.unix_seconds]
            if not before or not after:
                continue
            last = before[-1]
            if last.mark is StepMark.BEGUN or last.global_step > event.global_step:
                found.append(after[0].unix_seconds - last.unix_seconds)
    return found


def _was_beside(save: Event) -> bool:
    stall, seconds = _number(save, "stall_seconds"), _number(save, "seconds")
    return stall is not None and seconds is not None and stall < seconds


def _number(event: Event, *names: str) -> float | None:
    """Return the first of these facts that the event has; facts that were too long are cut, and all missing."""
    found = [event.data[name] for name in names if isinstance(event.data.get(name), int | float)]
    return float(found[0]) if found else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None


def _between_failures(
    failures: str | None, mtbf: str | None, gpus: int, failures_gpus: int | None, gpus_per_node: int
) -> float:
    """Return the mean seconds between two failures of the job.

    Raises:
        PolicyError: H705 for what cannot be read, H706 for a time that no job has, H707 unless exactly one of the
            two is given.
    """
    if (failures is None) == (mtbf is None):
        raise PolicyError(
            "neither --failures nor --mtbf" if mtbf is None else "both --failures and --mtbf",
            limit="one of them says how often the job fails",
            fix="pass --failures 419/54d (Llama 3 on 16384 GPUs), --failures '6.5/1000 node-days', or --mtbf 3.1h.",
            rule="H707",
        )
    if failures is not None:
        between = parse_failures(failures, gpus=gpus, counted_on=failures_gpus, gpus_per_node=gpus_per_node)
    else:
        between = parse_seconds(mtbf or "")
    if not 1 <= between <= _LONGEST_SECONDS:
        raise PolicyError(
            f"a failure every {between:g} s",
            limit=f"from 1 to {_LONGEST_SECONDS:g} s can be simulated",
            fix="check the rate, --gpus and --failures-gpus.",
            rule="H706",
        )
    return between


def _costs(recorded: Recorded, save: float | None, stall: float | None, restart: float | None) -> dict[str, Any]:
    """Return what a save and a restart cost, and where each figure is from.

    Raises:
        PolicyError: H708 if nothing says what a save costs, H706 for a figure that cannot be.
    """
    taken = recorded.save_seconds if save is None else save
    if taken is None:
        raise PolicyError(
            "the time that a save takes is unknown",
            limit="no finished save is recorded",
            fix="pass the directory of a run that has saved, or --save-seconds.",
            rule="H708",
        )
    if not 0 < taken < math.inf:
        raise PolicyError(
            f"save_seconds={taken:g}", limit="a save takes some time", fix="pass --save-seconds.", rule="H706"
        )
    held = taken if recorded.stall_seconds is None else min(recorded.stall_seconds, taken)
    if stall is not None:
        check_stall(stall, taken)
    back = _RESTART_SECONDS if recorded.restart_seconds is None else recorded.restart_seconds
    assumed = "assumed" if recorded.restart_seconds is None else "recorded"
    return {
        "save_seconds": taken,
        "stall_seconds": held if stall is None else stall,
        "restart_seconds": back if restart is None else restart,
        "restart_is": assumed if restart is None else "given",
    }


def _interval(text: str, costs: dict[str, Any]) -> float:
    given = parse_seconds(text)
    check_interval(given, costs["save_seconds"], costs["stall_seconds"])
    return given


def _intervals(
    recorded: Recorded, given: float | None, between: float, costs: dict[str, Any]
) -> list[tuple[str, float]]:
    """Return the intervals to compare, by name: none shorter than a step, or than the writer takes."""
    save, stall = costs["save_seconds"], costs["stall_seconds"]
    least = max(save - stall, recorded.step_seconds or 0.0)
    best = optimal_interval_seconds(stall, between, costs["restart_seconds"]) - stall
    found = [("optimal", max(best, least)), ("Young's", max(young_interval_seconds(stall, between), least))]
    if given is not None:
        return [("given", given), *found]
    if recorded.interval_seconds is not None:
        # Saves that come too fast wait for the writer.
        return [("this run's", max(recorded.interval_seconds, save - stall)), *found]
    return found


def _row(
    name: str, seconds: float, step_seconds: float | None, between: float, costs: dict[str, Any], seed: int
) -> dict[str, Any]:
    arguments = (seconds, costs["save_seconds"], between, costs["restart_seconds"])
    stall = costs["stall_seconds"]
    return {
        "name": name,
        "interval_seconds": seconds,
        "interval_steps": None if not step_seconds else max(1, round(seconds / step_seconds)),
        "formula": effective_training_time_ratio(*arguments, stall_seconds=stall),
        "first_order": effective_training_time_ratio(*arguments, stall_seconds=stall, first_order=True),
        "simulation": asdict(simulate_run(*arguments, stall_seconds=stall, seed=seed)),
    }


def _print(facts: dict[str, Any]) -> None:
    table = Table("interval", "", "steps", "formula", "simulation", "saving", "lost work", "restarts")
    for row in facts["intervals"]:
        played = row["simulation"]
        table.add_row(
            row["name"],
            duration(row["interval_seconds"]),
            str(row["interval_steps"] or "?"),
            f"{row['formula']:.2%}",
            f"{played['ratio']:.2%} ± {played['standard_error']:.2%}",
            *(f"{played[cause]:.2%}" for cause in ("saving", "lost_work", "restarting")),
        )
    gpus = "1 GPU" if facts["gpus"] == 1 else f"{facts['gpus']} GPUs"
    typer.echo(f"{gpus}, a failure every {duration(facts['mean_seconds_between_failures'])} on average")
    bytes_of_one = facts["recorded"]["size_bytes"]
    typer.echo(
        f"a save takes {duration(facts['save_seconds'])} and costs the training {duration(facts['stall_seconds'])}"
        + ("" if bytes_of_one is None else f" (checkpoints of {size(bytes_of_one)})")
        + f"; a restart takes {duration(facts['restart_seconds'])} ({facts['restart_is']})"
    )
    console().print(table)
    if facts["run_dir"] is not None and facts["intervals"][0]["name"] == "optimal":
        typer.echo("The recording has no two saves, so the interval of this run is unknown: pass --interval.")
    typer.echo("Shares of the wall-clock time; ± is one standard error. Another number of GPUs may change the costs.")
