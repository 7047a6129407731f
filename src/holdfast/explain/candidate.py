"""`Candidate`: one possible cause of a failure, what it rests on, and how certain that makes it.

`weighing` finds candidates, `choosing` picks one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from holdfast.explain.evidence import Statement
from holdfast.explain.rules import all_rules
from holdfast.explain.signature import Family, Signature
from holdfast.explain.signatures import endings


class Tier(IntEnum):
    """How certainly a statement is what ended its process, the most certain first."""

    # An exception that is known to have ended its process, or what a Guard stopped for.
    ENDED_PROCESS = 0
    # A traceback after which the process did not continue; a line about hardware or of a kernel
    # that killed a process.
    NOT_CONTINUED = 1
    # The last line of a traceback alone, or an exception that a logger printed.
    LAST_LINE = 2
    # Any other line after which the process did not continue. Also the newest traceback of a
    # process that left its main module, where later lines of progress can have waited in a buffer.
    OTHER_LINE = 3
    # Caught, warned of, or followed by progress: a cause only where there is nothing else.
    CAUGHT = 4


# What a candidate rests on.
#   own words    an error of holdfast, which says what was found
#   signature    a signature
#   symptom      a signature of a family whose failures mostly have their cause elsewhere
#   cascade      a signature of what follows from a failure elsewhere
#   words        an exception that no signature knows, with words that show its class
#   type         the same, with a type that only suggests a class
#   open words   the same, without a class
#   line         a line that no signature knows, with words that show its class
#   open line    the same, without a class
Grounds = Literal[
    "own words",
    "signature",
    "symptom",
    "cascade",
    "words",
    "type",
    "open words",
    "line",
    "open line",
]
# By grounds: the shares of right causes and of right classes when the rules first met failures from
# which none of them had been written. ``python -m evals.world.calibrate`` prints the figures. The
# first entry was not counted.
SHARES: dict[Grounds, tuple[float, float]] = {
    "own words": (0.97, 0.97),
    "signature": (0.88, 0.98),
    "symptom": (0.48, 0.9),
    "cascade": (0.69, 0.89),
    "words": (0.65, 0.93),
    "type": (0.69, 0.75),
    "open words": (0.66, 0.0),
    "line": (0.55, 0.89),
    "open line": (0.46, 0.0),
}
# Applied to both shares of a statement after which the process continued, or may have.
_SHARE_OF_CAUGHT = 0.5
_SYMPTOMS: frozenset[Family] = frozenset(
    {"out of memory", "crash", "device", "distributed", "autograd", "numerics"}
)
# Families whose lines a process does not survive, whatever its log says about being done.
_DEADLY: frozenset[Family] = frozenset({"preempted", "host out of memory", "crash"})
# From this rank on, nearly everything could look like a signature.
GENERIC_RANK = 90
# Rank of the kinds of unknown failures that only the type of an exception, or the library that
# raised it, suggests.
TYPE_RANK = 97
# Signatures that are the words of what was seen: an exception, or a line, that no signature knows.
# They carry no advice: what can be said of a class alone is as often wrong as right.
FALLBACKS = frozenset({endings.UNCAUGHT, endings.ERROR_LINE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One possible cause."""

    signature: Signature
    # What it was seen in.
    statement: Statement
    tier: Tier
    # All exceptions of its chain, the root first; a line is a chain of its own.
    chain: tuple[Statement, ...] = ()
    # Other signatures that match the same statements, the best first.
    also: tuple[Signature, ...] = ()

    @property
    def generic(self) -> bool:
        """Return whether nearly everything could look like it."""
        return self.signature.rank >= GENERIC_RANK

    @property
    def is_caught(self) -> bool:
        """Return whether its process continued after it, or may have."""
        return self.tier == Tier.CAUGHT

    @property
    def reports_a_kill(self) -> bool:
        """Return whether it is a line, not followed by progress, about what no process survives."""
        kills = self.signature.family in _DEADLY or self.signature.id == endings.BUS_ERROR
        return kills and self.tier == Tier.OTHER_LINE and self.signature.role == "root"

    @property
    def grounds(self) -> Grounds:
        """Return what it rests on."""
        signature = self.signature
        if signature.id in all_rules():
            return "own words"
        if signature.id == endings.ERROR_LINE:
            return "open line" if signature.family == "unknown" else "line"
        if signature.id == endings.UNCAUGHT:
            return self._grounds_of_unknown_exception()
        if signature.role == "cascade":
            return "cascade"
        if signature.family in _SYMPTOMS:
            return "symptom"
        return "signature"

    def _grounds_of_unknown_exception(self) -> Grounds:
        if self.signature.rank >= TYPE_RANK:
            return "type"
        return "open words" if self.signature.family == "unknown" else "words"

    @property
    def confidence(self) -> float:
        """Return how certain the cause is, before other causes and the exit status are considered.

        Between 0 and 1, from `SHARES`.
        """
        share_of_causes, _ = SHARES[self.grounds]
        return share_of_causes * self._certainty_of_end()

    @property
    def class_confidence(self) -> float:
        """Return how certain the class of the cause is, likewise."""
        _, share_of_classes = SHARES[self.grounds]
        return share_of_classes * self._certainty_of_end()

    def _certainty_of_end(self) -> float:
        return _SHARE_OF_CAUGHT if self.is_caught else 1.0
