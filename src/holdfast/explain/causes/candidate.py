"""`CandidateCause`: a possible cause of a failure, found in a statement, and its confidence.

`weighing` finds the candidates, and `choosing` picks one of them.
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
    """How certain it is that the failure in a statement ended its process.

    A lower value is more certain.
    """

    # An exception that is known to have ended its process, or the reason why a Guard stopped.
    ENDED_PROCESS = 0
    # A traceback after which the process did not continue, or a line in which the hardware, a
    # driver or the kernel reports a fatal event.
    NOT_CONTINUED = 1
    # The last line of a traceback whose other lines are missing, or an exception that a logger
    # printed.
    LAST_LINE = 2
    # Any other line after which the process did not continue. Also the newest traceback that starts
    # in a main module if progress lines follow it, because a buffer may have delayed these lines.
    OTHER_LINE = 3
    # A warning, an exception that was caught, or a failure followed by progress. It can be the
    # cause only if there is no other candidate.
    CAUGHT = 4


# The kinds of evidence that a candidate can be based on:
#   own words    a holdfast error, which states its cause
#   signature    a signature of an original failure (unless it is a symptom)
#   symptom      a signature of a family in which most failures have another cause
#   cascade      a signature of a failure that follows from a failure elsewhere
#   words        an exception without a signature; its message shows the class
#   type         an exception without a signature; only its type suggests a class
#   open words   an exception without a signature or a class
#   line         a log line without a signature; its words show the class
#   open line    a log line without a signature or a class
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
# For each kind of evidence, the fraction of verdicts that named the correct cause, and the fraction
# that named the correct class. Except for the first entry, which is an estimate, the fractions were
# measured on failures that were not used to write the rules. ``python -m evals.world.calibrate``
# prints them.
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
# Both fractions are multiplied by this factor if the process continued or may have continued.
_SHARE_OF_CAUGHT = 0.5
# Families of failures that are often only the symptom of another failure.
_SYMPTOMS: frozenset[Family] = frozenset(
    {"out of memory", "crash", "device", "distributed", "autograd", "numerics"}
)
# Families of events that no process survives. A log line that reports such an event casts doubt on
# a good end even if the log says that the run is done.
_DEADLY: frozenset[Family] = frozenset({"preempted", "host out of memory", "crash"})
# Signatures with at least this rank are so general that they could match almost any failure.
GENERIC_RANK = 90
# The rank of classes that are suggested only by an exception's type or by the library that raised
# the exception.
TYPE_RANK = 97
# Signatures that only quote an exception or a log line that matches no other signature. They
# suggest no fix, because a fix derived only from the class is wrong as often as it is right.
FALLBACKS = frozenset({endings.UNCAUGHT, endings.ERROR_LINE})


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCause:
    """A possible cause of a failure."""

    signature: Signature
    # The statement that matches the signature.
    statement: Statement
    tier: Tier
    # The chain of exceptions that contains the statement, with the root cause first. For a log
    # line, the chain contains only that line.
    chain: tuple[Statement, ...] = ()
    # Other signatures that match statements in the chain, with the best match first.
    also: tuple[Signature, ...] = ()

    @property
    def is_generic(self) -> bool:
        """Return whether the signature is so general that it could match almost any failure."""
        return self.signature.rank >= GENERIC_RANK

    @property
    def is_caught(self) -> bool:
        """Return whether the process continued, or may have continued, after this failure."""
        return self.tier == Tier.CAUGHT

    @property
    def reports_a_kill(self) -> bool:
        """Return whether a log line reports an event that no process survives.

        Return False if the line is followed by progress.
        """
        kills = self.signature.family in _DEADLY or self.signature.id == endings.BUS_ERROR
        return kills and self.tier == Tier.OTHER_LINE and self.signature.role == "root"

    @property
    def grounds(self) -> Grounds:
        """Return the kind of evidence that the candidate is based on."""
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
        """Return the confidence in this cause, from 0 to 1.

        The confidence is taken from `SHARES`, without regard to other candidates or to the exit
        status.
        """
        share_of_causes, _ = SHARES[self.grounds]
        return share_of_causes * self._certainty_of_end()

    @property
    def class_confidence(self) -> float:
        """Return the confidence that the cause is in the signature's class, from 0 to 1."""
        _, share_of_classes = SHARES[self.grounds]
        return share_of_classes * self._certainty_of_end()

    def _certainty_of_end(self) -> float:
        """Return the factor by which the confidence is reduced if the failure was caught."""
        return _SHARE_OF_CAUGHT if self.is_caught else 1.0
