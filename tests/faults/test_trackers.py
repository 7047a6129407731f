"""W&B, MLflow and trackio beside a run: one W&B run in all attempts, and all numbers recorded."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_logged import logged

from holdfast.supervise.launch.commands import make_observed_environment

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "tracked.py"
RUN = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]


def train(tmp_path: Path, **request: Any) -> subprocess.CompletedProcess[str]:
    """Train under `holdfast run` with W&B in offline mode."""
    full = {"run_dir": str(tmp_path / "guarded"), **request}
    options = ["--run-dir", str(tmp_path / "run"), "--restart-delay", "0.1", "--"]
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    return subprocess.run(
        [*RUN, *options, sys.executable, str(PROGRAM), json.dumps(full)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables, **request.get("variables", {})},
    )


def printed(tmp_path: Path, name: str) -> list[str]:
    """Return the ids that all attempts have printed behind a name."""
    lines = (tmp_path / "run" / "output.log").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(f"{name} ")]


def history(tmp_path: Path, run_id: str) -> list[int]:
    """Return the steps in W&B's own files of a run, in the order in which they were written."""
    steps = []
    for file in sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for record in records(file.read_bytes()):
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                if name == "at":
                    steps.append(int(json.loads(item.value_json)))
    return steps


def records(content: bytes) -> Iterator[Any]:
    """Yield the records of a W&B file, which is a log of LevelDB with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    block = 32 << 10
    offset = 7
    parts = b""
    while offset + 7 <= len(content):
        if block - offset % block < 7:
            offset += block - offset % block
            continue
        length, kind = struct.unpack_from("<HB", content, offset + 4)
        parts += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        # Kinds: 1 is a whole record, 2 to 4 are its first, middle and last parts.
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.parametrize("gives_step", [False, True])
def test_a_killed_run_continues_under_its_id_and_logs_no_step_twice(
    tmp_path: Path, gives_step: bool
) -> None:
    """Steps 5 and 6 are trained twice, with `step=` and without. A new start continues, too."""
    pytest.importorskip("wandb")

    ended = train(tmp_path, hurt_at=6, gives_step=gives_step)
    assert ended.returncode == 0, ended.stderr
    assert train(tmp_path, steps=12, gives_step=gives_step).returncode == 0

    ids = printed(tmp_path, "run")
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert history(tmp_path, ids[0]) == list(range(1, 13))


def test_only_one_run_of_a_script_is_continued(tmp_path: Path) -> None:
    """A second run in the same process is a new one in each attempt, as without holdfast."""
    pytest.importorskip("wandb")

    assert train(tmp_path, hurt_at=6, second=True).returncode == 0

    assert len(set(printed(tmp_path, "run"))) == 1
    assert len({*printed(tmp_path, "run"), *printed(tmp_path, "second")}) == 3


@pytest.mark.parametrize(
    "chosen", [{"init": {"id": "mine"}}, {"variables": {"WANDB_RUN_ID": "mine"}}]
)
def test_the_users_own_id_is_kept(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """Whether it is an argument or a variable."""
    pytest.importorskip("wandb")

    assert train(tmp_path, **chosen).returncode == 0

    assert printed(tmp_path, "run") == ["mine"]


@pytest.mark.parametrize(("signal", "is_marked"), [("SIGUSR1", True), ("SIGINT", False)])
def test_a_stop_for_a_scheduler_marks_the_run_as_preempting(
    tmp_path: Path, signal: str, is_marked: bool
) -> None:
    """Ctrl-C is a person's."""
    pytest.importorskip("wandb")
    marked = tmp_path / "marked"

    ended = train(tmp_path, hurt_at=6, signal=signal, preempting=str(marked))

    assert ended.returncode == 85, ended.stderr
    assert marked.exists() is is_marked
    if is_marked:
        assert [marked.read_text()] == printed(tmp_path, "run")


def test_the_variables_are_set_for_the_command(tmp_path: Path) -> None:
    """They are the same at each start, and never replace the user's own."""
    show = "import os; print('run', os.environ['WANDB_RUN_ID'], os.environ['WANDB_RESUME'])"
    command = [*RUN, "--run-dir", str(tmp_path / "run"), "--", sys.executable, "-c", show]
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"):
        assert name not in os.environ

    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    chosen = {**os.environ, "WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=chosen)

    lines = (tmp_path / "run" / "output.log").read_text().splitlines()
    lines = [line for line in lines if line.startswith("run ")]
    assert lines[0] == lines[1]
    assert lines[0].endswith(" allow")
    assert lines[2] == "run mine must"


MLFLOW = """
import mlflow
mlflow.set_tracking_uri("sqlite:///store.db")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.5, step=3)
    mlflow.log_metrics({"lr": 0.25, "wer": 0.125}, step=4)
    client = mlflow.MlflowClient()
    client.log_metric(run.info.run_id, "by_client", 2.0, step=5)
    client.log_batch(run.info.run_id, [mlflow.entities.Metric("in_batch", 3.0, 0, 6)])
"""
TRACKIO = """
import trackio
trackio.init(project="tests", embed=False)
trackio.log({"loss": 0.5, "nested": {"wer": 0.125}}, step=3)
trackio.finish()
"""


@pytest.mark.parametrize(
    ("package", "program", "expected"),
    [
        (
            "mlflow",
            MLFLOW,
            [
                ("loss", 0.5, 3),
                ("lr", 0.25, 4),
                ("wer", 0.125, 4),
                ("by_client", 2.0, 5),
                ("in_batch", 3.0, 6),
            ],
        ),
        ("trackio", TRACKIO, [("loss", 0.5, 3), ("nested/wer", 0.125, 3)]),
    ],
)
def test_what_a_tracker_logs_is_recorded_once(
    tmp_path: Path, package: str, program: str, expected: list[tuple[str, float, int]]
) -> None:
    """With its own step, and with a real store of the tracker."""
    pytest.importorskip(package)
    run = tmp_path / "run"
    run.mkdir()
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment = make_observed_environment({**os.environ, **own}, run, 0)

    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=300
    )

    assert not [path.read_text() for path in run.glob("processes/failed-*")]
    assert [(line["name"], line["value"], line["step"]) for line in logged(run)] == expected
