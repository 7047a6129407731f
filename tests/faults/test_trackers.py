"""W&B, MLflow and trackio beside a run: one W&B run in all attempts, and each step in it once."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.faults.test_logged import logged
from tests.faults.wandb_server import wandb_server

from holdfast.core.events.event import Event
from holdfast.recorder.reader import read_events
from holdfast.supervise.launch.commands import make_observed_environment
from holdfast.supervise.launch.wandb_id import wandb_variables
from holdfast.supervise.observe.wandb_file import last_position

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "tracked.py"
RUN = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]


def train(tmp_path: Path, **request: Any) -> subprocess.CompletedProcess[str]:
    """Train under `holdfast run` with W&B in offline mode; see the program for the request."""
    full = {"run_dir": str(tmp_path / "guarded"), **request}
    return supervise(tmp_path, sys.executable, str(PROGRAM), json.dumps(full))


def supervise(
    tmp_path: Path, *command: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command under `holdfast run` with W&B in offline mode, unless variables say more."""
    options = ["--run-dir", str(tmp_path / "run"), "--restart-delay", "0.1", "--"]
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    return subprocess.run(
        [*RUN, *options, *command],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **wandb, **variables},
    )


def printed(tmp_path: Path, name: str) -> list[str]:
    """Return the IDs that all attempts have printed behind a name."""
    lines = (tmp_path / "run" / "output.log").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(f"{name} ")]


def dropped(tmp_path: Path) -> list[Event]:
    """Return the events that say that rows were dropped."""
    processes = (tmp_path / "run" / "processes").iterdir()
    events = [event for process in processes for event in read_events(process)]
    return [event for event in events if event.kind == "repeated_rows_dropped"]


def history(tmp_path: Path, name: str = "at") -> list[int]:
    """Return the values of a name in W&B's own files, in the order in which they were written."""
    return [
        int(json.loads(item.value_json))
        for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        for row in rows(file)
        for item in row.item
        if name in (item.key, *item.nested_key)
    ]


def rows(file: Path) -> Iterator[Any]:
    """Yield the rows in a W&B file, which is a log of LevelDB with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    block_bytes = 32 << 10
    offset = 7
    data = b""
    while offset + 7 <= len(content):
        rest_of_block = block_bytes - offset % block_bytes
        if rest_of_block < 7:
            offset += rest_of_block
            continue
        length, kind = struct.unpack_from("<HB", content, offset + 4)
        data += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if offset > len(content):
            return
        # 1 is a whole record, and 2 to 4 are the first, a middle and the last part of one.
        if kind in (1, 4):
            record = Record.FromString(data)
            data = b""
            if record.WhichOneof("record_type") == "history":
                yield record.history


def test_a_killed_run_continues_under_its_id_and_has_each_step_once(tmp_path: Path) -> None:
    """Some steps are trained twice after a kill and after a rollback, which a later start has.

    When the run is killed after step 6, W&B has steps 1 to 4, but not all of the others.
    """
    pytest.importorskip("wandb")

    killed = train(tmp_path, hurt_at=6)
    assert killed.returncode == 0, killed.stderr
    rolled_back = train(tmp_path, steps=12, nan_at=10)
    assert rolled_back.returncode == 0, rolled_back.stderr

    assert printed(tmp_path, "rolled_back") == ["8"]
    # In the second attempt, and after the rollback.
    assert len(dropped(tmp_path)) == 2
    ids = printed(tmp_path, "run")
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert history(tmp_path) == list(range(1, 13))
    assert history(tmp_path, "evaluated_at") == [4, 8, 12]


def test_a_stop_for_a_scheduler_marks_the_run_as_preempting(tmp_path: Path) -> None:
    """The guard saves and exits although the call never returns."""
    pytest.importorskip("wandb")
    mark = tmp_path / "marked"

    ended = train(tmp_path, hurt_at=6, signal="SIGUSR1", marks=str(mark))

    assert ended.returncode == 85, ended.stderr
    assert [mark.read_text()] == printed(tmp_path, "run")
    assert list(tmp_path.glob("guarded/checkpoints/*-step00000006"))


SCRIPT_WITHOUT_GUARD = """
import os, signal, time
from pathlib import Path
import wandb

run = wandb.init(project="tests")
print("run", run.id, flush=True)
state = Path("state.txt")
start = int(state.read_text()) if state.exists() else 0
for step in range(start + 1, 9):
    run.log({"made_step": step}, step=step)
    if step == 4:
        state.write_text("4")
    if step == 6 and start == 0:
        file = Path(run.dir).parent / f"run-{run.id}.wandb"
        while file.read_bytes().count(b"made_step") < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
run.finish()
"""


def test_a_script_without_a_guard_that_passes_its_step(tmp_path: Path) -> None:
    """The step that it passes to W&B identifies the rows."""
    pytest.importorskip("wandb")

    ended = supervise(tmp_path, sys.executable, "-c", SCRIPT_WITHOUT_GUARD)

    assert ended.returncode == 0, ended.stderr
    ids = printed(tmp_path, "run")
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert history(tmp_path, "made_step") == list(range(1, 9))


ONLINE = """
import json, os, signal, time
from pathlib import Path
from urllib.request import urlopen
import wandb

run = wandb.init(project="tests")
print("run", run.id, flush=True)
state = Path("state.txt")
start = int(state.read_text()) if state.exists() else 0
for step in range(start + 1, 9):
    run.log({"train/global_step": step})
    if step == 4:
        state.write_text("4")
    if step == 5 and start == 0:
        while json.load(urlopen(os.environ["WANDB_BASE_URL"]))[run.id] < 4:
            time.sleep(0.01)
    if step == 6 and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
run.finish()
"""


def test_an_online_run_of_which_the_server_has_not_received_all(tmp_path: Path) -> None:
    """The real client sends rows now and then. Those that were lost are logged again.

    The script logs as transformers' Trainer does, which passes its step among the values.
    """
    pytest.importorskip("wandb")
    with wandb_server() as server:
        often = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.5"}

        ended = supervise(
            tmp_path, sys.executable, "-c", ONLINE, variables={**server.variables, **often}
        )

        assert ended.returncode == 0, ended.stderr
        (run_id,) = set(printed(tmp_path, "run"))
        rows_of_server = [json.loads(row) for row in server.rows[run_id]]
    assert [row["train/global_step"] for row in rows_of_server] == list(range(1, 9))
    assert [row["_step"] for row in rows_of_server] == list(range(8))


TWO_RUNS = """
import wandb
for name in ("first", "second"):
    with wandb.init(project="tests") as run:
        print(name, run.id, flush=True)
"""


def test_a_second_run_of_a_script_is_a_new_one(tmp_path: Path) -> None:
    """W&B itself must not see the variable any more, as for the folds of a cross-validation."""
    pytest.importorskip("wandb")

    assert supervise(tmp_path, sys.executable, "-c", TWO_RUNS).returncode == 0

    continued = json.loads((tmp_path / "run" / "tracker" / "wandb.json").read_text())["id"]
    assert printed(tmp_path, "first") == [continued]
    assert printed(tmp_path, "second") != [continued]


LARGE_ROWS = """
import wandb
with wandb.init(project="tests") as run:
    print("run", run.id)
    for number in range(100):
        run.log({"made_step": number, "text": "x" * 50_000})
"""


def test_the_last_row_of_a_large_file_that_was_cut_off(tmp_path: Path) -> None:
    """Only the end of the file is read, in which rows span several of its blocks."""
    pytest.importorskip("wandb")
    assert supervise(tmp_path, sys.executable, "-c", LARGE_ROWS).returncode == 0
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 4 << 20
    assert last_position(file) == 99

    cut_off = tmp_path / "cut-off.wandb"
    cut_off.write_bytes(file.read_bytes()[:4_400_000])

    assert last_position(cut_off) == [row.step.num for row in rows(cut_off)][-1]


# W&B refuses to continue a run that the user has deleted, which takes a server.
STUB = """
import os
run = None
class Run:
    disabled = True
def init(project=None, id=None, resume=None, settings=None):
    id = id or os.environ.get("WANDB_RUN_ID")
    print("asked", id, resume, flush=True)
    if os.environ.get("IS_DELETED") and id is not None:
        raise RuntimeError("the run was deleted")
    return Run()
"""


FIRST = "asked 0123abcd allow"
NEW = "asked None None"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("wandb.init()", [FIRST]),
        ("wandb.init('tests', resume=True)", [FIRST]),
        # What the user chooses wins.
        ("wandb.init(id='mine')", ["asked mine None"]),
        ("wandb.init(resume='never')", ["asked None never"]),
        ("wandb.init(settings={'run_id': 'mine'})", [NEW]),
        ("os.environ['WANDB_RUN_ID'] = 'mine'; wandb.init()", ["asked mine None"]),
        # Other ranks and other processes begin runs of their own.
        ("wandb.init(); subprocess.run([sys.executable, 'other.py'])", [FIRST, NEW]),
        ("os.environ['RANK'] = '1'; wandb.init()", [NEW]),
        # A script goes on if W&B refuses to continue the run.
        ("os.environ['IS_DELETED'] = '1'; wandb.init()", [FIRST, NEW]),
    ],
)
def test_which_run_begins(tmp_path: Path, script: str, expected: list[str]) -> None:
    """The first run of the first rank is continued, unless the user chooses another one."""
    (tmp_path / "wandb.py").write_text(STUB)
    (tmp_path / "other.py").write_text("import wandb; wandb.init()")
    run = tmp_path / "run"
    run.mkdir()
    names = ("WANDB_RUN_ID", "WANDB_RUN_BY_HOLDFAST")
    variables = {"WANDB_RESUME": "allow", **dict.fromkeys(names, "0123abcd")}

    ended = subprocess.run(
        [sys.executable, "-c", f"import os, subprocess, sys, wandb; {script}"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=make_observed_environment({**os.environ, **variables}, run, 0),
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == expected


def test_the_variables_of_the_command(tmp_path: Path) -> None:
    """They are the same at each start, and do not replace those of the user or of a sweep."""
    first = wandb_variables({}, tmp_path)
    again = wandb_variables({"PATH": "/bin"}, tmp_path)

    assert first["WANDB_RUN_ID"]
    assert first["WANDB_RESUME"] == "allow"
    assert again == first
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"):
        assert not {"WANDB_RUN_ID", "WANDB_RESUME"} & set(wandb_variables({name: "x"}, tmp_path))


MLFLOW = """
import mlflow
mlflow.set_tracking_uri("file:./store")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.5, step=3)
    mlflow.log_metrics({"lr": 0.25, "wer": 0.125}, step=4)
    client = mlflow.MlflowClient()
    client.log_metric(run.info.run_id, "by_client", 2.0, step=5)
    client.log_batch(run.info.run_id, [mlflow.entities.Metric("in_batch", 3.0, 0, 6)])
"""
LOGGED_TO_MLFLOW = [
    ("loss", 0.5, 3),
    ("lr", 0.25, 4),
    ("wer", 0.125, 4),
    ("by_client", 2.0, 5),
    ("in_batch", 3.0, 6),
]
TRACKIO = """
import trackio
trackio.init(project="tests", embed=False)
trackio.log({"loss": 0.5, "nested": {"wer": 0.125}}, step=3)
trackio.finish()
"""
LOGGED_TO_TRACKIO = [("loss", 0.5, 3), ("nested/wer", 0.125, 3)]


@pytest.mark.parametrize(
    ("package", "program", "expected"),
    [("mlflow", MLFLOW, LOGGED_TO_MLFLOW), ("trackio", TRACKIO, LOGGED_TO_TRACKIO)],
)
def test_what_a_tracker_logs_is_recorded_once(
    tmp_path: Path, package: str, program: str, expected: list[tuple[str, float, int]]
) -> None:
    """With its own step, while the tracker writes to a real store."""
    pytest.importorskip(package)
    run = tmp_path / "run"
    run.mkdir()
    own = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }

    subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=make_observed_environment({**os.environ, **own}, run, 0),
        check=True,
        timeout=300,
    )

    assert not [path.read_text() for path in run.glob("processes/failed-*")]
    assert [(line["name"], line["value"], line["step"]) for line in logged(run)] == expected
