"""`holdfast events RUN`: list the events of all processes of a run in chronological order."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, RunDirectory, failing_clearly, print_json
from holdfast.core.text import as_json_value, moment, sanitise
from holdfast.explain.runs.recordings import Recordings, all_rings, open_recordings
from holdfast.recorder.run_files import folder_of_first_host
from holdfast.report.sources import RecordedEvent, is_sound_event

# Maximum length of an event's sentence, which may quote a long exception message.
_MAX_SENTENCE_CHARACTERS = 800


def run(
    run_dir: RunDirectory,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Show only this kind of event. May be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the events of a run, oldest first."""
    with failing_clearly(as_json=as_json):
        recordings = open_recordings(folder_of_first_host(run_dir))
        all_events = _read_events(recordings)
        # Some ring buffers are read twice, so the same unreadable part may be reported twice.
        unread = list(dict.fromkeys(recordings.missing))
    events = [recorded for recorded in all_events if not kind or recorded.event.kind in kind]
    if as_json:
        json_events = [_as_json(recorded) for recorded in events]
        print_json({"run": str(run_dir), "events": json_events, "unread": unread})
        return
    for recorded in events:
        typer.echo(_line(recorded))
    if not events:
        typer.echo(_describe_kinds(all_events), err=True)
    for reason in unread:
        typer.echo(f"not read: {sanitise(reason)}", err=True)


def _read_events(recordings: Recordings) -> list[RecordedEvent]:
    """Return the events of all processes, sorted by time.

    Parts of the recordings that cannot be read are added to `recordings.missing`.
    """
    all_events = []
    for source, folder in all_rings(recordings):
        recordings.note_overwritten_steps({folder: source})
        events = recordings.events(folder)
        sound_events = [event for event in events if is_sound_event(event)]
        left_out = len(events) - len(sound_events)
        if left_out:
            recordings.missing.append(f"{left_out} events of {source} without a time or a step")
        all_events += [RecordedEvent(source=source, event=event) for event in sound_events]
    return sorted(all_events, key=lambda recorded: recorded.event.unix_seconds)


def _as_json(recorded: RecordedEvent) -> Any:
    event = recorded.event
    return as_json_value(
        {
            "unix_seconds": event.unix_seconds,
            "who": recorded.source,
            "kind": event.kind,
            "global_step": event.global_step,
            "data": dict(event.data),
        }
    )


def _line(recorded: RecordedEvent) -> str:
    """Return one line with the time, source, step and sentence of an event."""
    time = moment(recorded.event.unix_seconds, "%Y-%m-%d %H:%M:%S.%f")
    sentence = sanitise(str(recorded.event), most=_MAX_SENTENCE_CHARACTERS)
    return f"{time}  {sanitise(recorded.source)}  {sentence}"


def _describe_kinds(all_events: list[RecordedEvent]) -> str:
    kinds = sorted({recorded.event.kind for recorded in all_events})
    if not kinds:
        return "this run has no events"
    return f"no such events; this run has {sanitise(', '.join(kinds))}"
