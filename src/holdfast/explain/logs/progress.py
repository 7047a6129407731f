"""Recognize lines that show that a training run continues or is done, and extract printed losses.

Progress is recognized by words such as "epoch", or by lines that recur with different numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.explain.logs.keeping import is_relevant
from holdfast.explain.logs.quick import QuickPattern

# All patterns limit the number of digits. Otherwise, searching a long line of digits would take
# quadratic time.
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
_BAR_AT_ZERO = re.compile(r"[^%]{0,200}?\b0%\|[^%]{0,200}\| {0,20}0/[^%]{0,200}")
# A line that matches this pattern shows no progress, even if it also matches `_PROGRESS`.
_NO_PROGRESS = QuickPattern(
    r"wandb:|\b(?:error|exception|fail|abort|nan\b"
    r"|(?<!best )loss\W{1,4}inf\b|stopp(?:ed|ing)|interrupt|resum)"
)
_DONE = QuickPattern(
    r"\b(?:training|run|fit|job|experiment|fine-?tuning|all epochs|[\w-]{1,60}\.(?:sh|py))\b"
    r"(?:(?!\b(?:epoch|step|iter|batch|fold|stage|phase)\w*\W{1,3}\d).){0,20}"
    r"\b(?:finished|completed?|done|ended well)\b"
    r"|\b(?:finished|completed) (?:the )?(?:training|fine-?tuning|run)\b"
    r"|\b\d{1,7} epochs completed in \d"  # Ultralytics
    r"|`Trainer\.fit` stopped: `max_|'train_runtime':"
    r"|^\W*(?:done|finished)\W*$|\bsaved (?:the )?final\b"
    r"|\bfinal (?:(?:test|eval\w*|validation|val) ?_?)?(?:acc\w*|metrics?|results?|scores?)\b"
    r"|\bexit (?:code|status)\W{1,3}0\b"
)
_STOPPED_EARLY = QuickPattern(r"\btraining (?:finished|stopped|ended)\b.{0,60}\bearly stop")

_NOT_DONE = QuickPattern(
    r"\b(?:not|never|false|unsuccessful\w*|fail\w*|errors?|abort\w*|crash\w*|killed|died|oom|nan"
    r"|diverged|warm-?up|pre-?process\w*)\b"
    r"|\b(?:code|status|exit|rc)\W{0,3}(?:-|0*[1-9])"
)
_SAVED = QuickPattern(r"\b(?:done|finished|completed?|saved|saving|written|wrote)\b")
# Experiment trackers save their logs even after a failure.
_LOGS_SAVED = QuickPattern(
    r"wandb:|\blogs? .{0,20}\b(?:saved|written)\b|\b(?:saved|wrote|saving) (?:the )?logs?\b"
)

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# The mark that replaces each number in a line template (see `_line_templates`).
_NUMBER_MARK = "#"
# "Error: 72.0" is a metric, not an error.
_ERROR_METRIC = re.compile(r"\berr(?:or)?(?:_?rate)?\W{0,3}#", re.IGNORECASE)
_FRAME = re.compile(r'\s*File "|frame #|\S{1,300}:\d+: ')
_MAX_TEMPLATE_CHARACTERS = 300
# If a line template occurs this often before a statement, a line with the same template after the
# statement shows progress.
_RECURRENCES = 3
# How many lines after a statement are checked for recurring templates.
_LINES_AFTER = 400

# A printed NaN or infinity. Lightning's progress bar prints NaN as "nan.0".
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


def names_an_evaluation(name: str) -> bool:
    """Return whether the name of a metric says that it was computed in an evaluation."""
    return _EVALUATION.search(name) is not None


def is_progress_bar(text: str) -> bool:
    """Return whether a line contains a progress bar."""
    return _BAR.search(text, text.lower()) is not None


def _has_moved(text: str) -> bool:
    """Return False if a line contains a single progress bar, which is still at 0 %."""
    return _BAR_AT_ZERO.fullmatch(text) is None


def says_done(text: str) -> bool:
    """Return whether a line says that training is done."""
    lowered = text.lower()
    if _STOPPED_EARLY.search(text, lowered) is not None:
        return True
    return _DONE.search(text, lowered) is not None and _NOT_DONE.search(text, lowered) is None


def is_progress(text: str) -> bool:
    """Return whether a line shows that training continues or is done."""
    if "Traceback (most recent call last)" in text:
        # The line is a progress bar with a traceback printed right behind it.
        return False
    lowered = text.lower()
    shows_progress = _PROGRESS.search(text, lowered) is not None or is_progress_bar(text)
    if shows_progress and _has_moved(text) and _NO_PROGRESS.search(text, lowered) is None:
        return True
    return says_done(text)


def is_sign_of_life(text: str) -> bool:
    """Return whether a line shows that the run continued or saved something.

    Progress bars and messages of experiment trackers do not count, because a run also prints them
    when it shuts down after a failure.
    """
    lowered = text.lower()
    if _SAVED.search(text, lowered) is not None and _LOGS_SAVED.search(text, lowered) is None:
        return True
    return is_progress(text) and not is_progress_bar(text)


class ProgressIndex:
    """Finds progress before and after a line of a process, by words or by recurring templates.

    Progress words after a line are counted up to the end of the log, but recurring templates only
    in the next `_LINES_AFTER` lines.

    Args:
        texts: The lines of one process.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._templates = _line_templates(texts)
        # For each recurring template, the index of the line with its `_RECURRENCES`-th occurrence.
        self._recurring_since = _recurring_templates(self._templates)
        # For each index, how many lines from this index to the end show progress by their words.
        # Two extra entries make the indices after the last line valid.
        self._progress_from = [0] * (len(texts) + 2)
        for index in reversed(range(len(texts))):
            self._progress_from[index] = self._progress_from[index + 1] + is_progress(texts[index])

    def count_after(self, last: int) -> int:
        """Return how many lines after the index `last` show progress by their words or templates.

        The larger of the two counts is returned.
        """
        by_words = self._progress_from[last + 1]
        if by_words > 1 or not self._recurring_since:
            return by_words
        following = self._templates[last + 1 : last + 1 + _LINES_AFTER]
        by_template = sum(
            1 for template in following if self._recurring_since.get(template, last) < last
        )
        return max(by_template, by_words)

    def only_completion_after(self, last: int) -> bool:
        """Return whether every line of progress after the index `last` says that training is done.

        Return True if there is no such line.
        """
        following = self._texts[last + 1 : last + 1 + _LINES_AFTER]
        return all(
            says_done(text) for text in following if is_sign_of_life(text) or is_progress_bar(text)
        )

    def any_between(self, first: int, end: int) -> bool:
        """Return whether words in the lines with indices `first` to `end - 1` show progress."""
        return self._progress_from[first] > self._progress_from[max(first, end)]

    def any_before(self, first: int) -> bool:
        """Return whether a line before the index `first` shows progress by words or a template."""
        return self.any_between(0, first) or any(
            index < first for index in self._recurring_since.values()
        )


def _line_templates(texts: Sequence[str]) -> list[str]:
    """Return the template of each line: the line with every number replaced by a mark.

    The template is empty for a line without numbers and for a line that is part of an error or a
    traceback.
    """
    # Most lines share a few templates, so the result for each template is cached.
    may_show_progress: dict[str, bool] = {}
    templates = []
    # True if the previous line is a frame of a traceback. The current line is then source code.
    follows_frame = False
    for text in texts:
        is_frame = _FRAME.match(text) is not None
        template = ""
        if not is_frame and not follows_frame:
            template = _NUMBER.sub(_NUMBER_MARK, text[:_MAX_TEMPLATE_CHARACTERS]).strip()
        if template not in may_show_progress:
            may_show_progress[template] = _NUMBER_MARK in template and not is_relevant(
                _ERROR_METRIC.sub("", template)
            )
        templates.append(template if may_show_progress[template] else "")
        follows_frame = is_frame
    return templates


def _recurring_templates(templates: Sequence[str]) -> dict[str, int]:
    """Return the index of the `_RECURRENCES`-th occurrence of each recurring template."""
    times: dict[str, int] = {}
    recurring_since = {}
    for index, template in enumerate(templates):
        if not template:
            continue
        times[template] = times.get(template, 0) + 1
        if times[template] == _RECURRENCES:
            recurring_since[template] = index
    return recurring_since


class _PrintedValue(NamedTuple):
    name: str
    line_number: int
    value: float


def printed_losses(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return the line number and value of each printed training loss, oldest first.

    If there are losses with a plain name such as ``loss`` or ``train_loss``, only these are
    returned, because other losses are probably components of the plain loss.

    Args:
        lines: The line number and the text of each line.
    """
    losses = list(_printed_values(lines, _LOSS, "loss"))
    plain = [loss for loss in losses if _PLAIN_LOSS.fullmatch(loss.name)]
    return tuple((loss.line_number, loss.value) for loss in plain or losses)


def printed_norms(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return the line number and value of each printed gradient norm, oldest first.

    Args:
        lines: The line number and the text of each line.
    """
    return tuple((norm.line_number, norm.value) for norm in _printed_values(lines, _NORM, "norm"))


def _printed_values(
    lines: Sequence[tuple[int, str]], pattern: re.Pattern[str], word: str
) -> Iterator[_PrintedValue]:
    """Yield the values that a pattern finds, except values that were computed in an evaluation.

    Args:
        lines: The line number and the text of each line.
        pattern: A pattern with two groups: the name of the value and the value.
        word: A word in lower case that every match contains. For speed, the pattern is not searched
            for in lines without this word.
    """
    for number, text in lines:
        if word not in text.lower():
            continue
        end_of_previous = 0
        for match in pattern.finditer(text):
            if not _EVALUATION.search(text, end_of_previous, match.end(1)):
                yield _PrintedValue(match[1], number, _as_float(match[2]))
            end_of_previous = match.end()


def _as_float(text: str) -> float:
    """Convert a printed number to a float, ignoring a ``.0`` after a non-finite value."""
    return float(re.sub(r"([nfy])\.0$", r"\1", text))
