"""Answer code that reads the values of a fake tensor, and record all such answers.

A trace has shapes but no values. Most questions have a safe answer (is the loss finite?) or one
that a plan wants (how many rows does a mask leave? all of them, at worst). Every other question is
answered by a rule and recorded with the line that asked. If the code raises after an answer, that
line gets the other answer.

Answers that follow from known values are in `known_values`.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from holdfast.core.errors import PolicyError
from holdfast.forecast.trace.attribution import running_line
from holdfast.forecast.trace.events import Assumption

# The most answers to one line in a step. A loop that waits for a tensor would never end, and no
# training step is known to ask this often.
_MOST_ANSWERS = 10_000
# Modules between the line that asks and this one.
_PLUMBING = ("torch._", "torch.utils._", "holdfast.")


class Guesses:
    """Answers questions about values, which a trace does not have."""

    def __init__(self) -> None:
        # The lines that asked for an unknown bool, in the order of their first question:
        # "model.py:31 in forward".
        self.asked: dict[str, None] = {}
        # Those of `asked` that are answered with False.
        self.answered_false: set[str] = set()
        self._assumptions: dict[Assumption, None] = {}
        self._questions: Counter[str] = Counter()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions so far, each one once."""
        return tuple(self._assumptions)

    def assume(self, what: str, line: str | None = None) -> None:
        """Record an assumption, at the running line unless another one is given."""
        if line is None:
            line = running_line()
        self._assumptions.setdefault(Assumption(what=what, line=line))

    def answer_false(self, line: str) -> None:
        """Answer a line with False from now on, and drop what was assumed there."""
        self.answered_false.add(line)
        self._assumptions = {
            assumption: None for assumption in self._assumptions if assumption.line != line
        }

    def begin_step(self) -> None:
        """Reset how often each line has asked."""
        self._questions.clear()

    def decide(self, *, expected: bool | None = None, why: str = "") -> bool:
        """Answer ``bool(tensor)``.

        Args:
            expected: The expected answer, if known.
            why: The assumption behind `expected`.

        Raises:
            PolicyError: H424, if a loop waits for the answer to change.
        """
        line = running_line()
        if line not in self.answered_false and expected is not None:
            self.assume(why, line)
            return expected
        self.asked[line] = None
        self._questions[line] += 1
        if self._questions[line] > _MOST_ANSWERS:
            raise PolicyError(
                f"a loop read its condition from a tensor {_MOST_ANSWERS} times, at {line}",
                limit="tensors have no values in a forecast, so such a loop never ends",
                fix="limit the loop to a fixed number of iterations, such as the largest possible",
                rule="H424",
            )
        answer = line not in self.answered_false
        self.assume(f"bool(tensor) was assumed to be {answer}; {not answer} was not tried", line)
        return answer

    def count(self, *, at_most: int | None) -> int:
        """Answer ``int(tensor)`` or the ``.item()`` of an integer.

        Args:
            at_most: Its upper bound (the worst case), if known.
        """
        if at_most is None:
            self.assume("an integer read from a tensor was assumed to be 1 (its value is unknown)")
            return 1
        self.assume(f"an integer read from a tensor was assumed to be {at_most} (the worst case)")
        return at_most

    def number(self, *, typical: float | None = None) -> float:
        """Answer ``float(tensor)`` or the ``.item()`` of a floating-point number.

        Args:
            typical: Its typical value, if known; otherwise 1 is used.
        """
        module = _asking_module()
        if module == "torch.amp.grad_scaler":
            # GradScaler asks whether a gradient has overflowed.
            self.assume("no gradient overflowed: GradScaler lets the optimizer step", "")
            return 0.0
        answer = 1.0 if typical is None else typical
        # An optimizer asks for its step count, so this is no assumption about the user's code.
        if not module.startswith("torch.optim"):
            self.assume(
                f"a number read from a tensor was assumed to be {answer:g}; this matters only if"
                " the code branches on it"
            )
        return answer

    def rows(self, operator: str) -> None:
        """Record the assumption that a result has the largest possible number of elements."""
        self.assume(f"{operator} was assumed to keep every element (the worst case)")


def _asking_module() -> str:
    """Return the name of the module that asks, ignoring torch's and our own internals."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_PLUMBING):
            return module
        frame = frame.f_back
    return ""
