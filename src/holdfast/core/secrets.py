"""Secrets on a command line, found by the name of their option or by their shape, and left out of what is kept.

Three kinds of names are told apart. What follows a name such as ``--api-key`` or ``--password`` is always a secret. A
name such as ``--key``, ``-k``, ``-p`` or ``--auth`` has other meanings too: what follows is a secret unless it is
plainly something else, such as a number, a path, a switch or a data type. Any other name that ends in "key", such as
``--sort-key``, mostly names a column: only a random value is a secret there.

A secret of another kind is not found, nor is one that a program prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

HIDDEN = "***"
# Most processes have none of these in their words, and then need no pattern compiled when they start.
_HINTS = ("key", "token", "secret", "pass", "pwd", "cred", "bearer", "://", "hf_", "sk-", "ghp_", "gho_", "ghu_",
          "ghs_", "ghr_", "github_pat", "glpat-", "akia", "asia", "xox", "aiza", "eyj", "npm_", "pypi-", "sk_", "rk_",
          "gsk_", "r8_", "dop_v1_", "nvapi-", "wandb_v1_", "auth", "cookie", "jwt", "otp", "_pat=", "_pw=", "--pw",
          "--sas", "_sas=", "sig=", "signature", "-p", "-k", "-u", "--user", "--login")  # fmt: skip

# Of what a key is that nobody else may have; any other key is a column, a layer or a field.
_KEYS_OF_ACCESS = (
    "api|access|account|app|client|consumer|deploy|encryption|licen[cs]e|master|private|secret|service|shared|signing"
    "|ssh|storage|subscription|wandb"
)
_SECRETS = (
    rf"(?:{_KEYS_OF_ACCESS})[-_.]?key(?:[-_.]?id)?|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt|otp"
    r"|(?:db|ftp|http|ldap|mail|my|mysql|pg|proxy|redis|root|smtp|sudo|user)[-_.]?pass"
)
# Names of a whole option, which are often something else.
_AMBIGUOUS = "key|k|p|pass|pw|auth|bearer|cookie|sas"
_VOCABULARY = ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image")  # `--pad_token` and its like

_SHAPES = (
    # Access tokens with the prefix of who gave them out.
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|xox[abeoprs]-|AIza|gsk_|r8_|dop_v1_|nvapi-|wandb_v1_"
    r"|[rs]k_(?:live|test)_)[\w-]{16,}"
    r"|\bsk-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    # A JSON web token.
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
    # A private key as PEM, also if its end is cut off.
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)
# What is plainly no secret, as a whole value of an ambiguous name.
_HARMLESS = (
    r"[-+]?[\d.,:_x]*\d[\d.,:_x]*(?:e[-+]?\d+)?%?|[-+]?(?:nan|inf)"  # numbers, sizes, ports, addresses
    r"|true|false|yes|no|on|off|none|null|auto|default"
    r"|(?:bf|fp|tf|float|int|uint)\d{1,3}\w{0,9}(?:-(?:mixed|true))?|16-mixed|32-true"
    r"|\$\{?\w+\}?"  # of a shell that did not replace it
    r"|(?:~|\.{1,2})?/.*|\w{1,20}://.*|[a-z0-9_.-]+(?:/[a-z0-9_.-]+)+/?"  # paths; base64 has capitals
    r"|[\w.-]+\.(?:py|json|ya?ml|toml|txt|csv|pem|key|crt|pt|ckpt|safetensors)"
)


class _Patterns(NamedTuple):
    """What is searched for, compiled once."""

    secret: Any  # an option whose value is always a secret, up to its end or the "="
    ambiguous: Any  # one whose value is, unless it is plainly something else
    variable: Any  # the same as a variable of the environment, in capitals
    key: Any  # one whose value is if it is random
    user: Any  # one whose value may be "name:password"
    attached: Any  # a password right behind its option, as of mysql
    harmless: Any
    vocabulary: Any  # a value such as "<pad>"
    another: Any  # a word that is no value, but an option or an operator of a shell
    parts: Any  # the words within a word, and what is between them
    address: Any  # what is before the password in an address
    header: Any  # a header of HTTP whose value is a secret as a whole
    inside: Any  # a name and its value within a word, as in JSON, a query or a call
    shape: Any


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``***`` in place of what looks like a secret."""
    whole = " ".join(words).lower()
    return _hidden(words, within=False) if any(hint in whole for hint in _HINTS) else list(words)


def _hidden(words: Sequence[str], *, within: bool) -> list[str]:
    """Return words without secrets; `within`: of a word, where only what begins with a dash takes the next one."""
    patterns = _patterns()
    shown = []
    kind = None  # of the option that the next word may be the value of
    partitioned = False  # the command of Slurm is not over: its -p is a partition
    for word in words:
        is_option = patterns.another.fullmatch(word) and not _is_random(word.lstrip("-"))
        if kind is not None and not is_option:
            word = _value(kind, word)
        program = word.rpartition("/")[2]
        partitioned = program in ("srun", "sbatch", "salloc") or (partitioned and not program.startswith("python"))
        kind, word = _option(word, partitioned=partitioned)
        if within and not word.startswith("-"):
            kind = None
        word = _within(word, within=within)
        shown.append(patterns.shape.sub(HIDDEN, word))
    return shown


def _option(word: str, *, partitioned: bool) -> tuple[str | None, str]:
    """Return of which kind the value in the next word is, or None, and the word without a secret of its own."""
    patterns = _patterns()
    name, equals, value = word.partition("=")
    if partitioned and name.startswith("-p"):
        return None, word
    for kind in ("secret", "ambiguous", "variable", "key", "user"):
        if not getattr(patterns, kind).fullmatch(name):
            continue
        if equals:
            return None, f"{name}={_value(kind, value)}" if value else word
        return (None if kind == "variable" else kind), word
    attached = patterns.attached.fullmatch(word)
    if attached is not None and not patterns.harmless.fullmatch(attached[1]):
        return None, f"-p{HIDDEN}"
    return None, word


def _value(kind: str, value: str) -> str:
    """Return the value of an option of some kind, hidden if it is a secret."""
    patterns = _patterns()
    if kind == "user":
        name, colon, _ = value.partition(":")
        return f"{name}:{HIDDEN}" if colon and name and not patterns.harmless.fullmatch(value) else value
    if patterns.vocabulary.fullmatch(value):
        return value
    if kind == "key":
        return HIDDEN if _is_random(value) else value
    if kind != "secret" and patterns.harmless.fullmatch(value):
        return value
    return HIDDEN


def _within(word: str, *, within: bool) -> str:
    """Return a word without the secrets inside of it: of a command for a shell, an address, a header, JSON."""
    patterns = _patterns()
    parts = patterns.parts.findall(word)
    if len(parts) > 1:  # a command within a word, as of `sh -c`, has words of its own
        its = iter(_hidden([part for part in parts if not part.isspace()], within=True))
        word = "".join(part if part.isspace() else next(its) for part in parts)
    elif within and len(word) > 2 and word[0] == word[-1] and word[0] in "\"'":
        word = word[0] + _hidden([word[1:-1]], within=True)[0] + word[0]
    elif (at := patterns.address.search(word)) and at.end() < word.rfind("@"):
        word = word[: at.end()] + HIDDEN + word[word.rfind("@") :]
    word = patterns.header.sub(rf"\1{HIDDEN}", word)

    def hide(match: Any) -> str:
        quote = match[2] or match[3] or ""
        return f"{match[1]}{quote}{HIDDEN}{quote}"

    return str(patterns.inside.sub(hide, word))


def _is_random(word: str) -> bool:
    """Return whether a word is no name that a person has chosen, such as 40 hexadecimal digits."""
    return len(word) >= 20 and word.isalnum() and not word.isalpha()


@cache
def _patterns() -> _Patterns:
    import re

    not_of_a_vocabulary = "".join(f"(?<!{name}[-_])" for name in _VOCABULARY)
    names = rf"{_SECRETS}|{not_of_a_vocabulary}token"
    prefix = r"[-+]{0,3}[\w.-]{0,80}?"
    assigned = rf"(?:{names})[\"']?\s{{0,3}}[=:]\s{{0,3}}|\bbearer\s{{1,3}}"
    in_query = r"[?&;](?:[\w.-]{0,40}(?:sig|signature|auth|password)|key|code)="
    option_inside = rf"(?<![\w-])--?[\w.-]{{0,80}}?(?:{names})\s{{1,3}}(?!-|<|\[[A-Z])"
    value = r"(?:(\")[^\"]+\"|(')[^']+'|[\"']?(?!\*)[^\s\"',;&]+)"
    header = (
        r"((?:(?:proxy-)?authorization|(?:set-)?cookie)[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
        r"(?:(?:apikey|basic|bearer|digest|negotiate|token)\s{1,3})?)[^\s\"'][^\"'\n]*"
    )
    return _Patterns(
        secret=re.compile(f"{prefix}(?:{names})", re.IGNORECASE),
        ambiguous=re.compile(f"(?:-{{1,2}}|[+]{{0,2}})(?:{_AMBIGUOUS})", re.IGNORECASE),
        variable=re.compile(r"[A-Z][A-Z0-9_]{0,80}_(?:KEY|PASS|PAT|PW|AUTH|SAS)"),
        key=re.compile(f"{prefix}key", re.IGNORECASE),
        user=re.compile(r"-u|--(?:user|login|proxy-user)", re.IGNORECASE),
        attached=re.compile(r"-p(?![a-z_-]*\Z)([^=\s]+)"),
        harmless=re.compile(_HARMLESS, re.IGNORECASE),
        vocabulary=re.compile(r"<[^<>]{0,40}>|\[[A-Z_]{1,20}\]"),
        # What may follow an option that takes no value; `-S3cr` may not.
        another=re.compile(
            r"(?s)--[a-zA-Z][\w.-]*(?:=.*)?|-[a-z][a-z_.-]*\d*(?:=.*)?|-[A-Z]\d?|-[\d.]+(?:e-?\d+)?|[&|;<>]{1,2}"
        ),
        parts=re.compile(r"\s+|(?:\"[^\"]*\"|'[^']*'|[^\s\"']+|[\"'])+"),
        address=re.compile(r"://[^\s/@:\[]{0,80}:(?!\d{1,5}(?:[/,?#]|$))"),  # with a name, and not with a port
        header=re.compile(header, re.IGNORECASE),
        inside=re.compile(f"((?:{assigned}|{option_inside}|{in_query})){value}", re.IGNORECASE),
        shape=re.compile(_SHAPES),
    )
