"""Messages reach real receivers, in their formats, and no receiver delays the sender for long."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.webhooks import Webhook, webhook

from holdfast.core.errors import PolicyError
from holdfast.core.notify import notifier as notifier_module
from holdfast.core.notify.message import Message
from holdfast.core.notify.notifier import Notifier
from holdfast.core.notify.receivers import parse_receiver
from holdfast.core.secrets import without_secrets
from holdfast.supervise.process_tree import read_process

FAILED = Message.about("failure", "lm", what="Run failed", details="a < b & c", step=7)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with webhook() as started:
        yield started


def send(notify: str, *messages: Message, seconds: float = 30.0) -> list[str]:
    """Send messages, wait until they are delivered, and return why any could not be sent."""
    problems: list[str] = []
    sender = Notifier(parse_receiver(notify), lambda _, why: problems.append(why))
    for message in messages:
        sender.send(message)
    sender.close(seconds)
    return problems


def test_any_url_gets_plain_json(receiver: Webhook) -> None:
    """The user name and the password in the URL become a header."""
    assert send(receiver.url.replace("://", "://me:p%40ss@"), FAILED) == []

    (request,) = receiver.requests
    assert request["path"] == "/hook"
    assert request["headers"]["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert request["body"] == {
        "text": f"Run failed: lm on {socket.gethostname()}\na < b & c",
        "title": f"Run failed: lm on {socket.gethostname()}",
        "details": "a < b & c",
        "kind": "failure",
        "run": "lm",
        "step": 7,
        "source": "holdfast",
    }


@pytest.mark.parametrize(
    ("url", "path", "body"),
    [
        (
            "http://hooks.slack.com/services/T0/B0/x",
            "http://hooks.slack.com/services/T0/B0/x",
            {"text": f"{FAILED.title}\na &lt; b &amp; c"},
        ),
        (
            "http://discord.com/api/webhooks/1/x",
            "http://discord.com/api/webhooks/1/x",
            {"content": FAILED.text(), "allowed_mentions": {"parse": []}},
        ),
        (
            "http://ntfy.sh/my-topic?auth=x",
            "http://ntfy.sh/?auth=x",
            {
                "topic": "my-topic",
                "title": FAILED.title,
                "message": FAILED.details,
                "priority": 4,
            },
        ),
    ],
)
def test_slack_discord_and_ntfy_get_their_own_formats(
    url: str, path: str, body: object, receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recognized by the URL. The receiver here is a proxy, which sees all of the URL."""
    monkeypatch.setenv("http_proxy", f"http://{receiver.place}")

    assert send(url, FAILED) == []

    (request,) = receiver.requests
    assert (request["path"], request["body"]) == (path, body)
    # Discord refuses the default of urllib.
    assert "urllib" not in request["headers"]["User-Agent"]


@pytest.mark.parametrize("status", [302, 403, 404])
def test_a_refusal_and_a_redirect_are_final(status: int, receiver: Webhook) -> None:
    """A redirect would lose the message. The reason contains nothing of the URL."""
    receiver.statuses = [status]

    (problem,) = send(receiver.url, FAILED)

    assert str(status) in problem
    assert "hook" not in problem
    assert len(receiver.requests) == 1


def test_a_receiver_that_is_down_for_a_moment_is_tried_again(
    receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that follow wait for it, and keep their order."""
    monkeypatch.setattr(notifier_module, "_PAUSES_SECONDS", (0.0, 0.0))
    receiver.statuses = [503, 429]
    problems: list[str] = []
    sender = Notifier(parse_receiver(receiver.url), lambda _, why: problems.append(why))
    sender.send(FAILED)
    sender.send(Message.about("end", "lm", what="Run ended", details=""))
    while len(receiver.requests) < 4:
        assert not problems
        time.sleep(0.01)
    sender.close(30.0)

    assert receiver.kinds() == ["failure", "failure", "failure", "end"]
    assert problems == []


def test_the_last_message_is_tried_again_too(
    receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends before the usual pause is over."""
    monkeypatch.setattr(notifier_module, "_PAUSE_WHILE_CLOSING_SECONDS", 0.0)
    receiver.statuses = [503]

    problems = send(receiver.url, FAILED, seconds=60.0)

    assert receiver.kinds() == ["failure", "failure"]
    assert problems == []


def test_a_receiver_that_never_answers_is_given_up(receiver: Webhook) -> None:
    """The sender returns while the receiver still holds the connection. Nothing is sent twice."""
    receiver.is_silent = True

    problems = send(receiver.url, FAILED, FAILED, seconds=1.0)

    assert len(problems) == 2
    # On a busy machine, not even the first process may have started in time.
    assert len(receiver.requests) <= 1


def test_nobody_listens() -> None:
    """The reason is the one of the system."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (problem,) = send(f"http://127.0.0.1:{unused.getsockname()[1]}/secret", FAILED)

    assert "refused" in problem.lower()
    assert "secret" not in problem


def command(tmp_path: Path) -> str:
    """Return a command that writes its arguments, its input and its variables to files."""
    program = tmp_path / "tell"
    program.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do printf "%s\\0" "$word"; done > $0.arguments\n'
        "cat > $0.input\n"
        'echo "$NOTIFY_KIND|$NOTIFY_TITLE|$HOLDFAST_NOTIFY" > $0.variables\n'
    )
    program.chmod(0o755)
    return str(program)


def test_a_command_gets_the_message_as_its_last_argument_and_on_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs without a shell, so nothing in the message or in its words is expanded."""
    program = command(tmp_path)
    monkeypatch.setenv("HOLDFAST_NOTIFY", "secret")
    message = Message.about("hang", "lm", what="Run hangs", details="$(touch x); `id`")

    assert send(f"{program} -t 'my title' $HOME", message) == []

    arguments = Path(f"{program}.arguments").read_text().split("\0")[:-1]
    assert arguments == ["-t", "my title", "$HOME", message.text()]
    assert Path(f"{program}.input").read_text() == f"{message.text()}\n"
    assert Path(f"{program}.variables").read_text() == f"hang|{message.title}|\n"


def test_a_command_says_where_it_wants_the_message(tmp_path: Path) -> None:
    """With a place for the title only, the message is on stdin, as `mail -s` reads it."""
    program = command(tmp_path)

    assert send(f"{program} -s {{title}} me@host", FAILED) == []

    arguments = Path(f"{program}.arguments").read_text().split("\0")[:-1]
    assert arguments == ["-s", FAILED.title, "me@host"]
    assert Path(f"{program}.input").read_text() == f"{FAILED.text()}\n"


def test_a_command_that_fails_or_hangs_is_reported_without_its_words(tmp_path: Path) -> None:
    """A command that hangs is killed together with its children."""
    assert send("false secret", FAILED) == ["it ended with status 1"]

    program = tmp_path / "hang"
    program.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait\n")
    program.chmod(0o755)
    (problem,) = send(f"{program} secret", FAILED, seconds=1.0)
    assert "secret" not in problem
    child = read_process(int((tmp_path / "pid").read_text()))
    assert child is None or child.state == "Z"


@pytest.mark.parametrize(
    ("notify", "shown"),
    [
        ("https://", "https:///***"),
        ("https://me:secret@host:port/secret", "https://host:port/***"),
        ("https://host/a secret", "https://host/***"),
        ("https://hôst/secret", "https://hôst/***"),
        ("tgram://secret/chat", "tgram://***"),
        ("no-such-program secret", "no-such-program ***"),
        ("TOKEN=secret send", "***"),
        ("notify-send 'secret", "notify-send ***"),
        ("  ", "***"),
    ],
)
def test_a_receiver_that_cannot_be_used_is_refused(notify: str, shown: str) -> None:
    """The error shows no password, path or argument."""
    with pytest.raises(PolicyError) as caught:
        parse_receiver(notify)

    assert caught.value.rule == "H118"
    assert caught.value.what == f"notify={shown!r}"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--notify", "https://ntfy.sh/secret"],
        ["--notify=apprise tgram://secret/chat"],
        ["HOLDFAST_NOTIFY=https://ntfy.sh/secret"],
        ["https://discord.com/api/webhooks/1/secret"],
    ],
)
def test_a_command_line_is_recorded_without_its_receiver(words: list[str]) -> None:
    """Wherever a script takes it from."""
    assert "secret" not in " ".join(without_secrets(words))
    assert without_secrets(["--notify", "yes"]) == ["--notify", "yes"]


def test_a_message_contains_no_secret_of_its_details() -> None:
    """Text that looks like a secret is hidden, and control characters are removed."""
    message = Message.about("failure", "a\x1b[31m\n", what="x", details="token=S3cret\x00 end")

    assert "S3cret" not in message.text()
    assert message.text().isprintable() or message.text().count("\n") == 1


def test_a_process_that_exits_at_once_still_sends_its_message(receiver: Webhook) -> None:
    """Python starts no thread at that time, so the message is sent in the thread that exits."""
    program = (
        "import atexit, sys\n"
        "from holdfast.core.notify.message import Message\n"
        "from holdfast.core.notify.notifier import Notifier\n"
        "from holdfast.core.notify.receivers import parse_receiver\n"
        "sender = Notifier(parse_receiver(sys.argv[1]), lambda *_: None)\n"
        "atexit.register(sender.close)\n"
        "message = Message.about('end', 'lm', what='Run ended', details='')\n"
        "atexit.register(sender.send, message)\n"
    )
    subprocess.run([sys.executable, "-c", program, receiver.url], check=True, timeout=120)

    assert receiver.kinds() == ["end"]
