"""Define the severity of each kind of event, for figures and the live view."""

from __future__ import annotations

from typing import Literal

from holdfast.core.events.event import Event

EventSeverity = Literal["error", "warning", "info"]
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
        "repetition_differed",
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


def severity(event: Event) -> EventSeverity:
    """Return the severity of an event. An event about a finding states its severity itself."""
    stated = event.data.get("severity")
    if event.kind in _ERRORS or stated == "error":
        return "error"
    if event.kind in _WARNINGS or stated == "advice":
        return "warning"
    return "info"
