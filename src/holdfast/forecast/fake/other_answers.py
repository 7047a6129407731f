"""Where the way of a step depends on values: what the other answer to each ``bool(tensor)`` would need.

A plan is to hold whichever way the step goes, so that the answer that needs more is the one to plan for.

Does not: decide what is answered at first (``guesses``), or trace (``tracer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.core.errors import HoldfastError
from holdfast.forecast.fake.guesses import Guesses
from holdfast.forecast.trace.events import Assumption, Trace, live_peak

_MOST_QUESTIONS = 3  # of which both answers are traced: each costs two more steps
_WORTH_TRACING = 0.01  # more of the peak: below that the margin covers it
_TAKEN = "bool(tensor) was taken as "


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAnswers:
    """What is known of the other answers.

    Args:
        said: What is to be said of a line in place of the assumption that was made there.
        heavier: Answers that need more than those that were given, by line.
    """

    said: dict[str, str]
    heavier: dict[str, bool]

    def word(self, assumptions: Iterable[Assumption]) -> tuple[Assumption, ...]:
        """Return assumptions with what is known now."""
        return tuple(
            Assumption(what=self.said[each.line], line=each.line)
            if each.line in self.said and each.what.startswith(_TAKEN)
            else each
            for each in assumptions
        )

    def planned_for(self) -> OtherAnswers:
        """Return what is to be said once the heavier answers have been traced as the ones given."""
        said = {
            line: f"{_TAKEN}{answer}, the answer that needs more ({self.said[line].removeprefix(_TAKEN)})"
            for line, answer in self.heavier.items()
        }
        return OtherAnswers(said={**self.said, **said}, heavier=self.heavier)


def look_at_other_answers(guesses: Guesses, traced: Trace, again: Callable[[], Trace]) -> OtherAnswers:
    """Trace a step again with the other answer to each question.

    Args:
        guesses: What was asked and answered.
        traced: The step with the answers as they are.
        again: Makes the step once, and returns the trace of the next.
    """
    peak = live_peak(traced)
    said: dict[str, str] = {}
    heavier: dict[str, bool] = {}
    for question in [each for each in guesses.questions if each.kind == "bool"][:_MOST_QUESTIONS]:
        if guesses.is_given(question.line):
            continue
        guesses.answer(question.line, not question.answer)
        try:
            more = live_peak(again()) / peak - 1
            how = f"needs {abs(more):.2%} {'less' if more < 0 else 'more'}"
            if more > _WORTH_TRACING:
                heavier[question.line] = not question.answer
        except HoldfastError as error:
            how = f"does not run ({' '.join(error.what.split())})"
        finally:
            guesses.forget(question.line)
        said[question.line] = f"{_TAKEN}{question.answer}; {not question.answer} {how}"
    return OtherAnswers(said=said, heavier=heavier)
