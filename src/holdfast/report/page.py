"""The page: one HTML file that opens offline and says why a run ended and how it went.

Does not: read a run (``gathering``), decide what a curve looks like (``figures``), or keep what a run said from being
more than data (``offline_page``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby

from holdfast.core.text import as_json_value, duration, moment, size
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.report.figures import figures
from holdfast.report.images import ImageSeen
from holdfast.report.offline_page import as_html, fill_page, plot, prose
from holdfast.report.run_snapshot import CheckpointSeen, RunSnapshot
from holdfast.report.sources import EventSeen
from holdfast.report.verdicts import how_sure

_MOST_EVIDENCE = 12
_LEAST_WIDTH = 320  # pixels; smaller images are enlarged by a whole number


def render(run: RunSnapshot, *, now: datetime | None = None) -> str:
    """Return the page of a run.

    Args:
        run: From `gathering.gather`.
        now: Time to write at its foot.

    Raises:
        PolicyError: H742, if plotly is not installed.
    """
    drawn = figures(run)
    return fill_page(
        name=run.path.resolve().name or str(run.path),
        command=run.command or str(run.path),
        body="\n".join(_sections(run, drawn)),
        figures=drawn,
        now=now,
    )


def _sections(run: RunSnapshot, drawn: Mapping[str, object]) -> Iterable[str]:
    yield _verdict(run.verdict)
    yield _facts(run)
    if "timeline" in drawn:
        yield plot("Timeline", "timeline", "Drag to zoom, double-click to see all.")
    if "steps" in drawn:
        hint = "Drag to zoom, double-click to see all; the panels share one axis."
        yield plot("Steps", "steps", hint)
    else:
        yield "<section><h2>Steps</h2><p>No step was recorded.</p></section>"
    yield _images(run.images)
    yield _events(run.events, run.left_out_events)
    yield _checkpoints(run.checkpoints)
    yield _stacks(run)
    yield _output(run.output)
    yield _environment(run)


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return '<section class="verdict unknown"><h2>What happened</h2><p>No verdict was made.</p></section>'
    look = {"ended well": "well", "unknown": "unknown"}.get(verdict.family, "")
    parts = [
        f'<section class="verdict {look}"><p class="kicker">What happened: {as_html(verdict.family)}</p>',
        f"<h2>{as_html(verdict.title[:1].upper() + verdict.title[1:])}</h2>",
        f'<p class="summary">{prose(verdict.summary)}</p>',
    ]
    if verdict.where:
        parts.append(f"<p>Where: <code>{as_html(verdict.where)}</code></p>")
    sure = how_sure(verdict)
    parts.append(
        f'<p class="sure">{f"How sure: {as_html(sure)}. " if sure else ""}Rule {as_html(verdict.cause)}; '
        f"<code>holdfast explain {as_html(verdict.cause)}</code> says more.</p>"
    )
    if verdict.fix:
        parts.append(f"<h3>What to change</h3><p>{prose(verdict.fix)}</p>")
    if verdict.evidence:
        parts.append("<h3>Evidence</h3>" + "".join(map(_exhibit, verdict.evidence[:_MOST_EVIDENCE])))
    parts += _listed("What was tried", verdict.tried)
    if verdict.runner_up is not None:
        rule, title, confidence = verdict.runner_up
        parts.append(f"<h3>Next best cause</h3><p>{as_html(title)} ({as_html(rule)}), {confidence:.0%}</p>")
    parts += _listed("What would have made it surer", verdict.missing)
    return "".join(parts) + "</section>"


def _exhibit(exhibit: Exhibit) -> str:
    return (
        f"<blockquote><pre>{as_html(exhibit.text, lines=True)}</pre>"
        f"<footer>{as_html(exhibit.source)}, {as_html(exhibit.role)}</footer></blockquote>"
    )


def _listed(title: str, sentences: Iterable[str]) -> list[str]:
    items = "".join(f"<li>{as_html(sentence)}</li>" for sentence in sentences)
    return [f"<h3>{title}</h3><ul>{items}</ul>"] if items else []


def _facts(run: RunSnapshot) -> str:
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
        peaks = [lane.columns[name].values for lane in run.lanes if name in lane.columns]
        finite = [float(value) for values in peaks for value in values if value == value]
        if finite:
            facts[title] = size(max(finite))
    return (
        '<div class="facts">' + "".join(f"<div><b>{as_html(v)}</b><span>{k}</span></div>" for k, v in facts.items())
    ) + "</div>"


def _images(images: tuple[ImageSeen, ...]) -> str:
    parts = "".join(
        f'<h3>{as_html(tag)}</h3><div class="images">{"".join(map(_figure, seen))}</div>'
        for tag, seen in groupby(images, key=lambda each: each.tag)
    )
    return f"<section><h2>Images</h2>{parts}</section>" if parts else ""


def _figure(image: ImageSeen) -> str:
    named = as_html(f"step {image.global_step:,}")
    width = image.width * max(1, _LEAST_WIDTH // image.width)
    data = base64.b64encode(image.png).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width}" alt="{as_html(image.tag)}, {named}">'
        f"<figcaption>{named}</figcaption></figure>"
    )


def _events(events: tuple[EventSeen, ...], left_out: Mapping[str, int]) -> str:
    if not events:
        return ""
    rows = [
        (moment(seen.event.unix_seconds), seen.source, seen.event.global_step, seen.event.kind, _facts_of(seen))
        for seen in events
    ]
    more = ", ".join(f"{count} of {kind}" for kind, count in left_out.items())
    note = f'<p class="hint">Left out here: {as_html(more)}. <code>holdfast events</code> lists all.</p>'
    table = _table({"UTC": "number", "by": "", "step": "number", "what": "", "facts": "text"}, rows)
    return (
        f"<section><details><summary><b>Events</b> ({len(events)})</summary>{note if more else ''}"
        f"{table}</details></section>"
    )


def _facts_of(seen: EventSeen) -> str:
    return ", ".join(f"{key}={value!r}"[:400] for key, value in list(seen.event.data.items())[:40])


def _checkpoints(checkpoints: tuple[CheckpointSeen, ...]) -> str:
    rows = [
        (
            each.name,
            each.global_step,
            "" if each.size_bytes is None else size(each.size_bytes),
            "" if each.saved is None else moment(each.saved),
            each.status,
        )
        for each in checkpoints
    ]
    heads = {"name": "text", "step": "number", "size": "number", "saved (UTC)": "number", "status": ""}
    return f"<section><h2>Checkpoints</h2>{_table(heads, rows)}</section>" if rows else ""


def _table(heads: Mapping[str, str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of cells as text; `heads` are the titles of its columns, with their classes."""
    looks = [f' class="{look}"' if look else "" for look in heads.values()]
    body = "".join(
        f"<tr>{''.join(f'<td{look}>{as_html(cell)}</td>' for look, cell in zip(looks, row, strict=True))}</tr>"
        for row in rows
    )
    titles = "".join(f"<th>{title}</th>" for title in heads)
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def _stacks(run: RunSnapshot) -> str:
    parts = "".join(
        f"<details><summary>{as_html(name)}</summary><pre>{as_html(text, most=70_000, lines=True)}</pre></details>"
        for name, text in run.stacks
    )
    return f"<section><h2>Stacks</h2>{parts}</section>" if parts else ""


def _output(output: str) -> str:
    if not output.strip():
        return ""
    text = as_html(output, most=40_000, lines=True)
    return f"<section><details><summary><b>End of the output</b></summary><pre>{text}</pre></details></section>"


def _environment(run: RunSnapshot) -> str:
    values = {key: value for key, value in run.supervised.items() if key != "format"}
    if isinstance(values.get("started"), (int, float)):
        values["started"] = f"{moment(values['started'])} UTC"
    rows = [
        f'<tr><th>{as_html(key, most=80)}</th><td class="text">{as_html(_shown(value))}</td></tr>'
        for key, value in list(values.items())[:60]
    ]
    rows.append(f'<tr><th>run directory</th><td class="text">{as_html(run.path)}</td></tr>')
    notes = "".join(f'<p class="notice">{as_html(problem)}</p>' for problem in run.problems)
    return f"<section><h2>Environment</h2><table>{''.join(rows)}</table>{notes}</section>"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict) and not any(isinstance(each, (dict, list)) for each in value.values()):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(as_json_value(value), ensure_ascii=False)
