"""One trial: start the command, let it meet its fault, start it again as a scheduler would, and read its traces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.chaos.injecting import COMMAND_FILE, PLAN_FILE
from holdfast.chaos.workplace import Workplace
from holdfast.supervise.launch import child_start
from holdfast.supervise.launch.commands import make_environment
from holdfast.supervise.process_tree import kill_all, marked_processes, signal_all

Line = dict[str, Any]
_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 15.0
_LEFT_SECONDS = 0.5
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one process of a training did, from its start to its end."""

    rank: int
    ranks: int
    steps: list[Line]
    lines: list[Line]  # all of them: saves, evaluations, ...


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the command and how it ended."""

    status: int  # exit code, negative for a signal
    seconds: float
    hung: bool  # it stood still and was killed for it
    left: int  # processes that outlived the command
    output: str  # its end
    segments: list[Segment]
    elsewhere: list[str]  # paths that were written outside of the copy

    @property
    def met(self) -> bool:
        """Whether the fault that was planned happened."""
        return any(line["kind"] == "fault" for segment in self.segments for line in segment.lines)

    @property
    def trained(self) -> list[Segment]:
        """The segments with steps."""
        return [segment for segment in self.segments if segment.steps]


@dataclass(slots=True, kw_only=True)
class Trial:
    """All attempts of one trial; `files` are those that were there at its end, in words of the copy."""

    attempts: list[Attempt] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    damaged: str | None = None  # the file that was damaged between two attempts

    @property
    def last(self) -> Attempt:
        """The attempt that ended it."""
        return self.attempts[-1]

    def ranks(self) -> dict[int, list[Segment]]:
        """Return the segments with steps, by rank, in the order in which they were begun."""
        found: dict[int, list[Segment]] = {}
        for attempt in self.attempts:
            for segment in attempt.trained:
                found.setdefault(segment.rank, []).append(segment)
        return found


class Bench:
    """Starts a command in its workplace.

    Args:
        program: The file that the command's first word means.
        command: The command.
        place: Where it works.
        deadline: When everything must be over, in monotonic seconds.
    """

    def __init__(self, program: str, command: Sequence[str], place: Workplace, deadline: float) -> None:
        self._program, self._command, self._place = program, list(command), place
        self._deadline = deadline
        self.still_seconds = 600.0
        """Without a new line in any trace for so long, an attempt hangs."""
        self.most_seconds = 1e9
        """For one attempt."""
        self._number = 0

    def attempt(self, plan: dict[str, Any] | None) -> Attempt:
        """Start the command once and wait for its end; `plan` is the fault that it meets."""
        self._number += 1
        traces = self._place.scratch / f"attempt-{self._number}"
        (traces / "processes").mkdir(parents=True)
        roots = [str(each) for each in (self._place.work, self._place.temporary, *self._place.elsewhere)]
        (traces / PLAN_FILE).write_text(json.dumps({"inside": roots, **(plan or {})}))
        mark = f"chaos-{os.getpid()}-{self._number}"
        environment = make_environment(os.environ, traces, 0, mark, observe=True)
        environment |= {"OBSERVER_OF_HOLDFAST": "holdfast.chaos.inside", "TMPDIR": str(self._place.temporary)}
        began = time.monotonic()
        with (traces / "output.txt").open("wb") as output:
            child = subprocess.Popen(  # noqa: S603 - the user's own command is the point
                [sys.executable, "-I", "-S", child_start.__file__, str(os.getpid()), self._program, *self._command],
                cwd=self._place.work, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        (traces / COMMAND_FILE).write_text(str(child.pid))
        try:
            hung = self._wait(child, traces, began)
        finally:
            seconds, left = time.monotonic() - began, self._end(child, mark)
        segments, elsewhere = _read(traces)
        text = (traces / "output.txt").read_bytes()[-4000:].decode(errors="replace")
        shutil.rmtree(traces, ignore_errors=True)
        return Attempt(
            status=child.wait(), seconds=seconds, hung=hung, left=left, output=text, segments=segments,
            elsewhere=elsewhere,
        )  # fmt: skip

    def _wait(self, child: subprocess.Popen[bytes], traces: Path, began: float) -> bool:
        """Wait for the command; return whether it hangs. Stop after the time of grace what was asked to end."""
        size, since, asked = -1, began, None
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
            if child.poll() is not None:
                return False
            now, found = time.monotonic(), sum(each.stat().st_size for each in traces.iterdir())
            if found != size:
                size, since = found, now
                asked = asked or (now if _was_asked(traces) else None)
            if now - since > self.still_seconds or now - began > self.most_seconds or now > self._deadline:
                return True
            if asked is not None and now - asked > _GRACE_SECONDS:
                signal_all([child.pid], signal.SIGKILL)

    @staticmethod
    def _end(child: subprocess.Popen[bytes], mark: str) -> int:
        """End what is left of the command; return how many processes that were, which did not end by themselves."""

        def find() -> set[int]:
            return marked_processes(mark, [child.pid]) - {child.pid}

        until = time.monotonic() + _LEFT_SECONDS
        while child.poll() is not None and find() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        left = len(find()) if child.poll() is not None else 0
        signal_all([child.pid] if child.poll() is None else [], signal.SIGKILL)
        kill_all(find, _KILL_SECONDS)
        child.wait()
        return left


def _was_asked(traces: Path) -> bool:
    return b'"SIGTERM"' in (traces / PLAN_FILE).read_bytes() and (traces / "met").exists()


def _read(traces: Path) -> tuple[list[Segment], list[str]]:
    segments, elsewhere = [], []
    for path in sorted(traces.glob("*.jsonl")):
        lines = [json.loads(text) for text in path.read_bytes().split(b"\n")[:-1]]
        first = lines[0] if lines else {"rank": 0, "ranks": 1}
        steps = [line for line in lines if line["kind"] == "step"]
        segments.append(Segment(rank=first["rank"], ranks=first["ranks"], steps=steps, lines=lines))
        elsewhere += [line["path"] for line in lines if line["kind"] == "outside"]
    return segments, elsewhere


def is_over(attempt: Attempt, steps: int) -> bool:
    """Return whether a scheduler would not start the command again: it ended well, and was not only asked to."""
    asked = any(line.get("act") == "SIGTERM" for segment in attempt.segments for line in segment.lines)
    return attempt.status == 0 and not attempt.hung and not (asked and attempt.met and _made(attempt) < steps)


def _made(attempt: Attempt) -> int:
    return max((len(segment.steps) for segment in attempt.segments), default=0)


def carry_out(
    bench: Bench, place: Workplace, plan: dict[str, Any] | None, *, restarts: int, steps: int,
    between: Callable[[Workplace], str | None] | None = None,
) -> Trial:  # fmt: skip
    """Carry out one trial from the beginning, with at most so many restarts.

    `steps` are those of the undisturbed run; `between` damages a file after the first attempt and returns its name.
    """
    place.renew()
    trial = Trial()
    while not trial.attempts or (len(trial.attempts) <= restarts and not is_over(trial.last, steps)):
        trial.attempts.append(bench.attempt(plan if not trial.attempts else None))
        if len(trial.attempts) == 1 and between is not None and trial.last.met:
            trial.damaged = between(place)
        if len(trial.attempts) > 1 and trial.last.status and trial.last.output == trial.attempts[-2].output:
            break  # the same end twice: it would go on like that
    trial.files = {str(path.relative_to(place.scratch)) if path.is_relative_to(place.scratch) else str(path)
                   for path in place.files()}  # fmt: skip
    return trial
