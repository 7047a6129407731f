"""What happened, and what was decided: frozen records that go into the recorder.

A *Decision* is what a part returns and only ``guard/`` carries out. Every decision is written down as an
*Event* of the same name, so a report reads nothing but events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Promise = Literal["bit-exact", "equal up to rounding", "equal in distribution", "changes training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened in a run.

    Args:
        kind: Short name such as ``"out_of_memory"``, ``"skip_step"``, ``"checkpoint_saved"``.
        global_step: Optimizer steps committed when it happened.
        unix_seconds: Wall-clock time.
        data: Facts, as JSON values.
    """

    kind: str
    global_step: int
    unix_seconds: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={value!r}" for key, value in self.data.items())
        return f"[step {self.global_step}] {self.kind}: {facts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a part proposes; `name` is also the kind of its event."""

    reason: str
    promise: Promise

    @classmethod
    def name(cls) -> str:
        """Return the snake-case name of the decision, for instance ``"roll_back"``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Decision):
    """Run the same attempt again, now that memory was freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Decision):
    """Run the attempt again with activation checkpointing of these modules (none: switch it off)."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Decision):
    """Run the attempt again with this many samples in one forward/backward."""

    micro_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grow(Decision):
    """From the next step on, try this many samples in one forward/backward (None: the whole batch)."""

    micro_batch_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStep(Decision):
    """Leave no trace of this batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack(Decision):
    """Return to the last good checkpoint.

    Args:
        rewind_data: True replays the batches since then; False passes over them.
    """

    rewind_data: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Decision):
    """End the run: no remedy is left."""
