"""How bad an event is, and what it says in words.

Curves, the timeline and the live view take both from here, so that they agree.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.core.events.event import Event
from holdfast.core.text import duration, size

Severity = Literal["error", "warning", "info"]
_ERRORS = frozenset(
    {
        "exception",
        "left_by_exception",
        "hang",
        "stop",
        "state_taken",
        "rollback_failed",
        "save_failed",
        "output_lost",
        "checkpoint_damaged",
        "loss_scale_collapsed",
        "steps_not_recorded",
        "not_saved",
        "quarantine_full",
    }
)
_WARNINGS = frozenset(
    {
        "out_of_memory",
        "skip_step",
        "roll_back",
        "rolled_back",
        "spike",
        "hang_suspected",
        "restart",
        "leak",
        "memory_trend",
        "split",
        "recompute",
        "nonfinite_origin",
        "nonfinite_not_traced",
        "samples_dropped",
        "micro_batch_dropped",
        "loader_healed",
        "sample_quarantined",
        "save_refused",
        "process_stopped",
        "rank_is_slow",
        "preflight",
    }
)
# Facts whose values need no name, in the order in which they are shown.
_SENTENCES = (
    "rule",
    "sentence",
    "message",
    "what",
    "limit",
    "why",
    "reason",
    "error",
    "fix",
)
# Bounds of the text about an event.
_MOST_FACTS = 12
_MOST_LIST_ITEMS = 12
_MOST_CHARACTERS = 300
# Larger numbers are damage, or no amounts.
_MOST_AMOUNT = 1e15


def severity(event: Event) -> Severity:
    """Return how bad an event is; a finding says so itself."""
    stated = event.data.get("severity")
    if event.kind in _ERRORS or stated == "error":
        return "error"
    if event.kind in _WARNINGS or stated == "advice":
        return "warning"
    return "info"


def named(event: Event) -> str:
    """Return when and what an event was, such as "step 7, skip step"."""
    return f"step {event.global_step:,}, {event.kind.replace('_', ' ')}"


def in_words(event: Event) -> str:
    """Return the facts of an event as text; facts without a value are left out."""
    facts = {
        name: value for name, value in event.facts().items() if value not in (None, "", [], {})
    }
    words = [str(facts.pop(name)) for name in _SENTENCES if name in facts]
    words += [_fact_in_words(name, value)[:_MOST_CHARACTERS] for name, value in facts.items()]
    return "; ".join(words[:_MOST_FACTS])


def _fact_in_words(name: str, value: Any) -> str:
    """Return a fact such as ``("delay_seconds", 90)`` as "delay 1 min 30 s"."""
    words = name.replace("_", " ")
    unit = name.rpartition("_")[2]
    if isinstance(value, list):
        return f"{words} {', '.join(str(item) for item in value[:_MOST_LIST_ITEMS])}"
    if type(value) not in (int, float) or not abs(value) < _MOST_AMOUNT:
        return f"{words} {value}"
    if unit == "seconds":
        return f"{_without_unit(words, unit)} {duration(value)}"
    if unit == "bytes":
        return f"{_without_unit(words, unit)} {size(value)}"
    return f"{words} {value:.6g}" if isinstance(value, float) else f"{words} {value:,}"


def _without_unit(words: str, unit: str) -> str:
    """Return the name of an amount without its unit; "in" if it had no other name."""
    return words.removesuffix(unit).strip() or "in"
