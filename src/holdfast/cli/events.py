"""`holdfast events RUN`: everything that was recorded in a run, of all processes, by time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, failing_clearly, print_json
from holdfast.core.events import Event
from holdfast.diagnose.log_lines import plain_text
from holdfast.diagnose.run_recordings import Recordings, all_rings, open_recordings

_POLL_SECONDS = 0.5
_MOST_CHARACTERS = 400  # of one fact, for people


@dataclass(frozen=True, slots=True)
class _Told:
    """One event with who recorded it."""

    who: str
    event: Event

    def as_json(self) -> dict[str, Any]:
        return {
            "unix_seconds": self.event.unix_seconds,
            "who": self.who,
            "kind": self.event.kind,
            "global_step": self.event.global_step,
            "data": dict(self.event.data),
        }


def run(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of `holdfast run`, or one given to Guard.")
    ],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only events of this kind; may be repeated.")
    ] = None,
    since: Annotated[int, typer.Option("--since", metavar="STEP", min=0, help="Only from this step on.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Go on printing until the run has ended.")] = False,
    as_json: Json = False,
) -> None:
    """List the events of a run, oldest first; with --follow and --json, one JSON object a line."""
    with failing_clearly(as_json=as_json):
        recordings = open_recordings(run_dir)
        wanted = frozenset(kind or ())
        if follow:
            _follow(recordings, wanted, since, as_json=as_json)
            return
        found = list(_chosen(_all(recordings), wanted, since))
    if as_json:
        print_json({"run": str(run_dir), "events": [told.as_json() for told in found], "unread": recordings.missing})
        return
    for told in found:
        typer.echo(_line(told))
    for word in recordings.missing:
        typer.echo(f"not read: {plain_text(word)}", err=True)


def _all(recordings: Recordings) -> list[_Told]:
    found = [_Told(who, event) for who, folder in all_rings(recordings) for event in recordings.events(folder)]
    return sorted(found, key=lambda told: told.event.unix_seconds)


def _chosen(told: Iterable[_Told], kinds: frozenset[str], since: int) -> Iterator[_Told]:
    for each in told:
        if (not kinds or each.event.kind in kinds) and each.event.global_step >= since:
            yield each


def _follow(recordings: Recordings, kinds: frozenset[str], since: int, *, as_json: bool) -> None:
    """Print events as they come, until the supervisor says that it stopped or the user interrupts."""
    seen: set[str] = set()
    while True:
        found = _all(Recordings(run=recordings.run, supervised=recordings.supervised))
        ended = any(told.who == "supervisor" and told.event.kind == "stopped" for told in found)
        for told in _chosen(found, kinds, since):
            line = json.dumps(told.as_json())
            if line not in seen:
                typer.echo(line if as_json else _line(told))
        seen = {json.dumps(told.as_json()) for told in found}
        if ended:
            return
        try:
            time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return


def _line(told: _Told) -> str:
    event = told.event
    facts = ", ".join(f"{_word(str(key))}={_short(value)}" for key, value in event.data.items())
    head = f"{_when(event.unix_seconds)}  {_word(told.who)}  [step {event.global_step}]"
    return f"{head} {_word(event.kind)}  {facts}"


def _when(unix_seconds: float) -> str:
    try:
        when = datetime.fromtimestamp(unix_seconds, UTC)
        return when.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):
        return "?"


def _word(text: str) -> str:
    return plain_text(text).replace("\n", " ")


def _short(value: Any) -> str:
    text = repr(value)  # which escapes what a terminal would obey
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
