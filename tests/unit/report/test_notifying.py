"""Webhooks against a real server on this machine: what arrives, what is tried again, and that nothing raises."""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.report.made_runs import VERDICT
from tests.unit.report.test_page import HOSTILE

from holdfast.core.errors import PolicyError
from holdfast.report.notifying import check_webhook, notify, stop_message


class _Server(http.server.ThreadingHTTPServer):
    """Answer with the given statuses, the last one for ever; 0 hangs up without an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = [200]
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/secret"

    def handle_error(self, request, client_address):
        """Say nothing of clients that have gone."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append(dict(self.headers))
        self.server.gate.wait(30)
        status = self.server.statuses.pop(0) if len(self.server.statuses) > 1 else self.server.statuses[0]
        if status:
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{self.server.url}/moved")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_verdict_arrives_as_json(server):
    """One POST with the text for people and the whole verdict for machines, also where it is not finite."""
    waits: list[float] = []
    payload = stop_message(Path("/runs/speech-1"), {**VERDICT, "extra": math.nan})
    assert notify(server.url, payload, wait=waits.append)
    (body,) = server.bodies
    message = json.loads(body)
    assert message["verdict"]["cause"] == "H970"
    assert message["verdict"]["extra"] == "NaN"
    assert message["text"].splitlines()[0].startswith("speech-1 on ")
    assert "[H970], almost certain (93%)" in message["text"]
    assert message["text"].splitlines()[-1] == "holdfast explain /runs/speech-1"
    assert server.headers[0]["Content-Type"] == "application/json"
    assert waits == []
    head = stop_message(Path("r"), {**VERDICT, "family": "unknown"})["text"].splitlines()[0]
    assert head.endswith(f"{VERDICT['title']} [H970]")  # of an unknown cause no number, which would mislead


def test_what_may_pass_is_tried_three_times(server, caplog):
    """An overloaded server and a broken connection are tried again after a pause; the third answer counts."""
    waits: list[float] = []
    server.statuses = [503, 0, 204]
    assert notify(server.url, {}, wait=waits.append)
    assert (len(server.bodies), waits) == (3, [1.0, 3.0])
    server.statuses = [500]
    assert not notify(server.url, {}, wait=waits.append)
    assert len(server.bodies) == 6
    assert caplog.records[-1].message == "the message to 127.0.0.1 was not delivered: status 500"
    assert "secret" not in caplog.text


def test_a_redirect_is_no_delivery(server, caplog):
    """Of a POST urllib makes a GET without the message, or refuses: either way nobody was told."""
    for status in (302, 307):
        server.statuses = [status]
        assert not notify(server.url, {}, wait=lambda seconds: None)
        assert len(caplog.records) == 1
        caplog.clear()
    assert "secret" not in caplog.text


def test_a_server_that_never_answers_is_given_up(server):
    """The time of each try is bounded."""
    server.gate.clear()
    assert not notify(server.url, {}, timeout_seconds=0.05, wait=lambda seconds: None)
    assert len(server.bodies) == 3


def test_an_address_that_is_none_is_refused_at_the_start():
    """Only http and https with a host are posted to."""
    for url in ("file:///secret", "ftp://x/secret", "hooks", "", "http://", "http://x:99999999/", "http://a b/"):
        with pytest.raises(PolicyError) as caught:
            check_webhook(url)
        assert caught.value.rule == "H744"


def test_hostile_texts_give_no_command_to_a_chat(server):
    """A log line cannot call everybody, hide a link or break the JSON."""
    everything = " ".join((*HOSTILE, "<!channel> <https://evil.example|click> @everyone"))
    verdict = {**VERDICT, "title": everything, "summary": everything, "fix": everything}
    assert notify(server.url, stop_message(Path("r"), verdict))
    text = json.loads(server.bodies[0])["text"]
    assert not set(text) & set("<>@\x1b\u2028\u202e")
    assert len(text.splitlines()) == 4
