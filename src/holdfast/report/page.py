"""The page: one HTML file that opens offline and says why a run ended and how it went.

What it looks like is in ``templates/page.html``.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

import numpy as np

from holdfast.core.text import duration, moment, sanitise, size
from holdfast.report.environment import environment
from holdfast.report.figures import figures
from holdfast.report.goodput import COLOURS, goodput
from holdfast.report.offline_page import fill_page
from holdfast.report.run_snapshot import RunSnapshot
from holdfast.report.sources import EventSeen
from holdfast.report.verdicts import how_sure, tone


def render(run: RunSnapshot, *, now: datetime | None = None) -> str:
    """Return the page of a run, with a time at its foot (H742 if plotly is not installed)."""
    return fill_page(
        "page.html",
        figures(run),
        now,
        kind="report",
        run=run,
        name=run.path.resolve().name or str(run.path),
        under=run.command or run.path,
        tone="unknown" if run.verdict is None else tone(run.verdict),
        sure="" if run.verdict is None else how_sure(run.verdict),
        facts=facts_of_run(run),
        goodput=goodput(run),
        colours=COLOURS,
        environment=environment(run),
        facts_of=_facts_of,
        base64=lambda data: base64.b64encode(data).decode(),
    )


def facts_of_run(run: RunSnapshot) -> dict[str, str]:
    """Return the figures at the head of the page."""
    times = [time for lane in run.lanes for time in (lane.begun, lane.ended) if time]
    times += [seen.event.unix_seconds for seen in run.events]
    times += [] if run.began is None else [run.began]
    facts = {
        "steps": f"{max((lane.last_step for lane in run.lanes), default=0):,}",
        "began": moment(min(times)) if times else "unknown",
        "from first to last sign": duration(max(times) - min(times)) if times else "unknown",
        "attempts": str(1 + run.attempt),
    }
    if run.guards or run.checkpoints:  # what a script saves by itself is not counted
        facts["checkpoints"] = str(sum(each.status == "complete" for each in run.checkpoints))
    facts |= _pace(run)
    if spent := goodput(run):
        facts["goodput"] = f"{spent['steps'] / sum(spent.values()):.1%}"
    for title, name in (
        ("peak host memory", "host_bytes"),
        ("peak device memory", "device_peak_bytes"),
    ):
        peaks = [
            lane.columns[name].finite.max(initial=0) for lane in run.lanes if name in lane.columns
        ]
        if peaks:
            facts[title] = size(max(peaks))
    return facts


def _pace(run: RunSnapshot) -> dict[str, str]:
    """Return how fast steps of the first rank follow each other, mostly.

    Validation and breaks are left out.
    """
    found = [np.array([])]
    for lane in run.lanes:
        if not lane.rank and not lane.optimizer:
            steps, first = np.unique(lane.moments[1], return_index=True)
            seconds = np.diff(lane.moments[0][first])
            found.append(np.diff(steps)[seconds > 0] / seconds[seconds > 0])
    if not len(rates := np.concatenate(found)):
        return {}
    facts = {"steps a second": float(np.median(rates))}
    epochs = [each.event.data for each in run.events if each.event.kind == "epoch_ended"]
    # The others were begun before a restart
    epochs = [data for data in epochs if data.get("steps")]
    known: list[Any] = (
        [epochs[-1].get(name) for name in ("batches", "batch_size", "steps")] if epochs else [None]
    )
    if all(type(each) is int and each > 0 for each in known):
        of_step = known[0] * known[1] / known[2] * (1 + max(lane.rank or 0 for lane in run.lanes))
        facts["samples a second"] = facts["steps a second"] * of_step
    return {name: f"{float(f'{rate:.3g}'):,g}" for name, rate in facts.items()}


def _facts_of(seen: EventSeen) -> str:
    return sanitise(seen.event.sentence(), most=2000)
