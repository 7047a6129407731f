"""`CandidateCause`: a possible cause of a failure, what it is based on, and how certain it is.

`weighing` finds candidates, `choosing` picks one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from holdfast.explain.evidence import Statement
from holdfast.explain.rules import all_rules
from holdfast.explain.signatures import endings
from holdfast.explain.signatures.signature import Family, Signature


class Tier(IntEnum):
    """How certain it is that a statement ended its process, the most certain first."""

    # An exception that is known to have ended its process, or the reason why a Guard stopped.
    ENDED_PROCESS = 0
    # A traceback after which the process did not continue; or a line in which the hardware, a
    # driver or the kernel reports a fatal event.
    NOT_CONTINUED = 1
    # The last line of a traceback alone, or an exception that a logger printed.
    LAST_LINE = 2
    # Any other line after which the process did not continue. Also the newest traceback out of a
    # main module that is followed by progress lines, since those may have been buffered.
    OTHER_LINE = 3
    # Caught, only a warning, or followed by progress: a cause only if there is nothing else.
    CAUGHT = 4


# What a candidate is based on.
#   own words    a holdfast error, which states its own cause
#   signature    any other signature of an original failure
#   symptom      a signature of a family whose failures are mostly caused by something else
#   cascade      a signature of a failure that follows from one elsewhere
#   words        an exception that matches no signature; its message shows the class
#   type         the same, but only the type of the exception suggests a class
#   open words   the same, but nothing suggests a class
#   line         a log line that matches no signature; its words show the class
#   open line    the same, but nothing suggests a class
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
# For each kind of grounds, how often the cause and how often its class was right, measured on
# failures that were not used to write the rules. ``python -m evals.world.calibrate`` prints the
# figures. The first entry is an estimate.
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
# Both shares are multiplied by this if the process continued, or may have continued.
_SHARE_OF_CAUGHT = 0.5
_SYMPTOMS: frozenset[Family] = frozenset(
    {"out of memory", "crash", "device", "distributed", "autograd", "numerics"}
)
# Families whose log lines report something that no process survives, even if the log says that the
# run is done.
_DEADLY: frozenset[Family] = frozenset({"preempted", "host out of memory", "crash"})
# Signatures from this rank on are so general that nearly every failure could match them.
GENERIC_RANK = 90
# Rank of kinds that are suggested only by an exception's type or by the library that raised it.
TYPE_RANK = 97
# Signatures that only quote an exception or a line that no real signature matches. They carry no
# advice, because advice derived from a class alone is wrong as often as right.
FALLBACKS = frozenset({endings.UNCAUGHT, endings.ERROR_LINE})


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCause:
    """One possible cause."""

    signature: Signature
    # The text in which it was found.
    statement: Statement
    tier: Tier
    # All exceptions of its chain, the root first. A line is a chain of one.
    chain: tuple[Statement, ...] = ()
    # Other signatures that match the same statements, the best first.
    also: tuple[Signature, ...] = ()

    @property
    def is_generic(self) -> bool:
        """Return whether its signature is so general that nearly every failure could match."""
        return self.signature.rank >= GENERIC_RANK

    @property
    def is_caught(self) -> bool:
        """Return whether its process continued, or may have continued, after it."""
        return self.tier == Tier.CAUGHT

    @property
    def reports_a_kill(self) -> bool:
        """Return whether it is a log line about an event that no process survives.

        Not if the line is followed by progress.
        """
        kills = self.signature.family in _DEADLY or self.signature.id == endings.BUS_ERROR
        return kills and self.tier == Tier.OTHER_LINE and self.signature.role == "root"

    @property
    def grounds(self) -> Grounds:
        """Return what it is based on."""
        signature = self.signature
        if signature.id in all_rules():
            return "own words"
        if signature.id == endings.ERROR_LINE:
            return "open line" if signature.family == "unknown" else "line"
        if signature.id == endings.UNCAUGHT:
            if signature.rank >= TYPE_RANK:
                return "type"
            return "open words" if signature.family == "unknown" else "words"
        if signature.role == "cascade":
            return "cascade"
        if signature.family in _SYMPTOMS:
            return "symptom"
        return "signature"

    @property
    def confidence(self) -> float:
        """Return how certain the cause is, before other causes and the exit status are considered.

        Between 0 and 1, from `SHARES`.
        """
        share_of_causes, _ = SHARES[self.grounds]
        return share_of_causes * self._certainty_of_end()

    @property
    def class_confidence(self) -> float:
        """Return how certain the class of the cause is, from 0 to 1."""
        _, share_of_classes = SHARES[self.grounds]
        return share_of_classes * self._certainty_of_end()

    def _certainty_of_end(self) -> float:
        return _SHARE_OF_CAUGHT if self.is_caught else 1.0
