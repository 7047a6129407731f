"""`holdfast events RUN`: everything that was recorded in a run, of all processes, by time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, RunDirectory, failing_clearly, print_json
from holdfast.core.text import as_json_value, moment, sanitise
from holdfast.explain.runs.recordings import Recordings, all_rings, open_recordings
from holdfast.recorder.run_files import folder_of_first_host
from holdfast.report.sources import RecordedEvent, is_sound_event

_MOST_CHARACTERS = 400  # of one fact, for people


def run(
    run_dir: RunDirectory,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only events of this kind; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the events of a run, oldest first."""
    with failing_clearly(as_json=as_json):
        recordings = open_recordings(folder_of_first_host(run_dir))
        wanted = frozenset(kind or ())
        found = [each for each in _all(recordings) if not wanted or each.event.kind in wanted]
        unread = list(dict.fromkeys(recordings.missing))  # some rings are read twice
    if as_json:
        print_json(
            {"run": str(run_dir), "events": [_as_json(each) for each in found], "unread": unread}
        )
        return
    for each in found:
        typer.echo(_line(each))
    if not found:
        kinds = sorted({each.event.kind for each in _all(recordings)})
        typer.echo(
            f"no such events; this run has {sanitise(', '.join(kinds)) or 'none at all'}", err=True
        )
    for word in unread:
        typer.echo(f"not read: {sanitise(word)}", err=True)


def _all(recordings: Recordings) -> list[RecordedEvent]:
    found = []
    for who, folder in all_rings(recordings):
        recordings.say_lost_steps({folder: who})
        events = recordings.events(folder)
        sound = [event for event in events if is_sound_event(event)]
        if left_out := len(events) - len(sound):
            recordings.missing.append(f"{left_out} events of {who} without a time or a step")
        found += [RecordedEvent(source=who, event=event) for event in sound]
    return sorted(found, key=lambda each: each.event.unix_seconds)


def _as_json(seen: RecordedEvent) -> Any:
    event = seen.event
    facts = {"unix_seconds": event.unix_seconds, "who": seen.source, "kind": event.kind}
    return as_json_value({**facts, "global_step": event.global_step, "data": dict(event.data)})


def _line(seen: RecordedEvent) -> str:
    event = seen.event
    when = moment(event.unix_seconds, "%Y-%m-%d %H:%M:%S.%f")
    # `repr` shows what a line break or an escape sequence in a fact is.
    facts = ", ".join(
        f"{sanitise(key)}={sanitise(repr(value), most=_MOST_CHARACTERS)}"
        for key, value in event.facts().items()
        if value is not None
    )
    return (
        f"{when}  {sanitise(seen.source)}  [step {event.global_step}] {sanitise(event.kind)} "
        f" {facts}"
    )
