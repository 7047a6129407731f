"""What the events of a run say beside the cause.

Memory that grew, faults of the training, how it left.

Does not: choose the cause (see ``judging``).
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.events.event import Event
from holdfast.explain.evidence import Ending, Facts, Statement
from holdfast.explain.logs.text import quoted
from holdfast.explain.verdict import Exhibit

_MOST_FAULTS = 3  # quoted of those that a Guard found
_MOST_CHARACTERS = 300


def not_saved(facts: Facts) -> str | None:
    """Return what a Guard recorded of failed saves as it closed.

    None: all of its steps are in a checkpoint.
    """
    about = ("not_saved", "checkpoint_saved", "saved", "loop")
    newest = next((event for event in reversed(facts.events) if event.kind in about), None)
    if newest is None or newest.kind != "not_saved":
        return None
    step, failed = newest.data.get("newest_checkpoint"), newest.data.get("failed_saves")
    kept = "nothing of it was saved" if step is None else f"its newest checkpoint is of step {step}"
    return f"{kept}: saves failed, {failed} in all, and it stands at step {newest.global_step}"


def why_not_saved(facts: Facts) -> str:
    """Return what the newest save met, in a few words, or an empty text.

    Only if `not_saved` returns a text.
    """
    newest = next((event for event in reversed(facts.events) if event.kind == "not_saved"), None)
    error = None if newest is None else newest.data.get("error")
    if not isinstance(error, str):  # a recording of an older version
        return ""
    if any(words in error for words in ("No space left on device", "Disk quota exceeded")):
        return "the disk is full"
    return error.partition(": ")[2] or error


def leak_place(event: Event) -> str:
    """Return where leaked memory is kept; an empty text if that is not known."""
    place = event.data.get("retained_at")
    return place if isinstance(place, str) and place.strip(" ?") else ""


def newest_leak(facts: Facts) -> Event | None:
    """Return the newest leak that was traced."""
    return next((event for event in reversed(facts.events) if event.kind == "leak"), None)


def newest_trend(facts: Facts) -> Event | None:
    """Return the newest event of memory that grew from step to step, unless that came to an end."""
    trend = next((event for event in reversed(facts.events) if event.kind == "memory_trend"), None)
    return trend if trend is not None and trend.data.get("bytes_per_step") else None


def training_faults(facts: Facts) -> list[Event]:
    """Return what a Guard found to be wrong with the training.

    Causes first, then errors, then the surest.
    """
    found: dict[tuple[str, str], Event] = {}
    for event in facts.events:
        rule, what = event.data.get("rule"), event.data.get("what")
        if event.kind == "finding" and isinstance(rule, str) and isinstance(what, str):
            found[rule, str(event.data.get("where"))] = event

    def order(event: Event) -> tuple[bool, bool, float]:
        sure = event.data.get("confidence")
        later = event.data.get("about") == "symptom", event.data.get("severity") != "error"
        return *later, -float(sure) if isinstance(sure, (int, float)) else 0.0

    return sorted(found.values(), key=order)


def hang_left_alone(facts: Facts) -> Event | None:
    """Return the newest hang that nobody acted on, if no step was made after it."""
    hangs = [
        event
        for event in facts.events
        if event.kind == "hang" and event.data.get("remedy") == "wait"
    ]
    if not hangs:
        return None
    steps, step = facts.extra.get("steps"), hangs[-1].data.get("step")
    return None if isinstance(steps, int) and isinstance(step, int) and steps > step else hangs[-1]


def kills_counted(endings: tuple[Ending, ...]) -> int | None:
    """Return how far the kernel's counter of kills for memory rose; None: nobody could read it."""
    return max(
        (ending.oom_kills for ending in endings if ending.oom_kills is not None), default=None
    )


def way_out(facts: Facts) -> str:
    """Return how a process left that ended with a status of its own, as it was recorded.

    Or an empty text.
    """
    how, line = facts.extra.get("exit_how"), facts.extra.get("last_line")
    if how == "sys.exit" and (said := facts.extra.get("exit_said")):
        return f"It left by `sys.exit` with the words: {said}"
    if how == "sys.exit":
        return "It left by `sys.exit`" + (f", and its last line is: {line}" if line else "")
    return (
        "Its interpreter did not end in order: it left as by `os._exit`"
        if how == "os._exit"
        else ""
    )


def last_words(facts: Facts) -> Statement | None:
    """Return the exception with whose traceback the output ended, if nobody knows that it was
    caught.
    """
    raised = (each for each in reversed(facts.statements) if each.kind == "exception")
    return next((each for each in raised if each.last and each.fatal is None), None)


def unobserved(facts: Facts) -> bool:
    """Return whether a supervised run had no process that could be observed, so that only its
    status is known.
    """
    return facts.extra.get("observed") is False and not facts.extra.get("log_says_done")


def of_good_end(facts: Facts) -> Iterator[str]:
    """Yield the sentences about a run that ended with status 0."""
    if unobserved(facts):
        yield (
            "No process of it could be observed (a static program, `python -I`), so nothing says"
            " how it went."
        )
    leak = newest_leak(facts)
    trend = newest_trend(facts)
    if leak is not None:
        place = leak_place(leak)
        yield f"But memory leaks: {leak.data.get('what', 'objects')} are kept" + (
            f" at {place}." if place else "."
        )
    elif trend is not None:
        yield f"But {trend.data.get('what', 'host')} memory grew from step to step."
    if faults := training_faults(facts):
        what, rule = _line_of(faults[0], "what"), faults[0].data["rule"]
        yield f"But a Guard found a fault of the training: {what} [{rule}]."
    if (last := last_words(facts)) is not None:
        words = next(quoted(last, most_lines=1))
        yield (
            "But its last words are a traceback, and nothing that it printed says that it went on:"
            f" {words}"
        )
    elif any(each.kind == "exception" for each in facts.statements):
        yield "Errors that it printed before were caught: it went on after them."


def _line_of(event: Event, key: str, *, whole: bool = False) -> str:
    """Return the first line of a text of an event, or all of it as one line.

    Without a full stop.
    """
    value = event.data.get(key)
    if not isinstance(value, str):
        return ""
    line = " ".join(value.split()) if whole else value.strip().partition("\n")[0][:_MOST_CHARACTERS]
    return line.rstrip(".")


def exhibits_of_training(facts: Facts) -> Iterator[Exhibit]:
    """Yield what a Guard found, then what was wrong with the loader's settings.

    Quoted with its rule and fix.
    """
    warnings = [
        each
        for each in facts.events
        if each.kind == "preflight" and isinstance(each.data.get("rule"), str)
    ]
    for event in [*training_faults(facts)[:_MOST_FAULTS], *warnings[:_MOST_FAULTS]]:
        fix = _line_of(event, "fix")
        yield Exhibit(
            text=f"{_line_of(event, 'what')} [{event.data['rule']}]"
            + (f"\nFix: {fix}" if fix else ""),
            source=f"guard, step {event.global_step}",
            unix_seconds=event.unix_seconds,
        )


def fix_of_training(facts: Facts) -> str:
    """Return what to do about the first fault that a Guard found.

    An empty text if it found none.
    """
    faults = training_faults(facts)
    if not faults:
        return ""
    fix, rule = _line_of(faults[0], "fix", whole=True), faults[0].data["rule"]
    return f"{fix[:1].upper()}{fix[1:]}. `holdfast explain {rule}` says more."


def of_interference(facts: Facts) -> Iterator[str]:
    """Yield the sentences about what disturbed a run from outside, however it ended."""
    stopped: dict[object, Event] = {}
    for event in facts.events:
        pid, step = event.data.get("pid"), event.data.get("step")
        if event.kind == "process_stopped":
            stopped[pid] = event
        elif event.kind == "process_continued" and stopped.pop(pid, None) is not None:
            seconds = event.data.get("seconds")
            yield (
                f"Process {pid} was stopped by a signal at step {step}, for {seconds} s, and"
                " went on."
            )
    for pid, event in stopped.items():
        yield (
            f"Process {pid} was stopped by a signal at step {event.data.get('step')}, and did not"
            " go on after that."
        )
    lost = next((event for event in facts.events if event.kind == "output_lost"), None)
    if lost is not None:
        yield (
            f"A part of what it printed could not be kept in output.log: {lost.data.get('error')}."
        )


def of_interruption(facts: Facts) -> Iterator[str]:
    """Yield the sentences about a run that was ended by a signal on request."""
    hang = hang_left_alone(facts)
    if hang is not None:
        place = f" at {hang.data['frame']}" if hang.data.get("frame") else ""
        kind = hang.data.get("hang_kind") or "of an unknown kind"
        yield (
            f"Before that it hung{place} ({kind}), for {hang.data.get('seconds', '?')} s when last"
            " looked at."
        )
    if (lost := not_saved(facts)) is not None:
        yield f"But {lost}."
