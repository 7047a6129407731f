"""A webhook on stop: a POST with the verdict as JSON, whose "text" chat tools such as Slack show as it stands.

Does not: raise, hang or follow the run; a message that cannot be delivered is a line in the log.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
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
        url: An address that `check_webhook` has taken; its path is a secret and is not logged.
        payload: Any JSON values; what is not finite becomes a text.
        timeout_seconds: For each read of a try.
        wait: Waits so many seconds between tries.
    """
    body = json.dumps(as_json_value(dict(payload)), allow_nan=False).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"holdfast/{__version__}"}
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - check_webhook: http(s) only
    for pause in (0.0, *RETRY_SECONDS):
        if pause:
            wait(pause)
        problem = _post(request, timeout_seconds)
        if not problem:
            return True
    _log.warning("the message to %s was not delivered: %s", urllib.parse.urlsplit(url).hostname, problem)
    return False


def _post(request: urllib.request.Request, timeout_seconds: float) -> str:
    """Return what went wrong, an empty text if nothing did."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310 - as above
            # Of a POST that is redirected urllib makes a GET without the message, whose answer looks like success.
            return "" if answer.geturl() == request.full_url else "a redirect: give the address that it leads to"
    except urllib.error.HTTPError as error:
        error.close()
        return f"status {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return sanitise(error, most=200) or type(error).__name__
