"""`CandidateCause`: a possible cause of a failure, found in a statement, and its certainty.

`candidate_search` finds the candidates, and `choosing` picks one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from holdfast.explain.certainty import Certainty, lowered
from holdfast.explain.evidence import Statement
from holdfast.explain.signatures import ids
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
FALLBACKS = frozenset({ids.UNCAUGHT, ids.ERROR_LINE})


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
    # Whether an earlier exception in the chain, which may be the cause, matches no signature.
    follows_unknown: bool = False
    # Other signatures that match statements in the chain, with the best match first.
    other_signatures: tuple[Signature, ...] = ()

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
        kills = self.signature.family in _DEADLY or self.signature.id == ids.BUS_ERROR
        return kills and self.tier == Tier.OTHER_LINE and self.signature.role == "root"

    @property
    def quotes_an_exception(self) -> bool:
        """Return whether the cause is the exception itself, because no signature matches it."""
        return self.signature.id == ids.UNCAUGHT

    @property
    def certainty(self) -> Certainty:
        """Return how certain this cause is, without regard to other candidates or the exit status.

        If the process continued or may have continued after the failure, the cause is a guess. If
        the failure may not be what ended the process, or may follow from another one, a cause is
        likely at most: it is in a line, a logger printed the exception, which the script may have
        handled, or the exception was raised while another one was handled.
        """
        if self.is_caught:
            return "a guess"
        certainty = self.signature.certainty
        was_logged = (
            self.tier == Tier.LAST_LINE and self.statement.logged and not self.quotes_an_exception
        )
        is_doubtful = was_logged or self.follows_unknown or self.tier == Tier.OTHER_LINE
        if certainty == "certain" and is_doubtful:
            return lowered(certainty)
        return certainty
