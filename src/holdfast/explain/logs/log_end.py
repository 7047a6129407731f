"""Judge the last lines of a log: whether they say that training is done, and which one to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from holdfast.explain.logs.completion import says_done
from holdfast.explain.logs.lines import CleanLine
from holdfast.explain.logs.processes import ABOUT_CAUGHT_EXCEPTION
from holdfast.explain.logs.progress import is_progress_bar
from holdfast.explain.logs.tracebacks import HEADER

# This many lines at the end of the log are searched for a message that training is done.
_LAST_LINES = 15
# Failures that end a process or its job even if the process has just said that training is done.
_FATAL_AT_THE_END = re.compile(
    r"\bWatchdog caught collective operation timeout\b"
    r"|(?:^|: )(?:Aborted|Segmentation fault|Bus error)(?: \(core dumped\))?$"
    r"|\bsrun: error: .{1,200}: (?:Exited with exit code [1-9]|Killed|Out Of Memory)"
    r"|\bChildFailedError\b|\bexits with return code = -?[1-9]|\bfailed \(exitcode: -?[1-9]"
    r"|^\s*terminate called "
)
_MAX_LAST_LINE_CHARACTERS = 300
# An epoch and the number of all epochs, such as "Epoch 10/10" or "Epoch [10/10]".
_EPOCH = re.compile(r"\bepochs?\W{0,4}(\d{1,6})\s?(?:/|of)\s?(\d{1,6})\b", re.IGNORECASE)
_EVALUATION_OF_NANOGPT = re.compile(r"step (\d{1,9}): train loss [\d.]{1,20}, val loss [\d.]{1,20}")
_STEP_OF_NANOGPT = re.compile(r"iter (\d{1,9}): loss ")


def ends_with_completion(lines: Sequence[CleanLine]) -> bool:
    """Return whether one of the last lines says that training is done.

    A line that is followed by a traceback does not count, unless the exception is known to have
    been caught. Neither does a line that is followed by a failure that no process survives.
    """
    newest = [line.text for line in lines if line.text.strip()][-_LAST_LINES:]
    if any(ends_as_framework_does(newest) for ends_as_framework_does in _ENDS_WITHOUT_WORDS):
        return True
    for index in reversed(range(len(newest))):
        if says_done(newest[index]):
            return True
        if _reports_failure(newest, index):
            return False
    return False


def _reports_failure(newest: Sequence[str], index: int) -> bool:
    """Return whether a line reports a failure that is not known to have been caught."""
    text = newest[index]
    before = newest[index - 1] if index > 0 else ""
    if HEADER.search(text) and not ABOUT_CAUGHT_EXCEPTION.search(before):
        return True
    return _FATAL_AT_THE_END.search(text) is not None


def _ends_with_an_evaluation(newest: Sequence[str]) -> bool:
    """Return whether the last lines report an evaluation and the loss of the same step.

    nanoGPT evaluates every few hundred steps and after the last one. It prints the loss of every
    tenth step, so the log of a run that was killed rarely ends there.
    """
    if len(newest) < 2:
        return False
    evaluation = _EVALUATION_OF_NANOGPT.fullmatch(newest[-2].strip())
    step = _STEP_OF_NANOGPT.match(newest[-1].strip())
    return evaluation is not None and step is not None and evaluation[1] == step[1]


def _ends_with_the_last_epoch(newest: Sequence[str]) -> bool:
    """Return whether the last line reports the last epoch, and the line before it another one.

    If a program prints several lines per epoch, the last of them is not known.
    """
    epochs = [_EPOCH.search(text) for text in newest]
    reported = [epoch for epoch in epochs if epoch is not None]
    if len(reported) < 2 or epochs[-1] is None:
        return False
    number, total = int(reported[-1][1]), int(reported[-1][2])
    return number == total and int(reported[-2][1]) == number - 1


def _ends_with_the_time_of_detectron2(newest: Sequence[str]) -> bool:
    """Return whether detectron2 reports the time of the training, and no error before that.

    It reports the time after a failure too.
    """
    if any(HEADER.search(text) or "ERROR" in text or "Error" in text for text in newest):
        return False
    return any("d2.engine.hooks" in text and "Total training time: " in text for text in newest)


# Ways in which the logs of some frameworks end after the last step, although no line says so.
_ENDS_WITHOUT_WORDS: tuple[Callable[[Sequence[str]], bool], ...] = (
    _ends_with_an_evaluation,
    _ends_with_the_time_of_detectron2,
    _ends_with_the_last_epoch,
)


def find_last_line(lines: Sequence[CleanLine]) -> str:
    """Return the last line that the command printed, shortened for display; "" if there is none.

    Progress bars and lines that holdfast printed are ignored.
    """
    for line in reversed(lines):
        text = line.shown.strip()
        is_own = text.startswith("--- holdfast: ")
        if text and not is_own and not is_progress_bar(line.text):
            return text[:_MAX_LAST_LINE_CHARACTERS]
    return ""
