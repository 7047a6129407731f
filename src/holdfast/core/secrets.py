"""Secrets on a command line, found by the name of their option or by their shape, and left out of what is kept.

A secret of neither kind is not found, nor is one that a program prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

HIDDEN = "***"
# Most processes have none of these in their words, and then need no pattern compiled when they start.
_HINTS = ("key", "token", "secret", "pass", "pwd", "cred", "bearer", "://", "hf_", "sk-", "ghp_", "gho_", "ghu_",
          "ghs_", "ghr_", "github_pat", "glpat-", "akia", "asia", "xox", "aiza", "eyj", "npm_", "pypi-")  # fmt: skip
_NAMES = (
    r"(?:api|access|private|secret|account|wandb)[-_.]?key(?:[-_.]?id)?|secret|passw(?:or)?d|passphrase|pwd"
    r"|credentials?"
)
_SHAPES = (
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|xox[abeoprs]-|AIza)[\w-]{16,}|\bsk-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<=hooks\.slack\.com/services/)[\w/]+"
)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``***`` in place of what looks like a secret."""
    whole = " ".join(words).lower()
    if not any(hint in whole for hint in _HINTS):
        return list(words)
    option, inside, shape = _patterns()
    found, follows = [], None
    for word in words:
        if follows is not None and not word.startswith("-") and (follows == "secret" or _is_random(word)):
            word = HIDDEN
        match = option.match(word)
        follows = match.lastgroup if match and match.end() == len(word) else None
        if match and word[match.end() : match.end() + 1] == "=":
            value = word[match.end() + 1 :]
            if match.lastgroup == "secret" or _is_random(value):
                word = f"{word[: match.end()]}={HIDDEN}"
        found.append(shape.sub(HIDDEN, inside.sub(rf"\g<1>\g<2>{HIDDEN}", word)))
    return found


def _is_random(word: str) -> bool:
    """Return whether a word is no name that a person has chosen, such as 40 hexadecimal digits."""
    return len(word) >= 20 and word.isalnum() and not word.isalpha()


@cache
def _patterns() -> tuple[Any, Any, Any]:
    import re

    # Not `--pad_token` and its like, which are words of a vocabulary.
    vocabulary = "".join(f"(?<!{name}[-_])" for name in ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image"))
    names = rf"{_NAMES}|{vocabulary}token"
    option = re.compile(rf"[-+]{{0,3}}[\w.-]{{0,80}}?(?:(?P<secret>{names})|(?P<key>key))(?=$|=)", re.IGNORECASE)
    assigned = rf"(?:{names})[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?(?!\*)|\bbearer\s{{1,3}}"
    option_inside = rf"--?[\w.-]{{0,80}}?(?:{names})\s{{1,3}}(?!-)"  # in a command within a word, as of `sh -c`
    inside = rf"((?:{assigned}|{option_inside}))[^\s\"',;&]+|(://[^\s/@:]{{0,80}}:)[^\s/@]+(?=@)"
    return option, re.compile(inside, re.IGNORECASE), re.compile(_SHAPES)
