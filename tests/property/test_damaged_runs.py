"""Whatever lies in place of a file of a run.

Commands read what is left, and a run that continues begins.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.report.made_runs import happened, make_run, write_events
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.clock import SystemClock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.process_events import OutputLost
from holdfast.core.events.run_events import Closed
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import RunRecord
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import SUPERVISOR_FOLDER
from holdfast.recorder.scalars import Scalars, check_scalars
from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.launch.supervisor import RunOptions, Supervisor

pytestmark = pytest.mark.slow
COMMANDS = ("events", "explain", "watch --once", "metrics --jsonl /dev/null", "report")
FILES = (
    "run.json",
    "lock",
    "recorder/rank0/steps.ring",
    "recorder/rank0/events.ring",
    "supervised.json",
    "output.log",
    "supervisor/lock",
    "supervisor/events.ring",
    "supervisor/steps.ring",
    "recorder/rank0/scalars.ring",
    "processes/*/process.json",
    "processes/*/progress.board",
    "processes/*/samples.ring",
    "processes/*/events.ring",
)
FILLS = st.sampled_from(
    [b"\xff", b"\x00", b"\x01", b"\x7f", b"\x80", b"HOLDRING", b"[", b"{", b"9"]
)


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """Return a run with every kind of file, on a disk in memory."""
    base = Path(tempfile.mkdtemp(dir="/dev/shm"))
    run = make_run(base / "run", steps=5, verdict=False)
    write_events(run / "recorder" / "rank0", happened("spike", 3, 3, loss=1.0))
    box = BlackBox(run / "recorder" / "rank0")
    for step in range(5):
        box.step(StepMark.COMMITTED, step, 1, 0.5, 0.5, 0.1)
    box.close()
    scalars = Scalars(lambda: run / "recorder" / "rank0", lambda event: None)
    scalars.write(check_scalars({"accuracy": 0.5}, "", {}) * 5, 1, 0)
    scalars.close()
    (run / "run.json").write_text('{"format": 1}')
    for name in ("lock", "supervisor/lock"):
        (run / name).write_text("{}")
    yield run
    shutil.rmtree(base)


def damage(path: Path, kind: str, fill: bytes, share: float, seed: bytes) -> None:
    size = path.stat().st_size
    at = int(share * size)
    if kind == "directory":
        path.unlink()
        (path / "inside").mkdir(parents=True)
        return
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(at)
        elif kind == "filled":
            file.write(fill * (size // len(fill) + 1))
            file.truncate(size)
        elif kind == "filled from here":
            file.seek(at)
            file.write((fill * (size // len(fill) + 1))[: size - at])
        elif kind == "header":
            file.seek(8)
            file.write((fill * 12)[:12])
        else:
            file.seek(at)
            file.write(seed)


@example(
    name="recorder/rank0/steps.ring", kind="filled from here", fill=b"\xff", share=0.01, seed=b"x"
)
@example(
    name="supervisor/events.ring", kind="filled from here", fill=b"\xff", share=0.01, seed=b"x"
)
@example(name="lock", kind="directory", fill=b"\xff", share=0.0, seed=b"x")
@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["directory", "cut", "filled", "filled from here", "header", "random"]),
    fill=FILLS,
    share=st.floats(0, 1),
    seed=st.binary(min_size=1, max_size=5000),
)
def test_a_damaged_file_ends_no_command_and_keeps_no_run_from_starting(
    whole, name, kind, fill, share, seed
):
    """Every command answers with an exit code of its own, and guard and supervisor open, or
    refuse with a rule.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        run = shutil.copytree(whole, Path(place) / "run")
        damage(next(run.glob(name)), kind, fill, share, seed)
        for command in COMMANDS:
            name, *options = command.split()
            result = CliRunner().invoke(make_app(name), [name, str(run), *options])
            assert result.exception is None or isinstance(result.exception, SystemExit), (
                command,
                result.exception,
            )
            assert "Usage" not in result.output
        try:
            opened = RunDirectory(run)
            opened.acquire()
            record = RunRecord(opened.recorder, SystemClock())
            record.open()
            record.step(StepMark.BEGUN, 1, None, None, 0.0)
            record.scalars.write(check_scalars({"accuracy": 0.5}, "", {}), 1, 0)
            record.emit(Closed(how="left"))
            assert record.events()[-1].kind == "closed"
            record.close()
            opened.release()
        except RunDirectoryError:
            assert kind == "directory" or "format" in (run / "run.json").read_text(errors="replace")
        try:
            supervisor = Supervisor(
                RunOptions(command=("true",), program="/bin/true", run_path=run, budgets=Budgets()),
                quiet=True,
            )
            supervisor.emit(OutputLost(error="here"))
            assert "output_lost" in {event.kind for event in read_events(run / SUPERVISOR_FOLDER)}
            supervisor._folder.close()
        except RunDirectoryError:
            assert kind == "directory" or (run / "supervised.json").exists()


@pytest.mark.parametrize("fill", [b"\xff", b"\x01"])
@pytest.mark.parametrize("name", ["steps.ring", "events.ring"])
def test_a_ring_that_was_painted_over_is_kept_beside_the_new_one_and_said(
    tmp_path, caplog, name, fill
):
    """The recording begins anew, with an event and a warning that name the file.

    Nothing of the old one is lost.
    """
    directory = tmp_path / "rank0"
    BlackBox(directory).close()
    ring = directory / name
    painted = fill * ring.stat().st_size
    ring.write_bytes(ring.read_bytes()[:4096] + painted[4096:])
    before = ring.read_bytes()
    record = RunRecord(directory, SystemClock())
    record.open()
    record.step(StepMark.BEGUN, 1, None, None, 0.0)
    record.close()
    (said,) = [event for event in read_events(directory) if event.kind == "recording_moved_aside"]
    assert name in said.data["what"]
    assert f"{name}.old" in caplog.text
    assert (directory / f"{name}.old").read_bytes() == before
