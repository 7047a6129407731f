"""`Judgement`: the chosen cause and what it was chosen from, to be put into words."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.causes.case import Case
from holdfast.explain.causes.doubts import Doubt
from holdfast.explain.causes.ends import End
from holdfast.explain.evidence import Evidence, Frame, innermost_user_frame, is_user_code
from holdfast.explain.signatures.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything that a verdict is written from.

    Attributes:
        case: Everything known about the attempt.
        signature: The cause.
        confidence: The confidence in the cause, from 0 to 1.
        class_confidence: The confidence in its class, from 0 to 1.
        candidate: The candidate that shows the cause; None if only the end of the process does.
        doubt: The reason to doubt a good end.
        runner_up: As `Verdict.runner_up`.
    """

    case: Case
    signature: Signature
    confidence: float
    class_confidence: float
    candidate: CandidateCause | None
    doubt: Doubt | None
    runner_up: tuple[str, str, float] | None

    @property
    def evidence(self) -> Evidence:
        """Return everything that was collected."""
        return self.case.evidence

    @property
    def end(self) -> End:
        """Return how the attempt ended."""
        return self.case.end

    @property
    def is_good_end(self) -> bool:
        """Return whether nothing failed."""
        return self.signature.family == "ended well"

    @property
    def place(self) -> str:
        """Return the innermost frame of the user's own code, or the innermost of all.

        Empty if no frame is known.
        """
        if self.candidate is None:
            hang = self.end.hang
            return str(hang.data.get("frame") or "") if hang is not None else ""
        frame = _decisive_frame(self.candidate)
        if frame is None:
            return ""
        place = f"{frame.file}:{frame.line}"
        if frame.function:
            place += f" in {frame.function}"
        return place

    @property
    def steps(self) -> int | None:
        """Return how many steps were completed, or None if unknown."""
        if self.evidence.steps is not None:
            return self.evidence.steps
        for ending in reversed(self.evidence.endings):
            if ending.step is not None:
                return ending.step
        return None

    @property
    def leak(self) -> Event | None:
        """Return the newest traced leak, if the verdict is about memory."""
        if "memory" not in self.signature.family:
            return None
        return observations.newest_leak(self.evidence)


def _decisive_frame(candidate: CandidateCause) -> Frame | None:
    """Return the frame to look at first, of the statement or of another one in its chain.

    An exception raised in a handler may have no frame of user code; then the frame of the exception
    that was being handled is used.
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
