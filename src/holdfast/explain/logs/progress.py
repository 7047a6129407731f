"""Recognize lines that show that a training run continues.

Progress is recognized by words such as "epoch", or by lines that recur with different numbers.
``completion`` recognizes that a run is done, which counts as progress too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.explain.logs.completion import says_done
from holdfast.explain.logs.excerpt import has_error_word
from holdfast.explain.logs.quick_pattern import QuickPattern

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
_MIN_RECURRENCES = 3
# How many lines after a statement are checked for recurring templates.
_LINES_AFTER = 400


def is_progress_bar(text: str) -> bool:
    """Return whether a line contains a progress bar."""
    return _BAR.search(text, text.lower()) is not None


def _has_moved(text: str) -> bool:
    """Return False if a line contains a single progress bar, which is still at 0 %."""
    return _BAR_AT_ZERO.fullmatch(text) is None


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
        # For each recurring template, the index of its occurrence with number `_MIN_RECURRENCES`.
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
            may_show_progress[template] = _NUMBER_MARK in template and not has_error_word(
                _ERROR_METRIC.sub("", template)
            )
        templates.append(template if may_show_progress[template] else "")
        follows_frame = is_frame
    return templates


def _recurring_templates(templates: Sequence[str]) -> dict[str, int]:
    """Return the index of the `_MIN_RECURRENCES`-th occurrence of each recurring template."""
    times: dict[str, int] = {}
    recurring_since = {}
    for index, template in enumerate(templates):
        if not template:
            continue
        times[template] = times.get(template, 0) + 1
        if times[template] == _MIN_RECURRENCES:
            recurring_since[template] = index
    return recurring_since
