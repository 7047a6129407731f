"""The page: one HTML file that opens offline and tells why a run ended and how it went.

All that a run said is data here: it is escaped where it enters the HTML, JSON in which ``<``, ``>`` and ``&`` are
written as escapes where it enters a script, and the page's own policy runs only the two scripts that it was written
with (by their digests) and loads nothing from anywhere.

Does not: read a run (``gathering``), decide what a curve looks like (``figures``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from holdfast.core.errors import PolicyError
from holdfast.core.version import __version__
from holdfast.diagnose.verdict import Exhibit, Verdict
from holdfast.report.figures import figures
from holdfast.report.gathering import CheckpointSeen, ProcessSeen, RunPicture
from holdfast.report.inert import as_json_value, inert
from holdfast.report.quantities import duration, moment, size
from holdfast.report.sources import EventSeen
from holdfast.report.verdicts import how_sure

_TEMPLATES = Path(__file__).with_name("templates")
_MOST_EVIDENCE = 12
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(picture: RunPicture, *, now: datetime | None = None) -> str:
    """Return the page of a run.

    Args:
        picture: From `gathering.gather`.
        now: Time to write at its foot.

    Raises:
        PolicyError: H742, if plotly is not installed.
    """
    drawn = figures(picture)
    plotly = _plotly_script()
    script = _template("page.js").substitute()
    name = _named(picture)
    return _template("page.html").substitute(
        policy=_policy(plotly, script),
        title=_text(f"{name} - holdfast"),
        style=_template("page.css").template,
        name=_text(name),
        command=_text(_command(picture), most=4000),
        body="\n".join(_sections(picture, drawn)),
        written=_text((now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")),
        version=_text(__version__),
        figures=_json(drawn),
        plotly=plotly,
        script=script,
    )


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PolicyError(
            "plotly is not installed",
            limit="the page draws its curves with it",
            fix='install the extra: pip install "holdfast[report]"; `holdfast watch RUN --once` needs nothing.',
            rule="H742",
        ) from error
    # A browser reads CR LF and CR as LF, and takes the digest of what it read.
    script: str = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _template(name: str) -> Template:
    return Template((_TEMPLATES / name).read_text(encoding="utf-8"))


def _json(value: object) -> str:
    text = json.dumps(as_json_value(value, depth=12), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return "".join(_IN_SCRIPT.get(character, character) for character in text)


def _text(value: object, *, most: int = 2000, lines: bool = False) -> str:
    return escape(inert(value, most=most, lines=lines), quote=True)


def _prose(value: str) -> str:
    """Return text in which words between backticks are set as code; they are escaped before."""
    return re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", _text(value, most=4000))


def _named(picture: RunPicture) -> str:
    return picture.path.resolve().name or str(picture.path)


def _command(picture: RunPicture) -> str:
    argv = picture.supervised.get("argv")
    return " ".join(map(str, argv)) if isinstance(argv, list) else str(picture.path)


def _sections(picture: RunPicture, drawn: Mapping[str, object]) -> Iterable[str]:
    yield _verdict(picture.verdict)
    yield _facts(picture)
    if "timeline" in drawn:
        yield _plot("Timeline", "timeline", "Drag to zoom, double-click to see all.")
    if "steps" in drawn:
        hint = "Drag to zoom, double-click to see all; the panels share one axis."
        yield _plot("Steps", "steps", hint)
    else:
        yield "<section><h2>Steps</h2><p>No step was recorded.</p></section>"
    yield _events(picture.events, picture.left_out_events)
    yield _checkpoints(picture.checkpoints)
    yield _stacks(picture)
    yield _output(picture.output)
    yield _environment(picture)


def _plot(title: str, place: str, hint: str) -> str:
    return f'<section><h2>{title}</h2><p class="hint">{hint}</p><div class="plot" id="{place}"></div></section>'


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return '<section class="verdict unknown"><h2>What happened</h2><p>No verdict was made.</p></section>'
    look = {"ended well": "well", "unknown": "unknown"}.get(verdict.family, "")
    parts = [
        f'<section class="verdict {look}"><p class="kicker">What happened: {_text(verdict.family)}</p>',
        f"<h2>{_text(verdict.title[:1].upper() + verdict.title[1:])}</h2>",
        f'<p class="summary">{_prose(verdict.summary)}</p>',
    ]
    if verdict.where:
        parts.append(f"<p>Where: <code>{_text(verdict.where)}</code></p>")
    sure = how_sure(verdict)
    parts.append(
        f'<p class="sure">{f"How sure: {_text(sure)}. " if sure else ""}Rule {_text(verdict.cause)}; '
        f"<code>holdfast explain {_text(verdict.cause)}</code> tells more.</p>"
    )
    if verdict.fix:
        parts.append(f"<h3>What to change</h3><p>{_prose(verdict.fix)}</p>")
    if verdict.evidence:
        parts.append("<h3>Evidence</h3>" + "".join(map(_exhibit, verdict.evidence[:_MOST_EVIDENCE])))
    parts += _listed("What was tried", verdict.tried)
    if verdict.runner_up is not None:
        rule, title, confidence = verdict.runner_up
        parts.append(f"<h3>Next best cause</h3><p>{_text(title)} ({_text(rule)}), {confidence:.0%}</p>")
    parts += _listed("What would have made it surer", verdict.missing)
    return "".join(parts) + "</section>"


def _exhibit(exhibit: Exhibit) -> str:
    return (
        f"<blockquote><pre>{_text(exhibit.text, lines=True)}</pre>"
        f"<footer>{_text(exhibit.source)}, {_text(exhibit.role)}</footer></blockquote>"
    )


def _listed(title: str, sentences: Iterable[str]) -> list[str]:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return [f"<h3>{title}</h3><ul>{items}</ul>"] if items else []


def _facts(picture: RunPicture) -> str:
    begun = picture.supervised.get("started")
    times = [time for lane in picture.lanes for time in (lane.begun, lane.ended) if time]
    times += [seen.event.unix_seconds for seen in picture.events]
    times += [float(begun)] if isinstance(begun, (int, float)) else []
    facts = {
        "steps": f"{max((lane.last_step for lane in picture.lanes), default=0):,}",
        "began": moment(min(times)) if times else "unknown",
        "from first to last sign": duration(max(times) - min(times)) if times else "unknown",
        "attempts": str(1 + max((seen.info.attempt for seen in picture.processes), default=0)),
        "checkpoints": str(sum(each.status == "complete" for each in picture.checkpoints)),
    }
    for title, name in (("peak host memory", "host_bytes"), ("peak device memory", "device_peak_bytes")):
        peaks = [lane.columns[name].values for lane in picture.lanes if name in lane.columns]
        finite = [float(value) for values in peaks for value in values if value == value]
        if finite:
            facts[title] = size(max(finite))
    return (
        '<div class="facts">' + "".join(f"<div><b>{_text(v)}</b><span>{k}</span></div>" for k, v in facts.items())
    ) + "</div>"


def _events(events: tuple[EventSeen, ...], left_out: Mapping[str, int]) -> str:
    if not events:
        return ""
    rows = "".join(
        f'<tr><td class="number">{_text(moment(seen.event.unix_seconds))}</td><td>{_text(seen.source)}</td>'
        f'<td class="number">{_text(seen.event.global_step)}</td><td>{_text(seen.event.kind)}</td>'
        f'<td class="text">{_text(_told(seen))}</td></tr>'
        for seen in events
    )
    more = ", ".join(f"{count} of {kind}" for kind, count in left_out.items())
    note = f'<p class="hint">Left out here: {_text(more)}. <code>holdfast events</code> lists all.</p>'
    return (
        f"<section><details><summary><b>Events</b> ({len(events)})</summary>{note if more else ''}"
        '<div class="scroll"><table><tr><th>UTC</th><th>by</th><th>step</th><th>what</th><th>facts</th></tr>'
        f"{rows}</table></div></details></section>"
    )


def _told(seen: EventSeen) -> str:
    return ", ".join(f"{key}={value!r}"[:400] for key, value in list(seen.event.data.items())[:40])


def _checkpoints(checkpoints: tuple[CheckpointSeen, ...]) -> str:
    rows = "".join(
        f'<tr><td class="text">{_text(each.name)}</td><td class="number">{each.global_step}</td>'
        f'<td class="number">{_text("" if each.size_bytes is None else size(each.size_bytes))}</td>'
        f'<td class="number">{_text("" if each.saved is None else moment(each.saved))}</td>'
        f"<td>{_text(each.status)}</td></tr>"
        for each in checkpoints
    )
    if not rows:
        return ""
    return (
        '<section><h2>Checkpoints</h2><div class="scroll"><table><tr><th>name</th><th>step</th><th>size</th>'
        f"<th>saved (UTC)</th><th>status</th></tr>{rows}</table></div></section>"
    )


def _stacks(picture: RunPicture) -> str:
    parts = "".join(
        f"<details><summary>{_text(stack.name)}</summary><pre>{_text(stack.text, most=70_000, lines=True)}</pre>"
        "</details>"
        for stack in picture.stacks
    )
    return f"<section><h2>Stacks</h2>{parts}</section>" if parts else ""


def _output(output: str) -> str:
    if not output.strip():
        return ""
    text = _text(output, most=40_000, lines=True)
    return f"<section><details><summary><b>End of the output</b></summary><pre>{text}</pre></details></section>"


def _environment(picture: RunPicture) -> str:
    values = {key: value for key, value in picture.supervised.items() if key != "format"}
    if isinstance(values.get("started"), (int, float)):
        values["started"] = f"{moment(values['started'])} UTC"
    rows = [
        f'<tr><th>{_text(key, most=80)}</th><td class="text">{_text(_shown(value))}</td></tr>'
        for key, value in list(values.items())[:60]
    ]
    rows += [
        f'<tr><th>{_text(seen.label, most=80)}</th><td class="text">{_text(_process(seen), most=800)}</td></tr>'
        for seen in picture.processes[-60:]
    ]
    rows.append(f'<tr><th>run directory</th><td class="text">{_text(picture.path)}</td></tr>')
    notes = "".join(f'<p class="notice">{_text(problem)}</p>' for problem in picture.problems)
    return f"<section><h2>Environment</h2><table>{''.join(rows)}</table>{notes}</section>"


def _process(seen: ProcessSeen) -> str:
    torch = f"torch {seen.info.torch}" if seen.info.torch else "torch not imported"
    return f"{seen.info.role}, pid {seen.info.pid}, {torch}, {_shown(seen.info.argv)}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict) and not any(isinstance(each, (dict, list)) for each in value.values()):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(as_json_value(value), ensure_ascii=False)
