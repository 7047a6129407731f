"""Render the HTML page that shows how a run went and why it ended.

This module computes the contents of the page; ``templates/page.html`` defines the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import cast

import numpy as np

from holdfast.core.text import duration, moment, size
from holdfast.report.curves import FloatArray, StepTimes
from holdfast.report.live.outlook import three_digits
from holdfast.report.page.environment import environment
from holdfast.report.page.figures.plotly_values import Figure
from holdfast.report.page.figures.steps import share_equal_curves, step_figure
from holdfast.report.page.figures.timeline import timeline_figure
from holdfast.report.page.final_values import last_and_best_values
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.page.goodput import COLOURS, goodput
from holdfast.report.page.marked_stacks import mark_stacks
from holdfast.report.page.offline_page import fill_page
from holdfast.report.verdicts import tone

_BEGAN = "began (UTC)"
# Maximum number of cards with values of the loss and of metrics. The curves show the others.
_MAX_VALUE_CARDS = 8


def render(
    run: GatheredRun, *, now: datetime | None = None, plotly_addresses: Sequence[str] = ()
) -> str:
    """Return the page of a run as HTML.

    Args:
        run: The gathered recordings of the run.
        now: The time to show at the foot of the page; by default the current time.
        plotly_addresses: See `fill_page`.

    Raises:
        PolicyError: H742 if plotly is not installed.
    """
    return fill_page(
        "page.html",
        figures(run),
        now,
        plotly_addresses=plotly_addresses,
        kind="report",
        run=run,
        name=run.path.resolve().name or str(run.path),
        under=run.command or run.path,
        tone="unknown" if run.verdict is None else tone(run.verdict),
        facts=_cards(run),
        goodput=goodput(run),
        speed=() if run.verdict is None else run.verdict.speed,
        colours=COLOURS,
        environment=environment(run),
        marked_stacks=mark_stacks(run.stacks, run.verdict),
    )


def figures(run: GatheredRun) -> dict[str, Figure]:
    """Return the figures that have content, keyed by the id of the HTML element."""
    drawn = {
        "timeline": timeline_figure(run),
        "steps": step_figure(share_equal_curves(run.lanes), run.events),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _cards(run: GatheredRun) -> dict[str, str]:
    """Return the contents of the cards at the top of the page, keyed by title.

    What the run has learned comes first. Cards with more values than fit are left out.
    """
    values = dict(islice(last_and_best_values(run).items(), _MAX_VALUE_CARDS))
    facts = key_figures(run)
    # The date and the time in one line would be too long for a card.
    began = facts.pop(_BEGAN)
    date, _, time = began.partition(" ")
    return values | facts | {f"began {date} UTC": time or began}


def key_figures(run: GatheredRun) -> dict[str, str]:
    """Return the key figures of a run, keyed by title."""
    times = _recorded_times(run)
    facts = {
        "steps": f"{max((lane.last_step for lane in run.lanes), default=0):,}",
        "duration": duration(max(times) - min(times)) if times else "unknown",
    }
    seconds_by_use = goodput(run)
    if seconds_by_use:
        share = seconds_by_use["steps"] / sum(seconds_by_use.values())
        facts["time in steps"] = f"{share:.1%}"
    facts["attempts"] = str(run.attempt + 1)
    # Show the number of checkpoints only for a guard, because checkpoints that the script saves by
    # itself are not known.
    if run.guards or run.checkpoints:
        complete = [item for item in run.checkpoints if item.status == "complete"]
        facts["checkpoints"] = str(len(complete))
    facts |= _throughput(run)
    for title, name in (
        ("peak host memory", "host_bytes"),
        ("peak device memory", "device_peak_bytes"),
    ):
        peak = _largest_value(run, name)
        if peak is not None:
            facts[title] = size(peak)
    facts[_BEGAN] = moment(min(times), "%Y-%m-%d %H:%M") if times else "unknown"
    return facts


def _recorded_times(run: GatheredRun) -> list[float]:
    """Return the Unix times of all events of a run, and of the start and end of its lanes."""
    times = [recorded.event.unix_seconds for recorded in run.events]
    for lane in run.lanes:
        times += [time for time in (lane.begun, lane.ended) if time]
    if run.began is not None:
        times.append(run.began)
    return times


def _largest_value(run: GatheredRun, name: str) -> float | None:
    """Return the largest value of all curves with this name, or None if there are none."""
    curves = [lane.curves[name] for lane in run.lanes if name in lane.curves]
    if not curves:
        return None
    return max(float(curve.finite.max(initial=0)) for curve in curves)


def _throughput(run: GatheredRun) -> dict[str, str]:
    """Return the known rates, in steps and samples per second, as text, keyed by title."""
    steps_per_second = _median_rate(
        lane.times for lane in run.lanes if not lane.rank and not lane.optimizer
    )
    if steps_per_second is None:
        return {}
    rates = {"steps per second": steps_per_second}
    samples_per_step = _samples_per_step(run)
    if samples_per_step is not None:
        rates["samples per second"] = steps_per_second * samples_per_step
    return {title: three_digits(rate) for title, rate in rates.items()}


def _median_rate(times_of_attempts: Iterable[StepTimes]) -> float | None:
    """Return the median rate in steps per second, which validation and breaks do not affect."""
    rates: list[FloatArray] = [np.array([])]
    for times in times_of_attempts:
        # Steps may be repeated after a rollback, so use the first time of each step.
        steps, first = np.unique(times.steps, return_index=True)
        seconds = np.diff(times.unix_seconds[first])
        is_later = seconds > 0
        rates.append(np.diff(steps)[is_later] / seconds[is_later])
    all_rates = np.concatenate(rates)
    return float(np.median(all_rates)) if len(all_rates) else None


def _samples_per_step(run: GatheredRun) -> float | None:
    """Return the number of samples per step, over all ranks, in the newest complete epoch.

    Returns None if no epoch was recorded from start to end.
    """
    epochs = [item.event.data for item in run.events if item.event.kind == "epoch_ended"]
    # If an epoch was interrupted by a restart, its number of steps is missing.
    whole_epochs = [epoch for epoch in epochs if epoch.get("steps")]
    if not whole_epochs:
        return None
    counts = [whole_epochs[-1].get(name) for name in ("batches", "batch_size", "steps")]
    if not all(type(count) is int and count > 0 for count in counts):
        return None
    batches, batch_size, steps = cast("list[int]", counts)
    world_size = 1 + max(lane.rank or 0 for lane in run.lanes)
    return batches * batch_size / steps * world_size
