"""Guess the values of fake tensors that user code reads, and record the assumptions made.

Fake tensors have shapes but no values. When code reads a value, as in ``if loss.isnan():``, it asks
a question that must be answered. Many questions have an obvious answer: the loss is finite. Others
have a worst case, which is what a plan needs: a mask keeps every row. All remaining questions get a
default answer, which is recorded with the line of code that asked. If the step raises after a
question was answered with the default True, it is retried with the answer False.

Answers that follow from known values are in `known_values`.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from holdfast.core.errors import PolicyError
from holdfast.forecast.trace.attribution import running_line
from holdfast.forecast.trace.events import Assumption

# How often one line of code may ask for an unknown bool in a step. Without a limit, a loop that
# waits for the answer to change would never end. No known training step asks this often.
_MOST_ANSWERS = 10_000
# Prefixes of internal modules, which may be on the call stack between the code that asks and this
# module.
_PLUMBING = ("torch._", "torch.utils._", "holdfast.")


class Guesses:
    """Answers questions about unknown tensor values, and collects the underlying assumptions."""

    def __init__(self) -> None:
        # The lines of user code that asked for an unknown bool, such as "model.py:31 in forward",
        # ordered by their first question.
        self.asked: dict[str, None] = {}
        # The lines whose questions are answered with False instead of True.
        self.answered_false: set[str] = set()
        self._assumptions: dict[Assumption, None] = {}
        self._questions: Counter[str] = Counter()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions made so far, without duplicates."""
        return tuple(self._assumptions)

    def assume(self, what: str, line: str | None = None) -> None:
        """Record an assumption about a line of user code, by default the line that is running."""
        if line is None:
            line = running_line()
        self._assumptions.setdefault(Assumption(what=what, line=line))

    def answer_false(self, line: str) -> None:
        """Answer all questions from a line with False from now on, and drop its assumptions."""
        self.answered_false.add(line)
        self._assumptions = {
            assumption: None for assumption in self._assumptions if assumption.line != line
        }

    def begin_step(self) -> None:
        """Reset the number of questions that each line has asked, because a new step begins."""
        self._questions.clear()

    def decide(self, *, expected: bool | None = None, why: str = "") -> bool:
        """Return the value to assume for ``bool(tensor)``, and record the assumption.

        Args:
            expected: The answer that `KnownValues` inferred, or None.
            why: The assumption behind `expected`.

        Raises:
            PolicyError: H424 if one line asks so often that it must be in a loop that waits for the
                answer to change.
        """
        line = running_line()
        if line not in self.answered_false and expected is not None:
            self.assume(why, line)
            return expected
        self.asked[line] = None
        self._questions[line] += 1
        if self._questions[line] > _MOST_ANSWERS:
            raise PolicyError(
                f"a loop read its condition from a tensor {_MOST_ANSWERS:,} times, at {line}",
                limit="tensors have no values in a forecast, so such a loop never ends",
                fix="limit the loop to a fixed number of iterations, such as the worst case.",
                rule="H424",
            )
        answer = line not in self.answered_false
        self.assume(f"bool(tensor) was assumed to be {answer}; {not answer} was not tried", line)
        return answer

    def count(self, *, at_most: int | None) -> int:
        """Return the value to assume for ``int(tensor)`` or the ``.item()`` of an integer tensor.

        Args:
            at_most: An upper bound, which is the worst case; None if no bound is known.
        """
        if at_most is None:
            self.assume("an integer read from a tensor was assumed to be 1 (its value is unknown)")
            return 1
        self.assume(f"an integer read from a tensor was assumed to be {at_most} (the worst case)")
        return at_most

    def number(self, *, typical: float | None = None) -> float:
        """Return the value to assume for ``float(tensor)`` or the ``.item()`` of a float tensor.

        Args:
            typical: A typical value of the tensor, or None to assume 1.
        """
        module = _asking_module()
        if module == "torch.amp.grad_scaler":
            # GradScaler asks whether a gradient has overflowed.
            self.assume("no gradient overflowed, so GradScaler did not skip the optimizer step", "")
            return 0.0
        answer = 1.0 if typical is None else typical
        # torch's optimizers read their own step count, which is not worth reporting to the user.
        if not module.startswith("torch.optim"):
            self.assume(
                f"a number read from a tensor was assumed to be {answer:g}; this matters only if"
                " the code branches on it"
            )
        return answer

    def rows(self, operator: str) -> None:
        """Record that an operator's result was given the largest possible number of elements."""
        self.assume(f"{operator} was assumed to keep every element (the worst case)")


def _asking_module() -> str:
    """Return the name of the module whose code reads the value, skipping internal modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_PLUMBING):
            return module
        frame = frame.f_back
    return ""
