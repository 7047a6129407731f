"""Whether a line shows that a training goes on, or that it is done.

Does not: say anything about lines of errors.
"""

from __future__ import annotations

import re

_BAR = re.compile(r"\d+%\|.{0,200}\|\s*\d+/\d+|\[\d+:\d+<[^\]]{1,40}\]|\b\d+(?:\.\d+)?(?:it/s|s/it)\b")
_PROGRESS = re.compile(
    r"\b(?:epochs?|steps?|iter(?:ation)?s?|batch|loss|acc(?:uracy)?|lr|eta|global_step|perplexity|ppl)\b\W{0,4}\d"
    r"|\d+(?:\.\d+)?\s?(?:it/s|s/it|tok/s|tokens/s|samples/s|img/s)|['\"]loss['\"]:",
    re.IGNORECASE,
)
_NO_PROGRESS = re.compile(
    r"wandb:|\b(?:error|exception|fail|abort|nan\b|stopp(?:ed|ing)|interrupt|resum)", re.IGNORECASE
)
_DONE = re.compile(
    r"\b(?:training|run|fit|job|fine-?tuning|all epochs)\b.{0,20}\b(?:finished|completed?|done|ended well)\b"
    r"|`Trainer\.fit` stopped: `max_|'train_runtime':|^\s*(?:done|finished)[.!]?\s*$|\bsaved (?:the )?final\b",
    re.IGNORECASE,
)


def is_progress_bar(text: str) -> bool:
    """Return whether a line is one picture of a progress bar."""
    return _BAR.search(text) is not None


def is_end(text: str) -> bool:
    """Return whether a line says that the training is done."""
    return _DONE.search(text) is not None


def is_progress(text: str) -> bool:
    """Return whether a line shows that the training went on, or is done."""
    if is_end(text):
        return True
    return (is_progress_bar(text) or _PROGRESS.search(text) is not None) and not _NO_PROGRESS.search(text)
