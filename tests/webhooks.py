"""A receiver of messages: a real HTTP server on the loopback device, which keeps what it receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """What one receiver has received, and how it answers."""

    def __init__(self) -> None:
        # The requests, oldest first: path, headers and decoded body.
        self.requests: list[dict[str, Any]] = []
        # The status of the next answers, oldest first. Further answers are 200.
        self.statuses: list[int] = []
        # While this is set, requests are received and not answered.
        self.is_silent = False
        self.is_over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append(
                    {"path": self.path, "headers": dict(self.headers), "body": json.loads(body)}
                )
                if receiver.is_silent:
                    receiver.is_over.wait()
                    return
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.place = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.place}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def kinds(self) -> list[str]:
        """Return the kinds of the messages that were received as plain JSON."""
        return [request["body"]["kind"] for request in self.requests]

    def close(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Context manager that runs a receiver."""
    receiver = Webhook()
    try:
        yield receiver
    finally:
        receiver.close()
