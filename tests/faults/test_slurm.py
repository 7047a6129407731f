"""The job scripts of `docs/how-to/slurm.md` on a real Slurm of one node."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.one_node_slurm import one_node_slurm, why_no_slurm
from tests.docs.pages import DOCS, ROOT, blocks

pytestmark = pytest.mark.slow

REASON = why_no_slurm()
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "slurm_train.py"
# A job waits for its requeue, and Slurm looks at the time limits of jobs every 30 s.
TIMEOUT_SECONDS = 300.0
STOPPED = "85"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Mapping[str, str]]:
    """Start a Slurm, and return the environment in which its commands work."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as folder,
        one_node_slurm(Path(folder)) as environment,
    ):
        yield environment


class Job:
    """A job that was submitted from a folder of its own.

    Args:
        number: Its id. A task of an array has the array's id, and its index after an underscore.
        folder: Where it was submitted.
        environment: The environment in which the commands of Slurm work.
    """

    def __init__(self, number: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.number = number
        self.folder = folder
        self._environment = environment

    def slurm(self, *command: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        return subprocess.run(
            command, env=self._environment, check=True, capture_output=True, text=True
        ).stdout

    def starts(self, name: str = "0") -> list[list[dict[str, Any]]]:
        """Return what each start of `train.py` has written."""
        file = self.folder / f"{name}.jsonl"
        starts: list[list[dict[str, Any]]] = []
        for line in file.read_text().splitlines() if file.exists() else ():
            facts = json.loads(line)
            if "start" in facts:
                starts.append([])
            starts[-1].append(facts)
        return starts

    def steps(self, name: str = "0") -> list[int]:
        """Return the steps that all starts have completed, in order."""
        return [facts["step"] for lines in self.starts(name) for facts in lines if "step" in facts]

    def wait_for_steps(self, count: int, name: str = "0") -> None:
        self._wait_until(lambda: len(self.steps(name)) >= count)

    def set_time_limit(self, *, minutes: int) -> None:
        """Change the time limit, counted from the job's start."""
        self.slurm("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def wait_for_output(self, text: str) -> None:
        self._wait_until(lambda: text in self.output())

    def wait(self) -> None:
        """Wait until the job is neither running nor waiting to run."""
        self._wait_until(
            lambda: self.number not in self.slurm("squeue", "--noheader", "--format=%F").split()
        )

    def exit_code(self) -> str:
        """Return the exit code of the job's script."""
        (line,) = (
            word
            for word in self.slurm("scontrol", "show", "job", self.number).split()
            if word.startswith("ExitCode=")
        )
        return line.removeprefix("ExitCode=").partition(":")[0]

    def output(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("slurm-*.out"))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{self.starts()}\n{self.output()}"
            time.sleep(0.1)


@pytest.fixture
def submit(slurm: Mapping[str, str], tmp_path: Path) -> Callable[..., Job]:
    """Return a function that submits a job script of the page, as it is there.

    The options of `sbatch` that it is given win over those in the script.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    holdfast = "from holdfast.cli.main import main; main()"
    _write_program(programs / "python", f'exec {sys.executable} "$@"')
    _write_program(programs / "holdfast", f'exec {sys.executable} -c "{holdfast}" "$@"')

    def submit_one(
        title: str,
        *options: str,
        steps: int,
        step_seconds: float,
        without: str | None = None,
    ) -> Job:
        folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        script = _script(title)
        if without is not None:
            assert without in script
            script = script.replace(without, "true")
        (folder / title).write_text(script)
        (folder / "train.py").write_bytes(PROGRAM.read_bytes())
        environment = {
            **slurm,
            "PATH": f"{programs}:{slurm['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}",
            "STEPS": str(steps),
            "STEP_SECONDS": str(step_seconds),
        }
        number = subprocess.run(
            ["sbatch", "--parsable", *options, title],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        return Job(number, folder, environment)

    return submit_one


def _script(title: str) -> str:
    (text,) = (block.text for block in blocks(DOCS / "how-to" / "slurm.md") if block.title == title)
    return text


def _write_program(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def _undisturbed_weights(folder: Path, steps: int) -> list[float]:
    """Train without Slurm to the end, and return the weights."""
    folder.mkdir()
    subprocess.run(
        [sys.executable, str(PROGRAM)],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT / 'src'}", "STEPS": str(steps), "STEP_SECONDS": "0"},
        check=True,
    )
    last = json.loads((folder / "0.jsonl").read_text().splitlines()[-1])
    weights: list[float] = last["weights"]
    return weights


def test_a_job_that_is_signalled_before_its_time_limit_is_requeued_and_resumes(submit, tmp_path):
    """With either form of `--signal`, no step is lost or made twice, and the weights are the same."""
    steps = 120
    training = {"steps": steps, "step_seconds": 0.4}
    jobs = [submit("job.sh", **training), submit("supervised.sh", **training)]
    without_requeue = submit("job.sh", **training, without='scontrol requeue "$SLURM_JOB_ID"')

    for job in (*jobs, without_requeue):
        job.wait_for_steps(2)
        # The script's `--signal` is 300 s before the limit, so it comes when Slurm looks next.
        job.set_time_limit(minutes=5)
    for job in jobs:
        job.wait_for_output("stop requested: SIGUSR1")
        job.set_time_limit(minutes=240)
    weights = _undisturbed_weights(tmp_path / "undisturbed", steps)

    for job in jobs:
        job.wait()
        assert job.steps() == list(range(1, steps + 1)), job.output()
        assert len(job.starts()) == 2
        assert job.starts()[-1][-1] == {"end": steps, "weights": weights}
        assert job.exit_code() == "0"
    without_requeue.wait()
    assert len(without_requeue.starts()) == 1
    assert without_requeue.exit_code() == STOPPED


def test_a_job_whose_time_is_nearly_over_is_requeued_and_resumes(submit):
    """The guard reads the end of the job from Slurm. The signal is one that is ignored."""
    job = submit("supervised.sh", "--time=1", "--signal=URG@1", steps=60, step_seconds=1.0)
    job.wait_for_steps(1)
    # The guard has read the end already. The next start has time for the rest.
    job.set_time_limit(minutes=10)
    job.wait()

    assert job.steps() == list(range(1, 61)), job.output()
    assert len(job.starts()) == 2
    assert f"Slurm ends job {job.number}" in job.output()
    assert job.exit_code() == "0"


@pytest.mark.parametrize("title", ["job.sh", "supervised.sh"])
def test_a_preempted_job_is_requeued_and_resumes(submit, title):
    """It ends within the grace time, so Slurm itself would not requeue it."""
    job = submit(title, steps=60, step_seconds=0.2)
    job.wait_for_steps(2)
    job.slurm("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.wait()

    assert job.steps() == list(range(1, 61)), job.output()
    assert len(job.starts()) == 2
    assert job.exit_code() == "0"


def test_a_task_of_an_array_is_requeued_without_the_others(submit):
    """Each task has a run directory of its own."""
    array = submit("array.sh", "--array=0-1", steps=60, step_seconds=0.2)
    array.wait_for_steps(2, "0")
    array.wait_for_steps(2, "1")
    array.slurm("scancel", "--signal=USR1", f"{array.number}_1")
    array.wait()

    assert array.steps("0") == array.steps("1") == list(range(1, 61)), array.output()
    assert len(array.starts("0")) == 1
    assert len(array.starts("1")) == 2


@pytest.mark.parametrize("title", ["job.sh", "supervised.sh"])
def test_a_cancelled_job_is_not_requeued(submit, title):
    """`scancel` sends the same signal as a preemption, and the exit code of the run is the same."""
    job = submit(title, steps=10**6, step_seconds=0.1)
    job.wait_for_steps(3)
    job.slurm("scancel", job.number)
    job.wait()

    assert len(job.starts()) == 1
    assert "JobState=CANCELLED" in job.slurm("scontrol", "show", "job", job.number)
