"""Processes of their own on a CUDA device.

A dead device, ranks, fragmented memory, and what `holdfast run` sees.

All are started at once, since each takes seconds to load torch and to make a context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.gpu.marks import NEEDS_CUDA

import holdfast
from holdfast.recorder.progress import read_samples
from holdfast.recorder.run_files import SAMPLES_FILE, read_processes

pytestmark = [*NEEDS_CUDA, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120.0
Programs: TypeAlias = dict[str, Future[tuple[int, str]]]
CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PROGRAM = [sys.executable, "-m", "tests.gpu.program"]


def run(log: Path, *command: str | Path, **settings: str) -> tuple[int, str]:
    """Return the exit status and the output of a command; one that hangs raises."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = (
        os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TEST_NAME": log.stem} | settings
    )
    with log.open("wb") as out:
        ended = subprocess.run(
            list(map(str, command)),
            stdout=out,
            stderr=out,
            env=environment,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    return ended.returncode, log.read_text(errors="replace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Programs]:
    """Start everything."""
    supervised: tuple[str | Path, ...] = (*CLI, "run", "--max-restarts", "0", "--run-dir")
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    commands: dict[str, tuple[tuple[str | Path, ...], dict[str, str]]] = {
        "pieces": ((*PROGRAM, "pieces", folder), segments),
        "dead": ((*PROGRAM, "dead_device", folder / "dead"), {}),
        "supervised": (
            (*supervised, folder / "run", "--", *PROGRAM, "dead_device", folder / "supervised"),
            {},
        ),
        "gloo": ((*RANKS, *PROGRAM[1:], "ranks", folder), {"TEST_BACKEND": "gloo"}),
        "nccl": ((*RANKS, *PROGRAM[1:], "ranks", folder), {"TEST_BACKEND": "nccl"}),
        "plain": ((*PROGRAM, "plain", folder), {}),
        "observed": ((*supervised, folder / "observed", "--", *PROGRAM, "plain", folder), {}),
    }
    with ThreadPoolExecutor(len(commands)) as pool:
        found = {}
        for name, (command, settings) in commands.items():
            (folder / name).mkdir()
            found[name] = pool.submit(run, folder / f"{name}.log", *command, **settings)
        yield found


def test_memory_in_pieces_with_expandable_segments(started: Programs) -> None:
    """What does not fit in one piece fits in smaller parts there too."""
    status, output = started["pieces"].result()
    assert status == 0, output


@pytest.mark.parametrize("name", ["dead", "supervised"])
def test_a_dead_device_is_named_and_the_newest_checkpoint_goes_on(
    folder: Path, started: Programs, name: str
) -> None:
    """An index out of range kills the context: no retry, no hang, no talk of memory.

    The state on disk is sound.
    """
    status, output = started[name].result()
    assert status != 0
    assert "DeviceError: the device reports" in output
    assert "[H403]" in output
    assert "out of memory in attempt" not in output
    assert "does not fit" not in output
    guarded = folder / name / "guarded"
    newest = holdfast.latest(guarded)
    assert newest is not None
    assert newest.global_step == 4
    (folder / name / "sound").touch()
    status, output = run(folder / "again.log", *PROGRAM, "dead_device", folder / name)
    assert status == 0, output
    assert (folder / name / "ended").read_text().endswith("step00000004 8")


@pytest.mark.parametrize("about", ["dead.log", "supervised.log", "run"])
def test_the_cause_of_a_dead_device_is_explained(
    folder: Path, started: Programs, about: str
) -> None:
    """The kernel has said what it was, an index outside its table.

    That is the cause, and H403 what followed.
    """
    statuses = [started[name].result()[0] for name in ("dead", "supervised")]
    assert all(statuses)
    _, explained = run(folder / "explained.log", *CLI, "explain", folder / about)
    assert "H912" in explained.splitlines()[0], explained


def test_ranks_on_one_device_over_gloo(folder: Path, started: Programs) -> None:
    """One rank is out of memory once.

    Both end with the weights of the undisturbed run, bit for bit.
    """
    status, output = started["gloo"].result()
    assert status == 0, output
    assert len(list((folder / "gloo").glob("rank * ended equal"))) == 2


def test_ranks_on_one_device_over_nccl(folder: Path, started: Programs) -> None:
    """NCCL refuses two ranks on one device, and the log is explained.

    Where it does not, all is as over gloo.
    """
    status, output = started["nccl"].result()
    if status == 0:
        assert len(list((folder / "nccl").glob("rank * ended equal"))) == 2
        return
    assert "Duplicate GPU detected" in output
    _, explained = run(folder / "explained.log", *CLI, "explain", folder / "nccl.log")
    assert "H1144" in explained.splitlines()[0], explained


def test_a_plain_loop_is_observed_without_a_further_wait(folder: Path, started: Programs) -> None:
    """Losses are those of the script, copied while the device goes on.

    Memory is in samples, page and metrics.
    """
    found: dict[str, Any] = {}
    for name in ("plain", "observed"):
        status, output = started[name].result()
        assert status == 0, output
        found[name] = json.loads((folder / f"{name}.json").read_text())
    assert found["observed"] == found["plain"]
    observed = folder / "observed"
    ((trainer, _),) = [each for each in read_processes(observed) if each[1].role == "trainer"]
    samples = read_samples(trainer / SAMPLES_FILE)
    assert [each.step for each in samples] == list(range(1, 101))
    losses = [float.fromhex(each) for each in found["plain"]["losses"]]
    read = [(each.step, each.loss) for each in samples if each.loss is not None]
    assert len(read) > 50
    assert all(loss == losses[step - 1] for step, loss in read)
    assert max(each.device_peak_bytes for each in samples) > 2**20
    _, output = run(folder / "report.log", *CLI, "report", observed, "--out", folder / "page.html")
    assert "peak device memory" in (folder / "page.html").read_text(), output
    run(folder / "metrics.log", *CLI, "metrics", observed, "--jsonl", folder / "metrics.jsonl")
    assert "device_peak_bytes" in (folder / "metrics.jsonl").read_text()
