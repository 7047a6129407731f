"""Several hosts run one training, each under its own `holdfast run`, with one run directory.

Here on one machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.ports import unused_port

from holdfast.recorder.run_files import ATTEMPT_VARIABLE
from holdfast.supervise.launch.hosts import HostPosition, find_host

pytestmark = pytest.mark.slow
_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
_PYTHON = [sys.executable, "-I", "-S", "-c"]
_TIMEOUT_SECONDS = 120.0
# Words are printed to a file that all hosts share, so that their order can be seen.
_SAY = (
    f"import os, sys, time; host, attempt = sys.argv[-1], os.environ['{ATTEMPT_VARIABLE}']\n"
    "file = os.open('said', os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "def say(word): os.write(file, f'{host} {attempt} {word}\\n'.encode())\n"
    "def wait_for(word):\n"
    "    while word not in open('said').read().splitlines(): time.sleep(0.01)\n"
    "say('begins')\n"
)
_AS_LONG_AS_NOBODY_ENDS_IT = "time.sleep(1000)\n"


def on_host(folder: Path, command: list[str], grace_seconds: int = 1) -> subprocess.Popen[str]:
    options = ["--run-dir", "run", "--restart-delay", "0.1"]
    options += ["--grace-seconds", str(grace_seconds)]
    return subprocess.Popen(
        [*_CLI, "run", *options, "--", *command],
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def program(number: int, text: str) -> list[str]:
    return [*_PYTHON, _SAY + text, "--nnodes=2", f"--node-rank={number}", str(number)]


def said(folder: Path) -> list[str]:
    path = folder / "said"
    return path.read_text().splitlines() if path.exists() else []


def ended(*hosts: subprocess.Popen[str]) -> list[tuple[int, str]]:
    outputs = [host.communicate(timeout=_TIMEOUT_SECONDS)[0] for host in hosts]
    return [(host.returncode, output) for host, output in zip(hosts, outputs, strict=True)]


def say(folder: Path, line: str) -> None:
    with (folder / "said").open("a") as file:
        file.write(f"{line}\n")


def wait_for(folder: Path, line: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while line not in said(folder):
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.01)


def wait_until_ready(folder: Path, number: int) -> None:
    """Return once a host waits for the others; from then on it handles signals."""
    file = folder / "run" / "hosts" / f"{number}.json"
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not file.exists() or json.loads(file.read_text())["state"] != "ready":
        assert time.monotonic() < deadline, f"host {number} has not come"
        time.sleep(0.01)


def test_the_hosts_begin_an_attempt_together(tmp_path: Path) -> None:
    """Host 1 is killed.

    Host 0 is slow to end, and does not end by itself: host 1 must wait for it.
    """
    dies = "if attempt == '0': wait_for('0 0 listens'); say('dies'); os.kill(os.getpid(), 9)\n"
    slow = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.8), say('ends'), os._exit(1)))\n"
        "if attempt == '0': say('listens'); " + _AS_LONG_AS_NOBODY_ENDS_IT
    )
    results = ended(
        on_host(tmp_path, program(1, dies)),
        # Also how long it is left alone before it is asked to end.
        on_host(tmp_path, program(0, slow), grace_seconds=5),
    )
    assert [status for status, _ in results] == [0, 0], results
    lines = said(tmp_path)
    assert set(lines[:3]) == {"0 0 begins", "1 0 begins", "0 0 listens"}
    assert lines[3:5] == ["1 0 dies", "0 0 ends"]
    assert set(lines[5:]) == {"0 1 begins", "1 1 begins"}
    assert "host 1 has ended: killed" in results[1][1], "the reason is known"


def test_an_error_that_no_restart_mends_stops_all_hosts(tmp_path: Path) -> None:
    """Host 0 stops with the words of host 1, and `explain` of the run is about host 1."""
    wrong = "time.sleep(0.5); import no_such_module_at_all\n"
    results = ended(
        on_host(tmp_path, program(0, _AS_LONG_AS_NOBODY_ENDS_IT)),
        on_host(tmp_path, program(1, wrong)),
    )
    assert all(status != 0 for status, _ in results)
    assert "host 1" in results[0][1]
    assert "no_such_module_at_all" in results[0][1]
    explained = subprocess.run(
        [*_CLI, "explain", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "no_such_module_at_all" in explained.stdout.splitlines()[0]


def test_a_host_that_is_lost_and_comes_again(tmp_path: Path) -> None:
    """SIGKILL to the supervisor of a host, as when the machine is gone.

    A scheduler starts the same command there.
    """
    until = "if attempt == '0': " + _AS_LONG_AS_NOBODY_ENDS_IT
    first, lost = (on_host(tmp_path, program(number, until)) for number in (0, 1))
    wait_for(tmp_path, "0 0 begins")
    wait_for(tmp_path, "1 0 begins")
    lost.send_signal(signal.SIGKILL)
    lost.communicate(timeout=_TIMEOUT_SECONDS)
    results = ended(first, on_host(tmp_path, program(1, until)))
    assert [status for status, _ in results] == [0, 0], results
    assert said(tmp_path).count("0 1 begins") == said(tmp_path).count("1 1 begins") == 1


def test_what_hosts_have_left_is_nothing_to_a_run_of_one(tmp_path: Path) -> None:
    """The same directory, then one host alone: judged, restarted and explained is its own end."""
    wrong = "time.sleep(0.5); import no_such_module_at_all\n"
    ended(
        on_host(tmp_path, program(0, _AS_LONG_AS_NOBODY_ENDS_IT)),
        on_host(tmp_path, program(1, wrong)),
    )
    [(_, output)] = ended(on_host(tmp_path, [*_PYTHON, "raise ValueError('of one host')"]))
    assert "ValueError: of one host" in output
    explained = subprocess.run(
        [*_CLI, "explain", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "of one host" in explained.stdout.splitlines()[0]


def test_a_host_whose_part_ended_well_is_not_the_one_to_explain(tmp_path: Path) -> None:
    """Host 0 has ended with 0, host 1 failed."""
    results = ended(
        on_host(tmp_path, program(0, "time.sleep(0.1)")),
        on_host(tmp_path, program(1, "import no_such_module_at_all")),
    )
    assert results[0][0] == 0
    explained = subprocess.run(
        [*_CLI, "explain", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "no_such_module_at_all" in explained.stdout.splitlines()[0]
    assert "host-1" in explained.stdout


def test_a_host_that_is_started_twice_disturbs_nobody(tmp_path: Path) -> None:
    """The second is refused, and the training goes on."""
    until_told = "wait_for('go on')"
    first, other = (on_host(tmp_path, program(number, until_told)) for number in (0, 1))
    wait_for(tmp_path, "0 0 begins")
    wait_for(tmp_path, "1 0 begins")
    [(status, output)] = ended(on_host(tmp_path, program(1, until_told)))
    assert (status, "H723" in output) == (2, True)
    say(tmp_path, "go on")
    assert [status for status, _ in ended(first, other)] == [0, 0]
    assert sorted(said(tmp_path)) == ["0 0 begins", "1 0 begins", "go on"]


def test_the_folder_of_the_hosts_may_vanish(tmp_path: Path) -> None:
    """What they tell each other is lost then, and no more: exit codes are those of the command."""
    hosts = [on_host(tmp_path, program(number, "time.sleep(3)")) for number in (0, 1)]
    wait_for(tmp_path, "0 0 begins")
    wait_for(tmp_path, "1 0 begins")
    shutil.rmtree(tmp_path / "run" / "hosts")
    assert [status for status, _ in ended(*hosts)] == [0, 0]


@pytest.mark.parametrize(
    "left", ["a pipe", "[]", '{"state": "running", "beat": "1", "go": [1]}', "x" * (1 << 20)]
)
def test_what_lies_in_the_folder_of_the_hosts_is_no_danger(tmp_path: Path, left: str) -> None:
    """A file that no supervisor wrote says nothing, and is written anew."""
    folder = tmp_path / "run" / "hosts"
    folder.mkdir(parents=True)
    if left == "a pipe":
        os.mkfifo(folder / "1.json")
    else:
        (folder / "1.json").write_text(left)
    assert [
        status for status, _ in ended(*(on_host(tmp_path, program(n, "")) for n in (0, 1)))
    ] == [0, 0]


def test_a_host_that_left_while_it_waited_is_waited_for(tmp_path: Path) -> None:
    """Of three hosts one is ended by a signal before all are there.

    The others begin with its successor.
    """
    three = ["--nnodes=3"]
    first, leaves = (
        on_host(tmp_path, [*program(number, ""), *three, str(number)]) for number in (0, 1)
    )
    wait_until_ready(tmp_path, 1)
    leaves.terminate()
    leaves.communicate(timeout=_TIMEOUT_SECONDS)
    last = on_host(tmp_path, [*program(2, ""), *three, "2"])
    wait_until_ready(tmp_path, 2)
    time.sleep(1.5)
    assert said(tmp_path) == []
    again = on_host(tmp_path, [*program(1, ""), *three, "1"])
    assert [status for status, _ in ended(first, last, again)] == [0, 0, 0]


def test_a_host_that_is_alone_is_ended_by_a_signal(tmp_path: Path) -> None:
    """One that waits for the others has started nothing, and says so."""
    alone = on_host(tmp_path, program(0, ""))
    wait_until_ready(tmp_path, 0)
    alone.terminate()
    [(status, output)] = ended(alone)
    assert (status, "H725" in output, said(tmp_path)) == (2, True, [])


def test_two_launchers_go_on_after_a_kill(tmp_path: Path) -> None:
    """Two real torchruns with one rank each.

    Rank 1 is killed once, and both end with the same weights.
    """
    script = Path(__file__).parent / "programs" / "on_two_hosts.py"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(unused_port())]
    hosts = [
        on_host(tmp_path, [*launcher, *address, "--node-rank", str(n), str(script)]) for n in (0, 1)
    ]
    results = ended(*hosts)
    assert [status for status, _ in results] == [0, 0], results
    assert all(
        "ended after 36 steps" in output and "2 attempts" in output for _, output in results
    ), results
    assert len({output.partition("steps with ")[2].split()[0] for _, output in results}) == 1


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["torchrun", "--nnodes", "2", "--node_rank=1", "train.py"], {}, (1, 2)),
        (
            ["accelerate", "launch", "--num_machines", "4", "--machine_rank", "3", "train.py"],
            {},
            (3, 4),
        ),
        (["torchrun", "train.py"], {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, (0, 2)),
        # Elastic: any number of them
        (["torchrun", "--nnodes=1:4", "--node-rank", "1", "train.py"], {}, (0, 1)),
        (["torchrun", "--nnodes=2", "train.py"], {}, (0, 1)),  # nothing says which one this is
        (["torchrun", "--nnodes"], {}, (0, 1)),
        (["python", "train.py"], {}, (0, 1)),
    ],
)
def test_what_a_command_says_of_hosts(
    words: list[str], variables: dict[str, str], expected: tuple[int, int]
) -> None:
    """The launcher's options, as they are written, or its variables."""
    assert find_host(words, variables) == HostPosition(*expected)
