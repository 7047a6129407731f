"""Processes of their own on a CUDA device: a dead device, ranks, fragmented memory, and what `holdfast run` sees.

All are started at once, since each takes seconds to load torch and to make a context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.marks import NEEDS_CUDA

import holdfast
from holdfast.recorder.progress import read_samples
from holdfast.recorder.run_files import SAMPLES_FILE, read_processes

pytestmark = [*NEEDS_CUDA, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120.0
CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PROGRAM = ["-m", "tests.gpu.program"]


class Started:
    """A process whose output goes to a file."""

    def __init__(self, name: str, folder: Path, command: list[str], **settings: str) -> None:
        self.log = folder / f"{name}.log"
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TEST_NAME": name} | settings
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)

    def ended(self) -> tuple[int, str]:
        """Return the exit status and what was printed; one that hangs fails the test."""
        try:
            status = self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs: {self.log.read_text(errors='replace')[-3000:]}")
        return status, self.log.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def commands(folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return of each process its command and what is set for it."""
    python, run = [sys.executable, *PROGRAM], [*CLI, "run", "--max-restarts", "0", "--run-dir"]
    return {
        "pieces": ([*python, "pieces", str(folder)], {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        "dead": ([*python, "dead_device", str(folder / "dead")], {}),
        "supervised": ([*run, str(folder / "run"), "--", *python, "dead_device", str(folder / "supervised")], {}),
        "gloo": ([*RANKS, *PROGRAM, "ranks", str(folder)], {"TEST_BACKEND": "gloo"}),
        "nccl": ([*RANKS, *PROGRAM, "ranks", str(folder)], {"TEST_BACKEND": "nccl"}),
        "plain": ([*python, "plain", str(folder)], {}),
        "observed": ([*run, str(folder / "observed"), "--", *python, "plain", str(folder)], {}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[dict[str, Started]]:
    """Start everything."""
    found = {}
    for name, (command, settings) in commands(folder).items():
        (folder / name).mkdir(exist_ok=True)
        found[name] = Started(name, folder, command, **settings)
    yield found
    for each in found.values():
        each.kill()


def cli(*arguments: str | Path) -> tuple[int, str]:
    """Return the exit status and the output of a command of holdfast."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_memory_in_pieces_with_expandable_segments(started: dict[str, Started]) -> None:
    status, output = started["pieces"].ended()
    assert status == 0, output


@pytest.mark.parametrize("name", ["dead", "supervised"])
def test_a_dead_device_is_named_and_the_newest_checkpoint_goes_on(
    folder: Path, started: dict[str, Started], name: str
) -> None:
    """An index out of range kills the context: no retry, no hang, no talk of memory; the state on disk is sound."""
    status, output = started[name].ended()
    assert status != 0
    assert "DeviceError: the device reports" in output
    assert "[H403]" in output
    assert "out_of_memory" not in output
    assert "does not fit" not in output
    guarded = folder / name / "guarded"
    newest = holdfast.latest(guarded)
    assert newest is not None
    assert newest.global_step == 4
    told = {"dead": [folder / "dead.log", guarded], "supervised": [folder / "run", folder / "supervised.log"]}[name]
    for about in told:
        _, explained = cli("explain", about)
        assert "H912" in explained or "H911" in explained or (about == guarded and "H403" in explained), explained
    (folder / name / "sound").touch()
    again = Started("again", folder, [sys.executable, *PROGRAM, "dead_device", str(folder / name)])
    status, output = again.ended()
    assert status == 0, output
    assert (folder / name / "ended").read_text().endswith("step00000004 8")


def test_ranks_on_one_device_over_gloo(folder: Path, started: dict[str, Started]) -> None:
    """One rank is out of memory once: both end with the weights of the undisturbed run, bit for bit."""
    status, output = started["gloo"].ended()
    assert status == 0, output
    assert len(list((folder / "gloo").glob("rank * ended equal"))) == 2


def test_ranks_on_one_device_over_nccl(folder: Path, started: dict[str, Started]) -> None:
    """NCCL refuses two ranks on one device, and the log is explained; where it does not, all is as over gloo."""
    status, output = started["nccl"].ended()
    if status == 0:
        assert len(list((folder / "nccl").glob("rank * ended equal"))) == 2
        return
    assert "Duplicate GPU detected" in output
    _, explained = cli("explain", folder / "nccl.log")
    assert "H1144" in explained, explained


def test_a_plain_loop_is_observed_without_a_further_wait(folder: Path, started: dict[str, Started]) -> None:
    """Losses are those of the script, copied while the device goes on; memory is in samples, page and metrics."""
    found: dict[str, Any] = {}
    for name in ("plain", "observed"):
        status, output = started[name].ended()
        assert status == 0, output
        found[name] = json.loads((folder / f"{name}.json").read_text())
    assert found["observed"] == found["plain"]
    run = folder / "observed"
    ((trainer, _),) = [each for each in read_processes(run) if each[1].role == "trainer"]
    samples = read_samples(trainer / SAMPLES_FILE)
    assert [each.step for each in samples] == list(range(1, 101))
    losses = [float.fromhex(each) for each in found["plain"]["losses"]]
    read = [(each.step, each.loss) for each in samples if each.loss is not None]
    assert len(read) > 50
    assert all(loss == losses[step - 1] for step, loss in read)
    assert max(each.device_peak_bytes for each in samples) > 2**20
    status, output = cli("report", run, "--out", folder / "page.html")
    assert "peak device memory" in (folder / "page.html").read_text(), output
    cli("metrics", run, "--jsonl", folder / "metrics.jsonl")
    assert "device_peak_bytes" in (folder / "metrics.jsonl").read_text()
