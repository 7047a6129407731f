"""Random kills of a supervised training.

Is anything left a second later, is a record lost, is the verdict right?

How: ``holdfast run`` supervises an unmodified script that trains a small model with two loader
workers, about 200 steps a second. At a random moment of its first two seconds one process is killed
by SIGKILL: the supervisor, the trainer or a loader worker, in turn. In every fourth run a worker
was stopped (SIGSTOP) before, which cannot notice anything; not where a worker is killed, since
torch then waits for the other one for ever, which is another fault.

Left a second later: trainer, workers, sentinel, and every process that carries the mark of the
supervisor in its environment or descends from one that does, found by a scan of /proc that shares
no code with the supervisor. Where a worker is killed the second begins when the trainer has ended
of it. A record is lost if the ring of samples lacks a step that the script noted as made in a file
of its own. The verdict of ``holdfast explain --json`` is right if it is:

- trainer killed: killed from outside (H1602)
- worker killed: a worker was killed (H930), died (H929), or its tensors are gone with it (H939):
  torch raises one of the three, whichever notices first
- supervisor killed: the supervisor was lost (H1616)

Restarts are off, so that each run has one death. To reach: 0 of 100 with a process left, 0 of 100
with a lost record, 100 of 100 verdicts right.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import Options, Result, read_options
from holdfast.recorder.progress import read_samples
from holdfast.recorder.run_files import SAMPLES_FILE, read_processes

_SCRIPT = Path(__file__).parents[1] / "tests" / "faults" / "programs" / "supervised_training.py"
_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
_RIGHT = {"supervisor": ("H1616",), "trainer": ("H1602",), "worker": ("H929", "H930", "H939")}
_KINDS = tuple(_RIGHT)
_LATEST_SECONDS = 2.0
_AFTER_SECONDS = 1.0
_START_SECONDS = 120.0
_MARK = b"SUPERVISED_BY_HOLDFAST="


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one kill."""

    victim: str
    left: int  # processes that lived a second later
    made: int  # steps that the script had made
    lost: int  # of these, those that the ring of samples lacks
    cause: str
    family: str

    @property
    def right(self) -> bool:
        """Return whether the verdict is right."""
        return self.cause in _RIGHT[self.victim]


def processes_of(supervisor: int, known: list[int]) -> set[int]:
    """Return these if they live, and those whose environment or command line names the supervisor,
    with descendants.

    The command line is that of the sentinel. A process that is ending has no environment any more,
    but it is left.
    """
    parents: dict[int, int] = {}
    found: set[int] = set()
    mark = b"%d-" % supervisor
    for folder in Path("/proc").iterdir():
        name = folder.name
        if not name.isdigit():
            continue
        with suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if stat[0] == "Z":
                continue
            parents[int(name)] = int(stat[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
            marks = [
                each[len(_MARK) :].split(b",")[-1] for each in environment if each.startswith(_MARK)
            ]
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if int(name) in known or any(each.startswith(mark) for each in (*marks, *words)):
                found.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def run_once(folder: Path, victim: str, chance: random.Random, *, stop_worker: bool) -> Outcome:
    """Start a run, kill somebody, and look at what is left."""
    run, pids, steps = folder / "run", folder / "pids", folder / "steps"
    request = {
        "steps": 10**6,
        "workers": 2,
        "step_seconds": 0.005,
        "pids": str(pids),
        "steps_file": str(steps),
        "stop_worker": stop_worker,
    }
    command = [
        *_CLI,
        "run",
        "--run-dir",
        str(run),
        "--max-restarts",
        "0",
        "--quiet",
        "--",
        sys.executable,
    ]
    supervisor = subprocess.Popen(
        [*command, str(_SCRIPT), json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + _START_SECONDS
    while not pids.exists():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            supervisor.kill()
            raise RuntimeError(f"the run did not start: {supervisor.returncode}")
        time.sleep(0.005)
    known: dict[str, Any] = json.loads(pids.read_text())
    time.sleep(chance.random() * _LATEST_SECONDS)
    target = {
        "supervisor": supervisor.pid,
        "trainer": known["trainer"],
        "worker": known["workers"][-1],
    }[victim]
    os.kill(target, signal.SIGKILL)
    # Its death is noticed by the trainer, at its next look, which torch makes within 5 s
    if victim == "worker":
        until = time.monotonic() + 30
        while _lives(known["trainer"]) and time.monotonic() < until:
            time.sleep(0.005)
    time.sleep(_AFTER_SECONDS)
    if victim == "supervisor":
        supervisor.wait()
    left = processes_of(supervisor.pid, [known["trainer"], *known["workers"]])
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    return _look_at(run, victim, len(left), made=steps.stat().st_size)


def _lives(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _look_at(run: Path, victim: str, left: int, *, made: int) -> Outcome:
    recorded: list[int] = []
    for folder, info in read_processes(run):
        if info.role == "trainer" and (folder / SAMPLES_FILE).exists():
            recorded += [sample.step for sample in read_samples(folder / SAMPLES_FILE)]
    explained = subprocess.run(
        [*_CLI, "explain", str(run), "--json"], capture_output=True, text=True, check=False
    )
    try:
        verdict = json.loads(explained.stdout)
        cause, family = verdict["cause"], verdict["family"]
    except (ValueError, KeyError, TypeError):
        cause = family = f"no verdict, exit code {explained.returncode}"
    lost = len(set(range(1, made + 1)) - set(recorded))
    return Outcome(victim=victim, left=left, made=made, lost=lost, cause=cause, family=family)


def main(options: Options) -> None:
    """Kill, and count."""
    kills = 3 if options.quick else 100
    chance = random.Random(5)
    result = Result(
        options=options,
        parameters={
            "kills": kills,
            "latest_seconds": _LATEST_SECONDS,
            "looked_after_seconds": _AFTER_SECONDS,
        },
    )
    outcomes: list[Outcome] = []
    for number in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            victim = _KINDS[number % 3]
            stop = number % 4 == 3 and victim != "worker"
            outcomes.append(run_once(Path(folder), victim, chance, stop_worker=stop))
            print(f"  {number}: {outcomes[-1]}", flush=True)
    result.add_count(
        "runs with a process left after 1 s",
        sum(each.left > 0 for each in outcomes),
        kills,
        expected=0,
    )
    result.add_count(
        "runs with a lost record", sum(each.lost > 0 for each in outcomes), kills, expected=0
    )
    result.add_count("right verdicts", sum(each.right for each in outcomes), kills, expected=kills)
    for victim in _KINDS:
        ours = [each for each in outcomes if each.victim == victim]
        result.add_count(
            f"right verdicts, {victim} killed", sum(each.right for each in ours), len(ours)
        )
        result.samples[f"causes, {victim} killed"] = dict(Counter(each.cause for each in ours))
    result.samples["steps made"] = [each.made for each in outcomes]
    result.samples["records lost"] = [each.lost for each in outcomes]
    result.write()


if __name__ == "__main__":
    main(read_options("supervised_kills", __doc__ or ""))
