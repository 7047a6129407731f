"""Observation begins before the script, in real interpreters, and the script cannot tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.events.event import Event
from holdfast.recorder.progress import read_board
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import BOARD_FILE, FAULTHANDLER_FILE, STACKS_SIGNAL, read_processes
from holdfast.supervise.launch.commands import make_observed_environment

Run = Callable[..., subprocess.CompletedProcess[str]]
_OUTSIDE = sys._base_executable  # type: ignore[attr-defined] # the interpreter without the packages of the environment


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def run(tmp_path: Path, run_directory: Path) -> Run:
    """Return a function that runs a script, observed or not."""

    def run_script(
        script: str,
        *options: str,
        observed: bool = True,
        python: str = sys.executable,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        environment = {**os.environ, **variables}
        if observed:
            environment = make_observed_environment(environment, run_directory, 2)
        command = [python, *options, str(file)]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run_script


def events(run: Path, pid: int | None = None) -> list[Event]:
    return [
        event
        for folder, info in read_processes(run)
        if pid in (None, info.pid)
        for event in read_events(folder)
    ]


def same_with_and_without(
    run: Run, script: str, *options: str, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Check that a script gives the same output and status when it is observed, and return that."""
    plain = run(script, *options, observed=False, **more)
    observed = run(script, *options, **more)
    assert (observed.returncode, observed.stdout, observed.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )
    return observed


def test_a_script_cannot_tell_that_it_is_observed(run: Run) -> None:
    """Paths, loaded names, handlers and what follows from them are those of an unobserved
    script.
    """
    script = """
        import signal, sys
        print(sys.path)
        print("sitecustomize" in sys.modules)
        try:
            import sitecustomize
        except ImportError as error:
            print(type(error).__name__, error, error.name)
        print([signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)])
        print(signal.signal.__name__, sys.exit.__name__)
        import inspect
        print(inspect.signature(signal.signal))
        import threading
        print(threading.active_count())
    """
    assert same_with_and_without(run, script).returncode == 0


@pytest.mark.parametrize("body", ["print('theirs')", "1 / 0", "import nothing_of_this_name"])
def test_a_sitecustomize_of_theirs_runs_as_without_us(
    run: Run, tmp_path: Path, run_directory: Path, body: str
) -> None:
    """The next sitecustomize on the path is imported, or fails, with the same words.

    Ours began before it.
    """
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(f"here = 1\n{body}\n")
    script = (
        "import sitecustomize; print(sitecustomize.here, sitecustomize.__file__,"
        " sitecustomize.__spec__.name)"
    )
    same_with_and_without(run, script, PYTHONPATH=str(theirs))
    assert len(read_processes(run_directory)) == 1


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_python_that_ignores_the_environment_is_left_alone(
    run: Run, run_directory: Path, option: str
) -> None:
    """Options that keep PYTHONPATH or site out keep us out, and the script runs."""
    assert same_with_and_without(run, "print(1)", option).stdout == "1\n"
    assert read_processes(run_directory) == []


@pytest.mark.parametrize("broken", ["missing", "a file in the way", "relative"])
def test_a_run_directory_that_cannot_be_used_changes_nothing(tmp_path: Path, broken: str) -> None:
    """The script runs unobserved, in silence, and no directory is made that nobody asked for."""
    directory = tmp_path / "run"
    if broken != "missing":
        directory.mkdir()
    if broken == "a file in the way":
        (directory / "processes").touch()
    environment = make_observed_environment(os.environ, directory, 0)
    if broken == "relative":
        environment["OBSERVED_BY_HOLDFAST"] = "run"
    command = [sys.executable, "-c", "print(1)"]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
    assert directory.exists() is (broken != "missing")
    assert not (directory / "processes").is_dir()


def test_holdfast_is_found_where_the_script_has_none(run: Run, run_directory: Path) -> None:
    """In an environment without holdfast it is taken from where this one lies, and nothing else
    from there.
    """
    script = """
        import importlib.util
        print([importlib.util.find_spec(name) is None for name in ("torch", "typer", "safetensors")])
    """
    has_none = (
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('holdfast') is not None)"
    )
    if run(has_none, observed=False, python=_OUTSIDE).returncode:
        pytest.skip("the interpreter that this environment was made from has a holdfast too")
    same_with_and_without(run, script, python=_OUTSIDE)
    assert len(read_processes(run_directory)) == 1


def test_what_follows_an_exception_of_the_script(run: Run, run_directory: Path) -> None:
    """An uncaught exception prints what it prints without us, and is recorded with frames and
    causes.
    """
    script = """
        def inner():
            raise KeyError("no such key")
        try:
            inner()
        except KeyError as error:
            raise ValueError("x" * 5000) from error
    """
    assert same_with_and_without(run, script).returncode == 1
    exception, exiting = events(run_directory)
    assert (exception.kind, exception.data["type"], exception.data["fatal"]) == (
        "exception",
        "ValueError",
        True,
    )
    assert exception.data["message"] == "x" * 2000
    assert [frame[2] for frame in exception.data["frames"]] == ["<module>"]
    (cause,) = exception.data["chain"]
    assert (cause["type"], cause["message"]) == ("KeyError", "'no such key'")
    assert [frame[1:] for frame in cause["frames"]] == [[5, "<module>"], [3, "inner"]]
    assert exiting.data == {"how": "exception", "status": None, "said": None}


@pytest.mark.parametrize(("status", "recorded"), [("3", 3), ("'bad things'", 1), ("", None)])
def test_sys_exit(run: Run, run_directory: Path, status: str, recorded: int | None) -> None:
    """What a script leaves with is recorded, unless it is nothing to speak of."""
    same_with_and_without(run, f"import sys; sys.exit({status})")
    data = [event.data for event in events(run_directory)]
    said = "bad things" if status.startswith("'") else None
    assert data == ([{"how": "sys.exit", "status": recorded, "said": said}] if recorded else [])


def test_stacks_upon_a_signal(run: Run, run_directory: Path) -> None:
    """The signal for stacks does not end an observed script: it writes its stacks, and goes on."""
    script = f"""
        import os
        def deep():
            os.kill(os.getpid(), {STACKS_SIGNAL})
        deep()
        print("alive")
    """
    assert run(script).stdout == "alive\n"
    ((folder, _),) = read_processes(run_directory)
    assert "in deep" in (folder / FAULTHANDLER_FILE).read_text()


def test_a_signal_that_the_script_handles_is_its_own(run: Run, run_directory: Path) -> None:
    """A handler for it set by the script is called, and it is shown that the signal must not be
    sent.
    """
    script = f"""
        import os, signal
        signal.signal({STACKS_SIGNAL}, lambda *_: print("handled"))
        os.kill(os.getpid(), {STACKS_SIGNAL})
    """
    assert same_with_and_without(run, script).stdout == "handled\n"
    ((folder, info),) = read_processes(run_directory)
    assert info.stacks_signal is None
    assert (folder / FAULTHANDLER_FILE).read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_the_signals_of_schedulers_are_left_to_the_script(
    run: Run, run_directory: Path, number: int
) -> None:
    """An observed script that does not handle one ends of it, as without us, and its stacks are
    not written.
    """
    assert run(f"import os; os.kill(os.getpid(), {int(number)})").returncode == -number
    ((folder, info),) = read_processes(run_directory)
    assert info.stacks_signal == STACKS_SIGNAL
    assert (folder / FAULTHANDLER_FILE).read_text() == ""


def test_a_crash_leaves_its_stacks(run: Run, run_directory: Path) -> None:
    """A segmentation fault leaves the stacks of the process, which die with it otherwise."""
    assert run("import ctypes; ctypes.string_at(0)").returncode == -signal.SIGSEGV
    ((folder, _),) = read_processes(run_directory)
    assert "string_at" in (folder / FAULTHANDLER_FILE).read_text()


def test_a_bare_fork_shows_itself_only_when_something_happens(
    run: Run, run_directory: Path
) -> None:
    """A forked child writes nothing into what is its parent's, and gets a folder once it has an
    exception.
    """
    script = """
        import os, sys
        for fails in (False, True):
            child = os.fork()
            if child == 0:
                if fails:
                    raise ValueError("in the child")
                sys.exit(5)
            os.waitpid(child, 0)
        sys.exit(4)
    """
    same_with_and_without(run, script)
    (_, parent), (_, child) = read_processes(run_directory)
    assert child.ppid == parent.pid
    assert [event.data["status"] for event in events(run_directory, parent.pid)] == [4]
    assert [event.kind for event in events(run_directory, child.pid)] == ["exception", "exiting"]
    for folder, info in read_processes(run_directory):
        board = read_board(folder / BOARD_FILE)
        assert board is not None
        assert board.pid == info.pid


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(run: Run, run_directory: Path, method: str) -> None:
    """What ends a child is recorded by the child.

    An exception that its parent was handling is not taken for it.
    """
    script = f"""
        import multiprocessing
        def fails():
            raise LookupError("of the child")
        def works():
            pass
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            try:
                raise KeyError("handled by the parent")
            except KeyError:
                for target, name in ((fails, "failing"), (works, "working")):
                    process = context.Process(target=target, name=name)
                    process.start()
                    process.join()
                    print(process.exitcode)
    """
    assert same_with_and_without(run, script).stdout == "1\n0\n"
    (exception,) = [event for event in events(run_directory) if event.kind == "exception"]
    assert (exception.data["type"], exception.data["message"]) == ("LookupError", "of the child")
    assert (exception.data["thread"], exception.data["fatal"]) == ("failing", True)


@pytest.mark.parametrize("error", ["ImportError('no library')", "ValueError('odd')"])
def test_an_import_that_fails_reads_the_same(run: Run, tmp_path: Path, error: str) -> None:
    """The traceback of a torch that cannot be imported has no line of ours."""
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    assert error[:10] in same_with_and_without(run, "import torch").stderr


def test_a_torch_that_is_not_what_we_know(run: Run, run_directory: Path, tmp_path: Path) -> None:
    """Hooks that do not fit are noted in the run directory, and the script goes on.

    A look for torch is no import.
    """
    (tmp_path / "torch.py").write_text("__version__ = '99'")
    script = """
        import importlib.util
        print(type(importlib.util.find_spec("torch").loader).__name__ != "")
        import torch
        print(torch.__loader__ is torch.__spec__.loader, type(torch.__loader__).__name__, torch.__version__)
    """
    assert same_with_and_without(run, script).stdout == "True\nTrue SourceFileLoader 99\n"
    ((_, info),) = read_processes(run_directory)
    assert info.torch == "99"
    (failed,) = run_directory.glob("processes/failed-*.txt")
    assert "AttributeError" in failed.read_text()


def test_what_ranks_say(run: Run, run_directory: Path) -> None:
    """The rank comes from the launcher, or else from the scheduler.

    What is no number is no rank.
    """
    run("pass", RANK="3", LOCAL_RANK="1", WORLD_SIZE="8", SLURM_PROCID="7")
    run("pass", SLURM_PROCID="7", SLURM_NTASKS="many")
    (_, first), (_, second) = read_processes(run_directory)
    assert (first.rank, first.local_rank, first.world_size) == (3, 1, 8)
    assert (second.rank, second.local_rank, second.world_size) == (7, None, None)
