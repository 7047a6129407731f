"""What lines show of a training.

That it goes on, or is done, and the losses and norms of gradients that it printed.

Words say that it goes on, or, in a log without such words, a form of line that keeps coming back
with other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from holdfast.explain.logs.keeping import is_relevant
from holdfast.explain.logs.quick import QuickPattern

# Runs of digits are bounded: a line of nothing else would take time quadratic in its length.
_BAR = QuickPattern(
    r"\d{1,9}%\|.{0,200}\|\s{0,20}\d{1,18}/\d{1,18}|\[\d{1,9}:\d{1,9}<[^\]]{1,40}\]|\d{1,9}(?:\.\d{1,9})?(?:it/s|s/it)\b"
)
_PROGRESS = QuickPattern(
    r"\b(?:epochs?|steps?|iter(?:ation)?s?|batch|loss|acc(?:uracy)?|lr|eta|global_step|perplexity|ppl)\b\W{0,4}\d"
    r"|\d{1,9}(?:\.\d{1,9})?\s?(?:it/s|s/it|tok/s|tokens/s|samples/s|img/s)|['\"]loss['\"]:"
    r"|\bstarting (?:train|test)ing\b|\bbest (?:ckpt|checkpoint|model)\b.{0,20}[:=]"
)
_NO_PROGRESS = QuickPattern(
    r"wandb:|\b(?:error|exception|fail|abort|nan\b|(?<!best"
    r" )loss\W{1,4}inf\b|stopp(?:ed|ing)|interrupt|resum)"
)
_DONE = QuickPattern(
    r"\b(?:training|run|fit|job|fine-?tuning|all epochs)\b"
    r"(?:(?!\b(?:epoch|step|iter|batch|fold|stage|phase)\w*\W{1,3}\d).){0,20}"
    r"\b(?:finished|completed?|done|ended well)\b"
    r"|`Trainer\.fit` stopped: `max_|'train_runtime':|^\s*(?:done|finished)[.!]?\s*$|\bsaved (?:the"
    r" )?final\b"
)
_SAVED = QuickPattern(r"\b(?:done|finished|completed?|saved|saving|written|wrote)\b")
_OF_A_LOGGER = QuickPattern(
    r"wandb:|\blogs? .{0,20}\b(?:saved|written)\b|\b(?:saved|wrote|saving) (?:the )?logs?\b"
)
_NOT_DONE = QuickPattern(
    r"\b(?:not|never|false|unsuccessful\w*|fail\w*|errors?|abort\w*|crash\w*|killed|died|oom|nan|diverged"
    r"|warm-?up|pre-?process\w*)\b"
    r"|\b(?:code|status|exit|rc)\W{0,3}(?:-|0*[1-9])"
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# "Error: 72.0" measures something
_ERROR_METRIC = re.compile(r"\berr(?:or)?(?:_?rate)?\W{0,3}#", re.IGNORECASE)
_OF_A_TRACEBACK = re.compile(r'\s*File "|frame #|\S{1,300}:\d+: ')
_HABIT = 3  # times that a form of line came before what it is to be progress after
_LOOKED_AT = 400  # lines after a statement among which forms are looked for
_NOT_FINITE = r"(?:nan|inf(?:inity)?)(?:\.0)?"  # a progress bar of Lightning writes nan.0
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


def is_end(text: str) -> bool:
    """Return whether a line says that the training is done."""
    lowered = text.lower()
    return _DONE.search(text, lowered) is not None and _NOT_DONE.search(text, lowered) is None


def is_progress(text: str) -> bool:
    """Return whether a line shows that the training went on, or is done."""
    if "Traceback (most recent call last)" in text:  # it began behind a progress bar
        return False
    lowered = text.lower()
    goes = _PROGRESS.search(text, lowered) is not None or is_progress_bar(text)
    return (goes and not _NO_PROGRESS.search(text, lowered)) or is_end(text)


def goes_on(text: str) -> bool:
    """Return whether a line shows that the run went on, or saved.

    No bar or tracker that a failure closes too.
    """
    saved = (
        _SAVED.search(text, text.lower()) is not None
        and _OF_A_LOGGER.search(text, text.lower()) is None
    )
    return saved or (is_progress(text) and not is_progress_bar(text))


class Pulse:
    """Where in the lines of one process its training shows that it goes on."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._forms = _forms(texts)
        self._habit_at: dict[str, int] = {}  # where a form of line had come often enough
        seen: dict[str, int] = {}
        for index, form in enumerate(self._forms):
            if form:
                seen[form] = seen.get(form, 0) + 1
                if seen[form] == _HABIT:
                    self._habit_at[form] = index
        self._texts = texts
        self._words_after = [0] * (len(texts) + 2)
        for index in range(len(texts) - 1, -1, -1):
            self._words_after[index] = self._words_after[index + 1] + int(is_progress(texts[index]))

    def after(self, last: int) -> int:
        """Return how many lines of progress stand after a line, by words or else by their form."""
        if self._words_after[last + 1] > 1:
            return self._words_after[last + 1]
        if not self._habit_at:
            return self._words_after[last + 1]
        following = self._forms[last + 1 : last + 1 + _LOOKED_AT]
        by_form = sum(1 for form in following if form and self._habit_at.get(form, last) < last)
        return max(by_form, self._words_after[last + 1])

    def only_ends(self, last: int) -> bool:
        """Return whether all that goes on after a line, if anything does, is that all is done."""
        after = self._texts[last + 1 : last + 1 + _LOOKED_AT]
        return all(is_end(text) for text in after if goes_on(text) or is_progress_bar(text))

    def between(self, first: int, end: int) -> bool:
        """Return whether a line of progress stands from one index up to another."""
        return self._words_after[first] > self._words_after[max(first, end)]

    def before(self, first: int) -> bool:
        """Return whether a line of progress stands before a line."""
        return self.between(0, first) or any(index < first for index in self._habit_at.values())


def _forms(texts: Sequence[str]) -> list[str]:
    """Return each line with its numbers taken out, or an empty text if it counts nothing, or is
    of an error.
    """
    counts: dict[str, bool] = {}
    found = []
    of_frame = False  # the line after a frame is code
    for text in texts:
        form = "" if of_frame else _NUMBER.sub("#", text[:300]).strip()
        of_frame = _OF_A_TRACEBACK.match(text) is not None
        if form not in counts:
            counts[form] = (
                "#" in form and not of_frame and not is_relevant(_ERROR_METRIC.sub("", form))
            )
        found.append(form if counts[form] else "")
    return found


def printed_losses(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return number of the line and value of each training loss, oldest first, from numbered lines.

    Where any is called plainly ``loss`` or ``train_loss``, only these count: others are parts of
        it.
    """
    found = list(_values(lines, _LOSS, "loss"))
    plain = [each for each in found if _PLAIN_LOSS.fullmatch(each[0])]
    return tuple((number, value) for _, number, value in plain or found)


def printed_norms(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return line and value of each norm of gradients, oldest first."""
    return tuple((number, value) for _, number, value in _values(lines, _NORM, "norm"))


def _values(
    lines: Sequence[tuple[int, str]], named: re.Pattern[str], word: str
) -> Iterator[tuple[str, int, float]]:
    for number, text in lines:
        if word not in text.lower():  # the pattern looks from every place
            continue
        until = 0
        for match in named.finditer(text):
            if not _EVALUATION.search(text, until, match.end(1)):
                yield match[1], number, float(re.sub(r"([nfy])\.0$", r"\1", match[2]))
            until = match.end()
