"""What happened, and what was decided: frozen records that go into the recorder.

`EventData` is what one kind of event says: one class for each kind, here those of decisions, the
    others in
``run_events`` (of training) and ``process_events`` (of processes). Written down with its step and
time it is an `Event`, which is what readers get.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, dataclass_transform

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
        facts = ", ".join(
            f"{key}={value!r}" for key, value in self.data.items() if value is not None
        )
        return f"[step {self.global_step}] {self.kind}: {facts}"

    def facts(self) -> dict[str, Any]:
        """Return the facts as people read them: a validation's value by its name."""
        facts = dict(self.data)
        if (
            self.kind == "validated"
            and "loss" in facts
            and isinstance(name := facts.pop("name", "loss"), str)
        ):
            facts = {name: facts.pop("loss")} | facts
        return facts


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _FrozenDataclass(type):
    """Makes each class a dataclass with keyword arguments, and names its kind after it.

    What `dataclass` would generate for each is written once, in `EventData`: that takes a tenth of
        the time.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        namespace.setdefault("kind", re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        made = super().__new__(cls, name, bases, namespace)
        return dataclass(init=False, repr=False, eq=False, kw_only=True)(made)


class EventData(metaclass=_FrozenDataclass):
    """What events of one kind say.

    `kind` is the name of the class in snake case, such as ``"roll_back"``.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if cls.kind:
            KINDS[cls.kind] = cls

    def __init__(self, **given: Any) -> None:
        known = {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(self)
        }
        wrong = [name for name in given if name not in known]
        wrong += [
            name for name, default in known.items() if default is MISSING and name not in given
        ]
        if wrong:
            raise TypeError(
                f"{type(self).__name__} takes {', '.join(known) or 'nothing'}: {', '.join(wrong)}?"
            )
        vars(self).update({**known, **given})

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


KINDS: dict[str, type[EventData]] = {}
"""The class of each kind of event, as far as the modules with the classes are imported."""


class Decision(EventData):
    """What a part proposes and only the guard carries out: why, and what the result is equal to."""

    kind: ClassVar[str] = ""
    reason: str
    promise: Promise


class Retry(Decision):
    """Run the same attempt again, now that memory was freed."""


class Recompute(Decision):
    """Run the attempt again with activation checkpointing of these modules (none.

    Switch it off).
    """

    modules: tuple[str, ...]


class Split(Decision):
    """Run the attempt again with this many samples in one forward/backward."""

    micro_batch_size: int


class Grow(Decision):
    """From the next step on, try this many samples in one forward/backward (None.

    The whole batch).
    """

    micro_batch_size: int | None


class SkipStep(Decision):
    """Leave no trace of this batch: which one of which epoch, where the guard counts them."""

    epoch: int | None = None
    batch: int | None = None


class RollBack(Decision):
    """Return to the last good checkpoint.

    `rewind_data` replays the batches since then, else they are passed over.
    """

    rewind_data: bool
    epoch: int | None = None
    batch: int | None = None


class Stop(Decision):
    """End the run: no remedy is left. `rule` is that of the error."""

    epoch: int | None = None
    batch: int | None = None
    rule: str | None = None
