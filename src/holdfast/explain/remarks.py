"""What is worth saying beside the cause: memory that grew, what training suffers from, how it left.

Does not: choose the cause (see ``judging``).
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.events import Event
from holdfast.explain.evidence import Ending, Facts
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.verdict import Exhibit

WORKER_KILLED = "H930"
_MOST_FAULTS = 3  # quoted of those that a Guard found
_MOST_CHARACTERS = 300


def not_saved(facts: Facts) -> str | None:
    """Return what a Guard said of failed saves as it closed, in words; None: all of its steps are in a checkpoint."""
    said = ("not_saved", "checkpoint_saved", "saved", "loop")
    newest = next((event for event in reversed(facts.events) if event.kind in said), None)
    if newest is None or newest.kind != "not_saved":
        return None
    step, failed = newest.data.get("newest_checkpoint"), newest.data.get("failed_saves")
    kept = "nothing of it was saved" if step is None else f"its newest checkpoint is of step {step}"
    return f"{kept}: saves failed, {failed} in all, and it stands at step {newest.global_step}"


def leak_place(event: Event) -> str:
    """Return where leaked memory is kept, else where it was made; an empty text if neither is known."""
    for key in ("retained_at", "allocated_at"):
        place = event.data.get(key)
        if isinstance(place, str) and place.strip(" ?"):
            return place
    return ""


def newest_leak(facts: Facts) -> Event | None:
    """Return the newest leak that was traced."""
    return next((event for event in reversed(facts.events) if event.kind == "leak"), None)


def growth(facts: Facts) -> Event | None:
    """Return the newest trend of memory, if it had not ended."""
    newest = next((event for event in reversed(facts.events) if event.kind == "memory_trend"), None)
    return newest if newest is not None and newest.data.get("bytes_per_step") else None  # 0: over


def training_faults(facts: Facts) -> list[Event]:
    """Return what a Guard found to be wrong with the training: causes first, then errors, then the surest."""
    found: dict[tuple[str, str], Event] = {}
    for event in facts.events:
        rule, what = event.data.get("rule"), event.data.get("what")
        if event.kind == "finding" and isinstance(rule, str) and isinstance(what, str):
            found[rule, str(event.data.get("where"))] = event

    def order(event: Event) -> tuple[bool, bool, float]:
        sure = event.data.get("confidence")
        aside = event.data.get("about") == "symptom", event.data.get("severity") != "error"
        return *aside, -float(sure) if isinstance(sure, (int, float)) else 0.0

    return sorted(found.values(), key=order)


def loader_warnings(facts: Facts) -> list[Event]:
    """Return what was known to be wrong with the loader's settings before it started."""
    return [event for event in facts.events if event.kind == "preflight" and isinstance(event.data.get("rule"), str)]


def hang_left_alone(facts: Facts) -> Event | None:
    """Return the newest hang that nobody acted on, if no step was made after it."""
    hangs = [event for event in facts.events if event.kind == "hang" and event.data.get("remedy") == "wait"]
    if not hangs:
        return None
    steps, step = facts.extra.get("steps"), hangs[-1].data.get("step")
    moved = isinstance(steps, int) and isinstance(step, int) and steps > step
    return None if moved else hangs[-1]


def kills_counted(endings: tuple[Ending, ...]) -> int | None:
    """Return how far the kernel's counter of kills for memory rose; None: nobody could read it."""
    return max((ending.oom_kills for ending in endings if ending.oom_kills is not None), default=None)


def way_out(facts: Facts) -> str:
    """Return how a process left that ended with a status of its own, as it was recorded; or an empty text."""
    how, line = facts.extra.get("exit_how"), facts.extra.get("last_line")
    if how == "sys.exit" and (said := facts.extra.get("exit_said")):
        return f"It left by `sys.exit` with the words: {said}"
    if how == "sys.exit":
        said = f", and its last line is: {line}" if line else ""
        return f"It left by `sys.exit`{said}"
    if how == "os._exit":
        return "Its interpreter did not end in order: it left as by `os._exit`"
    return ""


def of_good_end(facts: Facts) -> Iterator[str]:
    """Yield the sentences about a run that ended with status 0."""
    if (lost := not_saved(facts)) is not None:
        yield f"But {lost}."
    leak, grows = newest_leak(facts), growth(facts)
    if leak is not None:
        place = leak_place(leak)
        yield f"But memory leaks: {leak.data.get('what', 'objects')} are kept" + (f" at {place}." if place else ".")
    elif grows is not None:
        yield f"But {grows.data.get('what', 'host')} memory grew from step to step."
    faults = training_faults(facts)
    if faults:
        what, rule = _first_line(faults[0], "what"), faults[0].data["rule"]
        yield f"But a Guard found a fault of the training: {what} [{rule}]."
    raised = any(each.kind == "exception" for each in facts.statements)
    if raised:
        yield "Errors that it printed before were caught: it went on after them."


def _first_line(event: Event, key: str) -> str:
    """Return the first line of a text of an event, cut, without a full stop."""
    value = event.data.get(key)
    return (
        plain_text(value).strip().partition("\n")[0][:_MOST_CHARACTERS].rstrip(".") if isinstance(value, str) else ""
    )


def _in_one_line(event: Event, key: str) -> str:
    """Return a text of an event as one line, whole, without a full stop."""
    value = event.data.get(key)
    return " ".join(plain_text(value).split()).rstrip(".") if isinstance(value, str) else ""


def exhibits_of_training(facts: Facts) -> Iterator[Exhibit]:
    """Yield what a Guard found, the loader's warnings last: quoted with its rule and what to do."""
    for event in [*training_faults(facts)[:_MOST_FAULTS], *loader_warnings(facts)[:_MOST_FAULTS]]:
        fix = _first_line(event, "fix")
        yield Exhibit(
            text=f"{_first_line(event, 'what')} [{event.data['rule']}]" + (f"\nFix: {fix}" if fix else ""),
            source=f"guard, step {event.global_step}",
            unix_seconds=event.unix_seconds,
        )


def fix_of_training(facts: Facts) -> str:
    """Return what to do about the first fault that a Guard found; an empty text if it found none."""
    faults = training_faults(facts)
    if not faults:
        return ""
    fix, rule = _in_one_line(faults[0], "fix"), faults[0].data["rule"]
    return f"{fix[:1].upper()}{fix[1:]}. `holdfast explain {rule}` says more."


def of_interference(facts: Facts) -> Iterator[str]:
    """Yield the sentences about what disturbed a run from outside, however it ended."""
    stopped: dict[object, Event] = {}
    for event in facts.events:
        pid = event.data.get("pid")
        if event.kind == "process_stopped":
            stopped[pid] = event
        elif event.kind == "process_continued" and stopped.pop(pid, None) is not None:
            yield (
                f"Process {pid} was stopped by a signal at step {event.data.get('step')}, for "
                f"{event.data.get('seconds')} s, and went on."
            )
    for pid, event in stopped.items():
        yield f"Process {pid} was stopped by a signal at step {event.data.get('step')}, and did not go on after that."
    lost = next((event for event in facts.events if event.kind == "output_lost"), None)
    if lost is not None:
        yield f"A part of what it printed could not be kept in output.log: {lost.data.get('error')}."


def of_interruption(facts: Facts) -> Iterator[str]:
    """Yield the sentences about a run that was ended by a signal on request."""
    hang = hang_left_alone(facts)
    if hang is not None:
        place = f" at {hang.data['frame']}" if hang.data.get("frame") else ""
        kind = hang.data.get("kind") or "of an unknown kind"
        yield f"Before that it hung{place} ({kind}), for {hang.data.get('seconds', '?')} s when last looked at."
    if (lost := not_saved(facts)) is not None:
        yield f"But {lost}."
