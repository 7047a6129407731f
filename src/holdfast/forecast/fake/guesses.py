"""What is answered where code asks a fake tensor for its values, and the list of all such answers.

A trace has shapes and no values. Most questions have a safe answer (is the loss finite?) or one that a plan wants
(how many rows does a mask leave? all, at worst); every other is answered by a rule that is written down with the line
that asked. A line's answer can be given beforehand, so that a decision can be traced both ways.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from holdfast.core.errors import PolicyError
from holdfast.forecast.trace.events import Assumption

_MOST_ANSWERS = 10_000  # at one line in a step: a loop that waits for a tensor would never end
_OVERFLOW_CHECK = str(Path("torch", "amp", "grad_scaler.py"))
_PLUMBING = (
    *("torch._ops", "torch._subclasses", "torch.utils._python_dispatch", "torch._tensor", "torch._compile"),
    *("torch._dynamo", "holdfast"),
)
_INSTALLED = (str(Path("site-packages")), str(Path("dist-packages")))
TAKEN = "bool(tensor) was taken as "


class Guesses:
    """Answers to questions for values that a trace does not have."""

    def __init__(self) -> None:
        self.given: dict[str, bool] = {}
        """Answers to ``bool(tensor)`` by line, ``"model.py:31 in forward"``, in place of the rule."""
        self.asked: dict[str, bool] = {}
        """Lines that asked for a bool which nothing is known of, and what was answered last."""
        self._assumptions: dict[Assumption, None] = {}
        self._times: Counter[str] = Counter()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was taken for granted so far, each once."""
        return tuple(self._assumptions)

    def assume(self, what: str, line: str | None = None) -> None:
        """Write down something that was taken for granted, at the line that is running if none is said."""
        self._assumptions.setdefault(Assumption(what=what, line=asking_line() if line is None else line))

    def give(self, answers: dict[str, bool]) -> None:
        """Have these lines answered so from now on, and no others; what was taken for granted there no longer is."""
        changed = {line for line in answers.keys() | self.given.keys() if answers.get(line) != self.given.get(line)}
        self.given = dict(answers)
        self._assumptions = {each: None for each in self._assumptions if each.line not in changed}

    def begin_step(self) -> None:
        """Begin to count anew how often each line asks."""
        self._times.clear()

    def decide(self, *, expected: bool | None = None, why: str = "") -> bool:
        """Answer ``bool(tensor)``.

        Args:
            expected: How it comes out, where that is likely; else None.
            why: What that takes for granted.

        Raises:
            PolicyError: H424: a loop waits for a tensor.
        """
        line = asking_line()
        if line not in self.given and expected is not None:
            self.assume(why, line)
            return expected
        answer = self.given.get(line, True)
        self.asked[line] = answer
        self._times[line] += 1
        if self._times[line] > _MOST_ANSWERS:
            raise PolicyError(
                f"a loop asked a tensor {_MOST_ANSWERS} times whether it is to end, at {line}",
                limit="a forecast has shapes and no values, so that such a loop has no end",
                fix="give it a fixed number of turns for the forecast, such as the most that it may take",
                rule="H424",
            )
        other = "" if line in self.given else f"; {not answer} was not looked at"
        self.assume(f"{TAKEN}{answer}{other}", line)
        return answer

    def count(self, *, at_most: int | None) -> int:
        """Answer ``int(tensor)`` or an integer ``.item()``.

        Args:
            at_most: The largest value that it can have, where that is known: the answer, as the worst case.
        """
        answer = 1 if at_most is None else at_most
        why = "nothing is known of it" if at_most is None else "the worst case"
        self.assume(f"an integer of a tensor was taken as {answer} ({why})")
        return answer

    def number(self, *, typical: float | None = None) -> float:
        """Answer ``float(tensor)`` or a floating-point ``.item()``: 1, but 0 for a GradScaler's overflow flag."""
        frame = _first_frame(_PLUMBING)
        if frame is not None and frame.f_code.co_filename.endswith(_OVERFLOW_CHECK):
            self.assume("no gradient overflowed: GradScaler lets the optimizer step", "")
            return 0.0
        answer = 1.0 if typical is None else typical
        if frame is None or not _is_of(frame, ("torch.optim",)):  # its step count is no choice of the user's
            self.assume(f"a number of a tensor was taken as {answer:g}: it matters only if the code branches on it")
        return answer

    def rows(self, operator: str) -> None:
        """Write down that a result has all the elements that it could have."""
        self.assume(f"{operator} was taken to keep every element (the worst case)")


def asking_line() -> str:
    """Return the innermost line outside torch and holdfast, ``"model.py:31 in forward"``; empty if there is none.

    Where that is in an installed package, the innermost line outside those is said too.
    """
    frame = _first_frame(("torch", "holdfast"))
    if frame is None:
        return ""
    line = _place(frame)
    if _is_installed(frame):
        caller: FrameType | None = frame
        while caller is not None and (_is_installed(caller) or _is_of(caller, ("torch", "holdfast"))):
            caller = caller.f_back
        if caller is not None and "<frozen" not in caller.f_code.co_filename:
            line += f", from {_place(caller)}"
    return line


def _first_frame(passed_over: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of(frame, passed_over):
        frame = frame.f_back
    return frame


def _is_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Return whether a frame is of a package's, or of anybody's mode around what is asked."""
    if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
        return True
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == package or name.startswith(package + ".") for package in packages)


def _is_installed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _INSTALLED)


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
