"""Which lines show that a training run continues, or is done, and what losses they print.

Words show that a run continues; in a log without such words, a form of line that keeps coming back
with other numbers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.explain.logs.keeping import is_relevant
from holdfast.explain.logs.quick import QuickPattern

# Runs of digits are bounded in all patterns: a line of nothing else would take time that is
# quadratic in its length.
_BAR = QuickPattern(
    r"\d{1,9}%\|.{0,200}\|\s{0,20}\d{1,18}/\d{1,18}"
    r"|\[\d{1,9}:\d{1,9}<[^\]]{1,40}\]"
    r"|\d{1,9}(?:\.\d{1,9})?(?:it/s|s/it)\b"
)
_PROGRESS = QuickPattern(
    r"\b(?:epochs?|steps?|iter(?:ation)?s?|batch|loss|acc(?:uracy)?|lr|eta|global_step"
    r"|perplexity|ppl)\b\W{0,4}\d"
    r"|\d{1,9}(?:\.\d{1,9})?\s?(?:it/s|s/it|tok/s|tokens/s|samples/s|img/s)|['\"]loss['\"]:"
    r"|\bstarting (?:train|test)ing\b|\bbest (?:ckpt|checkpoint|model)\b.{0,20}[:=]"
)
# A line with one of these shows no progress, even if it matches the pattern above.
_NO_PROGRESS = QuickPattern(
    r"wandb:|\b(?:error|exception|fail|abort|nan\b"
    r"|(?<!best )loss\W{1,4}inf\b|stopp(?:ed|ing)|interrupt|resum)"
)
_DONE = QuickPattern(
    r"\b(?:training|run|fit|job|fine-?tuning|all epochs)\b"
    r"(?:(?!\b(?:epoch|step|iter|batch|fold|stage|phase)\w*\W{1,3}\d).){0,20}"
    r"\b(?:finished|completed?|done|ended well)\b"
    r"|`Trainer\.fit` stopped: `max_|'train_runtime':"
    r"|^\s*(?:done|finished)[.!]?\s*$|\bsaved (?:the )?final\b"
)
_NOT_DONE = QuickPattern(
    r"\b(?:not|never|false|unsuccessful\w*|fail\w*|errors?|abort\w*|crash\w*|killed|died|oom|nan"
    r"|diverged|warm-?up|pre-?process\w*)\b"
    r"|\b(?:code|status|exit|rc)\W{0,3}(?:-|0*[1-9])"
)
_SAVED = QuickPattern(r"\b(?:done|finished|completed?|saved|saving|written|wrote)\b")
# Trackers save their logs after a failure too.
_LOGS_SAVED = QuickPattern(
    r"wandb:|\blogs? .{0,20}\b(?:saved|written)\b|\b(?:saved|wrote|saving) (?:the )?logs?\b"
)

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# "Error: 72.0" is a metric. In a form, a number is replaced by this mark.
_NUMBER_MARK = "#"
_ERROR_METRIC = re.compile(r"\berr(?:or)?(?:_?rate)?\W{0,3}#", re.IGNORECASE)
_FRAME = re.compile(r'\s*File "|frame #|\S{1,300}:\d+: ')
_LENGTH_OF_FORM = 300
# A form of line that came this often before a statement is progress where it comes after it.
_HABIT = 3
# Lines after a statement among which forms are looked for.
_LINES_AFTER = 400

# A progress bar of Lightning writes nan.0.
_NOT_FINITE = r"(?:nan|inf(?:inity)?)(?:\.0)?"
_EXPONENT = r"(?:e[-+]?\d{1,4})?"
_VALUE_TEXT = (
    rf"(?:{_NOT_FINITE}"
    rf"|\d{{1,30}}(?:\.\d{{0,30}})?{_EXPONENT}"
    rf"|\.\d{{1,30}}{_EXPONENT})"
    r"(?![\w.])"
)
_VALUE = rf"['\"]?\)?\s{{0,8}}(?:[:=|]|is)?\s{{0,8}}(?:tensor\()?([-+]?{_VALUE_TEXT})"
_LOSS = re.compile(rf"([\w/.-]{{0,60}}?loss(?:es)?){_VALUE}", re.IGNORECASE)
_NORM = re.compile(rf"([\w/.-]{{0,60}}?grad(?:ient)?[_ -]?norm){_VALUE}", re.IGNORECASE)
_PLAIN_LOSS = re.compile(r"(?:train(?:ing)?[_/.-]?)?loss", re.IGNORECASE)
_EVALUATION = re.compile(
    r"(?:^|[^a-z])(?:val(?:id(?:at(?:ion|ing))?)?|eval(?:uat(?:ion|ing))?|test(?:ing)?|dev)(?![a-z])",
    re.IGNORECASE,
)


def is_progress_bar(text: str) -> bool:
    """Return whether a line is one picture of a progress bar."""
    return _BAR.search(text, text.lower()) is not None


def says_done(text: str) -> bool:
    """Return whether a line says that the training is done."""
    lowered = text.lower()
    return _DONE.search(text, lowered) is not None and _NOT_DONE.search(text, lowered) is None


def is_progress(text: str) -> bool:
    """Return whether a line shows that the training continues, or is done."""
    if "Traceback (most recent call last)" in text:
        # It begins behind a progress bar.
        return False
    lowered = text.lower()
    shows_progress = _PROGRESS.search(text, lowered) is not None or is_progress_bar(text)
    if shows_progress and _NO_PROGRESS.search(text, lowered) is None:
        return True
    return says_done(text)


def is_sign_of_life(text: str) -> bool:
    """Return whether a line shows that the run continued, or saved something.

    Progress bars and trackers do not count, since a failure closes them too.
    """
    lowered = text.lower()
    if _SAVED.search(text, lowered) is not None and _LOGS_SAVED.search(text, lowered) is None:
        return True
    return is_progress(text) and not is_progress_bar(text)


class Pulse:
    """Where the lines of one process show that its training continues.

    Args:
        texts: The lines.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._forms = _forms(texts)
        # For each form of line that is a habit, the index at which it had come often enough.
        self._habit_since = _habits(self._forms)
        # For each index, how many lines from it on show progress by their words.
        self._progress_from = [0] * (len(texts) + 2)
        for index in reversed(range(len(texts))):
            self._progress_from[index] = self._progress_from[index + 1] + is_progress(texts[index])

    def after(self, last: int) -> int:
        """Return how many lines after an index show progress, by words or else by their form."""
        by_words = self._progress_from[last + 1]
        if by_words > 1 or not self._habit_since:
            return by_words
        following = self._forms[last + 1 : last + 1 + _LINES_AFTER]
        by_form = sum(1 for form in following if self._habit_since.get(form, last) < last)
        return max(by_form, by_words)

    def only_ends(self, last: int) -> bool:
        """Return whether nothing after an index shows progress, except that all is done."""
        following = self._texts[last + 1 : last + 1 + _LINES_AFTER]
        return all(
            says_done(text) for text in following if is_sign_of_life(text) or is_progress_bar(text)
        )

    def between(self, first: int, end: int) -> bool:
        """Return whether a line from one index up to another shows progress by its words."""
        return self._progress_from[first] > self._progress_from[max(first, end)]

    def before(self, first: int) -> bool:
        """Return whether a line before an index shows progress, by its words or its form."""
        return self.between(0, first) or any(index < first for index in self._habit_since.values())


def _forms(texts: Sequence[str]) -> list[str]:
    """Return each line with a mark in the place of each number.

    The form of a line is empty if it has no number, or belongs to an error.
    """
    counts: dict[str, bool] = {}
    forms = []
    # The line after a frame of a traceback is code.
    follows_frame = False
    for text in texts:
        form = "" if follows_frame else _NUMBER.sub(_NUMBER_MARK, text[:_LENGTH_OF_FORM]).strip()
        is_frame = _FRAME.match(text) is not None
        if form not in counts:
            counts[form] = (
                _NUMBER_MARK in form
                and not is_frame
                and not is_relevant(_ERROR_METRIC.sub("", form))
            )
        forms.append(form if counts[form] else "")
        follows_frame = is_frame
    return forms


def _habits(forms: Sequence[str]) -> dict[str, int]:
    """Return the forms that come often, each with the index at which it had come often enough."""
    times: dict[str, int] = {}
    habit_since = {}
    for index, form in enumerate(forms):
        if not form:
            continue
        times[form] = times.get(form, 0) + 1
        if times[form] == _HABIT:
            habit_since[form] = index
    return habit_since


class _PrintedValue(NamedTuple):
    name: str
    line_number: int
    value: float


def printed_losses(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return line number and value of each training loss, oldest first.

    Where one is called plainly ``loss`` or ``train_loss``, only such losses count: the others are
    parts of it.

    Args:
        lines: Number and text of each line.
    """
    losses = list(_printed_values(lines, _LOSS, "loss"))
    plain = [loss for loss in losses if _PLAIN_LOSS.fullmatch(loss.name)]
    return tuple((loss.line_number, loss.value) for loss in plain or losses)


def printed_norms(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return line number and value of each gradient norm, oldest first (see `printed_losses`)."""
    return tuple((norm.line_number, norm.value) for norm in _printed_values(lines, _NORM, "norm"))


def _printed_values(
    lines: Sequence[tuple[int, str]], pattern: re.Pattern[str], word: str
) -> Iterator[_PrintedValue]:
    """Yield the values that a pattern finds, without those of an evaluation.

    Args:
        lines: Number and text of each line.
        pattern: It has two groups: the name and the value.
        word: A word that each match contains. The pattern is slow, as it starts at every place.
    """
    for number, text in lines:
        if word not in text.lower():
            continue
        behind_last = 0
        for match in pattern.finditer(text):
            if not _EVALUATION.search(text, behind_last, match.end(1)):
                yield _PrintedValue(match[1], number, _as_float(match[2]))
            behind_last = match.end()


def _as_float(text: str) -> float:
    """Return a printed number. The ``.0`` behind a value that is not finite is ignored."""
    return float(re.sub(r"([nfy])\.0$", r"\1", text))
