"""How bad an event is, and what it says in words: the same on curves, in the timeline and in the live view."""

from __future__ import annotations

from typing import Literal

from holdfast.core.events.event import Event

Severity = Literal["error", "warning", "info"]
_ERRORS = frozenset({
    "exception", "left_by_exception", "hang", "stop", "state_taken", "rollback_failed", "save_failed", "output_lost",
    "checkpoint_damaged", "loss_scale_collapsed", "steps_not_recorded", "not_saved", "quarantine_full",
})  # fmt: skip
_WARNINGS = frozenset({
    "out_of_memory", "skip_step", "roll_back", "rolled_back", "spike", "spike_clipped", "hang_suspected", "restart",
    "leak", "memory_trend", "split", "recompute", "nonfinite_origin", "nonfinite_not_traced", "samples_dropped",
    "micro_batch_dropped", "learning_rate_lowered", "loader_healed", "sample_quarantined", "save_refused",
    "process_stopped", "rank_is_slow", "preflight",
})  # fmt: skip
_SAID = ("what", "why", "reason", "error", "message", "sentence", "checkpoint", "path")  # the first is shown


def severity(event: Event) -> Severity:
    """Return how bad an event is; a finding says so itself."""
    said = event.data.get("severity")
    if event.kind in _ERRORS or said == "error":
        return "error"
    return "warning" if event.kind in _WARNINGS or said == "advice" else "info"


def in_words(event: Event) -> str:
    """Return an event as a sentence for people, such as "step 7, skip step: the loss is NaN"."""
    said = next((f": {event.data[name]}" for name in _SAID if event.data.get(name)), "")
    return f"step {event.global_step:,}, {event.kind.replace('_', ' ')}{said}"
