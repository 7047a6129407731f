"""`Judgement`: the chosen cause and the evidence for it, from which a verdict is written."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.causes.case import Case
from holdfast.explain.causes.doubts import Doubt
from holdfast.explain.causes.ends import AttemptEnd
from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import Evidence, Frame, innermost_user_frame, is_user_code
from holdfast.explain.signatures import ids
from holdfast.explain.signatures.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The chosen cause and everything else that the text of a verdict is written from.

    Attributes:
        case: The evidence about the attempt and the possible causes.
        signature: The chosen cause.
        certainty: How certain the cause is, or None if it needs no word.
        candidate: The candidate that the cause was taken from, or None if the cause was inferred
            from how the process ended.
        doubt: A reason to doubt that the run ended well, or None.
        runner_up: The id and title of the second most likely cause, or None.
    """

    case: Case
    signature: Signature
    certainty: Certainty | None
    candidate: CandidateCause | None
    doubt: Doubt | None
    runner_up: tuple[str, str] | None

    @property
    def evidence(self) -> Evidence:
        """Return the collected evidence about the attempt."""
        return self.case.evidence

    @property
    def end(self) -> AttemptEnd:
        """Return how the attempt ended and the cause that this end suggests."""
        return self.case.end

    @property
    def is_good_end(self) -> bool:
        """Return whether the run ended well."""
        return self.signature.family == "ended well"

    @property
    def place(self) -> str:
        """Return the line of code to inspect first, as ``file:line in function``; "" if unknown.

        This is the innermost frame in user code or, if there is none, the innermost frame. For a
        hang, it is the frame at which the blamed process hangs.
        """
        flight = self.evidence.flight
        if flight is not None and flight.rule == self.signature.id and flight.where:
            return flight.where
        if self.candidate is None:
            hang = self.end.hang
            return str(hang.data.get("frame") or "") if hang is not None else ""
        return place_of(self.candidate)

    @property
    def code(self) -> str:
        """Return the text of the line of code to inspect first; "" if unknown."""
        if self.candidate is None:
            return ""
        frame = _decisive_frame(self.candidate)
        return "" if frame is None else frame.code.strip()

    @property
    def steps(self) -> int | None:
        """Return the number of steps that were completed, or None if unknown."""
        if self.evidence.steps is not None:
            return self.evidence.steps
        for ending in reversed(self.evidence.endings):
            if ending.step is not None:
                return ending.step
        return None

    @property
    def never_had_a_finite_loss(self) -> bool:
        """Return whether the cause is a loss that was not finite from the first step on."""
        divergence = self.evidence.divergence
        causes = (ids.LOSS_NOT_FINITE, ids.INTERRUPTED_AFTER_DIVERGENCE)
        if self.signature.id not in causes or divergence is None:
            return False
        return divergence.quantity == "loss" and divergence.always

    @property
    def leak(self) -> Event | None:
        """Return the newest traced leak if the cause is a lack of memory, otherwise None."""
        if "memory" not in self.signature.family:
            return None
        return observations.newest_leak(self.evidence)


def place_of(candidate: CandidateCause) -> str:
    """Return the line of code to inspect first, as ``file:line in function``; "" if unknown."""
    frame = _decisive_frame(candidate)
    if frame is None:
        return ""
    place = f"{frame.file}:{frame.line}"
    if frame.function:
        place += f" in {frame.function}"
    return place


def _decisive_frame(candidate: CandidateCause) -> Frame | None:
    """Return the frame to inspect first, from the statement or from its chain of exceptions.

    An exception that was raised in an exception handler may have no frame in user code. In that
    case, a frame of the exception that was being handled is used. Return None if no frames are
    known.
    """
    innermost = [
        innermost_user_frame(statement.frames)
        for statement in (candidate.statement, *candidate.chain)
        if statement.frames
    ]
    for frame in innermost:
        if is_user_code(frame):
            return frame
    return innermost[0] if innermost else None
