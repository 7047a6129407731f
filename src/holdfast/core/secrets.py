"""Hide secrets in a command line before it is recorded.

A secret is recognized by its shape, such as the prefix of an access token, or by the preceding
option:

    --api-key, --password     The value is always a secret.
    --key, -k, -p, --auth     The value is a secret unless it is clearly something else, such as a
                              number, a path, a keyword or a data type.
    --sort-key                Other options that end in "key" mostly name a column, so the value is
                              treated as a secret only if it looks random.

    --notify                  The value is a receiver of messages. If it is a webhook, its path is a
                              secret; if it is a command, its arguments may be.

Other secrets are not recognized, and a program's output is not searched. The patterns and the
search are in ``secret_words``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Every recognizable secret comes with at least one of these hints. Most command lines contain no
# hint, so most processes need not import ``secret_words``, which takes a few milliseconds.
_HINTS = (
    # Parts of the names of options, variables and HTTP headers.
    *("key", "token", "secret", "pass", "pwd", "cred", "bearer", "auth", "cookie", "jwt", "otp"),
    *("_pat=", "_pw=", "_sas=", "sig=", "signature", "--sas", "--login"),
    # Short options, which also cover longer ones such as --pw and --user.
    *("-p", "-k", "-u"),
    # Addresses, which may contain a password.
    "://",
    # The option that takes a receiver of messages, which may be a command with a password.
    "notify",
    # The beginnings of access tokens.
    *("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat", "glpat-", "akia", "asia"),
    *("xox", "aiza", "eyj", "npm_", "pypi-", "sk_", "rk_", "r8_", "dop_v1_", "nvapi-", "wandb_v1_"),
)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with each secret replaced by ``***``."""
    command_line = " ".join(words).lower()
    if not any(hint in command_line for hint in _HINTS):
        return list(words)
    # Imported here because the module compiles a dozen regular expressions.
    from holdfast.core.secret_words import hide_in_words

    return hide_in_words(words, nested=False)


# The user name and password at the beginning of a URL, as in ``sftp://user:password@host/run``.
_USER_INFO = re.compile(r"(?<=://)[^/?#]*@")


class SecretUrl(str):
    """A URL that may contain credentials, which its `repr` does not show.

    Settings are shown with ``repr`` in messages and recordings, so a URL of this type can be a
    setting. Use `redacted` to show it in any other way.
    """

    __slots__ = ()

    @property
    def redacted(self) -> str:
        """Return the URL with its credentials replaced by ``***``."""
        (text,) = without_secrets([_USER_INFO.sub("***@", self)])
        # A query may be a signature, such as that of an Azure SAS.
        address, question_mark, _ = text.partition("?")
        return f"{address}?***" if question_mark else address

    def __repr__(self) -> str:
        return repr(self.redacted)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """Return how pydantic makes an instance from a setting: from any string but an empty one.

        The module is imported here because only processes that validate settings need it.
        """
        from pydantic_core import core_schema

        text = core_schema.str_schema(min_length=1)
        return core_schema.no_info_after_validator_function(cls, text)
