"""Read the value of ``--notify`` and ``Policy.notify``, and deliver messages to what it names.

An ``http://`` or ``https://`` URL is a webhook, and any other value is a command. Slack, Discord
and ntfy are recognized by the URL. Their formats:

- https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
- https://docs.discord.com/developers/resources/webhook#execute-webhook
- https://docs.ntfy.sh/publish/#publish-as-json
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from holdfast.core.errors import PolicyError
from holdfast.core.notify import post
from holdfast.core.notify.message import Message
from holdfast.core.secret_text import hide_receiver
from holdfast.core.version import __version__

Service = Literal["slack", "discord", "ntfy", "json"]

_SLACK_HOSTS = ("hooks.slack.com", "hooks.slack-gov.com")
_DISCORD_DOMAINS = ("discord.com", "discordapp.com")
# Discord rejects the user agent of `urllib`.
_USER_AGENT = f"holdfast/{__version__}"
# Variables that the command must not inherit: with the first two, a command that is written in
# Python would be observed as part of the run, and the others hold the receiver itself.
_NOT_INHERITED = (
    "OBSERVED_BY_HOLDFAST",
    "OBSERVER_OF_HOLDFAST",
    "NOTIFY_BY_HOLDFAST",
    "HOLDFAST_NOTIFY",
)
_TITLE = "{title}"
_MESSAGE = "{message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A process that delivers one message.

    Args:
        words: The command line of the process.
        stdin: What the process reads.
        environment: The environment of the process.
    """

    words: list[str]
    stdin: str
    environment: dict[str, str]


class Receiver(Protocol):
    """Where messages are sent."""

    @property
    def shown(self) -> str:
        """The receiver without its secrets, for events and errors."""

    def delivery(self, message: Message) -> Delivery:
        """Return the process that delivers a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL to which messages are posted.

    Args:
        url: The URL, without user name and password.
        service: The service, which determines the format.
        authorization: The value of the header ``Authorization``, or None.
        shown: The URL without its secrets.
    """

    url: str
    service: Service
    authorization: str | None
    shown: str

    def delivery(self, message: Message) -> Delivery:
        """Return a process that posts the message.

        The URL is passed through stdin, because other users can read a command line.
        """
        headers = {"Content-Type": "application/json", "User-Agent": _USER_AGENT}
        if self.authorization is not None:
            headers["Authorization"] = self.authorization
        url, payload = _FORMATS[self.service](self.url, message)
        request = {"url": url, "headers": headers, "body": json.dumps(payload)}
        return Delivery(
            # These options skip site-packages and sitecustomize, so Python starts in 15 ms.
            words=[sys.executable, "-I", "-S", post.__file__],
            stdin=json.dumps(request),
            environment=_environment(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that is run with each message.

    Args:
        words: The words of the command. ``{title}`` and ``{message}`` in them are replaced.
        shown: The command without its arguments.
    """

    words: tuple[str, ...]
    shown: str

    def delivery(self, message: Message) -> Delivery:
        """Return a process that runs the command, without a shell.

        The message is on stdin. It is also the last argument, unless the command says where it
        wants the title or the message.
        """
        text = message.text()
        is_placed = any(_TITLE in word or _MESSAGE in word for word in self.words)
        words = [word.replace(_TITLE, message.title).replace(_MESSAGE, text) for word in self.words]
        if not is_placed:
            words.append(text)
        variables = {"NOTIFY_KIND": message.kind, "NOTIFY_TITLE": message.title}
        return Delivery(words=words, stdin=f"{text}\n", environment=_environment() | variables)


def parse_receiver(value: str) -> Receiver:
    """Return the receiver that a value of ``--notify`` or ``Policy.notify`` names.

    Raises:
        PolicyError: H118 for a URL that is malformed or has an unknown scheme, a command line that
            cannot be split into words, or a program that does not exist.
    """
    # str() would return the redacted value of a `SecretText`.
    text = "".join(value).strip()
    scheme, separator, _ = text.partition("://")
    if separator and scheme.replace("+", "").isalnum():
        return _parse_url(text)
    return _parse_command(text)


def _parse_url(text: str) -> Webhook:
    try:
        parts = urlsplit(text)
        host = parts.hostname
        # Reading the port also checks it.
        port = parts.port
    except ValueError as error:
        raise _unusable(text, f"its URL is malformed ({_reason_without_url(error)})") from None
    if parts.scheme not in ("http", "https"):
        raise _unusable(
            text,
            "only http:// and https:// are webhooks",
            fix=(
                f"run a program that supports {parts.scheme}://, such as --notify 'apprise URL -b'."
            ),
        )
    if not host or not text.isascii() or not text.isprintable() or " " in text:
        raise _unusable(text, "its URL needs a host, and ASCII characters without spaces")
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place += f":{port}"
    return Webhook(
        url=urlunsplit((parts.scheme, place, parts.path or "/", parts.query, "")),
        service=_service_of(parts, host),
        authorization=_authorization_of(parts),
        shown=hide_receiver(text),
    )


def _reason_without_url(error: ValueError) -> str:
    """Return the type of an error of `urllib.parse`, whose text may quote a part of the URL."""
    return "its port is not a number" if "Port" in str(error) else type(error).__name__


def _service_of(parts: SplitResult, host: str) -> Service:
    """Return the service that a URL belongs to, or ``"json"`` if it is not a known one."""
    segments = [segment for segment in parts.path.split("/") if segment]
    if host in _SLACK_HOSTS:
        return "slack"
    is_discord = any(host == name or host.endswith(f".{name}") for name in _DISCORD_DOMAINS)
    if is_discord and "webhooks" in segments:
        # Discord also accepts Slack's format, at another path.
        return "slack" if segments[-1] == "slack" else "discord"
    if host.startswith("ntfy.") and len(segments) == 1:
        return "ntfy"
    return "json"


def _authorization_of(parts: SplitResult) -> str | None:
    """Return the header for the user name and the password in a URL, or None without them."""
    if parts.username is None and parts.password is None:
        return None
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _parse_command(text: str) -> Command:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _unusable(text, f"it cannot be split into words ({error})") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise _unusable(
            text,
            "a value that is not a URL is a command, and no such program is on PATH",
            fix="correct the name, or pass an https:// URL.",
        )
    return Command(
        words=(str(Path(program).absolute()), *words[1:]),
        shown=hide_receiver(text),
    )


def _unusable(
    text: str, limit: str, *, fix: str = "correct it, or omit it to send no messages."
) -> PolicyError:
    return PolicyError(f"notify={hide_receiver(text)!r}", limit=limit, fix=fix, rule="H118")


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}


# --- formats --------------------------------------------------------------------------------------


def _for_slack(url: str, message: Message) -> tuple[str, Mapping[str, Any]]:
    # Slack requires that these three characters are escaped.
    text = message.text().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return url, {"text": text}


def _for_discord(url: str, message: Message) -> tuple[str, Mapping[str, Any]]:
    # Without `allowed_mentions`, an "@everyone" in the text would notify all users.
    return url, {"content": message.text(), "allowed_mentions": {"parse": []}}


def _for_ntfy(url: str, message: Message) -> tuple[str, Mapping[str, Any]]:
    # ntfy accepts JSON at its root only, and the topic is a field.
    parts = urlsplit(url)
    payload = {
        "topic": parts.path.strip("/"),
        "title": message.title,
        "message": message.details,
        "priority": 4 if message.kind in ("failure", "hang") else 3,
    }
    return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, "")), payload


def _for_any(url: str, message: Message) -> tuple[str, Mapping[str, Any]]:
    # Mattermost and Rocket.Chat show the field "text".
    payload = {
        "text": message.text(),
        "title": message.title,
        "details": message.details,
        "kind": message.kind,
        "run": message.run,
        "step": message.step,
        "source": "holdfast",
    }
    return url, payload


# For each service, a function that returns the URL to post to and the payload.
_FORMATS = {
    "slack": _for_slack,
    "discord": _for_discord,
    "ntfy": _for_ntfy,
    "json": _for_any,
}
