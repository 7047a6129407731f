"""A server on the loopback interface with the parts of W&B's interface that an online run needs.

It answers the GraphQL requests with which a client begins or resumes a run, and keeps the rows of
the history that the client sends.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """The server. `rows` maps the ID of each run to the rows of its history, as JSON texts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: dict[str, list[str]] = {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which a client uses this server."""
        return {
            "WANDB_MODE": "online",
            "WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}",
            "WANDB_API_KEY": "0" * 40,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Run the server in a background thread."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        """Return the number of rows of each run, for which a test script waits."""
        self._answer({run_id: len(rows) for run_id, rows in self.server.rows.items()})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/file_stream"):
            self._append(self.path.split("/")[-2], json.loads(content))
        elif self.path == "/graphql":
            self._query(json.loads(content))
        else:
            # Statistics about the use of W&B.
            self._answer({})

    def _query(self, request: dict[str, Any]) -> None:
        if "upsertBucket" in request["query"]:
            self._begin(request["variables"])
        elif "historyTail" in request["query"]:
            self._resume(request["variables"]["name"])
        elif "createRunFiles" in request["query"]:
            # No file is to be uploaded anywhere.
            files = {"runID": "run", "uploadHeaders": [], "files": []}
            self._answer({"data": {"createRunFiles": files}})
        else:
            viewer = {"id": "viewer", "entity": "tester", "username": "tester", "flags": "{}"}
            self._answer({"data": {"viewer": viewer, "serverInfo": {"features": []}}})

    def _append(self, run_id: str, request: dict[str, Any]) -> None:
        """Keep the rows of a request, which says at which line of the history they begin."""
        history = request.get("files", {}).get("wandb-history.jsonl")
        if history is not None:
            begin = history["offset"]
            lines = history["content"]
            self.server.rows[run_id][begin : begin + len(lines)] = lines
        self._answer({"exitcode": None, "limits": {}})

    def _begin(self, variables: dict[str, Any]) -> None:
        run_id = variables["name"]
        is_new = run_id not in self.server.rows
        self.server.rows.setdefault(run_id, [])
        bucket = {**self._bucket(run_id), "project": _PROJECT}
        self._answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": is_new}}})

    def _resume(self, run_id: str) -> None:
        """Describe a run that exists."""
        model = None
        if run_id in self.server.rows:
            tails = {
                "historyTail": json.dumps(self.server.rows[run_id][-1:]),
                "eventsTail": "[]",
                "eventsLineCount": 0,
                "logLineCount": 0,
                "summaryMetrics": "{}",
                "wandbConfig": json.dumps({"t": {}}),
            }
            model = {**_PROJECT, "bucket": {**self._bucket(run_id), **tails}}
        self._answer({"data": {"model": model}})

    def _bucket(self, run_id: str) -> dict[str, Any]:
        return {
            "id": run_id,
            "name": run_id,
            "displayName": run_id,
            "config": "{}",
            "historyLineCount": len(self.server.rows[run_id]),
        }

    def _answer(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


_PROJECT = {"id": "project", "name": "tests", "entity": {"id": "entity", "name": "tester"}}
