"""Recognize lines that say that a training run is done.

``log_end`` decides whether the last lines of a whole log say so.
"""

from __future__ import annotations

from holdfast.explain.logs.quick_pattern import QuickPattern

_DONE = QuickPattern(
    # "20% nodes as training set...finished" is about the set.
    r"\b(?:training(?! (?:set|data|sample|split|loader)\w*)|run|fit|job|experiment|fine-?tuning"
    r"|all epochs|[\w-]{1,60}\.(?:sh|py))\b"
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


def says_done(text: str) -> bool:
    """Return whether a line says that training is done."""
    lowered = text.lower()
    if _STOPPED_EARLY.search(text, lowered) is not None:
        return True
    return _DONE.search(text, lowered) is not None and _NOT_DONE.search(text, lowered) is None
