"""What is answered where code asks a fake tensor for its values, and the list of all such answers.

A trace has shapes and no values. Most questions have a safe answer (is the loss finite?) or one that a plan wants
(how many rows does a mask leave? all, at worst); every other is answered by a rule that is written down with the line
that asked. A line's answer can be given beforehand, so that a decision can be traced both ways.

Does not: know operators (``data_dependent``) or values (``facts``); import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from holdfast.forecast.fake.asking_code import find_wish
from holdfast.forecast.trace.events import Assumption

Answer = bool | int | float

_MOST_EQUAL_ANSWERS = 10_000  # a loop might never end otherwise: after so many the opposite is answered once
_OVERFLOW_CHECK = str(Path("torch", "amp", "grad_scaler.py"))
_PLUMBING = (
    *("torch._ops", "torch._subclasses", "torch.utils._python_dispatch", "torch._tensor", "torch._compile"),
    "torch._dynamo",
)
_INSTALLED = (str(Path("site-packages")), str(Path("dist-packages")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A place where the course of the step depends on values.

    Args:
        line: Such as ``"model.py:31 in forward"``: the key for `Guesses`' ``answers``.
        kind: ``"bool"``, ``"int"``, ``"float"``, or ``"rows"``: how many elements a result has.
        answer: What was answered; for ``"rows"`` the operator's name.
        times: How often it was asked.
    """

    line: str
    kind: str
    answer: Answer | str
    times: int


class Guesses:
    """Answers to questions for values that a trace does not have.

    Args:
        answers: By line (see `Question`): what to answer there instead of the rule.
    """

    def __init__(self, *, answers: Mapping[str, Answer] | None = None) -> None:
        self._answers = dict(answers or {})
        self._questions: dict[tuple[str, str], Question] = {}
        self._assumptions: dict[Assumption, None] = {}
        self._turning: tuple[int, int] | None = None

    @property
    def questions(self) -> tuple[Question, ...]:
        """The distinct questions so far, in the order in which they came up."""
        return tuple(self._questions.values())

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was taken for granted so far, each once."""
        return tuple(self._assumptions)

    def assume(self, what: str, line: str = "") -> None:
        """Write down something that was taken for granted."""
        self._assumptions.setdefault(Assumption(what=what, line=line))

    def answer(self, line: str, value: Answer) -> None:
        """Have a line answered so from now on; what was taken for granted there no longer is."""
        self._answers[line] = value
        self._assumptions = {each: None for each in self._assumptions if each.line != line}

    def is_given(self, line: str) -> bool:
        """Return whether a line has its answer from elsewhere than the rules."""
        return line in self._answers

    def forget(self, line: str) -> None:
        """Answer a line by the rules again."""
        self._answers.pop(line, None)

    def decide(self, *, expected: bool | None = None, why: str = "") -> bool:
        """Answer ``bool(tensor)``.

        Args:
            expected: How it comes out, where that is known or likely; else None.
            why: What that takes for granted; empty if it is certain.
        """
        if expected is not None and not why:
            return expected
        line = asking_line()
        if line not in self._answers and expected is not None:
            self.assume(why, line)
            return expected
        frame = _first_frame(torch_too=True)
        wish = None if frame is None or line in self._answers else find_wish(frame)
        if wish is not None and not wish.loops:
            self.assume("a check was taken to pass, or a loop to end", line)
            return wish.answer
        if wish is not None and frame is not None:
            return self._turn(frame, line, enter=wish.answer)
        answer = bool(self._answers.get(line, True))
        question = self._note(line, "bool", answer)
        if question.times % _MOST_EQUAL_ANSWERS == 0:
            return not answer
        other = "" if line in self._answers else f"; {not answer} was not looked at"
        self.assume(f"bool(tensor) was taken as {answer}{other}", line)
        return answer

    def _turn(self, frame: FrameType, line: str, *, enter: bool) -> bool:
        """Answer the condition of a loop: it turns once."""
        self.assume("a loop that waits for a tensor was taken to turn once", line)
        if self._turning == (id(frame), frame.f_lineno):
            self._turning = None
            return not enter
        self._turning = (id(frame), frame.f_lineno)
        return enter

    def count(self, *, at_most: int | None) -> int:
        """Answer ``int(tensor)`` or an integer ``.item()``.

        Args:
            at_most: The largest value that it can have, where that is known: the answer, as the worst case.
        """
        line = asking_line()
        given = self._answers.get(line)
        answer = int(given) if given is not None else 1 if at_most is None else at_most
        self._note(line, "int", answer)
        why = "as given" if given is not None else "nothing is known of it" if at_most is None else "the worst case"
        self.assume(f"an integer of a tensor was taken as {answer} ({why})", line)
        return answer

    def number(self, *, typical: float | None = None) -> float:
        """Answer ``float(tensor)`` or a floating-point ``.item()``: 1, but 0 for a GradScaler's overflow flag.

        Args:
            typical: What to answer instead, for a random number.
        """
        frame = _first_frame(torch_too=True)
        if frame is not None and frame.f_code.co_filename.endswith(_OVERFLOW_CHECK):
            self.assume("no gradient overflowed: GradScaler lets the optimizer step")
            return 0.0
        line = asking_line()
        answer = float(self._answers.get(line, 1.0 if typical is None else typical))
        if frame is None or not _is_of(frame, "torch.optim"):  # an optimizer's step count: no choice of the user's
            self._note(line, "float", answer)
            self.assume(
                f"a number of a tensor was taken as {answer:g}: it matters only if the code branches on it", line
            )
        return answer

    def rows(self, operator: str) -> None:
        """Write down that a result has all the elements that it could have."""
        line = asking_line()
        self._note(line, "rows", operator)
        self.assume(f"{operator} was taken to keep every element (the worst case)", line)

    def _note(self, line: str, kind: str, answer: Answer | str) -> Question:
        seen = self._questions.get((line, kind))
        now = replace(seen, times=seen.times + 1) if seen else Question(line=line, kind=kind, answer=answer, times=1)
        self._questions[line, kind] = now
        return now


def asking_line() -> str:
    """Return the innermost line outside torch and holdfast, ``"model.py:31 in forward"``; empty if there is none.

    Where that is in an installed package, the innermost line outside those is said too.
    """
    frame = _first_frame(torch_too=False)
    if frame is None:
        return ""
    line = _place(frame)
    if _is_installed(frame):
        caller: FrameType | None = frame
        while caller is not None and (_is_installed(caller) or _is_ours(caller)):
            caller = caller.f_back
        if caller is not None and "<frozen" not in caller.f_code.co_filename:
            line += f", from {_place(caller)}"
    return line


def _first_frame(*, torch_too: bool) -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and (_is_plumbing(frame) if torch_too else _is_ours(frame)):
        frame = frame.f_back
    return frame


def _is_of(frame: FrameType, package: str) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(package + ".")


def _is_watching(frame: FrameType) -> bool:
    """Tell whether it is somebody's mode around what is asked."""
    return frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")


def _is_ours(frame: FrameType) -> bool:
    return _is_watching(frame) or _is_of(frame, "torch") or _is_of(frame, "holdfast")


def _is_plumbing(frame: FrameType) -> bool:
    return _is_watching(frame) or _is_of(frame, "holdfast") or any(_is_of(frame, name) for name in _PLUMBING)


def _is_installed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _INSTALLED)


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
