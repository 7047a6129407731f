"""The page: one HTML file that opens offline and says why a run ended and how it went.

What it looks like is in ``templates/page.html``.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from itertools import islice

from holdfast.core.text import as_json_value, duration, moment, size
from holdfast.core.version import __version__
from holdfast.report.figures import figures
from holdfast.report.offline_page import fill_page
from holdfast.report.run_snapshot import RunSnapshot
from holdfast.report.sources import EventSeen
from holdfast.report.verdicts import how_sure, tone


def render(run: RunSnapshot, *, now: datetime | None = None) -> str:
    """Return the page of a run, with a time at its foot (H742 if plotly is not installed)."""
    return fill_page(
        figures(run),
        {"moment": moment, "size": size, "base64": lambda data: base64.b64encode(data).decode(), "facts": _facts_of},
        run=run,
        name=run.path.resolve().name or str(run.path),
        tone="unknown" if run.verdict is None else tone(run.verdict),
        sure="" if run.verdict is None else how_sure(run.verdict),
        facts=_facts(run),
        environment=_environment(run),
        written=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _facts(run: RunSnapshot) -> dict[str, str]:
    """Return the figures at the head of the page."""
    times = [time for lane in run.lanes for time in (lane.begun, lane.ended) if time]
    times += [seen.event.unix_seconds for seen in run.events]
    times += [] if run.began is None else [run.began]
    facts = {
        "steps": f"{max((lane.last_step for lane in run.lanes), default=0):,}",
        "began": moment(min(times)) if times else "unknown",
        "from first to last sign": duration(max(times) - min(times)) if times else "unknown",
        "attempts": str(1 + run.attempt),
        "checkpoints": str(sum(each.status == "complete" for each in run.checkpoints)),
    }
    for title, name in (("peak host memory", "host_bytes"), ("peak device memory", "device_peak_bytes")):
        peaks = [lane.columns[name].finite.max(initial=0) for lane in run.lanes if name in lane.columns]
        if peaks:
            facts[title] = size(max(peaks))
    return facts


def _facts_of(seen: EventSeen) -> str:
    return ", ".join(f"{key}={value!r}"[:400] for key, value in list(seen.event.data.items())[:40])


def _environment(run: RunSnapshot) -> dict[str, str]:
    values = {key: value for key, value in run.supervised.items() if key != "format"}
    if isinstance(values.get("started"), (int, float)):
        values["started"] = f"{moment(values['started'])} UTC"
    return {key: _shown(value) for key, value in islice(values.items(), 60)}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict) and not any(isinstance(each, (dict, list)) for each in value.values()):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(as_json_value(value), ensure_ascii=False)
