"""A webhook on stop: a POST with the verdict as JSON, whose "text" chat tools such as Slack show as it stands.

Does not: raise, hang or follow the run; a message that cannot be delivered is a line in the log.
"""

from __future__ import annotations

import functools
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, sanitise
from holdfast.core.version import __version__
from holdfast.report.verdicts import how_sure, verdict_from

TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = (1.0, 3.0)
"""Waits before the second and the third try: long enough for a proxy to come back, short enough to wait for."""
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})  # RFC 9110 and 6585: may succeed when tried again
# What chat tools take for a command, such as <!channel>, a masked link or @everyone, has other signs in a message.
_NO_COMMANDS = str.maketrans({"<": "\u2039", ">": "\u203a", "@": "\uff20"})
_log = logging.getLogger("holdfast")


def check_webhook(url: str) -> str:
    """Return the address if it can be posted to.

    Raises:
        PolicyError: H744, if it is not http or https, or names no host.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
        _ = parts.port  # raises for a port that is none
    except ValueError:
        sound = False
    if not sound:
        raise PolicyError(
            f"webhook {url!r}",
            limit="an address such as https://hooks.example.org/abc is needed",
            fix="pass the address that the chat tool shows for an incoming webhook.",
            rule="H744",
        )
    return url


def stop_message(run: Path, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is posted when a run stopped, from its directory and ``Verdict.as_json()``."""
    seen = verdict_from(verdict)
    sure = how_sure(seen)
    head = f"{seen.title} [{seen.cause}]{', ' if sure else ''}{sure}"
    lines = [
        f"{run.name} on {socket.gethostname()}: {head}",
        seen.summary,
        f"Fix: {seen.fix}" if seen.fix else "",
        f"holdfast explain {run}",
    ]
    return {
        "text": "\n".join(sanitise(line, most=1200).translate(_NO_COMMANDS) for line in lines if line),
        "run": str(run),
        "hostname": socket.gethostname(),
        "holdfast": __version__,
        "verdict": dict(verdict),
    }


def notify(
    url: str,
    payload: Mapping[str, Any],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    wait: Callable[[float], object] = time.sleep,
) -> bool:
    """Post a message as JSON, at most three times; return whether it was taken.

    Args:
        url: An http or https address; its path is a secret and is not logged.
        payload: Any JSON values; what is not finite becomes a text.
        timeout_seconds: For each try.
        wait: Waits so many seconds between tries.
    """
    try:
        check_webhook(url)
        body = json.dumps(as_json_value(dict(payload)), allow_nan=False).encode()
        host = urllib.parse.urlsplit(url).hostname
    except (PolicyError, ValueError, TypeError) as error:
        # Not what a PolicyError says, since that names the whole address.
        why = "its address is none" if isinstance(error, PolicyError) else sanitise(error, most=200)
        _log.warning("no message was sent: %s", why)
        return False
    for pause in (*RETRY_SECONDS, None):
        problem, again = _post(url, body, timeout_seconds)
        if not problem:
            return True
        if pause is None or not again:
            break
        wait(pause)
    _log.warning("the message to %s was not delivered: %s", host, problem)
    return False


def _post(url: str, body: bytes, timeout_seconds: float) -> tuple[str, bool]:
    """Return what went wrong, an empty text if nothing did, and whether another try may help.

    In a thread of its own, since urllib's time limit is for each read: a server that answers byte by byte passes it.
    """
    answers: list[tuple[str, bool]] = []
    thread = threading.Thread(target=lambda: answers.append(_try(url, body, timeout_seconds)), daemon=True)
    thread.start()
    thread.join(2 * timeout_seconds)  # to connect, and to answer
    return answers[0] if answers else ("no whole answer in time", True)


def _try(url: str, body: bytes, timeout_seconds: float) -> tuple[str, bool]:
    headers = {"Content-Type": "application/json", "User-Agent": f"holdfast/{__version__}"}
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - check_webhook: http(s) only
    try:
        with _opener().open(request, timeout=timeout_seconds) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        redirected = ", a redirect: give the address that it leads to" if 300 <= error.code < 400 else ""
        return f"status {error.code}{redirected}", error.code in _RETRIED
    except (OSError, http.client.HTTPException, ValueError) as error:
        return sanitise(error, most=200) or type(error).__name__, True
    return "", False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object, **_named: object) -> None:
        """Follow none: of a POST urllib would make a GET without the message, and its answer look like success."""


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)
