"""Runs that a real Slurm preempts: are they resumed, and what do they lose?

How: a Slurm of one node is started on this machine, see ``one_node_slurm``. Its jobs train a small
network for 2500 steps of about 40 ms, see ``preemptions_train``, with a checkpoint every 500 steps
beside those of a stop. Each of five runs of a kind, three of the last, is preempted twice or more,
then trains to its end:

- USR1 to the tasks: ``--signal=USR1@N``, ``srun python``, and ``scontrol requeue`` in the job's
  script if the exit code is that of a stop
- USR1 to the script: ``--signal=B:USR1@N``, ``exec srun holdfast run --requeue``
- preemption: a job of a partition with a higher priority takes the whole node at a random moment.
  Slurm sends SIGTERM, and kills after the partition's `GraceTime`. ``holdfast run --requeue``
- TERM: ``scancel --signal=TERM --full`` at a random moment. The job's script survives the signal,
  starts the training without `srun`, and requeues by exit code
- time limit: two minutes, ``exec srun holdfast run --requeue``. The guard reads the end of the job
- two ranks: as the first, with two tasks that train together by DDP on gloo

Slurm looks at the times of jobs every 30 s, so when a signal of ``--signal`` comes is chance too.

A preemption is a start of the training that ended before the last step. It is resumed if the job
was requeued and the next start began from a checkpoint, not from step 0. Steps lost are those that
the next starts made again, on any rank. The final weights and moments are compared, by digest, with
a run outside Slurm that nothing disturbed.

To reach: all resumed, at most one step lost by each, all final states equal.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.one_node_slurm import one_node_slurm, why_no_slurm
from benchmarks.preemptions_train import SAVE_INTERVAL_STEPS, SLOW_STARTS, STEPS
from benchmarks.results_file import Result, read_options

_ROOT = Path(__file__).parents[1]
_STEP_SECONDS = 0.04
# The time limit of a job is at least a minute, and the guard keeps a minute free until it has
# measured a save. So these jobs have two minutes, and longer steps, for the same number of steps.
_STEP_SECONDS_AT_TIME_LIMIT = 0.1
# Slurm sends the signal up to 30 s earlier, and looks every 30 s: 20 to 50 s after the job's start.
_SIGNAL_SECONDS = 70
# With several processes of each job, it takes longer until all guards exist: 40 to 70 s.
_SIGNAL_SECONDS_OF_RANKS = 50
# A signal that is sent by this script comes after a random number of steps of the start.
_FEWEST_STEPS = 50
_MOST_STEPS = 300
_MOST_SECONDS_OF_A_KIND = 420.0

_BY_EXIT_CODE = """\
#!/bin/bash
export HOLDFAST_STOP_EXIT_CODE=85
srun {python} -m benchmarks.preemptions_train {folder} {step_seconds}
code=$?
if [ $code -eq 85 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
_BY_SUPERVISOR = """\
#!/bin/bash
exec srun {python} -c 'from holdfast.cli.main import main; main()' run --run-dir {folder}/watched \
--requeue -- {python} -m benchmarks.preemptions_train {folder} {step_seconds}
"""
# Without srun, which kills its tasks when it gets SIGTERM itself.
_WITHOUT_SRUN = """\
#!/bin/bash
trap : TERM
export HOLDFAST_STOP_EXIT_CODE=85
{python} -m benchmarks.preemptions_train {folder} {step_seconds}
code=$?
if [ $code -eq 85 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

_Environment = Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Run:
    """One job, and the trace of its training.

    Args:
        folder: Of its files.
        job: Its id.
        tasks: How many processes train.
        next_signal: The number of steps of a start after which it is preempted.
        signals: The starts that this script has preempted.
    """

    folder: Path
    job: str
    tasks: int
    next_signal: int
    signals: int = 0

    def starts(self, task: int = 0) -> list[list[dict[str, Any]]]:
        """Return the lines of each start of a task."""
        file = self.folder / f"trace{task}.jsonl"
        starts: list[list[dict[str, Any]]] = []
        for line in file.read_text().splitlines() if file.exists() else ():
            facts = json.loads(line)
            if "start" in facts:
                starts.append([])
            starts[-1].append(facts)
        return starts

    def digest(self) -> str | None:
        """Return the digests of the tasks' final states, or None if one is not at the last step."""
        digests = []
        for task in range(self.tasks):
            starts = self.starts(task)
            last = starts[-1][-1] if starts else {}
            if last.get("end") != STEPS:
                return None
            digests.append(last["digest"])
        return " ".join(digests)

    def preemptions(self) -> int:
        """Return how many starts ended before the last step.

        A job that was killed before its training began counts too.
        """
        return max(1, len(self.starts())) - (self.digest() is not None)

    def resumed(self) -> int:
        """Return how many starts began from a checkpoint."""
        return sum(lines[0]["start"] > 0 for lines in self.starts())

    def lost(self) -> list[int]:
        """Return how many steps were made again after each preemption, on the worst rank."""
        of_tasks = [_steps_made_again(self.starts(task)) for task in range(self.tasks)]
        return [max(losses) for losses in zip(*of_tasks, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to be preempted.

    Args:
        name: In the result.
        script: Of the job, with fields.
        options: Of `sbatch`.
        step_seconds: The time that each step waits.
        tasks: How many processes train.
        runs: How many jobs are submitted.
        preempt: Preempts these runs, which all have made their steps. None if Slurm does it.
        together: Whether one preemption hits all running jobs.
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    step_seconds: float = _STEP_SECONDS
    tasks: int = 1
    runs: int = 5
    preempt: Callable[[list[Run], _Environment], None] | None = None
    together: bool = False


def take_the_node(runs: list[Run], environment: _Environment) -> None:
    """Submit a short job that needs the whole node, and wait until it has ended."""
    del runs  # all that are running
    options = ["--partition=urgent", "--exclusive", "--wait", "--output=/dev/null", "--wrap=true"]
    _slurm("sbatch", *options, environment=environment)


def send_term(runs: list[Run], environment: _Environment) -> None:
    """Send SIGTERM to all processes of jobs, the script too."""
    for run in runs:
        _slurm("scancel", "--signal=TERM", "--full", run.job, environment=environment)


_WARNED = ("--time=2", f"--signal=USR1@{_SIGNAL_SECONDS}")
KINDS = (
    Kind(name="USR1 to the tasks", script=_BY_EXIT_CODE, options=_WARNED),
    Kind(
        name="USR1 to the script",
        script=_BY_SUPERVISOR,
        options=("--time=2", f"--signal=B:USR1@{_SIGNAL_SECONDS}"),
    ),
    Kind(name="preemption", script=_BY_SUPERVISOR, preempt=take_the_node, together=True),
    Kind(name="TERM", script=_WITHOUT_SRUN, preempt=send_term),
    Kind(
        name="time limit",
        script=_BY_SUPERVISOR,
        options=("--time=2",),
        step_seconds=_STEP_SECONDS_AT_TIME_LIMIT,
    ),
    Kind(
        name="two ranks",
        script=_BY_EXIT_CODE,
        options=("--time=2", f"--signal=USR1@{_SIGNAL_SECONDS_OF_RANKS}"),
        tasks=2,
        runs=3,
    ),
)


def run_kind(
    kind: Kind, folder: Path, count: int, chance: random.Random, environment: _Environment
) -> list[Run]:
    """Submit runs of a kind, preempt them, and wait until their jobs have ended."""
    runs = []
    for number in range(count):
        place = folder / f"{kind.name.replace(' ', '_')}_{number}"
        place.mkdir()
        runs.append(_submit(kind, place, _steps_before_signal(chance), environment))
    deadline = time.monotonic() + _MOST_SECONDS_OF_A_KIND
    while _unfinished(runs, environment) and time.monotonic() < deadline:
        if kind.preempt is not None:
            _preempt_due(kind, runs, chance, environment)
        time.sleep(0.2)
    return runs


def _submit(kind: Kind, folder: Path, next_signal: int, environment: _Environment) -> Run:
    script = folder / "job.sh"
    script.write_text(
        kind.script.format(python=sys.executable, folder=folder, step_seconds=kind.step_seconds)
    )
    options = [*kind.options, f"--ntasks={kind.tasks}", "--requeue", "--parsable"]
    output = [f"--output={folder}/output", "--open-mode=append"]
    job = _slurm("sbatch", *options, *output, str(script), environment=environment).strip()
    return Run(folder=folder, job=job, tasks=kind.tasks, next_signal=next_signal)


def _preempt_due(
    kind: Kind, runs: list[Run], chance: random.Random, environment: _Environment
) -> None:
    """Preempt the runs whose current start has made its steps, if it is one to be preempted."""
    assert kind.preempt is not None
    due = [run for run in runs if _is_due(run)]
    if not due or (kind.together and len(due) < len(runs)):
        return
    kind.preempt(due, environment)
    for run in due:
        run.signals += 1
        run.next_signal = _steps_before_signal(chance)


def _is_due(run: Run) -> bool:
    starts = run.starts()
    if run.signals >= SLOW_STARTS or len(starts) != run.signals + 1:
        return False
    return len(starts[-1]) - 1 >= run.next_signal


def _steps_before_signal(chance: random.Random) -> int:
    return chance.randint(_FEWEST_STEPS, _MOST_STEPS)


def _unfinished(runs: list[Run], environment: _Environment) -> bool:
    """Return whether a job is in the queue, running or waiting."""
    jobs = _slurm("squeue", "--noheader", "--format=%i", environment=environment).split()
    return any(run.job in jobs for run in runs)


def _steps_made_again(starts: list[list[dict[str, Any]]]) -> list[int]:
    """Return, for each start but the first, by how many steps it went back."""
    reached = 0
    losses = []
    for number, lines in enumerate(starts):
        if number > 0:
            losses.append(max(0, reached - lines[0]["start"]))
        reached = max([reached, *(facts["step"] for facts in lines if "step" in facts)])
    return losses


def undisturbed_digest(folder: Path, tasks: int) -> str:
    """Train without Slurm to the end, and return the digest of the final state."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.preemptions_train", str(folder), "0"]
    ranks = [
        subprocess.Popen(
            command, cwd=_ROOT, env={**os.environ, **variables, "HOLDFAST_MAX_TIME": "none"}
        )
        for task in range(tasks)
        for variables in [
            {"SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks), "SLURM_JOB_ID": "0"}
        ]
    ]
    if any(rank.wait() for rank in ranks):
        raise RuntimeError(f"the undisturbed run of {tasks} tasks failed")
    digest = Run(folder=folder, job="", tasks=tasks, next_signal=0).digest()
    assert digest is not None
    return digest


def _slurm(program: str, *arguments: str, environment: _Environment) -> str:
    """Run a program of Slurm, and return what it prints."""
    command = [program, *arguments]
    result = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return result.stdout


def main() -> None:
    options = read_options("preemptions", __doc__ or "")
    reason = why_no_slurm()
    if reason is not None:
        print(f"preemptions: left out: {reason}")
        return
    parameters: dict[str, Any] = {
        "runs": {kind.name: kind.runs for kind in KINDS},
        "steps": STEPS,
        "save_interval_steps": SAVE_INTERVAL_STEPS,
        "seconds_per_step": _STEP_SECONDS,
        "seconds_per_step_at_the_time_limit": _STEP_SECONDS_AT_TIME_LIMIT,
        "signal_seconds_before_the_time_limit": _SIGNAL_SECONDS,
        "signal_seconds_before_the_time_limit_of_ranks": _SIGNAL_SECONDS_OF_RANKS,
    }
    result = Result(options=options, parameters=parameters)
    chance = random.Random(0)
    losses: list[int] = []
    preemptions, resumed = 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as state,
        tempfile.TemporaryDirectory() as scratch,
        one_node_slurm(Path(state)) as environment,
    ):
        folder = Path(scratch)
        parameters["slurm"] = _slurm("sbatch", "--version", environment=environment).strip()
        digests = {
            tasks: undisturbed_digest(folder / f"undisturbed{tasks}", tasks) for tasks in (1, 2)
        }
        for kind in KINDS:
            count = 1 if options.quick else kind.runs
            runs = run_kind(kind, folder, count, chance, environment)
            preempted = sum(run.preemptions() for run in runs)
            result.add_count(
                f"{kind.name}: resumed, of all preemptions",
                sum(run.resumed() for run in runs),
                preempted,
                expected=preempted,
            )
            result.add_count(
                f"{kind.name}: final states equal to the undisturbed run's",
                sum(run.digest() == digests[kind.tasks] for run in runs),
                count,
                expected=count,
            )
            lost = [loss for run in runs for loss in run.lost()]
            result.samples[f"{kind.name}: steps lost by each preemption"] = lost
            result.samples[f"{kind.name}: steps that each start made"] = [
                [len([facts for facts in lines if "step" in facts]) for lines in run.starts()]
                for run in runs
            ]
            preemptions += preempted
            resumed += sum(run.resumed() for run in runs)
            losses += lost
            for run in runs:
                if run.digest() != digests[kind.tasks]:
                    print((run.folder / "output").read_text()[-2000:])
    result.add_count("resumed, of all preemptions", resumed, preemptions, expected=preemptions)
    result.add_count(
        "preemptions that lost at most one step",
        sum(loss <= 1 for loss in losses),
        preemptions,
        expected=preemptions,
    )
    result.add_count(
        "preemptions that lost no step", sum(loss == 0 for loss in losses), preemptions
    )
    result.write()


if __name__ == "__main__":
    main()
