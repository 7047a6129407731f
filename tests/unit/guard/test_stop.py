"""A request to stop by a signal.

Whose handlers it takes, calls and gives back, and what comes of it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.core.errors import PolicyError
from holdfast.core.policy.policy import Policy
from holdfast.guard import stop as stop_module
from holdfast.guard.stop import Interrupted, StopRequest
from holdfast.loader.workers import child_signals


class Lost(BaseException):
    """What the handler of a child's death raises, as that of loader workers does."""


@pytest.fixture
def dying() -> Iterator[Callable[[StopRequest], threading.Thread]]:
    """Return a function that makes a thread which kills a child once a stop request is handled.

    The child's death makes another handler raise `Lost` within that of the request.
    """

    def raise_lost(number: int, frame: object) -> None:
        raise Lost

    child = subprocess.Popen(["sleep", "100"])
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    signal.signal(signal.SIGCHLD, raise_lost)

    def kill_while_handled(stop: StopRequest) -> None:
        while not stop._settling:
            time.sleep(0.001)
        child.kill()

    yield lambda stop: threading.Thread(target=kill_while_handled, args=[stop], daemon=True)
    for number, handler in before.items():
        signal.signal(number, handler)
    child.kill()
    child.wait()


@pytest.mark.parametrize(("waits", "raised"), [(False, Lost), (True, Interrupted)])
def test_a_worker_that_dies_of_the_same_signal_loses_neither_request_nor_message(
    dying: Callable[[StopRequest], threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    waits: bool,
    raised: type[BaseException],
) -> None:
    """Its loss is raised in the midst of the handler, which ends its work all the same.

    So the second one counts.
    """
    # On a busy machine the child may take that long to die.
    monkeypatch.setattr(stop_module, "_ONE_REQUEST_SECONDS", 1.0)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    stop = StopRequest()
    stop.install()
    dying(stop).start()
    with pytest.raises(raised):
        if waits:
            with stop:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert stop.reason == "SIGTERM"
    assert capfd.readouterr().err.count("holdfast: ") == 1
    assert heard == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2
    assert capfd.readouterr().err == ""
    stop.uninstall()


def test_after_a_request_torch_raises_about_no_worker_also_from_within_our_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a loader of holdfast's and one of torch's alive, workers that got the same signal
    disturb no step.
    """

    def as_torch_does(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    monkeypatch.setattr(child_signals, "_previous_handler", as_torch_does)
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    signal.signal(signal.SIGCHLD, child_signals._on_child)
    stop = StopRequest()
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        assert subprocess.run(["true"], check=True).returncode == 0
    finally:
        stop.uninstall()
        for number, handler in before.items():
            signal.signal(number, handler)


HANDLED = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Have the handlers of a program that was started in a terminal, and those of before back at
    the end.
    """
    names = (*HANDLED, "SIGUSR2", "SIGQUIT", "SIGCHLD")
    before = {
        number: signal.getsignal(number) for number in (getattr(signal, name) for name in names)
    }
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(getattr(signal, name)) for name in HANDLED]


def without_warnings(handlers: list[object]) -> list[object]:
    """Return handlers of the signals in `HANDLED`, with SIGUSR1 ignored."""
    return [
        signal.SIG_IGN if name == "SIGUSR1" else handler
        for name, handler in zip(HANDLED, handlers, strict=True)
    ]


# What a second signal meets: it ends the process, unless it is only a warning.
AFTER_A_SIGNAL = without_warnings([signal.SIG_DFL] * len(HANDLED))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no time to see whether a signal comes twice."""
    monkeypatch.setattr(stop_module, "_ONE_REQUEST_SECONDS", 0.0)


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize("name", HANDLED)
def test_handlers_are_given_back_also_after_a_signal(name: str) -> None:
    """Each signal does afterwards what it did before the guard, except SIGUSR1, which is ignored."""
    before = handlers()
    stop = StopRequest(HANDLED)
    stop.install()
    os.kill(os.getpid(), getattr(signal, name))
    assert (stop.reason, stop.signal_name) == (name, name)
    assert handlers() == AFTER_A_SIGNAL, "a second one ends the process, Ctrl-C too"
    stop.uninstall()
    assert handlers() == without_warnings(before)


@pytest.mark.usefixtures("usual_handlers")
def test_without_a_signal_all_handlers_are_given_back() -> None:
    """SIGUSR1, which a stop by a signal leaves ignored, ends a process again."""
    before = handlers()
    stop = StopRequest(HANDLED)
    stop.install()
    stop.request("a time limit")
    stop.uninstall()
    assert handlers() == before


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize("first_closed", ["older", "newer"])
def test_two_guards_are_asked_by_one_signal_and_give_back_what_was_there(
    first_closed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both stop, one speaks; in whichever order they are closed, nothing of them is left."""
    before = handlers()
    older, newer = StopRequest(HANDLED), StopRequest(HANDLED)
    for stop in (older, newer):
        stop.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (older.reason, newer.reason) == ("SIGUSR1", "SIGUSR1")
    assert capfd.readouterr().err.count("holdfast: ") == 1
    for stop in (older, newer) if first_closed == "older" else (newer, older):
        stop.uninstall()
    assert handlers() == without_warnings(before)


# The exit code of a child whose loop has seen the request.
GOES_ON = 7


def fork_with_blocked_stderr(guards: int) -> int:
    """Return a child with some guards, whose writes to stderr never return.

    It exits with `GOES_ON` after SIGTERM, once its main thread runs again.
    """
    _, stderr = os.pipe()
    os.set_blocking(stderr, False)
    with suppress(BlockingIOError):
        while True:
            os.write(stderr, b"x" * 4096)
    os.set_blocking(stderr, True)
    is_ready, ready = os.pipe()

    child = os.fork()
    if child == 0:
        os.dup2(stderr, 2)
        requests = [StopRequest(HANDLED) for _ in range(guards)]
        for request in requests:
            request.install()
        os.write(ready, b"1")
        while requests[-1].reason != "SIGTERM":
            time.sleep(0.01)
        os._exit(GOES_ON)

    os.read(is_ready, 1)
    return child


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize("guards", [1, 2])
def test_a_second_signal_ends_a_process_that_cannot_announce_the_first(guards: int) -> None:
    """A launcher that reads nothing must not take the second signal's effect away."""
    child = fork_with_blocked_stderr(guards)
    deadline = time.monotonic() + 30
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        os.kill(child, signal.SIGINT)
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    assert ended
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_a_run_that_cannot_announce_a_signal_goes_on_to_save() -> None:
    """Writing the announcement to a pipe that nobody reads would keep the main thread for good."""
    child = fork_with_blocked_stderr(guards=1)
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + 30
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    assert ended
    assert os.waitstatus_to_exitcode(status) == GOES_ON


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_a_second_signal_can_be_sent_once_the_first_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads the announcement may send the second signal at once."""
    handlers_then: list[list[object]] = []
    monkeypatch.setattr(stop_module, "_announce", lambda *_: handlers_then.append(handlers()))
    older, newer = StopRequest(HANDLED), StopRequest(HANDLED)
    older.install()
    newer.install()

    os.kill(os.getpid(), signal.SIGTERM)

    assert handlers_then == [AFTER_A_SIGNAL]
    newer.uninstall()
    older.uninstall()


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_an_evaluation_after_a_stopped_loop_runs(tmp_path: Path) -> None:
    """The signal has ended the loop, and the code after it still runs."""
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[torch.ones(4, 2)] * 4,
    )
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    losses = []
    with guard.evaluate():
        losses.append(float(model(torch.ones(4, 2)).mean()))

    assert (guard.stop_reason, guard.global_step) == ("SIGTERM", 2)
    assert len(losses) == 1


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_a_guard_over_a_closed_one_is_asked_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """The handler of a closed guard that another one has found is passed by, and not given back."""
    before = handlers()
    closed, stop = StopRequest(HANDLED), StopRequest(HANDLED)
    closed.install()
    stop.install()
    closed.uninstall()
    os.kill(os.getpid(), signal.SIGHUP)
    assert (closed.reason, stop.reason) == (None, "SIGHUP")
    assert "ends the process at once" in capfd.readouterr().err
    stop.uninstall()
    assert handlers() == without_warnings(before)


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_a_handler_of_the_user_is_called_too(name: str) -> None:
    """Upon the first signal and upon the second, which it has for itself then."""
    heard: list[int] = []
    signal.signal(getattr(signal, name), lambda number, _: heard.append(number))
    stop = StopRequest(HANDLED)
    stop.install()
    for count in (1, 2):
        os.kill(os.getpid(), getattr(signal, name))
        assert (stop.reason, len(heard)) == (name, count)
    stop.uninstall()


@pytest.mark.usefixtures("usual_handlers")
def test_what_faulthandler_has_is_left_to_it(tmp_path: Path) -> None:
    """A script that has its stacks printed upon SIGUSR1 keeps that.

    The guard says which signal does not stop it.
    """
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            stop = StopRequest(HANDLED)
            stop.install()
            os.kill(os.getpid(), signal.SIGUSR1)
            stop.uninstall()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (stop.reason, stop.left_alone) == (None, ["SIGUSR1"])
    assert "test_what_faulthandler_has" in (tmp_path / "stacks").read_text()


@pytest.mark.usefixtures("usual_handlers")
def test_outside_the_main_thread_nothing_is_handled() -> None:
    """Python allows no handlers there, neither to set nor to give back; a guard works without."""
    before = handlers()
    stop = StopRequest(HANDLED)
    thread = threading.Thread(target=stop.install)
    thread.start()
    thread.join()
    assert handlers() == before
    stop.install()
    thread = threading.Thread(target=stop.uninstall)
    thread.start()
    thread.join()
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
    assert stop.reason is None


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize(
    ("name", "times", "status"),
    [("SIGUSR1", 2, 0), ("SIGHUP", 1, 0), ("SIGHUP", 2, -1), ("SIGTERM", 1, -15)],
)
def test_a_forked_child_leaves_the_first_signal_to_its_parent(
    name: str, times: int, status: int
) -> None:
    """One that is sent to all processes does not end a worker.

    SIGTERM, by which parents end children, does.
    """
    stop = StopRequest(HANDLED)
    stop.install()
    child = os.fork()
    if child == 0:
        for _ in range(times):
            os.kill(os.getpid(), getattr(signal, name))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    stop.uninstall()
    assert stop.reason is None


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_a_guard_in_a_forked_child_is_asked_itself() -> None:
    """What it finds is the handler of its parent's guard, which has no part in it."""
    parents = StopRequest(HANDLED)
    parents.install()
    child = os.fork()
    if child == 0:
        own = StopRequest(HANDLED)
        own.install()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if own.reason == "SIGTERM" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    parents.uninstall()


@pytest.mark.usefixtures("usual_handlers", "at_once")
def test_a_notebook_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """A cell is interrupted when its step is saved.

    The next cell goes on with the same guard, and can be too.

    The kernel has handlers of its own between cells, and Python's within one.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[torch.randn(4, 2) for _ in range(20)],
    )

    def run_cell(interrupted_at: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for batch in guard.batches(max_epochs=1):
                guard.step(batch, lambda batch: model(batch).square().mean())
                if guard.global_step == interrupted_at:
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    for step in (3, 8):
        with pytest.raises(KeyboardInterrupt):
            run_cell(interrupted_at=step)
        assert (guard.global_step, guard.stop_reason) == (step, "SIGINT")
    run_cell(interrupted_at=1000)
    assert (guard.global_step, guard.stop_reason) == (20, None)
    assert [
        event.data.get("signal") for event in guard.events() if event.kind == "stop_requested"
    ] == ["SIGINT"] * 2


@pytest.mark.usefixtures("usual_handlers", "at_once")
@pytest.mark.parametrize("code", [0, 85])
def test_an_exit_code_of_the_policy_is_that_of_a_loop_of_ones_own_too(
    tmp_path: Path, code: int
) -> None:
    """Where the loop is not the guard's, the step after the signal saves and ends the process
    with it.
    """
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        stop_exit_code=code,
    )
    guard.step(torch.randn(4, 2), lambda batch: model(batch).square().mean())
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(SystemExit) as raised:
        guard.step(torch.randn(4, 2), lambda batch: model(batch).square().mean())
    assert raised.value.code == code
    assert holdfast.latest(tmp_path).global_step == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_signals", ("SIGKILL",)),
        ("stop_signals", ("USR1",)),
        ("stop_signals", "SIGTERM"),
        ("stop_signals", (signal.SIGTERM,)),
        ("stop_exit_code", 256),
        ("stop_exit_code", -1),
        ("stop_exit_code", True),
    ],
)
def test_signals_and_codes_that_cannot_be_are_refused_when_the_policy_is_made(
    field: str, value: object
) -> None:
    """H102 names the field.

    A signal that nobody can handle, a name that there is not, a code that no process has.
    """
    with pytest.raises(PolicyError, match=rf"{field}=[\s\S]*\[H102\]"):
        Policy(**{field: value})


def test_signals_are_given_by_yaml_and_variable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both as every other list, where none is an empty one."""
    file = tmp_path / "policy.yaml"
    file.write_text("stop_signals: [SIGTERM, SIGUSR2]\nstop_exit_code: 85\n")
    policy = Policy.from_yaml(file)
    assert (policy.stop_signals, policy.stop_exit_code) == (("SIGTERM", "SIGUSR2"), 85)
    monkeypatch.setenv("HOLDFAST_STOP_SIGNALS", "SIGUSR1, SIGTERM")
    assert Policy.from_yaml(file).stop_signals == ("SIGUSR1", "SIGTERM")
    monkeypatch.setenv("HOLDFAST_STOP_SIGNALS", "none")
    assert Policy().stop_signals == ()


def test_a_second_ctrl_c_at_a_prompt_raises_keyboard_interrupt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a notebook, whose variables would be lost with the process, the first one only asks."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest(("SIGINT",))
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stop.uninstall()
        signal.signal(signal.SIGINT, before)
    assert "SIGINT" in capfd.readouterr().err
