"""The program that posts one message to a webhook.

``python -I -S post.py`` reads a JSON object with the keys ``url``, ``headers`` and ``body`` from
stdin. The exit code says whether the message arrived (see the constants below). If it did not, one
line on stdout says why, without the URL.

It is a separate program so that it can be killed. A receiver may answer one byte at a time, and a
name server may not answer at all; neither can be interrupted in a thread.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request

# The receiver was not reached, or asks to try again later.
TRY_AGAIN = 1
# The receiver refuses the message, or has not answered, so that it may have arrived.
GIVE_UP = 2

# The caller kills the process after a slightly longer time.
_TIMEOUT_SECONDS = 9.0
# Too Many Requests, and Request Timeout.
_TEMPORARY_STATUSES = (429, 408)


# Without a handler of redirects, a redirect is an error. `urllib` would follow it without the
# message.
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
)


def main() -> int:
    """Post the message, and return the exit code."""
    message = json.load(sys.stdin)
    request = urllib.request.Request(  # noqa: S310 - the caller checks the scheme
        message["url"], data=message["body"].encode(), headers=message["headers"], method="POST"
    )
    try:
        opener = urllib.request.OpenerDirector()
        for handler in _HANDLERS:
            opener.add_handler(handler())
        with opener.open(request, timeout=_TIMEOUT_SECONDS):
            return 0
    except urllib.error.HTTPError as error:
        # The server's own phrase could repeat the URL, so use the standard one.
        phrase = http.client.responses.get(error.code, "")
        print(f"HTTP {error.code} {phrase}".strip())  # noqa: T201
        is_temporary = error.code >= 500 or error.code in _TEMPORARY_STATUSES
        return TRY_AGAIN if is_temporary else GIVE_UP
    except urllib.error.URLError as error:
        print(f"not reached: {error.reason}")  # noqa: T201
        return TRY_AGAIN
    except (OSError, http.client.HTTPException) as error:
        print(f"no valid answer ({type(error).__name__})")  # noqa: T201
        return GIVE_UP


if __name__ == "__main__":
    sys.exit(main())
