"""Run one trial: start the command, inject a fault, and restart the command as a scheduler would.

An attempt is one start of the command, which `Bench` performs and observes. `run_trial` makes
attempts until the training run is complete. `fault_plans` decides what to inject, and `comparison`
interprets the recorded traces.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from holdfast.chaos.injection.change_watcher import ChangeWatcher
from holdfast.chaos.injection.listener import CallListener
from holdfast.chaos.injection.plan import (
    COMMAND_FILE,
    MET_FILE,
    Action,
    AttemptPlan,
    Injection,
)
from holdfast.chaos.injection.refuser import Refuser
from holdfast.chaos.trace import RecordedSave, Segment, TraceEvent, read_segment
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError
from holdfast.recorder.run_files import NOTIFY_VARIABLE, OBSERVE_VARIABLE
from holdfast.supervise.launch import child_start
from holdfast.supervise.launch.commands import make_environment
from holdfast.supervise.launch.kernel import become_subreaper
from holdfast.supervise.process_tree import Tree, kill_all, marked_processes, signal_all

# How often to check whether a running command has ended.
POLL_SECONDS = 0.02
# After the command has ended, its remaining processes have this much time to end too. Processes
# that are still running after that count as left behind.
LEFTOVER_GRACE_SECONDS = 0.5
# How long to wait for killed processes to disappear.
KILL_SECONDS = 5.0
# How many bytes from the end of the command's output are kept: a few screens of text.
OUTPUT_TAIL_BYTES = 4000
# With less free disk space than this, the traces may be incomplete.
MIN_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAttempt:
    """One start of the command: how it ended, and the records of its processes.

    Args:
        status: The exit code of the command, or the negative number of the signal that killed it.
        seconds: The time from the command's start to its end.
        hung: Whether the command was killed because it made no progress or took too long.
        leftover_processes: The number of processes that were still running after the command had
            ended.
        output: The end of the command's output.
        segments: The records of each Python process, in the order of their first records.
        observer_error: The last line of an error message from the observer; empty if there was no
            error.
        refused_calls: The number of writes and reads that the campaign made fail.
        changes: Descriptions of the system calls by which the watched save changed files, with
            `Action.WATCH_CHANGES`.
    """

    status: int
    seconds: float
    hung: bool
    leftover_processes: int
    output: str
    segments: list[Segment]
    observer_error: str = ""
    refused_calls: int = 0
    changes: tuple[str, ...] = ()

    def events(self, kind: str) -> list[TraceEvent]:
        """Return the events of the given kind from all processes."""
        return [event for segment in self.segments for event in segment.events(kind)]

    @property
    def saves(self) -> list[RecordedSave]:
        """Return the saves of all processes."""
        return [save for segment in self.segments for save in segment.saves]

    @property
    def most_steps(self) -> int:
        """Return the largest number of steps that any one process took."""
        return max((len(segment.steps) for segment in self.segments), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All attempts of one trial.

    Args:
        attempts: The attempts, in order.
        files: The files in the workplace at the end of the trial.
        damaged: The file that was damaged between the first two attempts, or of which a read failed
            in the second attempt. None if there is no such file.
        read: The files that were written in this trial and that restarts read before their first
            step.
    """

    attempts: list[TrialAttempt]
    files: set[Path]
    damaged: Path | None = None
    read: set[Path]

    @property
    def last(self) -> TrialAttempt:
        """Return the last attempt."""
        return self.attempts[-1]

    @property
    def seconds(self) -> float:
        """Return the total duration of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    def segments_by_rank(self) -> dict[int, list[Segment]]:
        """Return the records of each process that took steps, grouped by rank, in order."""
        segments_by_rank: dict[int, list[Segment]] = {}
        for attempt in self.attempts:
            for segment in attempt.segments:
                if segment.steps:
                    segments_by_rank.setdefault(segment.rank, []).append(segment)
        return segments_by_rank


# A function that is called between the first two attempts with the workplace and the paths of
# saves. It damages a checkpoint and returns its path, or None if there is no checkpoint.
Damage = Callable[[Workplace, Sequence[Path]], Path | None]


class Bench:
    """Starts a command in its workplace and observes it.

    Args:
        program: The path of the command's executable.
        command: The words of the command.
        workplace: The copy of the working directory, in which the command runs.
        deadline: The time at which the campaign must end, on the clock of `time.monotonic`.
    """

    # Whether orphaned processes of the command become children of this process; see
    # `adopt_orphans`.
    adopts_orphans = False

    def __init__(
        self, program: str, command: Sequence[str], workplace: Workplace, deadline: float
    ) -> None:
        self._program = workplace.word(program)
        self._command = [workplace.word(word) for word in command]
        self.workplace = workplace
        self.deadline = deadline
        # An attempt counts as hanging if it writes no record and prints nothing for
        # `stall_seconds`, or takes longer than `max_seconds`. The campaign lowers both limits once
        # it has measured the undisturbed run.
        self.stall_seconds = 600.0
        self.max_seconds = 1e9
        # How long the command ran, in total over all attempts.
        self.command_seconds = 0.0
        self._attempts_started = 0

    def attempt(self, injection: Injection | None = None) -> TrialAttempt:
        """Start the command once, wait for it to end, and return a record of the attempt.

        Args:
            injection: What to inject; None for nothing.

        Raises:
            PolicyError: H730 if no disk space is left for the traces.
        """
        self._attempts_started += 1
        mark = f"{self.workplace.scratch.name}-{self._attempts_started}"
        plan = AttemptPlan(
            injection=injection or Injection(),
            trial_began=self.workplace.began,
            writable_folders=tuple(str(folder) for folder in self.workplace.writable_folders),
        )
        traces = self.workplace.scratch / f"attempt-{self._attempts_started}"
        # `sitecustomize` writes into this folder if the observer cannot be imported.
        (traces / "processes").mkdir(parents=True)
        plan.write(traces)
        tree = Tree(mark) if self.adopts_orphans else None
        listener = _new_listener(traces, plan)
        began = time.monotonic()
        child = self._start(traces, mark)
        assert child.stdout is not None
        output = OutputTail(child.stdout)
        (traces / COMMAND_FILE).write_text(str(child.pid))
        try:
            hung = self._wait(child, traces, output, plan.injection)
        finally:
            seconds = time.monotonic() - began
            self.command_seconds += seconds
            leftover_processes = end_command(child, mark, tree)
            output.close()
            if listener is not None:
                listener.close()
        _check_free_space(traces)
        observed = TrialAttempt(
            status=child.wait(),
            seconds=seconds,
            hung=hung,
            leftover_processes=leftover_processes,
            output=output.text(),
            segments=[read_segment(path) for path in sorted(traces.glob("*.jsonl"))],
            observer_error=_read_observer_error(traces),
            refused_calls=listener.refused_calls if isinstance(listener, Refuser) else 0,
            changes=tuple(listener.changes) if isinstance(listener, ChangeWatcher) else (),
        )
        shutil.rmtree(traces, ignore_errors=True)
        return observed

    def _start(self, traces: Path, mark: str) -> subprocess.Popen[bytes]:
        """Start the command in the workplace, with the observer in each of its Python processes.

        Args:
            traces: The trace folder of the attempt.
            mark: A string to put into the environment of the command's processes, by which they can
                be found.
        """
        environment = make_environment(os.environ, traces, 0, mark, observe=True)
        # Only the chaos observer should run. If the command is `holdfast run`, it sets this
        # variable again for its own processes.
        del environment[OBSERVE_VARIABLE]
        environment["OBSERVER_OF_HOLDFAST"] = f"holdfast.chaos.observation.observer:{traces}"
        # The end of a trial is not worth a message.
        environment[NOTIFY_VARIABLE] = ""
        environment["PWD"] = str(self.workplace.work)
        environment["TMPDIR"] = str(self.workplace.temporary)
        # The starter asks the kernel to kill it when this process dies, and then replaces itself
        # with the command.
        starter = [sys.executable, "-I", "-S", child_start.__file__, str(os.getpid())]
        return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
            [*starter, self._program, *self._command],
            cwd=self.workplace.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait(
        self,
        child: subprocess.Popen[bytes],
        traces: Path,
        output: OutputTail,
        injection: Injection,
    ) -> bool:
        """Wait until the command ends or hangs, and end the fault after its `later_seconds`.

        Returns:
            True if the command hangs, because it made no progress or exceeded a time limit; False
                if it has ended.
        """
        began = time.monotonic()
        last_progress = began
        progress = -1
        fault_time: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_SECONDS)
            if child.poll() is not None:
                return False
            now = time.monotonic()
            new_progress = output.total_bytes + _total_size(traces)
            if new_progress != progress:
                progress = new_progress
                last_progress = now
                if fault_time is None and (traces / MET_FILE).exists():
                    fault_time = now
            makes_no_progress = now - last_progress > self.stall_seconds
            is_out_of_time = now - began > self.max_seconds or now > self.deadline
            if makes_no_progress or is_out_of_time:
                return True
            if fault_time is not None and now - fault_time > injection.later_seconds:
                _end_fault(injection, child, traces)


def _new_listener(traces: Path, plan: AttemptPlan) -> CallListener | None:
    """Return the listener that an attempt needs for its injection, or None."""
    if plan.injection.action == Action.WATCH_CHANGES:
        return ChangeWatcher(traces, plan)
    if plan.injection.errno is not None:
        return Refuser(traces, plan)
    return None


class OutputTail:
    """Reads the output of a command in a thread, and keeps the end of the output.

    The command writes to a pipe rather than a file, because a fault may limit the size of files.

    Args:
        pipe: The pipe to which the command writes its output.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._tail = b""
        # The number of bytes printed so far. While it grows, the command is making progress.
        self.total_bytes = 0
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := pipe.read(1 << 16):
                self._tail = (self._tail + data)[-OUTPUT_TAIL_BYTES:]
                self.total_bytes += len(data)

    def close(self) -> None:
        """Wait until the pipe is closed, which happens once all processes have ended."""
        self._thread.join(KILL_SECONDS)

    def text(self) -> str:
        """Return the last `OUTPUT_TAIL_BYTES` of the output as text."""
        return self._tail.decode(errors="replace")


def run_trial(
    bench: Bench,
    injection: Injection | None = None,
    *,
    restarts: int = 0,
    expected_steps: int = 0,
    damage: Damage | None = None,
    restart_injections: Sequence[Injection] = (),
) -> Trial:
    """Run one trial in a fresh workplace and return its attempts.

    Args:
        bench: The bench that starts the command.
        injection: What to inject into the first attempt; None for nothing.
        restarts: The maximum number of times that the command is restarted.
        expected_steps: The number of steps of the undisturbed run.
        damage: A function that damages a file between the first two attempts, called if the fault
            has happened; None for no damage.
        restart_injections: What to inject into each restart, in order. The last item also applies
            to all later restarts.
    """
    bench.workplace.renew()
    attempts = [bench.attempt(injection)]
    damaged = None
    if damage is not None and attempts[0].events("fault"):
        damaged = damage(bench.workplace, _saved_paths(attempts[0]))
    injections = _repeat_last(restart_injections)
    while len(attempts) <= restarts and not _is_complete(attempts[-1], expected_steps):
        next_injection = next(injections)
        if damaged is not None and next_injection.errno is not None:
            next_injection = replace(next_injection, unreadable_file=str(damaged))
        attempts.append(bench.attempt(next_injection))
        if _fails_alike(attempts[-2], attempts[-1]):
            break
    read = {
        Path(event.facts["path"]) for attempt in attempts[1:] for event in attempt.events("read")
    }
    return Trial(attempts=attempts, files=set(bench.workplace.files()), damaged=damaged, read=read)


def adopt_orphans() -> None:
    """Let this process adopt the command's orphaned processes, so that all of them can be found.

    Call this function only in a process that starts no other processes.
    """
    become_subreaper()
    Bench.adopts_orphans = True


def end_command(child: subprocess.Popen[bytes], mark: str, tree: Tree | None) -> int:
    """Kill a command if it is still running, and then all of its remaining processes.

    Args:
        child: The command.
        mark: The string in the environment of the command's processes, by which they are found.
        tree: The tree of the command's processes, if this process adopts orphans; otherwise None.

    Returns:
        The number of processes that were still running `LEFTOVER_GRACE_SECONDS` after the command
            had ended, or 0 if the command itself had to be killed.
    """

    def find_processes() -> set[int]:
        processes = marked_processes(mark, [child.pid])
        if tree is not None:
            for pid in tree.ended_orphans({child.pid}):
                os.waitpid(pid, os.WNOHANG)
            processes |= tree.processes()
        return processes - {child.pid}

    leftover_processes = 0
    if child.poll() is None:
        signal_all([child.pid], signal.SIGKILL)
    else:
        deadline = time.monotonic() + LEFTOVER_GRACE_SECONDS
        while find_processes() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        leftover_processes = len(find_processes())
    kill_all(find_processes, KILL_SECONDS)
    child.wait()
    return leftover_processes


def _end_fault(injection: Injection, child: subprocess.Popen[bytes], traces: Path) -> None:
    """Kill a command that has not exited after SIGTERM, or continue a process that was stopped."""
    if injection.action == Action.SIGTERM:
        signal_all([child.pid], signal.SIGKILL)
    else:
        stopped_process = int((traces / MET_FILE).read_text())
        signal_all([stopped_process], signal.SIGCONT)


def _total_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _check_free_space(traces: Path) -> None:
    """Raise an error if the disk is full, which would look like a failure of the training run."""
    if shutil.disk_usage(traces).free >= MIN_FREE_BYTES:
        return
    raise PolicyError(
        f"no disk space is left for a trial in {traces.parent}",
        limit="its traces and copies of the working directory are written there",
        fix="free some space on that disk, or set TMPDIR to a folder on another disk.",
        rule="H730",
    )


def _read_observer_error(traces: Path) -> str:
    """Return the last line of an error message from the observer, or "" if there is none."""
    notes = [*traces.glob("failed.txt"), *traces.glob("processes/failed-*")]
    if not notes:
        return ""
    return notes[0].read_text().strip().rpartition("\n")[2]


def _saved_paths(attempt: TrialAttempt) -> list[Path]:
    """Return the paths to which an attempt saved or renamed checkpoints."""
    saved = [save.path for save in attempt.saves if save.path is not None]
    moved = [event.facts["path"] for event in attempt.events("moved")]
    return [Path(path) for path in (*saved, *moved)]


def _repeat_last(injections: Sequence[Injection]) -> Iterator[Injection]:
    last = injections[-1] if injections else Injection()
    return itertools.chain(injections, itertools.repeat(last))


def _is_complete(attempt: TrialAttempt, expected_steps: int) -> bool:
    """Return whether the run is complete, so that a scheduler would not restart the command.

    A command that exits with code 0 after SIGTERM before all steps are done expects a restart.
    """
    if attempt.hung or attempt.status != 0:
        return False
    terminated = any(event.facts["act"] == Action.SIGTERM for event in attempt.events("fault"))
    return not terminated or attempt.most_steps >= expected_steps


def _fails_alike(attempt: TrialAttempt, next_attempt: TrialAttempt) -> bool:
    """Return whether a restart failed like the attempt before it. More restarts would not help."""
    if next_attempt.status == 0 or next_attempt.events("fault"):
        return False
    return next_attempt.output == attempt.output
