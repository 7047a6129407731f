"""`FeatureCache`: a build that is killed, loses workers or finds the disk full ends with the
same file.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recipes.demo.small_disk import command_with_small_disk
from tests.prepared import Prepared

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.faults.programs.build_features")  # from ROOT: the cache is a recipe's
ITEMS = 120


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a build; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(path: Path, **request: Any) -> subprocess.Popen[str]:
        process = Prepared(
            [*PROGRAM, json.dumps({"path": str(path), **request})],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def items_written(path: Path) -> int:
    """Return how many items of a build lie whole in its file, which begins with 64 KiB of
    nothing.
    """
    file = path.with_name(f"{path.name}.building") / "data"
    data, place, count = file.read_bytes() if file.exists() else b"", 65536, 0
    while place + 24 <= len(data):
        place += 24 + int.from_bytes(data[place : place + 8], "little")
        count += place <= len(data)
    return count


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "f.h5"
    request = json.dumps({"path": str(path), "workers": 0})
    subprocess.run(
        [sys.executable, *PROGRAM, request], check=True, capture_output=True, timeout=120, cwd=ROOT
    )
    return path.read_bytes()


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (2, 0), (1, 3)])
def test_a_build_that_is_killed_goes_on_where_it_was(start, undisturbed, tmp_path, workers):
    """Killed at random moments, also with other numbers of workers, it loses a few items.

    The file is the same.
    """
    path, chance, reached = tmp_path / "f.h5", random.Random(str(workers)), 0
    for count in workers:
        target = min(reached + chance.randrange(1, 50), ITEMS - 20)
        build = start(path, workers=count, seconds=0.005)
        wait_until(lambda target=target: items_written(path) >= target)
        time.sleep(chance.random() * 0.02)
        build.kill()
        build.wait()
        assert not path.exists(), "nothing lies under the name before it is whole"
        assert items_written(path) >= max(reached, target), "what was written stays"
        reached = items_written(path)
    assert end(start(path)) == {"items": ITEMS}
    assert path.read_bytes() == undisturbed
    assert [file.name for file in tmp_path.iterdir()] == ["f.h5"]


def test_workers_die_with_their_parent(start, tmp_path):
    """After a SIGKILL of the builder none of its workers is left, neither a waiting one nor one
    that is stuck.
    """
    pids = tmp_path / "pids"
    pids.mkdir()
    build = start(tmp_path / "f.h5", workers=3, pids=str(pids), hang_at=60)
    wait_until(lambda: items_written(tmp_path / "f.h5") == 60)
    workers = {int(file.name) for file in pids.iterdir()} - {build.pid}
    assert len(workers) == 3
    build.kill()
    build.wait()
    wait_until(lambda: not any(_runs(pid) for pid in workers))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_is_killed_is_replaced(start, undisturbed, tmp_path):
    """The item is computed again by a new worker, and the file is the same."""
    path = tmp_path / "f.h5"
    assert end(start(path, kill_worker_at=47, once=str(tmp_path / "once"))) == {"items": ITEMS}
    assert (tmp_path / "once").exists()
    assert path.read_bytes() == undisturbed


def test_an_item_that_kills_each_worker_is_named(start, undisturbed, tmp_path):
    """At the second worker the build stops with the item's number; all items before it are kept."""
    path = tmp_path / "f.h5"
    answer = end(start(path, kill_worker_at=47))
    assert answer["rule"] == "H623"
    assert "sample 47 cannot be used (killed its worker: worker" in answer["error"]
    assert items_written(path) == 47
    assert end(start(path)) == {"items": ITEMS}
    assert path.read_bytes() == undisturbed


def test_a_stopped_builder_is_named_to_the_second(start, tmp_path):
    """As long as a builder lives, even stopped, another process is told its number.

    After its death one goes on.
    """
    path = tmp_path / "f.h5"
    first = start(path, hang_at=60)
    wait_until(lambda: items_written(path) == 60)
    first.send_signal(signal.SIGSTOP)
    answer = end(start(path))
    assert answer["rule"] == "H621"
    assert f"is being written by process {first.pid} on" in answer["error"]
    first.kill()
    first.wait()
    assert end(start(path)) == {"items": ITEMS}


def test_a_full_disk_is_a_clear_error_and_the_build_goes_on_when_there_is_room(
    undisturbed, small_disk, tmp_path
):
    """On a disk that fills up in the middle the error says so, nothing is lost, and the file is
    the same later.
    """
    common = {"path": str(small_disk / "f.h5"), "filler": str(small_disk / "filler")}
    requests = [
        json.dumps({**common, "fill_at": 50}),
        json.dumps({**common, "fill_at": 119}),
        json.dumps(common),
    ]
    builds = "; ".join(f"{sys.executable} {' '.join(PROGRAM)} '{request}'" for request in requests)
    # Both see the disk: it is theirs alone
    script = f"{builds}; cp {small_disk / 'f.h5'} {tmp_path / 'copy.h5'}"
    command = command_with_small_disk(small_disk, ["sh", "-c", script])
    assert command is not None
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    first, second, third = (json.loads(line) for line in ended.stdout.splitlines())
    for answer in (first, second):
        assert answer["rule"] == "H624"
        assert "no space left on device" in answer["error"].lower()
    assert third == {"items": ITEMS}
    assert (tmp_path / "copy.h5").read_bytes() == undisturbed
