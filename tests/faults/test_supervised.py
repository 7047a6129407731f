"""`holdfast run` as a user drives it.

Real commands, real signals, real terminals, and nothing left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.forked_attempts import supervise_forked

from holdfast.core.control_groups import group_folders
from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import ATTEMPT_VARIABLE
from holdfast.report.run_follower import RunFollower
from holdfast.supervise.process_tree import marked_processes, read_process

pytestmark = pytest.mark.slow
TRAINING = Path(__file__).parent / "programs" / "supervised_training.py"
CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]
_TIMEOUT_SECONDS = 300.0
PYTHON = [sys.executable, "-I", "-S", "-c"]  # starts in 15 ms


class Run:
    """One `holdfast run`, with everything that it recorded.

    `forked` is for a training script alone, and for tests that are not about how it starts.
    """

    def __init__(
        self,
        folder: Path,
        options: list[str],
        command: list[str],
        *,
        cli: list[str] = CLI,
        forked: bool = False,
        **popen: Any,
    ) -> None:
        self.folder = folder
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **popen,
        }
        arguments = [
            "--run-dir",
            str(folder),
            "--restart-delay",
            "0.1",
            *options,
            "--",
            *command,
        ]
        self.process: subprocess.Popen[bytes]
        if forked:
            self.process = supervise_forked(arguments, **streams)
        else:
            self.process = subprocess.Popen([*cli, *arguments], **streams)

    @property
    def mark(self) -> str:
        found = read_process(self.process.pid)
        assert found is not None
        return f"{found.pid}-{found.ticks}"

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                self.log() if (self.folder / "output.log").exists() else "nothing"
            )
            time.sleep(0.005)
        return found

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: (self.folder / "output.log").exists() and text in self.log())

    def log(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=_TIMEOUT_SECONDS)
        return (
            self.process.returncode,
            (out or b"").decode(errors="replace"),
            (err or b"").decode(errors="replace"),
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            dict(event.data)
            for event in read_events(self.folder / "supervisor")
            if event.kind == kind
        ]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run; at the end nothing of it may be left."""
    runs: list[tuple[Run, str]] = []
    numbers = itertools.count()

    def start(*options: str, command: list[str], **popen: Any) -> Run:
        run = Run(tmp_path / f"run{next(numbers)}", list(options), command, **popen)
        runs.append((run, run.mark))
        return run

    yield start
    for run, mark in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
            time.sleep(1.0)
        left = marked_processes(mark, [])
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for stream in (run.process.stdout, run.process.stderr, run.process.stdin):
            if stream is not None:
                stream.close()
        assert not left


def soon_gone(mark: str, *pids: int) -> bool:
    """Return whether all processes with the mark have ended soon, and these PIDs too.

    While a process ends, it has no mark any more, so a PID can be named in addition.
    """
    deadline = time.monotonic() + 20.0
    while marked_processes(mark, []) or any(
        (found := read_process(pid)) and found.state != "Z" for pid in pids
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", 139), ("kill -KILL $$", 137)],
)
def test_the_exit_code_is_that_of_the_command(supervise, script, status):
    """As a shell says it.

    Both streams arrive where they would without us, and three lines of ours follow.
    """
    run = supervise(
        "--max-restarts", "0", command=["sh", "-c", f"echo out; echo err >&2; {script}"]
    )
    code, out, err = run.end()
    assert code == status
    assert out == "out\n"
    assert err.startswith("err\n")
    assert f"holdfast explain {run.folder}" in err
    assert {"out", "err"} <= set(run.log().splitlines())
    (ended,) = run.events("attempt_ended")
    assert ended["status"] == (status if status < 128 else 128 - status)
    assert json.loads((run.folder / "verdict.json").read_text())["cause"].startswith("H")


@pytest.mark.parametrize(
    ("options", "command", "status", "rule"),
    [
        ((), ["no-such-command"], 127, "H720"),
        ((), [str(TRAINING.parent)], 126, "H721"),
        (("--run-dir", __file__), ["true"], 2, "H722"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_made(
    supervise, options, command, status, rule
):
    """Exit codes of shells or of wrong use, a clear message, no run directory."""
    run = supervise(*options, command=command)
    code, out, err = run.end()
    assert (code, out) == (status, "")
    assert f"[{rule}]" in err
    assert "Traceback" not in err
    assert not run.folder.exists()


def test_a_file_that_the_kernel_refuses_is_126(supervise, tmp_path):
    """A script without a first line that names its interpreter is executable for a shell only."""
    script = tmp_path / "script"
    script.write_text("echo x")
    script.chmod(0o755)
    code, _, err = supervise("--max-restarts", "0", command=[str(script)]).end()
    assert code == 126
    assert "cannot be executed: Exec format error" in err


def test_everything_after_the_dashes_is_the_commands_own(supervise):
    """Options of the command, a second pair of dashes and empty words arrive as they are."""
    words = ["--max-restarts", "9", "--", "", "a b", "$HOME"]
    _, out, _ = supervise(
        "--quiet", command=[*PYTHON, "import sys; print(sys.argv[1:])", *words]
    ).end()
    assert out == f"{words}\n"


def test_quiet_and_json(supervise):
    """--quiet adds nothing to what the command prints, on stderr.

    All of stdout is a summary for machines.
    """
    run = supervise("--quiet", "--json", command=["sh", "-c", "echo x; exit 3"])
    code, out, err = run.end()
    assert (code, err) == (3, "x\n")
    summary = json.loads(out)
    assert (summary["exit_code"], summary["attempts"], summary["run"]) == (3, 1, str(run.folder))
    assert summary["verdict"]["cause"].startswith("H")


def test_stdin_passes_through(supervise):
    """What is piped in is the command's input, to its end."""
    run = supervise("--quiet", command=["cat"], stdin=subprocess.PIPE)
    out, _ = run.process.communicate(b"a\0b\nc" * 30_000, timeout=_TIMEOUT_SECONDS)
    assert out == b"a\0b\nc" * 30_000


def test_gigabytes_are_drained_without_growing_the_log_or_the_supervisor(supervise):
    """200 MB of junk in a second or so.

    The log stays within its size, and memory within a few megabytes.
    """
    code = (
        "import os\nfor _ in range(200): os.write(1, bytes(range(256)) * 4096)\nprint('last words')"
    )
    run = supervise(
        "--max-log-bytes", str(1 << 22), command=[*PYTHON, code], stdout=subprocess.DEVNULL
    )
    peaks = []
    while run.process.poll() is None:
        with suppress(OSError):
            status = Path(f"/proc/{run.process.pid}/status").read_text()
            peaks += [
                int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
            ]
        time.sleep(0.02)
    assert run.process.returncode == 0
    assert (run.folder / "output.log").stat().st_size <= (1 << 22) + (1 << 16)
    assert run.log().rstrip().endswith("last words")
    assert max(peaks) < 150_000, "kilobytes"


def test_an_orphan_that_holds_the_output_is_ended_and_not_waited_for(supervise):
    """A background process of the command's does not outlive it, and does not hold us up."""
    run = supervise(
        command=[
            "sh",
            "-c",
            "setsid nohup sleep 600 & (trap '' TERM; sleep 600; sleep 600) & echo done",
        ]
    )
    mark = run.mark
    code, out, _ = run.end()
    assert code == 0
    assert out == "done\n"
    assert len(run.events("leftovers")[0]["pids"]) >= 2
    assert not marked_processes(mark, [])


SIGNALLED = """
import os, signal, sys, time
def tell(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # another may come meanwhile: no print
    if number in (signal.SIGTERM, signal.SIGINT):
        sys.exit(5)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(each, tell)
child = os.fork()
if child == 0:
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


def test_signals_are_passed_on_once_and_to_whom_they_belong(supervise):
    """USR1, USR2, HUP and TERM reach the command.

    Its helpers get none but HUP, as from a terminal. No restart.
    """
    # Under `nohup` these tests ignore SIGHUP, and so would all that they start.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    run = supervise("--max-restarts", "3", command=[*PYTHON, SIGNALLED], **heard)
    run.wait_for(lambda: (run.folder / "output.log").exists() and run.log().count("ready") == 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        run.process.send_signal(number)
        run.wait_for_text(f"got {number.name}")
    run.process.send_signal(signal.SIGTERM)
    code, out, _ = run.end()
    assert code == 5
    counts = {name: out.count(f"got {name}") for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
    assert counts == {"SIGUSR1": 1, "SIGUSR2": 1, "SIGTERM": 1}
    assert [event["number"] for event in run.events("signal")] == [10, 12, 1, 15]
    assert len(run.events("attempt_started")) == 1


def test_what_does_not_listen_is_killed_after_the_time_of_grace(supervise):
    """SIGTERM, grace, SIGKILL to the command and to everything that it has started."""
    ignoring = "trap '' TERM; sleep 600 & setsid sleep 600 & echo ready; while :; do sleep 1; done"
    run = supervise("--grace-seconds", "0.3", command=["sh", "-c", ignoring])
    mark = run.mark
    run.wait_for_text("ready")
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 137
    assert "SIGTERM" in err
    assert "SIGKILL" in err
    assert not marked_processes(mark, [])
    assert run.events("attempt_ended")[0]["signal_sent_by_us"] == signal.SIGKILL


# What is passed on of one key counts as one, however long the test is held up between two signals.
PATIENT_CLI = [
    *CLI[:2],
    "from holdfast.supervise.launch import shutdown; shutdown.SAME_INTERRUPT_SECONDS = 1000.0; "
    + CLI[2],
    *CLI[3:],
]


@pytest.mark.parametrize("is_one_key", [False, True])
def test_a_second_ctrl_c_is_the_last(supervise, is_one_key):
    """Who ignores SIGINT is killed at the second one.

    What a shell and a wrapper pass on of one key counts once.
    """
    ignoring = "trap '' INT; echo ready; while :; do sleep 1; done"
    run = supervise(
        "--grace-seconds",
        "1000",
        command=["sh", "-c", ignoring],
        cli=PATIENT_CLI if is_one_key else CLI,
    )
    run.wait_for_text("ready")
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: run.events("signal"))
    time.sleep(0.6)
    run.process.send_signal(signal.SIGINT)
    if is_one_key:
        run.wait_for(lambda: len(run.events("signal")) == 2)
        time.sleep(0.5)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 137
    assert "SIGINT" in err
    assert "SIGKILL" in err


def test_under_nohup_a_hang_up_is_nobodys_business(supervise):
    """A signal that is ignored when we start stays ignored, for us and for the command."""
    run = supervise(
        command=["sh", "-c", "echo ready; read line; echo after"],
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    run.wait_for_text("ready")
    run.process.send_signal(signal.SIGHUP)
    run.process.stdin.write(b"go on\n")
    code, out, _ = run.end()
    assert (code, out) == (0, "ready\nafter\n")


class Terminal:
    """A terminal with a person in front of it, whose shell has given it to one process group."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.screen = b""
        self.resize(100, 30)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def take(self) -> None:
        """Become the controlling terminal of a new session, as a login shell's."""
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def read_until(self, text: bytes) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while text not in self.screen:
            assert time.monotonic() < deadline, self.screen
            if select.select([self.master], [], [], 0.1)[0]:
                with suppress(OSError):
                    self.screen += os.read(self.master, 65536)

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


ON_A_TERMINAL = """
import os, signal, sys, time
def size(*_):
    os.write(1, f"size {os.get_terminal_size(2)}\\n".encode())  # a second signal may come meanwhile: no print
signal.signal(signal.SIGWINCH, size)
print("terminals", [os.isatty(n) for n in (0, 1, 2)], flush=True)
size()
print("read", input("name? "), flush=True)
try:
    while True: time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(9)
"""


def test_on_a_terminal_everything_is_as_without_us(supervise, terminal):
    """Progress bars have a terminal of the right size that follows the window, input is read,
    Ctrl-C comes once.
    """
    on_it = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    run = supervise(command=[*PYTHON, ON_A_TERMINAL], preexec_fn=terminal.take, **on_it)
    terminal.read_until(b"terminals [True, True, True]")
    terminal.read_until(b"columns=100, lines=30")
    terminal.resize(70, 20)
    os.kill(run.process.pid, signal.SIGWINCH)
    terminal.read_until(b"columns=70, lines=20")
    os.write(terminal.master, b"ada\n")
    terminal.read_until(b"read ada")
    os.write(terminal.master, b"\x03")
    terminal.read_until(b"explain")
    assert run.process.wait(_TIMEOUT_SECONDS) == 9
    assert run.log().count("interrupted") == 1
    assert b"\r" not in (run.folder / "output.log").read_bytes()
    assert [event["number"] for event in run.events("signal")] == [signal.SIGINT]


def test_ctrl_z_stops_the_command_too(supervise, terminal):
    """Both stop, and both go on when the shell says so."""
    code = "import time\nfor n in range(100000): print('n', n, flush=True); time.sleep(0.01)"
    on_it = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    # The kernel stops nobody in a session whose leader is the only process group: a shell stands
    # between.
    run = supervise(command=[*PYTHON, code], preexec_fn=os.setpgrp, **on_it)
    run.wait_for_text("n 5")
    (child,) = marked_processes(run.mark, [])
    os.kill(run.process.pid, signal.SIGTSTP)
    run.wait_for(lambda: read_process(run.process.pid).state == read_process(child).state == "T")
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait_for(lambda: read_process(child).state != "T")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(_TIMEOUT_SECONDS) == 130


def test_a_reader_that_leaves_does_not_end_the_training(supervise):
    """`holdfast run ...

    | head -1` reads one line; the command runs on to its end, and the log has all of it.
    """
    run = supervise(
        command=["sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.2; done; exit 3"]
    )
    assert run.process.stdout.readline() == b"line 1\n"
    run.process.stdout.close()
    run.process.stderr.close()
    run.process.stdout = run.process.stderr = None
    assert run.process.wait(_TIMEOUT_SECONDS) == 3
    assert "line 3" in run.log()


def test_after_a_real_sigkill_the_command_is_started_again(supervise):
    """A trainer that is killed at step 15 runs a second time, each attempt is judged, and the
    run ends well.
    """
    request = json.dumps({"steps": 40, "kill_at": 15, "kills": 1})
    run = supervise(command=[sys.executable, str(TRAINING), request], forked=True)
    code, out, err = run.end()
    assert code == 0, err
    assert out.count("step 14 ") == 2
    assert run.events("restart")[0]["cause"] in err
    assert [event["status"] for event in run.events("attempt_ended")] == [-9, 0]
    assert [event["steps"] for event in run.events("attempt_ended")] == [15, 40]
    verdicts = run.events("verdict")
    assert verdicts[0]["verdict"]["restart"] == "retry"
    assert verdicts[1]["verdict"]["family"] == "ended well"
    assert run.log().count("--- holdfast: attempt 1 ---") == 1


def test_a_signal_between_two_attempts_ends_the_wait(supervise):
    """While the next start is waited for, SIGTERM means that there is none."""
    run = supervise("--restart-delay", "600", command=["sh", "-c", "kill -KILL $$"])
    run.wait_for(
        lambda: (run.folder / "supervisor" / "events.ring").exists() and run.events("restart")
    )
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 137
    assert run.events("stopped")[0]["why"] in err
    assert len(run.events("attempt_started")) == 1
    # The start that was announced is no attempt: `holdfast explain` judges the one that there was,
    # as the run did.
    assert (
        judge(collect(run.folder)).cause
        == json.loads((run.folder / "verdict.json").read_text())["cause"]
        == "H1602"
    )


def test_the_same_death_at_the_same_step_is_the_last(supervise):
    """A trainer that is killed at step 15 each time is run twice and not a third time."""
    request = json.dumps({"steps": 40, "kill_at": 15, "kills": 9})
    run = supervise(command=[sys.executable, str(TRAINING), request], forked=True)
    code, out, err = run.end()
    assert code == 137
    assert out.count("step 14 ") == 2
    assert "step 15" in err


GUARDED_THRICE = """
import os, signal, sys, torch, holdfast
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
guard = holdfast.Guard(
    sys.argv[1], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    loader=holdfast.DataLoader(torch.randn(60, 4), batch_size=1), save_interval_steps=20, async_save=False,
)
made = 0
for batch in guard.batches(max_epochs=1):
    guard.step(batch, lambda values: model(values).square().mean())
    made += 1
    if made == 22:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_guarded_run_that_got_further_is_no_repetition(supervise, tmp_path):
    """Each start dies after 22 steps of its own, and resumes where that had saved.

    It goes on to the end.
    """
    command = [sys.executable, "-c", GUARDED_THRICE, str(tmp_path / "guard")]
    run = supervise(command=command, forked=True)
    code, _, err = run.end()
    assert code == 0, err
    assert len(run.events("attempt_started")) == 3


def test_a_users_mistake_is_not_repeated(supervise):
    """An AttributeError ends the run after one attempt, with its exit code.

    The verdict names the line.
    """
    command = [sys.executable, str(TRAINING), json.dumps({"fail_at": 3})]
    run = supervise(command=command, forked=True)
    code, _, err = run.end()
    assert code == 1
    assert "no_such_attribute" in err
    assert run.events("restart") == []
    found = json.loads((run.folder / "verdict.json").read_text())
    assert found["restart"] == "stop"
    assert "supervised_training.py" in found["where"]


FAILS, LASTS = json.dumps({"fail_at": 9}), json.dumps({"steps": 12})
SPAWN = (
    "import multiprocessing, runpy, sys\n"
    "if __name__ == '__main__':\n"
    "    child = multiprocessing.get_context('spawn').Process("
    "target=runpy.run_path, args=(sys.argv.pop(1),), kwargs={'run_name': '__main__'})\n"
    "    child.start(), child.join()"
)
TRY = (
    "import runpy, sys, traceback\ntry:\n    runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    "except Exception:\n    traceback.print_exc()"
)


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        (["bash", "-c", '"$0" "$@" 2>&1 | cat', sys.executable, TRAINING, FAILS], True),
        ([sys.executable, "-c", SPAWN, TRAINING, FAILS], True),
        # Another training came to its end after it; and what leaves by `sys.exit` or Ctrl-C did not
        # fail.
        (
            ["bash", "-c", f'"$0" "$@" || "$0" "$1" \'{LASTS}\'', sys.executable, TRAINING, FAILS],
            False,
        ),
        ([sys.executable, "-c", SPAWN, TRAINING, json.dumps({"leave_at": 9})], False),
        ([sys.executable, "-c", SPAWN, TRAINING, json.dumps({"interrupt_at": 9})], False),
    ],
    ids=["pipe", "child", "tried again", "child that exits", "child interrupted"],
)
def test_an_exit_code_of_0_hides_no_training_that_died(supervise, command, hidden):
    """The exit code stays that of the command.

    The verdict is the exception that ended the training process.
    """
    run = supervise(command=[str(word) for word in command])
    code, _, err = run.end()
    assert code == 0
    verdict = json.loads((run.folder / "verdict.json").read_text())
    assert (verdict["family"] != "ended well") == hidden, verdict["title"]
    assert ("no_such_attribute" in err.partition("holdfast: ")[2]) == hidden
    assert ("hid the failure" in verdict["summary"]) == hidden


@pytest.mark.parametrize(("then", "last"), [("bye", True), ("model saved", False)])
def test_a_traceback_as_the_last_words_makes_a_good_end_less_sure(supervise, then, last):
    """A script that catches its own failure and exits with 0 is in doubt, unless it went on
    after that.
    """
    # Where the traceback is: of two pipes either may be read first
    said = f"\nsys.stderr.write({then!r})"
    run = supervise(command=[sys.executable, "-c", TRY + said, str(TRAINING), FAILS], forked=True)
    code, _, err = run.end()
    assert code == 0
    assert ("ends with a traceback [H1601]\n" in err) == last
    assert ("learning was not judged [H1626]\n" in err) != last


def test_the_same_directory_is_continued(tmp_path):
    """As a scheduler starts it: output and numbers of attempts go on, for another command too."""
    same, other = f"echo attempt ${ATTEMPT_VARIABLE}", "printf unfinished >&2"
    ended = [
        subprocess.run(
            [*CLI, "--run-dir", str(tmp_path), "--", "sh", "-c", script],
            capture_output=True,
            text=True,
            check=True,
        )
        for script in (same, same, other)
    ]
    assert [each.stdout for each in ended] == ["attempt 0\n", "attempt 1\n", ""]
    assert (tmp_path / "output.log").read_text().count("--- holdfast: attempt ") == 3
    assert ended[2].stderr.startswith("unfinished\nholdfast: ")


def test_without_a_directory_runs_last_leads_to_the_run(tmp_path):
    """A directory named after the script and the time is made in runs/, and the relative link
    leads to it.
    """
    (tmp_path / "train.py").write_text("print('hello')\n")
    subprocess.run(
        [*CLI, "-q", sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True
    )
    (made,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert re.fullmatch(r"train-\d{8}-\d{6}", made.name)
    assert (tmp_path / "runs" / "last").readlink() == Path(made.name)
    assert "hello" in (tmp_path / "runs" / "last" / "output.log").read_text()


def test_streams_that_are_closed_harm_nothing(supervise):
    """A daemon starts us without stdin, stdout and stderr.

    The command finds /dev/null, and the log is whole.
    """
    code = (
        "import os, sys; print([os.path.sameopenfile(0, os.open(os.devnull, 0))], file=sys.stderr);"
        " sys.exit(6)"
    )
    run = supervise(command=[*PYTHON, code], preexec_fn=lambda: os.closerange(0, 3))
    assert run.process.wait(_TIMEOUT_SECONDS) == 6
    assert "[True]" in run.log()


def test_a_run_directory_that_vanishes_ends_nothing(supervise):
    """Somebody deletes it while the command runs: it runs on, and its exit code is passed on."""
    run = supervise(command=["sh", "-c", "echo ready; read line; exit 4"], stdin=subprocess.PIPE)
    run.wait_for_text("ready")
    shutil.rmtree(run.folder)
    out, err = run.process.communicate(b"go on\n", timeout=_TIMEOUT_SECONDS)
    assert run.process.returncode == 4
    assert out == b"ready\n"
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1")]
)
def test_a_hang_is_ended_and_started_again(supervise, launcher):
    """What stands still is asked, then killed, and runs again, with its launcher where it has
    one.
    """
    request = json.dumps({"steps": 40, "hang_at": 15, "kills": 1})
    limits = ["all=120"] * (not launcher) + ["data wait=5", "forward/backward=5", "optimizer=5"]
    options = [word for limit in limits for word in ("--hang-limit", limit)]
    run = supervise(*options, command=[sys.executable, *launcher, str(TRAINING), request])
    code, out, err = run.end()
    assert code == 0, err
    assert out.count("step 14 ") == 2
    assert run.events("hang")
    assert len(run.events("attempt_started")) == 2
    assert run.events("attempt_ended")[0]["signal_sent_by_us"] == signal.SIGTERM
    assert run.events("verdict")[0]["verdict"]["family"] == "hang"


def start_training(
    supervise: Callable[..., Run], tmp_path: Path, **request: Any
) -> tuple[Run, dict[str, Any]]:
    """Return a run whose trainer has taken a step, with the numbers of its processes."""
    pids = tmp_path / "pids"
    wanted = {"steps": 10**6, "step_seconds": 0.005, "pids": str(pids), **request}
    run = supervise(
        "--max-restarts", "0", command=[sys.executable, str(TRAINING), json.dumps(wanted)]
    )
    run.wait_for(pids.exists)
    return run, json.loads(pids.read_text())


@pytest.mark.parametrize("victim", ["supervisor", "trainer"])
def test_nothing_outlives_who_is_killed(supervise, tmp_path, victim):
    """SIGKILL of supervisor or trainer ends trainer and loader workers, a stopped one too."""
    run, pids = start_training(supervise, tmp_path, workers=2, stop_worker=True)
    mark = run.mark
    os.kill(run.process.pid if victim == "supervisor" else pids["trainer"], signal.SIGKILL)
    assert soon_gone(mark, pids["trainer"], *pids["workers"])
    if victim == "trainer":
        assert run.end()[0] == 137
        return
    run.process.wait()
    lost = json.loads(run.wait_for(lambda: _text(run.folder / "supervisor" / "lost.json")))
    assert set(lost) == {"unix_seconds", "killed", "left"}
    assert not lost["left"]


def test_under_torchrun_every_rank_ends_with_the_supervisor(supervise, tmp_path):
    """The launcher puts ranks into sessions of their own.

    They are found all the same.
    """
    pids = tmp_path / "pids"
    request = json.dumps({"steps": 10**6, "step_seconds": 0.005, "pids": str(pids), "workers": 1})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = supervise(command=[*launcher, str(TRAINING), request])
    run.wait_for(pids.exists)
    mark = run.mark
    (session,) = {
        found.session
        for pid in (json.loads(pids.read_text())["trainer"],)
        if (found := read_process(pid))
    }
    assert session not in (run.process.pid, os.getsid(0))
    run.process.kill()
    assert soon_gone(mark)


def test_restarts_of_torchrun_are_left_to_it(supervise):
    """A rank that is killed is started again by the launcher, within one attempt of ours."""
    script = 'echo rank; [ "$TORCHELASTIC_RESTART_COUNT" -ge 1 ] || kill -KILL $$'
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=1",
        "--no-python",
    ]
    run = supervise(command=[*launcher, "sh", "-c", script])
    code, out, _ = run.end()
    assert (code, out.count("rank\n")) == (0, 2)
    assert len(run.events("attempt_started")) == 1
    assert run.events("restart") == []


def test_a_supervised_supervisor_leaves_nothing_either(supervise, tmp_path):
    """Of two, one within the other, the outer one is killed.

    The inner one and its command are gone.
    """
    inner = [
        *CLI,
        "--run-dir",
        str(tmp_path / "inner"),
        "--",
        "sh",
        "-c",
        "setsid sleep 600 & sleep 600",
    ]
    run = supervise(command=inner)
    mark = run.mark

    def sleeping_processes() -> int:
        count = 0
        for pid in marked_processes(mark, []):
            with contextlib.suppress(OSError):
                count += Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        return count

    # A process that is just being started has no mark yet, and would not be seen below.
    run.wait_for(lambda: sleeping_processes() == 2)
    run.process.kill()
    assert soon_gone(mark)


def test_as_the_first_process_of_a_container_everything_is_the_same(tmp_path):
    """In a pid namespace of its own the supervisor is process 1.

    Exit code and leftovers are as ever.
    """
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no pid namespace can be made here")
    command = ["sh", "-c", "setsid sleep 600 & exit 5"]
    arguments = [*namespace, *CLI, "--run-dir", str(tmp_path / "run"), "--", *command]
    assert subprocess.run(arguments, check=False, timeout=_TIMEOUT_SECONDS).returncode == 5
    kinds = [event.kind for event in read_events(tmp_path / "run" / "supervisor")]
    assert "leftovers" in kinds
    assert "not_killable" not in kinds


def test_memory_that_is_refused_is_told_as_such(supervise):
    """Under RLIMIT_DATA the allocation fails with an error of torch's, which the verdict names."""
    code = "import torch\nx = [torch.ones(2**27) for _ in range(64)]"
    run = supervise(
        "--max-restarts",
        "0",
        command=["sh", "-c", f"ulimit -d 3000000; exec {sys.executable} -c '{code}'"],
    )
    code, _, _ = run.end()
    assert code == 1
    found = json.loads((run.folder / "verdict.json").read_text())
    assert found["family"] == "host out of memory"


def test_a_kill_by_the_kernel_for_memory_is_counted(supervise, memory_group):
    """In a control group of 200 MB the kernel kills the command; counter and verdict say so."""
    code = "x = []\nwhile True: x.append(bytearray(1 << 24))"
    run = supervise("--max-restarts", "0", command=[*PYTHON, code], preexec_fn=memory_group)
    status, _, _ = run.end()
    assert status == 137
    (ended,) = run.events("attempt_ended")
    assert ended["oom_kills"] == 1
    found = json.loads((run.folder / "verdict.json").read_text())
    assert found["family"] == "host out of memory"


@pytest.fixture
def memory_group() -> Iterator[Callable[[], None]]:
    """Return a function that puts the calling process into a control group of 200 MB."""
    own = next(
        (each for each in group_folders(Path("/"), "memory") if (each / "cgroup.procs").exists()),
        None,
    )
    group = None if own is None else own / f"holdfast_test_supervised_{os.getpid()}"
    try:
        assert group is not None
        group.mkdir()
        limit = next(
            each
            for name in ("memory.limit_in_bytes", "memory.max")
            if (each := group / name).exists()
        )
        limit.write_text(str(200 << 20))
    except (OSError, StopIteration, AssertionError) as error:
        if group is not None and group.exists():
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.05)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_lines_that_were_printed_are_kept_when_the_command_is_killed(supervise):
    """A pipe makes Python collect 8 KiB before it writes.

    What stood there would be lost with SIGKILL.
    """
    script = "import os, sys; print('last words'); os.kill(os.getpid(), 9)"
    for options in ([], ["--no-observe"]):
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
        }
        run = supervise(
            "--max-restarts", "0", *options, command=[sys.executable, "-c", script], env=environment
        )
        assert run.end()[0] == 137
        assert "last words" in run.log()


def test_a_trainer_that_is_stopped_by_a_signal_is_said_in_log_events_and_verdict(
    supervise, tmp_path
):
    """SIGSTOP is no hang and no silence.

    It is said that and when it stopped, that it went on, and in the verdict.
    """
    run, told = start_training(supervise, tmp_path)
    os.kill(told["trainer"], signal.SIGSTOP)
    run.wait_for(lambda: run.events("process_stopped"))
    os.kill(told["trainer"], signal.SIGCONT)
    run.wait_for(lambda: run.events("process_continued"))
    run.process.send_signal(signal.SIGTERM)
    _, _, err = run.end()
    assert "kill -CONT" in err
    assert (
        "was stopped by a signal"
        in json.loads((run.folder / "verdict.json").read_text())["summary"]
    )


def test_what_helpers_leave_that_ended_well_is_bounded(supervise):
    """Of 70 processes that came and went the newest 64 stay, and each that ended badly.

    Whoever reads goes on.
    """
    helpers = """
import subprocess, sys
bad = "import os; os.kill(os.getpid(), 9)", "import sys; sys.exit(3)", "1 / 0"
one = lambda code: subprocess.Popen([sys.executable, "-c", code])
[each.wait() for each in map(one, bad)]
for _ in range(10): [each.wait() for each in [one("pass") for _ in range(7)]]
print("all have ended", flush=True), sys.stdin.read()
"""
    run = supervise(command=[sys.executable, "-c", helpers], stdin=subprocess.PIPE)
    processes = run.folder / "processes"
    run.wait_for(processes.is_dir)
    follower = RunFollower(run.folder)
    run.wait_for(
        lambda: [follower.new()] and "all have" in run.log() and len([*processes.iterdir()]) <= 68
    )
    assert (run.end()[0], len([*processes.iterdir()])) == (0, 1 + 3 + 64)
    told = [event.kind for folder in processes.iterdir() for event in read_events(folder)]
    assert (sorted(told), follower.problems) == (["exception", "exiting", "exiting"], {})
    assert judge(collect(run.folder)).family == "ended well"
    for command in ("report", "explain"):
        done = subprocess.run(
            [*CLI[:-1], command, str(run.folder)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
