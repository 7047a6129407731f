"""The parts of a supervisor that need no command.

What is executed, where it records, what the kernel says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.core.errors import RunDirectoryError
from holdfast.recorder.run_files import ProcessInfo, write_process
from holdfast.supervise.launch.attempt import Attempt
from holdfast.supervise.launch.commands import make_environment
from holdfast.supervise.launch.kernel import count_oom_kills
from holdfast.supervise.launch.output import CommandStreams, OutputCopier
from holdfast.supervise.launch.output_log import OutputLog
from holdfast.supervise.launch.run_folder import RunFolder, choose_folder
from holdfast.supervise.launch.shutdown import Shutdown
from holdfast.supervise.launch.signals import Signals
from holdfast.supervise.process_tree import MARK_VARIABLE, Tree, kill_all


def test_a_run_is_named_after_its_script_and_never_takes_a_directory_that_exists(tmp_path):
    """Script, module or program, then the time in UTC, then a number."""
    named = [
        choose_folder(command, 0.0, tmp_path).name
        for command in (
            ["python", "-u", "a/train.py"],
            ["python", "-m", "pkg.train"],
            ["/bin/sh", "-c", "x"],
        )
    ]
    assert named == ["train-19700101-000000", "pkg.train-19700101-000000", "sh-19700101-000000"]
    (tmp_path / "sh-19700101-000000").mkdir()
    assert choose_folder(["sh"], 0.0, tmp_path).name == "sh-19700101-000000-2"


def test_one_supervisor_at_a_time_writes_to_a_directory(tmp_path):
    """The second one, in another process, learns who holds it; after the first is gone it may."""
    first = RunFolder(tmp_path / "runs" / "a")
    code = (
        "import sys; from pathlib import Path; from holdfast.supervise.launch.run_folder import"
        " RunFolder; "
    )
    command = [sys.executable, "-c", f"{code}RunFolder(Path(sys.argv[1]))", str(first.path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "[H723]" in refused.stderr
    assert f"process {os.getpid()}" in refused.stderr
    first.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_the_next_attempt_is_known_although_the_ring_has_wrapped(tmp_path):
    """The number of attempts is found in whatever an attempt has left, not only in the event of
    its start.
    """
    folder = RunFolder(tmp_path / "a")
    assert folder.next_attempt() == 0
    write_process(folder.path, ProcessInfo(pid=7, ticks=1, ppid=1, argv=[], attempt=4))
    assert folder.next_attempt() == 5
    folder.close()


def test_a_directory_of_a_newer_holdfast_or_without_permission_is_refused(tmp_path):
    """Both say what to do; a damaged description is written again."""
    run = tmp_path / "run"
    folder = RunFolder(run)
    folder.write_description(["true"], 1.0)
    folder.close()
    (run / "supervised.json").write_text('{"format": 99}')
    with pytest.raises(RunDirectoryError, match="H724"):
        RunFolder(run)
    (run / "supervised.json").write_bytes(b"\0junk")
    RunFolder(run).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="H722"):
        RunFolder(tmp_path / "file" / "run")


def test_the_description_says_what_was_run_where(tmp_path):
    """Command, directory, interpreter, machine and versions are there before anything starts."""
    folder = RunFolder(tmp_path / "run")
    folder.write_description(["python", "train.py"], 12.5)
    found = json.loads((tmp_path / "run" / "supervised.json").read_text())
    assert (found["format"], found["argv"], found["started"]) == (1, ["python", "train.py"], 12.5)
    assert found["cwd"] == str(Path.cwd())
    assert {"holdfast", "python", "torch"} <= set(found["versions"])
    assert folder.next_attempt() == 0
    folder.close()


def test_the_environment_carries_the_mark_beside_those_of_supervisors_above(tmp_path):
    """A supervised supervisor marks its own command without hiding it from the one above."""
    alone = make_environment({"A": "1"}, tmp_path, 0, "7-8", observe=False)
    assert alone == {"A": "1", "PYTHONUNBUFFERED": "1", MARK_VARIABLE: "7-8"}
    assert make_environment(alone, tmp_path, 0, "9-9", observe=False)[MARK_VARIABLE] == "7-8,9-9"


def test_killed_for_memory_is_read_from_the_innermost_group_of_either_version(tmp_path):
    """A group above counts the kills of other jobs and is not asked; no counter at all is None."""
    (tmp_path / "proc/self").mkdir(parents=True)
    assert count_oom_kills(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/step\n0::/user\n")
    for folder, kills in (("memory/job/step", 2), ("memory/job", 7)):
        group = tmp_path / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        )
    assert count_oom_kills(tmp_path) == 2
    (tmp_path / "proc/self/cgroup").write_text("0::/user\n")
    group = tmp_path / "sys/fs/cgroup/user"
    group.mkdir()
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
    assert count_oom_kills(tmp_path) == 1


def test_a_signal_that_ends_the_command_at_once_counts_as_a_request(tmp_path, monkeypatch):
    """Also one that arrives after the supervisor's last look at signals."""
    log = OutputLog(tmp_path / "output.log", 1 << 20)
    tree = Tree("no mark")
    exited = Attempt._has_exited

    def exits_of_a_signal(attempt: Attempt) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        while not exited(attempt):
            time.sleep(0.01)
        return True

    monkeypatch.setattr(Attempt, "_has_exited", exits_of_a_signal)
    with Signals(tree) as signals:
        attempt = Attempt(
            number=0,
            run_path=tmp_path,
            child=subprocess.Popen(["sleep", "600"], start_new_session=True),
            tree=tree,
            streams=CommandStreams(),
            copier=OutputCopier(log, quiet=True),
            signals=signals,
            shutdown=Shutdown(grace_seconds=25.0),
            emit=lambda data: None,
        )
        end = attempt.serve()
    log.close()
    attempt.streams.close_command_ends()
    for source in attempt.streams.sources:
        os.close(source.descriptor)
    assert end.status == -signal.SIGTERM
    assert end.requested_by == signal.SIGTERM


def test_children_that_were_there_before_and_processes_of_our_session_are_not_the_commands(
    tmp_path,
):
    """A daemon of the script that executed us, and what we run for ourselves, are spared.

    What comes later is not.
    """
    before = subprocess.Popen(["sleep", "600"], start_new_session=True)
    tree = Tree("no mark")
    ours = subprocess.Popen(["sleep", "600"])
    command = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600; :"], start_new_session=True)
    deadline = time.monotonic() + 30
    while len(found := tree.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert command.pid in found
    assert len(found) == 3
    kill_all(tree.processes, 10.0)
    assert tree.ended_orphans(set()) == [command.pid]
    assert tree.ended_orphans({command.pid}) == []
    assert before.poll() is None
    assert ours.poll() is None
    for each in (before, ours, command):
        each.kill()
        each.wait()
