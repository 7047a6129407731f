"""Write the sentences of a verdict's summary that are about observations other than the cause.

`observations` extracts these observations from the evidence. `causes.choosing` chooses the cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.evidence import Evidence
from holdfast.explain.exhibits import finding_text, first_line


def exit_clause(evidence: Evidence) -> str:
    """Return a clause that says how the training process exited, or "" if unknown."""
    if evidence.exit_call == "os._exit":
        return "Its interpreter did not shut down normally, for example because of `os._exit`"
    if evidence.exit_call != "sys.exit":
        return ""
    if evidence.exit_message:
        return f"It called `sys.exit` with the message: {evidence.exit_message}"
    if evidence.last_output_line:
        return f"It called `sys.exit`, and its last line is: {evidence.last_output_line}"
    return "It called `sys.exit`"


def on_good_end(evidence: Evidence) -> Iterator[str]:
    """Yield sentences about faults, errors and missing records in a run that ended well."""
    if observations.was_not_observed(evidence):
        yield (
            "None of its processes could be observed (for example because of `python -I`), so there"
            " is no record of how the run went."
        )
    faults = observations.training_faults(evidence)
    if faults:
        words = f"{finding_text(faults[0], 'what')} [{faults[0].data['rule']}]"
        yield f"But a Guard found a problem with the training: {words}."
    yield from _on_repeated_late_steps(evidence)
    traceback = observations.final_traceback(evidence)
    if traceback is not None:
        yield (
            "But its output ends with a traceback, and nothing shows that the run continued after"
            f" it: {first_line(traceback)}"
        )
    elif any(statement.kind == "exception" for statement in evidence.statements):
        yield "The errors that it printed were caught: the run continued after them."


def _on_repeated_late_steps(evidence: Evidence) -> Iterator[str]:
    """Yield a sentence if steps that were decided late had to be repeated, which takes time."""
    counts = observations.late_steps(evidence)
    if counts is not None and counts.repeated:
        yield f"{counts.repeated:,} of {counts.steps:,} steps that were decided late were repeated."


def on_flight_recorder(evidence: Evidence) -> Iterator[str]:
    """Yield a sentence about the collective in which ranks differ."""
    if evidence.flight is not None:
        yield f"According to the flight recorders of its ranks: {evidence.flight.sentence}"


def on_interference(evidence: Evidence) -> Iterator[str]:
    """Yield sentences about processes that a signal stopped and about output that was lost."""
    # The newest stop event of each process that has not continued yet, keyed by PID.
    stop_events: dict[object, Event] = {}
    for event in evidence.events:
        pid = event.data.get("pid")
        if event.kind == "process_stopped":
            stop_events[pid] = event
        elif event.kind == "process_continued" and pid in stop_events:
            del stop_events[pid]
            yield (
                f"Process {pid} was stopped by a signal at step {event.data.get('step')} and"
                f" continued after {event.data.get('seconds')} s."
            )
    for pid, event in stop_events.items():
        yield (
            f"Process {pid} was stopped by a signal at step {event.data.get('step')} and never"
            " continued."
        )
    for event in evidence.events:
        if event.kind == "output_lost":
            yield (
                f"Part of the output could not be written to output.log: {event.data.get('error')}."
            )
            break


def on_interruption(evidence: Evidence) -> Iterator[str]:
    """Yield sentences about a hang, or unsaved steps, before SIGTERM or SIGINT ended a run."""
    hang = observations.ignored_hang(evidence)
    if hang is not None:
        place = f" at {hang.data['frame']}" if hang.data.get("frame") else ""
        kind = hang.data.get("hang_kind") or "of an unknown kind"
        yield (
            f"Before that, it hung{place} ({kind}): when it was last examined, it had made no"
            f" progress for {hang.data.get('seconds', '?')} s."
        )
    unsaved = observations.unsaved_steps(evidence)
    if unsaved is not None:
        yield f"But {unsaved.clause()}."
