"""`holdfast events RUN`: everything that was recorded in a run, of all processes, by time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, RunDirectory, failing_clearly, print_json
from holdfast.core.text import as_json_value, moment, sanitise
from holdfast.explain.runs.recordings import Recordings, all_rings, open_recordings
from holdfast.recorder.run_files import folder_of_first_host
from holdfast.report.sources import RecordedEvent, is_sound_event

# A sentence may quote the message of an exception, which has up to 2,000 characters.
_MAX_SENTENCE_CHARACTERS = 800


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
        all_events = _read_events(recordings)
        # Some rings are read twice, and both times they may be unreadable.
        unread = list(dict.fromkeys(recordings.missing))
    events = _of_kinds(all_events, kind)
    if as_json:
        json_events = [_as_json(seen) for seen in events]
        print_json({"run": str(run_dir), "events": json_events, "unread": unread})
        return
    for seen in events:
        typer.echo(_line(seen))
    if not events:
        typer.echo(_no_such_events(all_events), err=True)
    for reason in unread:
        typer.echo(f"not read: {sanitise(reason)}", err=True)


def _read_events(recordings: Recordings) -> list[RecordedEvent]:
    """Return the events of all processes by time; what cannot be read is noted in `recordings`."""
    all_events = []
    for source, folder in all_rings(recordings):
        recordings.note_overwritten_steps({folder: source})
        events = recordings.events(folder)
        sound_events = [event for event in events if is_sound_event(event)]
        left_out = len(events) - len(sound_events)
        if left_out:
            recordings.missing.append(f"{left_out} events of {source} without a time or a step")
        all_events += [RecordedEvent(source=source, event=event) for event in sound_events]
    return sorted(all_events, key=lambda seen: seen.event.unix_seconds)


def _of_kinds(events: list[RecordedEvent], kinds: list[str] | None) -> list[RecordedEvent]:
    """Return the events of these kinds, or all events if no kind is asked for."""
    if not kinds:
        return events
    return [seen for seen in events if seen.event.kind in kinds]


def _as_json(seen: RecordedEvent) -> Any:
    event = seen.event
    return as_json_value(
        {
            "unix_seconds": event.unix_seconds,
            "who": seen.source,
            "kind": event.kind,
            "global_step": event.global_step,
            "data": dict(event.data),
        }
    )


def _line(seen: RecordedEvent) -> str:
    """Return the time, source, step and sentence of an event."""
    time = moment(seen.event.unix_seconds, "%Y-%m-%d %H:%M:%S.%f")
    sentence = sanitise(str(seen.event), most=_MAX_SENTENCE_CHARACTERS)
    return f"{time}  {sanitise(seen.source)}  {sentence}"


def _no_such_events(all_events: list[RecordedEvent]) -> str:
    kinds = sorted({seen.event.kind for seen in all_events})
    if not kinds:
        return "this run has no events"
    return f"no such events; this run has {sanitise(', '.join(kinds))}"
