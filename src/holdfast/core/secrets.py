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
    return _hidden(words, within=False) if any(hint in whole for hint in _HINTS) else list(words)


def _hidden(words: Sequence[str], *, within: bool) -> list[str]:
    """Return words without secrets; `within`: of a word, where only what begins with a dash takes the next one."""
    option, another, in_parts, address, shape, inside = _patterns()
    found, follows = [], None
    for word in words:
        is_value = follows is not None and (_is_random(word.lstrip("-")) or not another.fullmatch(word))
        if is_value and (follows == "secret" or _is_random(word)):
            word = HIDDEN
        match = option.match(word)
        follows = match.lastgroup if match and match.end() == len(word) and not (within and word[0] != "-") else None
        name, _, value = word.partition("=")
        if match and match.end() == len(name) < len(word) and (match.lastgroup == "secret" or _is_random(value)):
            word = f"{name}={HIDDEN}"
        parts = in_parts.findall(word)
        if len(parts) > 1:  # a command within a word, as of `sh -c`, has words of its own
            its = iter(_hidden([part for part in parts if not part.isspace()], within=True))
            word = "".join(part if part.isspace() else next(its) for part in parts)
        elif within and len(word) > 2 and word[0] == word[-1] and word[0] in "\"'":
            word = word[0] + _hidden([word[1:-1]], within=True)[0] + word[0]
        elif (at := address.search(word)) and at.end() < word.rfind("@"):
            word = word[: at.end()] + HIDDEN + word[word.rfind("@") :]
        word = inside.sub(lambda each: each[1] + (quote := each[2] or each[3] or "") + HIDDEN + quote, word)
        found.append(shape.sub(HIDDEN, word))
    return found


def _is_random(word: str) -> bool:
    """Return whether a word is no name that a person has chosen, such as 40 hexadecimal digits."""
    return len(word) >= 20 and word.isalnum() and not word.isalpha()


@cache
def _patterns() -> tuple[Any, ...]:
    import re

    # Not `--pad_token` and its like, which are words of a vocabulary.
    vocabulary = "".join(f"(?<!{name}[-_])" for name in ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image"))
    names = rf"{_NAMES}|{vocabulary}token"
    option = rf"[-+]{{0,3}}[\w.-]{{0,80}}?(?:(?P<secret>{names})|(?P<key>key))(?=$|=)"
    # What may follow an option that takes no value; `-S3cr` may not.
    another = r"(?s)--[a-zA-Z][\w.-]*(?:=.*)?|-[a-z][a-z_.-]*\d*(?:=.*)?|-[A-Z]\d?|-[\d.]+(?:e-?\d+)?|[&|;<>]{1,2}"
    parts = r"\s+|(?:\"[^\"]*\"|'[^']*'|[^\s\"']+|[\"'])+"
    assigned = rf"(?:{names})[\"']?\s{{0,3}}[=:]\s{{0,3}}|\bbearer\s{{1,3}}"
    option_inside = rf"--?[\w.-]{{0,80}}?(?:{names})\s{{1,3}}(?!-)"
    value = r"(?:(\")[^\"]+\"|(')[^']+'|[\"']?(?!\*)[^\s\"',;&]+)"
    address = r"://[^\s/@:\[]{0,80}:(?!\d{1,5}(?:[/,?#]|$))"  # with a name, and not with a port
    inside = re.compile(f"((?:{assigned}|{option_inside})){value}", re.IGNORECASE)
    return re.compile(option, re.IGNORECASE), *map(re.compile, (another, parts, address, _SHAPES)), inside
