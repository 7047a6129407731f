"""Hide secrets in a command line before it is recorded.

A secret is recognised by its form, such as the prefix of an access token, or by the option before
it:

    --api-key, --password   the value is always a secret
    --key, -k, -p, --auth   the value is a secret unless it is plainly a number, a path, a switch or
    a data type --sort-key              other names that end in "key" mostly name a column: only a
    random value is a secret

Other secrets are not recognised, and neither are those that a program prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

HIDDEN = "***"
# If a command line has none of these, it has no secret. Most have none, so that no pattern has to
# be compiled.
_HINTS = (
    "key",
    "token",
    "secret",
    "pass",
    "pwd",
    "cred",
    "bearer",
    "://",
    "hf_",
    "sk-",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat",
    "glpat-",
    "akia",
    "asia",
    "xox",
    "aiza",
    "eyj",
    "npm_",
    "pypi-",
    "sk_",
    "rk_",
    "gsk_",
    "r8_",
    "dop_v1_",
    "nvapi-",
    "wandb_v1_",
    "auth",
    "cookie",
    "jwt",
    "otp",
    "_pat=",
    "_pw=",
    "--pw",
    "--sas",
    "_sas=",
    "sig=",
    "signature",
    "-p",
    "-k",
    "-u",
    "--user",
    "--login",
)

# Words before "key" that make it a secret. Any other key is the name of a column, a layer or a
# field.
_PRIVATE_KEYS = (
    "api|access|account|app|client|consumer|deploy|encryption|licen[cs]e|master|private|secret|service|shared|signing"
    "|ssh|storage|subscription|wandb"
)
# Names whose values are always secrets, as the end of an option.
_SECRETS = (
    rf"(?:{_PRIVATE_KEYS})[-_.]?key(?:[-_.]?id)?|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt|otp"
    r"|(?:db|ftp|http|ldap|mail|my|mysql|pg|proxy|redis|root|smtp|sudo|user)[-_.]?pass"
)
# Names whose values are often something else, as a whole option.
_AMBIGUOUS = "key|k|p|pass|pw|auth|bearer|cookie|sas"
# Words before "token" that make it an entry of a vocabulary, as in `--pad_token`.
_VOCABULARY = ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image")

_SHAPES = (
    # Access tokens with the prefix of their issuer.
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|xox[abeoprs]-|AIza|gsk_|r8_|dop_v1_|nvapi-|wandb_v1_"
    r"|[rs]k_(?:live|test)_)[\w-]{16,}"
    r"|\bsk-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    # A JSON web token.
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
    # A private key in PEM format, even if its end is cut off.
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)
# Values of an ambiguous name that are plainly no secrets.
_HARMLESS = (
    # Numbers, sizes, ports, addresses
    r"[-+]?[\d.,:_x]*\d[\d.,:_x]*(?:e[-+]?\d+)?%?|[-+]?(?:nan|inf)"
    r"|true|false|yes|no|on|off|none|null|auto|default"
    r"|(?:bf|fp|tf|float|int|uint)\d{1,3}\w{0,9}(?:-(?:mixed|true))?|16-mixed|32-true"
    r"|\$\{?\w+\}?"  # a variable that the shell did not expand
    # Paths; base64 has capitals
    r"|(?:~|\.{1,2})?/.*|\w{1,20}://.*|[a-z0-9_.-]+(?:/[a-z0-9_.-]+)+/?"
    r"|[\w.-]+\.(?:py|json|ya?ml|toml|txt|csv|pem|key|crt|pt|ckpt|safetensors)"
)


class _Patterns(NamedTuple):
    """The compiled regular expressions.

    Attributes:
        secret: The name of an option whose value is always a secret.
        ambiguous: The name of an option whose value is a secret unless it is `harmless`.
        variable: The same for an environment variable, in capitals.
        key: The name of an option whose value is a secret if it is random.
        user: The name of an option whose value may be ``name:password``.
        attached: A password that directly follows its option, as in ``mysql -pS3cret``.
        harmless: A value that is plainly no secret.
        vocabulary: A value such as ``<pad>``.
        no_value: A word that cannot be the value of an option: another option, or an operator of
            the shell.
        parts: The words within a word, and the white space between them.
        address: The part of a URL before the password.
        header: An HTTP header whose whole value is a secret.
        assignment: A name and its value within a word, as in JSON, a query string or a function
            call.
        shape: A secret that is recognised by its form.
    """

    secret: Any
    ambiguous: Any
    variable: Any
    key: Any
    user: Any
    attached: Any
    harmless: Any
    vocabulary: Any
    no_value: Any
    parts: Any
    address: Any
    header: Any
    assignment: Any
    shape: Any


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``***`` in place of secrets."""
    command_line = " ".join(words).lower()
    if not any(hint in command_line for hint in _HINTS):
        return list(words)
    return _hide_in_words(words, nested=False)


def _hide_in_words(words: Sequence[str], *, nested: bool) -> list[str]:
    """Return words without secrets.

    Args:
        words: The words of a command line.
        nested: Whether they are the words within one word, such as a command for ``sh -c``. They
            may also be text, so that only a word that begins with a dash counts as an option.
    """
    patterns = _patterns()
    shown = []
    # The kind of the option before the current word, whose value the word may be.
    kind = None
    # In a command line of Slurm -p is a partition and no password, up to the name of the Python
    # program.
    is_slurm = False
    for word in words:
        is_no_value = patterns.no_value.fullmatch(word) and not _is_random(word.lstrip("-"))
        if kind is not None and not is_no_value:
            word = _hide_value(kind, word)
        program = word.rpartition("/")[2]
        is_slurm = program in ("srun", "sbatch", "salloc") or (
            is_slurm and not program.startswith("python")
        )
        kind, word = _parse_option(word, is_slurm=is_slurm)
        if nested and not word.startswith("-"):
            kind = None
        word = _hide_within_word(word, nested=nested)
        shown.append(patterns.shape.sub(HIDDEN, word))
    return shown


def _parse_option(word: str, *, is_slurm: bool) -> tuple[str | None, str]:
    """Parse a word that may be an option.

    Returns:
        The kind of the option if its value is the next word, else None; and the word, in which a
        value after "=" or directly after the option is hidden if it is a secret.
    """
    patterns = _patterns()
    name, equals, value = word.partition("=")
    if is_slurm and name.startswith("-p"):
        return None, word
    for kind in ("secret", "ambiguous", "variable", "key", "user"):
        if not getattr(patterns, kind).fullmatch(name):
            continue
        if equals:
            return None, f"{name}={_hide_value(kind, value)}" if value else word
        return (None if kind == "variable" else kind), word
    attached = patterns.attached.fullmatch(word)
    if attached is not None and not patterns.harmless.fullmatch(attached[1]):
        return None, f"-p{HIDDEN}"
    return None, word


def _hide_value(kind: str, value: str) -> str:
    """Return the value of an option, hidden if it is a secret.

    The kind is the name of a pattern of the option.
    """
    patterns = _patterns()
    if kind == "user":
        name, colon, _ = value.partition(":")
        return (
            f"{name}:{HIDDEN}"
            if colon and name and not patterns.harmless.fullmatch(value)
            else value
        )
    if patterns.vocabulary.fullmatch(value):
        return value
    if kind == "key":
        return HIDDEN if _is_random(value) else value
    if kind != "secret" and patterns.harmless.fullmatch(value):
        return value
    return HIDDEN


def _hide_within_word(word: str, *, nested: bool) -> str:
    """Return a word without the secrets in it, if it holds a shell command, a URL, an HTTP
    header or JSON.
    """
    patterns = _patterns()
    parts = patterns.parts.findall(word)
    if len(parts) > 1:
        # The word is a text or a command, as for `sh -c`, with words of its own.
        shown = iter(_hide_in_words([part for part in parts if not part.isspace()], nested=True))
        word = "".join(part if part.isspace() else next(shown) for part in parts)
    elif nested and len(word) > 2 and word[0] == word[-1] and word[0] in "\"'":
        word = word[0] + _hide_in_words([word[1:-1]], nested=True)[0] + word[0]
    elif (at := patterns.address.search(word)) and at.end() < word.rfind("@"):
        word = word[: at.end()] + HIDDEN + word[word.rfind("@") :]
    word = patterns.header.sub(rf"\1{HIDDEN}", word)

    def hide(match: Any) -> str:
        quote = match[2] or match[3] or ""
        return f"{match[1]}{quote}{HIDDEN}{quote}"

    return str(patterns.assignment.sub(hide, word))


def _is_random(word: str) -> bool:
    """Return whether a word looks generated, such as 40 hexadecimal digits, and not like a name."""
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
        # A word such as `-S3cr` is not matched, because it may be a password.
        no_value=re.compile(
            r"(?s)--[a-zA-Z][\w.-]*(?:=.*)?|-[a-z][a-z_.-]*\d*(?:=.*)?|-[A-Z]\d?|-[\d.]+(?:e-?\d+)?|[&|;<>]{1,2}"
        ),
        parts=re.compile(r"\s+|(?:\"[^\"]*\"|'[^']*'|[^\s\"']+|[\"'])+"),
        # The number after the colon may be a port instead of a password.
        address=re.compile(r"://[^\s/@:\[]{0,80}:(?!\d{1,5}(?:[/,?#]|$))"),
        header=re.compile(header, re.IGNORECASE),
        assignment=re.compile(f"((?:{assigned}|{option_inside}|{in_query})){value}", re.IGNORECASE),
        shape=re.compile(_SHAPES),
    )
