"""The base class of all kinds of events, and the registry of these kinds.

The kinds themselves are in ``decisions``, ``run_events`` (training) and ``process_events``
(processes). An `Event` (in ``event``) combines the data of one event with its step and time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, dataclass_transform

Promise = Literal["bit-exact", "equal up to rounding", "equal in distribution", "changes training"]

# The event classes in all modules that have been imported so far, by kind. `event.event_kinds`
# imports the remaining modules.
KINDS: dict[str, type[EventData]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class EventData:
    """The data of an event; each kind of event is a subclass.

    A subclass declares the facts about an event as annotated fields, which become keyword
    arguments of its constructor, and its ``__str__`` returns a sentence about them. The subclass is
    registered in `KINDS` under its `kind`, which by default is the class name in snake case, such
    as ``"roll_back"``. A base class of several kinds sets `kind` to an empty string and is not
    registered.

    Instances behave like frozen dataclasses. The methods that `dataclass` would generate are
    written once here, because generating them for 100 classes would take ten times as long. Default
    values must be immutable, since all instances share them.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = _snake_case(cls.__name__)
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        if cls.kind:
            KINDS[cls.kind] = cls

    def __init__(self, **facts: Any) -> None:
        defaults = {field.name: field.default for field in _fields(type(self))}
        required = {name for name, default in defaults.items() if default is MISSING}
        if not required <= facts.keys() <= defaults.keys():
            raise TypeError(
                f"{type(self).__name__} takes {', '.join(defaults) or 'no facts'}, of which"
                f" {', '.join(sorted(required)) or 'none'} must be given; got {', '.join(facts)}"
            )
        vars(self).update({**defaults, **facts})

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Create an instance from recorded facts, ignoring facts that are not fields of the class.

        Raises:
            TypeError: If the value of a field without a default is missing.
        """
        names = {field.name for field in _fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in names})

    def facts(self) -> dict[str, Any]:
        """Return the values of the fields by name, for serialization as JSON."""
        return asdict(self)  # type: ignore[call-overload, no-any-return] # subclasses are dataclasses

    def __str__(self) -> str:
        """Return a sentence that describes the event, without its step and time."""
        return key_value_text(self.kind, self.facts())

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({arguments})"

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


class WithReason(EventData):
    """Base class of the kinds of events that are described as "`summary`: `why`".

    A subclass that overrides ``__str__`` needs no `summary`.
    """

    kind: ClassVar[str] = ""
    summary: ClassVar[str]
    why: str

    def __str__(self) -> str:
        return f"{self.summary}: {self.why}"


class Failed(EventData):
    """Base class of the kinds of events that are described as "`summary`: `error`".

    A subclass that overrides ``__str__`` needs no `summary`.
    """

    kind: ClassVar[str] = ""
    summary: ClassVar[str]
    error: str

    def __str__(self) -> str:
        return f"{self.summary}: {self.error}"


def key_value_text(kind: str, facts: Mapping[str, Any]) -> str:
    """Describe an event as ``kind: key=value, ...``, for events without a sentence of their own."""
    pairs = [f"{key}={value!r}" for key, value in facts.items() if value is not None]
    if not pairs:
        return kind
    return f"{kind}: {', '.join(pairs)}"


def _fields(data_class: type[EventData]) -> tuple[Field[Any], ...]:
    return fields(data_class)  # type: ignore[arg-type] # subclasses are dataclasses


def _snake_case(name: str) -> str:
    """Convert a class name to snake case, for example ``"RollBack"`` to ``"roll_back"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
