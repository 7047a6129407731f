"""One trial: start the command, let it meet its fault, start it again as a scheduler would, and
read its traces.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.chaos.injecting import COMMAND_FILE, MET_FILE, PLAN_FILE
from holdfast.chaos.refusing import Refuser
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError
from holdfast.recorder.run_files import OBSERVE_VARIABLE
from holdfast.supervise.launch import child_start
from holdfast.supervise.launch.commands import make_environment
from holdfast.supervise.launch.kernel import become_subreaper
from holdfast.supervise.process_tree import Tree, kill_all, marked_processes, signal_all

Line = dict[str, Any]
_LOOK_SECONDS = 0.02
_OUTPUT_BYTES, _MOST_OUTPUT_BYTES, _LEAST_FREE_BYTES = 4000, 1 << 20, 1 << 20
_LEFT_SECONDS = 0.5
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one process of a training did, from its start to its end."""

    rank: int
    ranks: int
    steps: list[Line]
    lines: list[Line]  # all of them: saves, evaluations, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the command and how it ended."""

    status: int  # exit code, negative for a signal
    seconds: float
    hung: bool  # it stood still and was killed for it
    left: int  # processes that outlived the command
    output: str  # its end
    segments: list[Segment]
    failed: str = ""  # how our observer has failed
    refused: int = 0  # writes and reads

    def lines(self, kind: str) -> list[Line]:
        """Return the lines of one kind of all its processes."""
        return [line for segment in self.segments for line in segment.lines if line["kind"] == kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All attempts of one trial."""

    attempts: list[Attempt]
    files: set[Path]  # that were there at its end
    # The file that was damaged between two attempts, or is not read in the second
    damaged: Path | None = None
    # Of what the training has made, by the restarts before their first step, as far as that is seen
    read: set[Path]

    @property
    def last(self) -> Attempt:
        """The attempt that ended it."""
        return self.attempts[-1]

    def ranks(self) -> dict[int, list[Segment]]:
        """Return the segments with steps, by rank, in the order in which they were begun."""
        found: dict[int, list[Segment]] = {}
        for segment in (
            segment for attempt in self.attempts for segment in attempt.segments if segment.steps
        ):
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

    still_seconds = 600.0
    """Without a new line in any trace for so long, an attempt hangs."""
    most_seconds = 1e9
    """For one attempt."""
    gets_orphans = False
    """Whether all further children of this process are the command's, see `take_orphans`."""

    def __init__(
        self, program: str, command: Sequence[str], place: Workplace, deadline: float
    ) -> None:
        self._program, self._command = place.word(program), list(map(place.word, command))
        self.place, self.deadline = place, deadline
        self._number = 0

    def attempt(self, plan: dict[str, Any] | None) -> Attempt:
        """Start the command once and wait for its end; `plan` is the fault that it meets."""
        self._number += 1
        plan = {
            "since": self.place.since,
            "inside": list(map(str, self.place.tops)),
            **(plan or {}),
        }
        traces = self.place.scratch / f"attempt-{self._number}"
        (traces / "processes").mkdir(parents=True)  # where `sitecustomize` notes what fails
        (traces / PLAN_FILE).write_text(json.dumps(plan))
        mark = f"{self.place.scratch.name}-{self._number}"
        environment = make_environment(os.environ, traces, 0, mark, observe=True)
        del environment[OBSERVE_VARIABLE]  # the command may be `holdfast run` itself
        environment |= {
            "OBSERVER_OF_HOLDFAST": f"holdfast.chaos.inside:{traces}",
            "PWD": str(self.place.work),
        }
        environment["TMPDIR"] = str(self.place.temporary)
        tree = Tree(mark) if self.gets_orphans else None
        began = time.monotonic()
        refuser = Refuser(traces, plan) if "errno" in plan else None
        child = subprocess.Popen(  # noqa: S603 - the user's own command is the point
            [
                sys.executable,
                "-I",
                "-S",
                child_start.__file__,
                str(os.getpid()),
                self._program,
                *self._command,
            ],
            cwd=self.place.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Through a pipe, since a limit on files is none on printing.
        reader = threading.Thread(
            target=_copy_output, args=(child.stdout, traces / "output.txt"), daemon=True
        )
        reader.start()
        (traces / COMMAND_FILE).write_text(str(child.pid))
        try:
            hung = self._wait(child, traces, began, *plan.get("later", (math.inf, 0)))
        finally:
            seconds, left = time.monotonic() - began, _end(child, mark, tree)
            reader.join(_KILL_SECONDS)
            if refuser is not None:
                refuser.close()
        # That would be taken for the training's
        if shutil.disk_usage(traces).free < _LEAST_FREE_BYTES:
            fix = f"make room on the disk of {self.place.scratch}, or set TMPDIR to another."
            raise PolicyError(
                "there is no room left for a trial", limit="it writes there", fix=fix, rule="H730"
            )
        text = (traces / "output.txt").read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace")
        segments = [_read(path) for path in sorted(traces.glob("*.jsonl"))]
        noted = [*traces.glob("failed.txt"), *traces.glob("processes/failed-*")][:1]
        failed = "".join(each.read_text().strip().rpartition("\n")[2] for each in noted)
        shutil.rmtree(traces, ignore_errors=True)
        return Attempt(
            status=child.wait(),
            seconds=seconds,
            hung=hung,
            left=left,
            output=text,
            segments=segments,
            failed=failed,
            refused=0 if refuser is None else refuser.refused,
        )

    def _wait(
        self, child: subprocess.Popen[bytes], traces: Path, began: float, later: float, number: int
    ) -> bool:
        """Wait for the command, and send a signal so long after the fault.

        Return whether it hangs.
        """
        size, since, met = -1, began, math.inf
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
            if child.poll() is not None:
                return False
            now, found = time.monotonic(), sum(each.stat().st_size for each in traces.iterdir())
            if found != size:
                size, since = found, now
                met = min(met, now) if (traces / MET_FILE).exists() else met
            if (
                now - since > self.still_seconds
                or now - began > self.most_seconds
                or now > self.deadline
            ):
                return True
            if now - met > later:  # what was asked to end is killed, what was stopped goes on
                whom = (
                    child.pid if number == signal.SIGKILL else int((traces / MET_FILE).read_text())
                )
                signal_all([whom], number)


def take_orphans() -> None:
    """Let orphans of a command become children of this process, which starts nothing else."""
    become_subreaper()
    Bench.gets_orphans = True


def _copy_output(pipe: IO[bytes], path: Path) -> None:
    """Keep the end of what is printed.

    Where that cannot be written the pipe is read all the same.
    """
    end = b""
    with pipe, path.open("wb", buffering=0) as file:
        while data := pipe.read(1 << 16):
            end = (end + data)[-_OUTPUT_BYTES:]
            with suppress(OSError):
                if file.tell() > _MOST_OUTPUT_BYTES:
                    file.seek(0)
                    file.truncate()
                    data = end
                file.write(data)


def _end(child: subprocess.Popen[bytes], mark: str, tree: Tree | None) -> int:
    """End what is left of a command.

    Return how many processes did not end with it by themselves.
    """

    def find() -> set[int]:
        for each in tree.ended_orphans({child.pid}) if tree else ():
            os.waitpid(each, os.WNOHANG)
        return (marked_processes(mark, [child.pid]) | (tree.processes() if tree else set())) - {
            child.pid
        }

    until, ended = time.monotonic() + _LEFT_SECONDS, child.poll() is not None
    while ended and find() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    left = len(find()) if ended else 0
    signal_all([] if ended else [child.pid], signal.SIGKILL)
    kill_all(find, _KILL_SECONDS)
    child.wait()
    return left


def _read(path: Path) -> Segment:
    lines = []
    for text in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError, TypeError):  # the training may have written there too
            lines += [line] if "kind" in (line := json.loads(text)) else []
    steps = [line for line in lines if line["kind"] == "step"]
    rank, ranks = steps[0]["ranks"] if steps else (0, 1)
    return Segment(rank=rank, ranks=ranks, steps=steps, lines=lines)


def _is_over(attempt: Attempt, steps: int) -> bool:
    """Return whether a scheduler would not start the command again.

    It ended well, and was not only asked to.
    """
    asked = any(line["act"] == "SIGTERM" for line in attempt.lines("fault"))
    made = max((len(segment.steps) for segment in attempt.segments), default=0)
    return attempt.status == 0 and not attempt.hung and not (asked and made < steps)


def carry_out(
    bench: Bench,
    plan: dict[str, Any] | None = None,
    *,
    restarts: int = 0,
    steps: int = 0,
    between: Callable[[Workplace, Sequence[Path]], Path | None] | None = None,
    then: Sequence[dict[str, Any]] = (),
) -> Trial:
    """Carry out one trial from the beginning, with at most so many restarts.

    `steps` are those of the undisturbed run; `between` is given where saves were seen after the
    first attempt; it returns the file that it damages, or which the second does not read. `then`
    are plans of the restarts; the last one holds for all that follow.
    """
    bench.place.renew()
    attempts, damaged = [bench.attempt(plan)], None
    if between is not None and attempts[0].lines("fault"):
        lines = [*attempts[0].lines("save"), *attempts[0].lines("moved")]
        saved = [Path(line["path"]) for line in lines if line["path"]]
        damaged = between(bench.place, saved)
    plans = itertools.chain(then, itertools.repeat(then[-1] if then else {}))
    while len(attempts) <= restarts and not _is_over(attempts[-1], steps):
        again = next(plans)
        attempts.append(
            bench.attempt(
                {**again, "path": str(damaged)} if damaged and "errno" in again else again
            )
        )
        if (
            attempts[-1].status
            and attempts[-1].output == attempts[-2].output
            and not attempts[-1].lines("fault")
        ):
            break  # the same end twice: it would go on like that
    read = {Path(line["path"]) for attempt in attempts[1:] for line in attempt.lines("read")}
    return Trial(attempts=attempts, files=set(bench.place.files()), damaged=damaged, read=read)
