"""What is answered where code asks a fake tensor for its values, and the list of all such answers.

A trace has shapes and no values. Most questions have a safe answer (is the loss finite?) or one
that a plan wants (how many rows does a mask leave? all, at worst); every other is answered by a
rule that is written down with the line that asked. Where code raises after an answer, that line
gets the other one.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from holdfast.core.errors import PolicyError
from holdfast.forecast.trace.attribution import running_line
from holdfast.forecast.trace.events import Assumption

_MOST_ANSWERS = 10_000  # at one line in a step: a loop that waits for a tensor would never end
_PLUMBING = ("torch._", "torch.utils._", "holdfast.")


class Guesses:
    """Answers to questions for values that a trace does not have."""

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}
        """Lines that asked for a bool of which nothing is known, ``"model.py:31 in forward"``."""
        self.turned: set[str] = set()
        """Those that are answered with False."""
        self._assumptions: dict[Assumption, None] = {}
        self._times: Counter[str] = Counter()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was taken for granted so far, each once."""
        return tuple(self._assumptions)

    def assume(self, what: str, line: str | None = None) -> None:
        """Write down something that was taken for granted, at the line that is running if none
        is said.
        """
        self._assumptions.setdefault(
            Assumption(what=what, line=running_line() if line is None else line)
        )

    def turn(self, line: str) -> None:
        """Have a line answered with False from now on.

        What was taken for granted there no longer is.
        """
        self.turned.add(line)
        self._assumptions = {each: None for each in self._assumptions if each.line != line}

    def begin_step(self) -> None:
        """Begin to count anew how often each line asks."""
        self._times.clear()

    def decide(self, *, expected: bool | None = None, why: str = "") -> bool:
        """Answer ``bool(tensor)``, maybe `expected` to come out one way, and `why` (H424 if a
        loop waits for it).
        """
        line = running_line()
        if line not in self.turned and expected is not None:
            self.assume(why, line)
            return expected
        self.asked[line] = None
        answer = line not in self.turned
        self._times[line] += 1
        if self._times[line] > _MOST_ANSWERS:
            raise PolicyError(
                f"a loop asked a tensor {_MOST_ANSWERS} times whether it is to end, at {line}",
                limit="a forecast has shapes and no values, so that such a loop has no end",
                fix=(
                    "give it a fixed number of turns for the forecast, such as the most that it may"
                    " take"
                ),
                rule="H424",
            )
        self.assume(f"bool(tensor) was taken as {answer}; {not answer} was not looked at", line)
        return answer

    def count(self, *, at_most: int | None) -> int:
        """Answer ``int(tensor)`` or an integer ``.item()``.

        Its bound, as the worst case, if one is known.
        """
        answer = 1 if at_most is None else at_most
        why = "nothing is known of it" if at_most is None else "the worst case"
        self.assume(f"an integer of a tensor was taken as {answer} ({why})")
        return answer

    def number(self, *, typical: float | None = None) -> float:
        """Answer ``float(tensor)`` or a floating-point ``.item()``.

        1, but 0 for a GradScaler's overflow flag.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_PLUMBING):
            frame = frame.f_back
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if module == "torch.amp.grad_scaler":
            self.assume("no gradient overflowed: GradScaler lets the optimizer step", "")
            return 0.0
        answer = 1.0 if typical is None else typical
        if not module.startswith("torch.optim"):  # its step count is no choice of the user's
            self.assume(
                f"a number of a tensor was taken as {answer:g}: it matters only if the code"
                " branches on it"
            )
        return answer

    def rows(self, operator: str) -> None:
        """Write down that a result has all the elements that it could have."""
        self.assume(f"{operator} was taken to keep every element (the worst case)")
