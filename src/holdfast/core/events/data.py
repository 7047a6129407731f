"""The base class of all kinds of events, and the table of kinds.

The kinds themselves are in ``decisions``, ``run_events`` (training) and ``process_events``
(processes). An `Event` (in ``event``) combines the data of one kind with a step and a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, dataclass_transform

Promise = Literal["bit-exact", "equal up to rounding", "equal in distribution", "changes training"]

# All event classes by kind, for the modules imported so far. `event.event_kinds` imports the rest.
KINDS: dict[str, type[EventData]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class EventData:
    """The content of one kind of event.

    A subclass declares its facts as annotated fields, which become keyword arguments, and returns a
    sentence about them from ``__str__``. The subclass is registered in `KINDS` under its `kind`,
    which by default is the name of the class in snake case, such as ``"roll_back"``. A base class
    of several kinds sets `kind` to an empty string and is not registered.

    Instances behave like frozen dataclasses. The methods that `dataclass` would generate are
    written once here, because generating them for 100 classes takes ten times as long. Defaults
    must be immutable, since all instances share them.
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
        """Create the data from recorded facts; facts that this class does not know are ignored.

        Raises:
            TypeError: If a fact without a default is missing.
        """
        names = {field.name for field in _fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in names})

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return] # subclasses are dataclasses

    def __str__(self) -> str:
        """Return a sentence about what happened, without the step and the time."""
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
    """Base of kinds whose sentence is "`summary`: `why`".

    A kind that has its own ``__str__`` needs no `summary`.
    """

    kind: ClassVar[str] = ""
    summary: ClassVar[str]
    why: str

    def __str__(self) -> str:
        return f"{self.summary}: {self.why}"


class Failed(EventData):
    """Base of kinds whose sentence is "`summary`: `error`".

    A kind that has its own ``__str__`` needs no `summary`.
    """

    kind: ClassVar[str] = ""
    summary: ClassVar[str]
    error: str

    def __str__(self) -> str:
        return f"{self.summary}: {self.error}"


def key_value_text(kind: str, facts: Mapping[str, Any]) -> str:
    """Return ``kind: key=value, ...``, which replaces the sentence of an event that has none."""
    pairs = [f"{key}={value!r}" for key, value in facts.items() if value is not None]
    if not pairs:
        return kind
    return f"{kind}: {', '.join(pairs)}"


def _fields(data_class: type[EventData]) -> tuple[Field[Any], ...]:
    return fields(data_class)  # type: ignore[arg-type] # subclasses are dataclasses


def _snake_case(name: str) -> str:
    """Return ``"roll_back"`` for ``"RollBack"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
