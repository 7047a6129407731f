"""Following a run of many processes.

Nothing that is recorded is missed, and what is over costs nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.unit.report.made_runs import GONE, add_process, happened, sample

from holdfast.recorder.run_files import PROCESS_FILE, SUPERVISED_FILE
from holdfast.report.run_follower import RunFollower


def _kinds(follower: RunFollower) -> list[str]:
    return [recorded.event.kind for news in follower.new() for recorded in news.events]


def _labels(follower: RunFollower) -> list[str]:
    return [source.label for source in follower.sources]


def test_a_loader_worker_is_read_to_its_end_and_forgotten(tmp_path):
    """The last that a worker recorded arrives, and then its folder is never looked at again.

    A trainer stays.
    """
    add_process(tmp_path, [sample(1)])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        ticks = int(Path(f"/proc/{living.pid}/stat").read_text().rpartition(")")[2].split()[19])
        folder = add_process(tmp_path, [], happened("begun", 1), role="loader worker", pid=GONE + 1)
        said = json.loads((folder / PROCESS_FILE).read_text()) | {"pid": living.pid, "ticks": ticks}
        (folder / PROCESS_FILE).write_text(json.dumps(said))
        follower = RunFollower(tmp_path)
        assert _kinds(follower) == ["begun"]
        assert _labels(follower) == [f"trainer {GONE}", f"worker {living.pid}"]
    add_process(tmp_path, [], happened("exception", 2), role="loader worker", pid=GONE + 1)
    assert _kinds(follower) == ["exception"]
    assert _labels(follower) == [f"trainer {GONE}"]
    add_process(tmp_path, [], happened("never", 3), role="loader worker", pid=GONE + 1)
    assert _kinds(follower) == []


def test_workers_of_another_machine_are_not_forgotten(tmp_path):
    """Their processes cannot be seen from here, so they may live."""
    (tmp_path / SUPERVISED_FILE).write_text(json.dumps({"hostname": f"not-{socket.gethostname()}"}))
    add_process(tmp_path, [], happened("begun", 1), role="loader worker")
    follower = RunFollower(tmp_path)
    assert _kinds(follower) == ["begun"]
    add_process(tmp_path, [], happened("more", 2), role="loader worker")
    assert _kinds(follower) == ["more"]


def test_a_process_that_says_something_new_of_itself_is_read_again(tmp_path):
    """A process becomes a trainer at its first step."""
    add_process(tmp_path, role="other")
    follower = RunFollower(tmp_path)
    follower.new()
    assert _labels(follower) == [f"process {GONE}"]
    add_process(tmp_path, [sample(1)], role="trainer")
    follower.new()
    assert _labels(follower) == [f"trainer {GONE}"]
