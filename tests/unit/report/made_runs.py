"""Run directories for the tests of reports.

Written with the real writers, at times that are chosen.

Does not: train. The rings of samples are packed here, since their writer stamps each record with
    the time of day.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.progress import _SAMPLE, ProcessPhase, ProgressBoard, SampleRing, StepSample
from holdfast.recorder.ring import HEADER_BYTES, slot_struct
from holdfast.recorder.run_files import (
    BOARD_FILE,
    OUTPUT_FILE,
    SAMPLES_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    VERDICT_FILE,
    ProcessInfo,
    write_process,
)

BEGAN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
# A pid that no process has here: the kernel's largest is 4,194,304 and they are given in order
GONE = 4_100_000


@dataclass
class Clock:
    """A clock that shows what it is set to."""

    unix: float = BEGAN
    monotonic: float = 0.0

    def unix_seconds(self) -> float:
        return self.unix

    def monotonic_seconds(self) -> float:
        return self.monotonic


def own_ticks() -> int:
    """Return when this process started, as the kernel counts."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def sample(step: int, **changes: Any) -> StepSample:
    """Return an ordinary step: 0.1 seconds, of which 20 % waiting, a loss that falls."""
    ordinary = StepSample(
        step=step,
        micro_steps=1,
        unix_seconds=BEGAN + 5 + 0.1 * step,
        loss=2.5 / math.sqrt(step),
        grad_norm=1.0 + 0.2 * math.sin(step),
        learning_rate=1e-3 * min(1.0, step / 50),
        seconds=0.1,
        wait_seconds=0.02,
        host_bytes=(400 << 20) + 4096 * step,
    )
    return ordinary._replace(**changes)


def write_samples(path: Path, samples: Sequence[StepSample]) -> None:
    """Write a ring of samples with the times that they say, at most as many as it holds."""
    SampleRing(path).close()  # header and size by the real writer
    slot = slot_struct(_SAMPLE.size)
    capacity = (path.stat().st_size - HEADER_BYTES) // slot.size
    with path.open("rb+") as file:
        for sequence, each in enumerate(samples, start=1):
            values = [each.loss, each.grad_norm, each.learning_rate]
            is_read = sum(1 << place for place, value in enumerate(values) if value is not None)
            is_read |= each.optimizer << 8
            payload = _SAMPLE.pack(
                each.step,
                each.micro_steps,
                is_read,
                *(math.nan if value is None else value for value in values),
                each.seconds,
                each.wait_seconds,
                each.host_bytes,
                each.device_allocated_bytes,
                each.device_reserved_bytes,
                each.device_peak_bytes,
            )
            file.seek(HEADER_BYTES + sequence % capacity * slot.size)
            file.write(slot.pack(sequence, round(each.unix_seconds * 1e9), payload, sequence))


def write_events(directory: Path, *events: Event) -> None:
    """Write events into a black box."""
    box = BlackBox(directory)
    for event in events:
        box.event(event)
    box.close()


@contextmanager
def locked(path: Path) -> Iterator[Callable[[], None]]:
    """Hold a lock in another process.

    Return a function that lets it go, at the end at the latest.
    """
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        yield holder.stdin.close


def happened(kind: str, seconds: float, step: int = 0, /, **facts: Any) -> Event:
    """Return an event so many seconds after the run began."""
    return Event(kind=kind, global_step=step, unix_seconds=BEGAN + seconds, data=facts)


def add_process(
    run: Path,
    samples: Sequence[StepSample] = (),
    *events: Event,
    phase: ProcessPhase | None = None,
    pid: int = GONE,
    **said: Any,
) -> Path:
    """Add an observed process; with this process's own pid it is alive."""
    ticks = own_ticks() if pid == os.getpid() else 7
    said = {
        "role": "trainer",
        "argv": ["python", "train.py"],
        "torch": "2.13.0",
        "started": BEGAN + 1,
        **said,
    }
    folder = write_process(run, ProcessInfo(pid=pid, ticks=ticks, ppid=1, **said))
    if samples:
        write_samples(folder / SAMPLES_FILE, samples)
    if phase is not None:
        board = ProgressBoard(folder / BOARD_FILE)
        board.step = samples[-1].step if samples else 0
        board.enter(phase)
        board.close()
    write_events(folder, *events)
    return folder


def make_run(
    run: Path, *, steps: int = 300, ranks: int = 1, verdict: bool = True, **supervised: Any
) -> Path:
    """Make a run of one attempt that ended in an exception."""
    run.mkdir(parents=True, exist_ok=True)
    facts = {
        "format": 1,
        "argv": ["python", "train.py", "--epochs", "3"],
        "cwd": "/home/ada/speech",
        "hostname": os.uname().nodename,
        "started": BEGAN,
        "versions": {"torch": "2.13.0", "holdfast": "0.5"},
        **supervised,
    }
    (run / SUPERVISED_FILE).write_text(json.dumps(facts))
    end = 6 + 0.1 * steps
    write_events(
        run / SUPERVISOR_FOLDER,
        happened("attempt_started", 0.5, attempt=0, argv=facts["argv"]),
        happened("attempt_ended", end, attempt=0, status=1, steps=steps, seconds=end),
        happened("stopped", end + 0.1, why="the same would happen again"),
    )
    for rank in range(ranks):
        add_process(
            run,
            [
                sample(step, loss=2.5 / math.sqrt(step) + 0.05 * rank)
                for step in range(1, steps + 1)
            ],
            happened(
                "exception",
                end - 0.2,
                steps,
                type="RuntimeError",
                message="shapes differ",
                frames=[],
                chain=[],
                thread="MainThread",
                fatal=True,
            ),
            phase=ProcessPhase.FORWARD_BACKWARD,
            pid=GONE + rank,
            rank=rank if ranks > 1 else None,
        )
    (run / OUTPUT_FILE).write_text(
        "--- holdfast: attempt 0 ---\nepoch 0\repoch 1\nRuntimeError: shapes differ\n"
    )
    (run / "stacks").mkdir(exist_ok=True)
    (run / "stacks" / f"0001-{GONE}-a.txt").write_text(
        'Thread 1 (idle): "MainThread"\n    forward (model.py:31)\n'
    )
    if verdict:
        (run / VERDICT_FILE).write_text(json.dumps(VERDICT))
    return run


VERDICT: dict[str, Any] = {
    "cause": "H970",
    "family": "shape or type",
    "title": "a matrix product got shapes that do not fit",
    "summary": (
        "The training stopped at step 300 in the forward pass of layer `proj`: the input has 80"
        " features and the layer expects 128. The first 299 batches had 128."
    ),
    "fix": "Look at the batch that the loader gave at step 300; pad or drop what has 80 mel bands.",
    "certainty": "certain",
    "evidence": [
        {
            "text": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x80 and 128x256)",
            "source": "rank 0",
            "role": "root",
            "unix_seconds": BEGAN + 36,
            "rank": None,
        },
        {
            "text": "exit status 1",
            "source": "attempt 0",
            "role": "fact",
            "unix_seconds": None,
            "rank": None,
        },
    ],
    "runner_up": ["H975", "a tensor has another dtype than the weights"],
    "tried": [],
    "missing": [],
    "restart": "stop",
    "changes": [],
    "where": "model.py:31 in forward",
    "rank": None,
    "step": 300,
    "exit_code": 21,
}
