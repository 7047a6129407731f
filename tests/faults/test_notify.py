"""Messages about real runs, with and without `holdfast run`, arrive once at a real receiver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recipes.demo.small_disk import command_with_small_disk
from tests.webhooks import Webhook, webhook

from holdfast.recorder.reader import read_events

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "notified.py"
RUN = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]
SECRETS = ("S3cret-user", "S3cret-word", "S3cret-topic")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with webhook() as started:
        yield started


def train(
    tmp_path: Path,
    *options: str,
    before: tuple[str, ...] = (),
    notify: str | None = None,
    **request: Any,
) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, under `holdfast run` if options are given.

    Args:
        tmp_path: The folder of the run directories.
        options: Options of `holdfast run`.
        before: Words in front of the command.
        notify: `Policy.notify`.
        request: What the program does; see there.
    """
    full = {"run_dir": str(tmp_path / "guarded"), **request}
    command = [sys.executable, str(PROGRAM), json.dumps(full)]
    if options:
        # The name of the directory is that of the run.
        place = ["--run-dir", str(tmp_path / "lm-small"), "--restart-delay", "0.1"]
        command = [*RUN, *place, *options, "--", *command]
    variables = {} if notify is None else {"NOTIFY_OF_PROGRAM": notify}
    return subprocess.run(
        [*before, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )


def test_a_supervised_run_reports_its_restart_and_its_end(
    tmp_path: Path, receiver: Webhook
) -> None:
    """The guard reports NaN to the same receiver, and each message arrives once.

    None of them contains a word of the command line.
    """
    ended = train(tmp_path, "--notify", receiver.url, nan_at=[5], end="killed")

    assert ended.returncode == 0, ended.stderr
    assert sorted(receiver.kinds()) == ["end", "nan", "restart"]
    assert receiver.kinds()[-1] == "end"
    by_kind = {request["body"]["kind"]: request["body"] for request in receiver.requests}
    assert (by_kind["restart"]["run"], by_kind["restart"]["step"]) == ("lm-small", 5)
    assert "H1602" in by_kind["restart"]["text"]
    assert by_kind["nan"]["run"] == "guarded"
    texts = json.dumps([request["body"] for request in receiver.requests])
    assert "notified.py" not in texts
    assert "run_dir" not in texts


def test_an_unsupervised_guard_reports_what_it_knows(
    tmp_path: Path, receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill is not reported, because nobody is left to do so, but the resume after it is."""
    monkeypatch.setenv("HOLDFAST_NOTIFY", receiver.url)

    assert train(tmp_path, end="killed").returncode < 0
    assert receiver.kinds() == []
    assert train(tmp_path, nan_at=[5]).returncode == 0
    assert receiver.kinds() == ["restart", "nan", "end"]
    assert train(tmp_path, steps=12, raise_at=10).returncode == 1
    assert receiver.kinds() == ["restart", "nan", "end", "restart", "failure"]
    # The message of an exception may contain anything.
    assert "ValueError" in receiver.requests[-1]["body"]["text"]
    assert "S3cret" not in receiver.requests[-1]["body"]["text"]


def test_a_failure_and_a_run_that_starts_again(tmp_path: Path, receiver: Webhook) -> None:
    """A failure that a restart cannot help is reported once, and so is the next start."""
    assert train(tmp_path, "--notify", receiver.url, raise_at=5).returncode == 1
    assert receiver.kinds() == ["failure"]
    assert "S3cret" not in receiver.requests[0]["body"]["text"]

    assert train(tmp_path, "--notify", receiver.url).returncode == 0
    assert receiver.kinds() == ["failure", "restart", "end"]


def test_a_hang_is_reported_before_its_restart(tmp_path: Path, receiver: Webhook) -> None:
    """The message names what hangs."""
    options = ("--notify", receiver.url, "--hang-limit", "all=2")
    ended = train(tmp_path, *options, hang_at=3)

    assert ended.returncode == 0, ended.stderr
    assert receiver.kinds() == ["hang", "restart", "end"]
    assert receiver.requests[0]["body"]["step"] == 3


def test_a_disk_that_fills_is_reported_once(
    tmp_path: Path, receiver: Webhook, small_disk: Path
) -> None:
    """A real disk, with room for the next checkpoint but not for two."""
    mounted = command_with_small_disk(small_disk, [])
    assert mounted is not None
    ended = train(
        tmp_path,
        before=tuple(mounted),
        run_dir=str(small_disk / "run"),
        fill=str(small_disk / "filler"),
        notify=receiver.url,
    )

    assert ended.returncode in (0, 74), ended.stderr
    assert receiver.kinds().count("low_disk") == 1


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_receiver_that_never_answers_ends_no_run(
    tmp_path: Path, receiver: Webhook, is_supervised: bool
) -> None:
    """The run ends while the receiver still holds the connection, and an event says so."""
    receiver.is_silent = True

    if is_supervised:
        ended = train(tmp_path, "--notify", receiver.url)
        recording = tmp_path / "lm-small" / "supervisor"
    else:
        ended = train(tmp_path, notify=receiver.url, nan_at=[2])
        recording = tmp_path / "guarded" / "recorder" / "rank0"

    assert ended.returncode == 0, ended.stderr
    assert not receiver.is_over.is_set()
    assert len(receiver.requests) == 1
    shown = f"http://{receiver.place}/***"
    if is_supervised:
        (event,) = [event for event in read_events(recording) if event.kind == "message_not_sent"]
        assert (event.data["message"], event.data["receiver"]) == ("end", shown)
    assert shown in ended.stderr


def test_the_receiver_is_shown_nowhere(tmp_path: Path, receiver: Webhook) -> None:
    """Not in the files of the run, its page, its events, or the output."""
    url = f"http://{SECRETS[0]}:{SECRETS[1]}@{receiver.place}/{SECRETS[2]}"
    receiver.statuses = [404] * 9
    ended = train(tmp_path, "--notify", url, notify=url, nan_at=[2])
    page = tmp_path / "page.html"
    report = [*RUN[:-1], "report", str(tmp_path / "lm-small"), "--out", str(page)]
    reported = subprocess.run(report, check=False, capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    assert len(receiver.requests) == 2
    outputs = [ended.stdout, ended.stderr, reported.stdout, reported.stderr]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert page in files
    contents = [path.read_bytes() for path in files] + [text.encode() for text in outputs]
    assert not [word for word in SECRETS for content in contents if word.encode() in content]


@pytest.mark.parametrize("notify", ["no-such-program S3cret", "ftp://host/S3cret", "https://"])
def test_a_receiver_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, notify: str
) -> None:
    """By `holdfast run` before it makes a directory, and by a guard before its first step."""
    supervised = train(tmp_path, "--notify", notify)
    assert supervised.returncode == 2
    assert "H118" in supervised.stderr
    assert "S3cret" not in supervised.stderr
    assert not (tmp_path / "lm-small").exists()

    alone = train(tmp_path, notify=notify)
    assert alone.returncode == 1
    assert "H118" in alone.stderr
    assert not list((tmp_path / "guarded").glob("checkpoints/*"))


def test_a_command_is_run_for_each_message(tmp_path: Path) -> None:
    """A real program, with a word of its own that contains a space."""
    program = tmp_path / "tell"
    program.write_text(f'#!/bin/sh\necho "$1|$NOTIFY_KIND" >> {tmp_path}/told\n')
    program.chmod(0o755)

    assert train(tmp_path, "--notify", f"{program} 'a b'", nan_at=[2]).returncode == 0

    assert (tmp_path / "told").read_text().splitlines() == ["a b|nan", "a b|end"]
