"""Find the secrets in the words of a command line.

Read `hide_in_words` first. `OPTIONS` lists the kinds of options and how to hide their values. The
patterns at the top of the module match option names, values and the shapes of secrets. ``secrets``
documents what counts as a secret, and imports this module only for command lines that may contain
one.

Repetitions in the patterns are bounded (``{0,80}`` instead of ``*``), so that even a word of
128 KiB, the longest that Linux allows, is searched in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.secret_text import hide_receiver

HIDDEN = "***"

# --- names ----------------------------------------------------------------------------------------

# If one of these words precedes "key" at the end of a name, as in `--api-key`, the value is a
# secret. Other names that end in "key" usually refer to a column, a layer or a field.
_PRIVATE_KEYS = (
    "api|access|account|app|client|consumer|deploy|encryption|licen[cs]e|master|private|secret"
    "|service|shared|signing|ssh|storage|subscription|wandb"
)
# If one of these words precedes "token", as in `--pad_token`, the value is a vocabulary entry and
# not a secret.
_VOCABULARY_TOKENS = ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image")
_TOKEN = "".join(f"(?<!{word}[-_])" for word in _VOCABULARY_TOKENS) + "token"
# Name endings that always indicate a secret value.
_SECRET_NAMES = (
    rf"(?:{_PRIVATE_KEYS})[-_.]?key(?:[-_.]?id)?"
    r"|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt|otp"
    r"|(?:db|ftp|http|ldap|mail|my|mysql|pg|proxy|redis|root|smtp|sudo|user)[-_.]?pass"
    rf"|{_TOKEN}"
)
# The beginning of an option's name, in the style of argparse, Hydra and similar tools.
_PREFIX = r"[-+]{0,3}[\w.-]{0,80}?"

# An option whose value is always a secret.
SECRET_OPTION = re.compile(rf"{_PREFIX}(?:{_SECRET_NAMES})", re.IGNORECASE)
# An option whose value may be a secret but often is not. These names are so short that the whole
# name must match.
AMBIGUOUS_OPTION = re.compile(
    r"(?:-{1,2}|[+]{0,2})(?:key|k|p|pass|pw|auth|bearer|cookie|sas)", re.IGNORECASE
)
# An environment variable whose value may be a secret but often is not.
AMBIGUOUS_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,80}_(?:KEY|PASS|PAT|PW|AUTH|SAS)")
# Any other option that ends in "key". Most of these options name a column.
KEY_OPTION = re.compile(rf"{_PREFIX}key", re.IGNORECASE)
# An option whose value may be ``name:password``.
USER_OPTION = re.compile(r"-u|--(?:user|login|proxy-user)", re.IGNORECASE)
# An option whose value is a receiver of messages, as for `holdfast run` and `Policy.add_arguments`,
# or the variable HOLDFAST_NOTIFY.
NOTIFY_OPTION = re.compile(r"(?:-{1,2}|[+]{0,2})(?:holdfast(?:_|\.))?notify", re.IGNORECASE)
# A password directly attached to its option, as in ``mysql -pS3cret``. A word of lower-case letters
# such as ``-preset`` does not match.
ATTACHED_PASSWORD = re.compile(r"-p(?![a-z_-]*\Z)([^=\s]+)")

# --- values ---------------------------------------------------------------------------------------

# Values of an ambiguous option that are clearly not secrets.
HARMLESS_VALUE = re.compile(
    # Numbers, sizes, ports and addresses.
    r"[-+]?[\d.,:_x]*\d[\d.,:_x]*(?:e[-+]?\d+)?%?|[-+]?(?:nan|inf)"
    # Keywords.
    r"|true|false|yes|no|on|off|none|null|auto|default"
    # Data types and precisions.
    r"|(?:bf|fp|tf|float|int|uint)\d{1,3}\w{0,9}(?:-(?:mixed|true))?|16-mixed|32-true"
    # A variable that the shell did not expand.
    r"|\$\{?\w+\}?"
    # Paths and URLs. A relative path must not contain capital letters, to exclude base64 text.
    r"|(?:~|\.{1,2})?/.*|\w{1,20}://.*|[a-z0-9_.-]+(?:/[a-z0-9_.-]+)+/?"
    # File names.
    r"|[\w.-]+\.(?:py|json|ya?ml|toml|txt|csv|pem|key|crt|pt|ckpt|safetensors)",
    re.IGNORECASE,
)
# A vocabulary entry such as ``<pad>``, which may be the value of an option such as --stop-token.
VOCABULARY_ENTRY = re.compile(r"<[^<>]{0,40}>|\[[A-Z_]{1,20}\]")
# A word that cannot be the value of the preceding option: another option, or a shell operator. A
# word such as ``-S3cr`` does not match, because it may be a password.
NO_VALUE = re.compile(
    r"(?s)--[a-zA-Z][\w.-]*(?:=.*)?|-[a-z][a-z_.-]*\d*(?:=.*)?|-[A-Z]\d?|-[\d.]+(?:e-?\d+)?"
    r"|[&|;<>]{1,2}"
)

# --- within a word --------------------------------------------------------------------------------

# Splits one command-line word, such as a command for ``sh -c``, into inner words and whitespace.
PARTS = re.compile(r"\s+|(?:\"[^\"]*\"|'[^']*'|[^\s\"']+|[\"'])+")
# The part of a URL up to the password. A number after the colon does not match, because it may be
# a port.
ADDRESS = re.compile(r"://[^\s/@:\[]{0,80}:(?!\d{1,5}(?:[/,?#]|$))")
# An HTTP header whose whole value is a secret.
HEADER = re.compile(
    r"((?:(?:proxy-)?authorization|(?:set-)?cookie)[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
    r"(?:(?:apikey|basic|bearer|digest|negotiate|token)\s{1,3})?)[^\s\"'][^\"'\n]*",
    re.IGNORECASE,
)
# A name and its value within a word, as in JSON, a function call, a shell command or a query
# string. Group 1 is the name. Group 2 or 3 is the quotation mark before the value, if any.
_NAME_BEFORE_VALUE = (
    rf"(?:{_SECRET_NAMES})[\"']?\s{{0,3}}[=:]\s{{0,3}}|\bbearer\s{{1,3}}"
    rf"|(?<![\w-])--?[\w.-]{{0,80}}?(?:{_SECRET_NAMES})\s{{1,3}}(?!-|<|\[[A-Z])"
    r"|[?&;](?:[\w.-]{0,40}(?:sig|signature|auth|password)|key|code)="
)
_VALUE = r"(?:(\")[^\"]+\"|(')[^']+'|[\"']?(?!\*)[^\s\"',;&]+)"
ASSIGNMENT = re.compile(rf"({_NAME_BEFORE_VALUE}){_VALUE}", re.IGNORECASE)
# Secrets that are recognized by their shape, wherever they appear.
SECRET_SHAPE = re.compile(
    # Access tokens, each with its issuer's prefix.
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|xox[abeoprs]-|AIza|gsk_|r8_|dop_v1_|nvapi-"
    r"|wandb_v1_|[rs]k_(?:live|test)_)[\w-]{16,}"
    r"|\bsk-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    # JSON web tokens.
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    # The secret parts of webhooks of Slack and Discord.
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
    r"|(?<=discord\.com/api/webhooks/)[\w/-]+|(?<=discordapp\.com/api/webhooks/)[\w/-]+"
    # A private key in PEM format, even if its end is cut off.
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?"
    r"(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)

# Slurm's commands, whose option -p specifies a partition rather than a password.
_SLURM_PROGRAMS = ("srun", "sbatch", "salloc")
# Shorter words do not count as random, because they cannot be distinguished from names.
_LEAST_RANDOM_CHARACTERS = 20


def hide_in_words(words: Sequence[str], *, nested: bool) -> list[str]:
    """Return the words of a command line with their secrets hidden.

    Args:
        words: The words of a command line.
        nested: Whether the words come from inside a single word, such as a command for ``sh -c``.
            Nested words may also be plain text, so only words that start with a dash count as
            options.
    """
    shown = []
    # The option that precedes the current word. The current word may be the option's value.
    option: Option | None = None
    # True between a Slurm command and the name of the Python program. The options between them
    # belong to Slurm.
    is_slurm = False
    for word in words:
        if option is not None and _may_be_value(word):
            word = option.hide(word)
        option = None
        program = word.rpartition("/")[2]
        if program in _SLURM_PROGRAMS:
            is_slurm = True
        elif program.startswith("python"):
            is_slurm = False
        is_partition = is_slurm and word.startswith("-p")
        if not is_partition:
            word = _hide_own_value(word)
            if word.startswith("-") or not nested:
                option = _option_before_value(word)
        word = _hide_within_word(word, nested=nested)
        shown.append(SECRET_SHAPE.sub(HIDDEN, word))
    return shown


# --- options --------------------------------------------------------------------------------------


def hide_always(value: str) -> str:
    """Return ``***`` for the value of an option such as ``--password``.

    A vocabulary entry is returned unchanged.
    """
    if VOCABULARY_ENTRY.fullmatch(value):
        return value
    return HIDDEN


def hide_unless_harmless(value: str) -> str:
    """Return ``***`` for the value of an option such as ``-p``, unless it is clearly no secret."""
    if HARMLESS_VALUE.fullmatch(value):
        return value
    return hide_always(value)


def hide_if_random(value: str) -> str:
    """Return ``***`` for the value of an option such as ``--sort-key`` if it looks random."""
    if not _is_random(value):
        return value
    return hide_always(value)


def hide_password(value: str) -> str:
    """Return ``name:***`` for ``name:password``. User and group ids (``1000:1000``) are kept."""
    name, colon, _ = value.partition(":")
    if not name or not colon or HARMLESS_VALUE.fullmatch(value):
        return value
    return f"{name}:{HIDDEN}"


def hide_notify_value(value: str) -> str:
    """Return the value of an option such as ``--notify`` without its secrets.

    A single word that is not a URL is the name of a program or the value of another program's
    option, and is returned unchanged.
    """
    if "://" not in value and not re.search(r"\s", value):
        return value
    return hide_receiver(value)


@dataclass(frozen=True, slots=True)
class Option:
    """A kind of command-line option, and how to hide its value.

    Args:
        name: The pattern that must match the option's whole name.
        hide: Takes the option's value and returns it, hidden if it is a secret.
        takes_next_word: Whether the value may be the next word, instead of following ``=``.
    """

    name: re.Pattern[str]
    hide: Callable[[str], str]
    takes_next_word: bool = True


# The order matters: the first kind whose pattern matches the option's name is used.
OPTIONS = (
    Option(SECRET_OPTION, hide_always),
    Option(AMBIGUOUS_OPTION, hide_unless_harmless),
    Option(AMBIGUOUS_VARIABLE, hide_unless_harmless, takes_next_word=False),
    Option(KEY_OPTION, hide_if_random),
    Option(USER_OPTION, hide_password),
    Option(NOTIFY_OPTION, hide_notify_value),
)


def _find_option(name: str) -> Option | None:
    for option in OPTIONS:
        if option.name.fullmatch(name):
            return option
    return None


def _option_before_value(word: str) -> Option | None:
    """Return the `Option` that a word matches, or None if the next word cannot be its value."""
    option = _find_option(word)
    if option is None or not option.takes_next_word:
        return None
    return option


def _may_be_value(word: str) -> bool:
    """Return whether a word can be the value of the preceding option."""
    return NO_VALUE.fullmatch(word) is None or _is_random(word.lstrip("-"))


def _is_random(word: str) -> bool:
    """Return whether a word looks randomly generated, such as 40 hexadecimal digits."""
    return len(word) >= _LEAST_RANDOM_CHARACTERS and word.isalnum() and not word.isalpha()


# --- within a word --------------------------------------------------------------------------------


def _hide_own_value(word: str) -> str:
    """Hide the value in a word that contains both an option and its value.

    Examples are ``--password=S3cret``, ``HF_TOKEN=S3cret`` and ``-pS3cret``. Return any other word
    unchanged.
    """
    name, _, value = word.partition("=")
    option = _find_option(name)
    if option is not None:
        return f"{name}={option.hide(value)}" if value else word
    attached = ATTACHED_PASSWORD.fullmatch(word)
    if attached is not None and not HARMLESS_VALUE.fullmatch(attached[1]):
        return f"-p{HIDDEN}"
    return word


def _hide_within_word(word: str, *, nested: bool) -> str:
    """Hide all secrets inside a word.

    The word may be a shell command, a quoted value, a URL, an HTTP header or JSON.
    """
    parts = PARTS.findall(word)
    if len(parts) > 1:
        word = _hide_in_parts(parts)
    elif nested and _is_quoted(word):
        (inner,) = hide_in_words([word[1:-1]], nested=True)
        word = f"{word[0]}{inner}{word[0]}"
    else:
        word = _hide_password_in_address(word)
    word = HEADER.sub(rf"\1{HIDDEN}", word)
    return ASSIGNMENT.sub(_hide_assigned_value, word)


def _hide_in_parts(parts: Sequence[str]) -> str:
    """Join the parts of a text or of an ``sh -c`` command, with their secrets hidden."""
    inner_words = [part for part in parts if not part.isspace()]
    shown_words = iter(hide_in_words(inner_words, nested=True))
    return "".join(part if part.isspace() else next(shown_words) for part in parts)


def _is_quoted(word: str) -> bool:
    return len(word) > 2 and word[0] == word[-1] and word[0] in "\"'"


def _hide_password_in_address(word: str) -> str:
    """Hide the password in a URL such as ``https://name:password@host``.

    The password is assumed to end at the last ``@``, because it may itself contain ``@``.
    """
    address = ADDRESS.search(word)
    end = word.rfind("@")
    if address is None or end <= address.end():
        return word
    return word[: address.end()] + HIDDEN + word[end:]


def _hide_assigned_value(assignment: re.Match[str]) -> str:
    name, double_quote, single_quote = assignment.groups()
    quote = double_quote or single_quote or ""
    return f"{name}{quote}{HIDDEN}{quote}"
