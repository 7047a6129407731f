"""How bad an event is, and what it says in words.

The same on curves, in the timeline and in the live view.
"""

from __future__ import annotations

from typing import Literal

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


def severity(event: Event) -> Severity:
    """Return how bad an event is; a finding says so itself."""
    said = event.data.get("severity")
    if event.kind in _ERRORS or said == "error":
        return "error"
    return "warning" if event.kind in _WARNINGS or said == "advice" else "info"


def named(event: Event) -> str:
    """Return when and what an event was, such as "step 7, skip step"."""
    return f"step {event.global_step:,}, {event.kind.replace('_', ' ')}"


def in_words(event: Event) -> str:
    """Return the facts of an event as people say them; those that hold nothing are left out."""
    facts = {
        name: value for name, value in event.facts().items() if value not in (None, "", [], {})
    }
    said = [str(facts.pop(name)) for name in _SENTENCES if name in facts]
    for name, value in facts.items():
        words = name.replace("_", " ")
        if type(value) in (int, float) and abs(value) < 1e15:
            kind = name.rpartition("_")[2]
            plain = f"{value:.6g}" if isinstance(value, float) else f"{value:,}"
            value = (
                duration(value) if kind == "seconds" else size(value) if kind == "bytes" else plain
            )
            words = words.removesuffix("seconds").removesuffix("bytes").strip() or "in"
        elif isinstance(value, list):
            value = ", ".join(map(str, value[:12]))
        said.append(f"{words} {value}"[:300])
    return "; ".join(said[:12])
