"""`holdfast explain` and `holdfast compare` of what other tools recorded.

The files in ``records`` were written by the tools themselves; its README says how. TensorBoard's
event files are written here, by tensorboardX.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.proto.tensor_pb2 import TensorProto
from tests.unit.report.made_runs import make_run
from typer.testing import CliRunner, Result

from holdfast.cli.main import make_app
from holdfast.explain.records.finding import find_record
from holdfast.explain.records.reading import read_record
from holdfast.explain.records.series import Series
from holdfast.explain.signatures.signature import FAMILIES

RECORDS = Path(__file__).parent / "records"
TRAINER_FELL = RECORDS / "trainer_fell" / "trainer_state.json"
TRAINER_LOST = RECORDS / "trainer_lost" / "trainer_state.json"
LIGHTNING = RECORDS / "lightning" / "version_0"
WANDB = RECORDS / "offline-run-20261201_001102-zi1wghuj"

NUMERICS = 10 + FAMILIES.index("numerics")
FELL = "H1633"
LOST = "H1617"
NEVER_FINITE = "H963"
NOT_LEARNED = "H1625"
NOT_JUDGED = "H1626"
USAGE = "H105"
UNREADABLE = "H733"

app = make_app()


def call(command: str, *words: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, words)])


def explained(path: Path) -> dict[str, Any]:
    """Return the verdict on a record as JSON. The exit code is that of the verdict."""
    result = call("explain", path, "--json")
    verdict: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == verdict["exit_code"]
    return verdict


def refused(command: str, *words: object) -> str:
    """Return the id of the error with which a command refuses its arguments."""
    result = call(command, *words, "--json")
    assert result.exit_code == 2, result.output
    rule: str = json.loads(result.output)["error"]["rule"]
    return rule


def write_events(folder: Path, scalars: Mapping[str, Iterable[float]], first: int = 0) -> Path:
    """Write an event file with the scalars of each tag, and return its path."""
    known = set(folder.glob("*")) if folder.exists() else set()
    # Files are ordered by the second in their name, so each one needs a name of its own.
    writer = SummaryWriter(str(folder), filename_suffix=f".{len(known)}")
    for tag, values in scalars.items():
        for step, value in enumerate(values, start=first):
            writer.add_scalar(tag, value, step)
    writer.close()
    (path,) = set(folder.glob("*")) - known
    return path


def write_table(path: Path, columns: Mapping[str, Iterable[object]]) -> Path:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines))
    return path


def falling(count: int) -> list[float]:
    return [2.0 / (1 + step / 10) + 0.01 * (step % 3) for step in range(count)]


def flat(count: int) -> list[float]:
    return [2.3 + 0.001 * math.sin(7 * step) for step in range(count)]


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "cause", "code", "step"),
    [
        (TRAINER_FELL, FELL, 0, 40),
        (TRAINER_FELL.parent, FELL, 0, 40),
        (TRAINER_LOST, LOST, NUMERICS, 40),
        (LIGHTNING, FELL, 0, 39),
        (LIGHTNING / "metrics.csv", FELL, 0, 39),
        (LIGHTNING.parent, FELL, 0, 39),
        (WANDB, LOST, NUMERICS, 240),
        (WANDB / "run-zi1wghuj.wandb", LOST, NUMERICS, 240),
    ],
)
def test_the_file_of_a_tool_and_its_directory_are_explained(
    path: Path, cause: str, code: int, step: int
) -> None:
    """A record gets the verdict on its curve, whether its file or its directory is named."""
    verdict = explained(path)
    assert (verdict["cause"], verdict["exit_code"], verdict["step"]) == (cause, code, step)


def test_the_step_of_the_first_nan_is_named() -> None:
    """The step is the optimizer's, not W&B's own, and the Trainer's zeros count as NaN."""
    assert "step 190" in explained(WANDB)["title"]
    lost = explained(TRAINER_LOST)
    assert "step 11" in lost["title"]
    assert lost["evidence"][0]["source"] == "trainer_state.json: loss"
    assert "logging_nan_inf_filter" in lost["summary"]


def test_nothing_is_claimed_about_the_end_of_the_process() -> None:
    """A loss that fell is no good end: the class is another one, and the end is missing."""
    verdict = explained(TRAINER_FELL)
    assert verdict["family"] == "learning"
    assert verdict["missing"]
    assert "ended" not in verdict["summary"] + verdict["title"]


def test_event_files_are_explained(tmp_path: Path) -> None:
    """Scalars are read from a file, its directory and the directory above; others are skipped."""
    folder = tmp_path / "runs" / "Nov30_host"
    losses = [*falling(30), *[math.nan] * 5]
    events = write_events(folder, {"Loss/train": losses, "Loss/val": falling(3)})
    writer = SummaryWriter(str(tmp_path / "runs" / "Nov30_host" / "histograms"))
    writer.add_histogram("weights", [1.0, 2.0, 3.0], 0)
    writer.close()
    for path in (events, folder, tmp_path / "runs"):
        verdict = explained(path)
        assert verdict["cause"] == LOST
        assert "step 30" in verdict["title"]
        assert "'Loss/train'" in verdict["summary"]
    assert refused("explain", folder / "histograms") == UNREADABLE


@pytest.mark.parametrize("stored", ["float_val", "double_val", "tensor_content"])
def test_scalars_that_are_stored_as_tensors_are_read(tmp_path: Path, stored: str) -> None:
    """TensorFlow 2 and torch's `new_style` store a scalar as a tensor of one value."""
    writer = SummaryWriter(str(tmp_path))
    for step, loss in enumerate(falling(40)):
        tensor = TensorProto(dtype="DT_DOUBLE" if stored == "double_val" else "DT_FLOAT")
        if stored == "tensor_content":
            tensor.tensor_content = struct.pack("<f", loss)
        else:
            getattr(tensor, stored).append(loss)
        value = Summary.Value(tag="train/loss", tensor=tensor)
        writer.file_writer.add_summary(Summary(value=[value]), step)
    writer.close()
    verdict = explained(tmp_path)
    assert (verdict["cause"], verdict["step"]) == (FELL, 39)


def test_a_file_that_is_being_written_is_read_up_to_its_end(tmp_path: Path) -> None:
    """A record that is cut off at the end is judged, and the verdict says what is missing."""
    events = write_events(tmp_path, {"loss": falling(50)})
    events.write_bytes(events.read_bytes()[:-5])
    verdict = explained(events)
    assert (verdict["cause"], verdict["step"]) == (FELL, 48)
    assert len(verdict["missing"]) == 2


def test_of_several_runs_in_a_directory_the_newest_counts(tmp_path: Path) -> None:
    """Event files of a resumed run are joined, but a run that began again replaces an older one."""
    write_events(tmp_path, {"loss": [math.nan] * 40})
    write_events(tmp_path, {"loss": falling(60)[:40]})
    write_events(tmp_path, {"loss": falling(60)[40:]}, first=40)
    verdict = explained(tmp_path)
    assert (verdict["cause"], verdict["step"]) == (FELL, 59)
    assert "60 values" in verdict["summary"]


def test_a_directory_of_several_records_needs_a_name(tmp_path: Path) -> None:
    """No record is chosen silently, and the directory of a holdfast run is never a record."""
    for name in ("a", "b"):
        write_events(tmp_path / name, {"loss": falling(20)})
    assert refused("explain", tmp_path) == USAGE

    run = make_run(tmp_path / "run", steps=20)
    shutil.copy(TRAINER_LOST, run)
    assert explained(run)["cause"] != LOST


@pytest.mark.parametrize(
    ("columns", "cause", "chosen"),
    [
        ({"loss": flat(100)}, NOT_LEARNED, "'loss'"),
        ({"loss": [math.nan] * 20}, NEVER_FINITE, "'loss'"),
        ({"loss": falling(60), "grad_norm": [*[1.0] * 40, *[math.nan] * 20]}, LOST, "'loss'"),
        ({"train_loss_epoch": flat(100), "train_loss_step": falling(100)}, FELL, "loss_step'"),
        ({"val_loss": flat(100), "train/nll_loss": falling(100)}, FELL, "'train/nll_loss'"),
        # One of several losses did not fall: the others may have.
        ({"box_loss": flat(100), "class_loss": falling(100)}, NOT_JUDGED, "'box_loss'"),
        ({"val_loss": flat(100)}, NOT_JUDGED, "'val_loss'"),
        ({"accuracy": falling(100)}, NOT_JUDGED, ""),
        ({"loss": falling(9)}, NOT_JUDGED, "'loss'"),
        ({"loss": [*falling(60), math.nan]}, NOT_JUDGED, "'loss'"),
        # A loss that is exactly 0 at once: older Trainers write this for NaN.
        ({"loss": [*falling(50), *[0.0] * 50]}, NOT_JUDGED, "'loss'"),
        ({"g_loss": flat(100), "d_loss": flat(100)}, NOT_JUDGED, "_loss'"),
        ({"loss": flat(100), "reward": falling(100)}, NOT_JUDGED, "'loss'"),
        ({"loss": flat(100), "rewards/chosen": falling(100)}, NOT_LEARNED, "'loss'"),
        # A GAN is not judged, but if one of its losses is not finite any more, it is lost.
        ({"g_loss": [*flat(50), *[math.nan] * 9], "d_loss": flat(59)}, LOST, "'g_loss'"),
        ({"g_loss": [math.nan] * 59, "d_loss": flat(59)}, NOT_JUDGED, "'d_loss'"),
        ({"loss_G": [*flat(50), *[math.inf] * 9]}, LOST, "'loss_G'"),
    ],
)
def test_which_loss_is_judged(
    tmp_path: Path, columns: dict[str, list[float]], cause: str, chosen: str
) -> None:
    """Plain names come first, evaluations last, and losses that measure nothing are not judged."""
    steps = range(len(next(iter(columns.values()))))
    verdict = explained(write_table(tmp_path / "metrics.csv", {"step": steps, **columns}))
    assert verdict["cause"] == cause
    assert chosen in verdict["summary"]


@pytest.mark.parametrize(
    ("numbers", "where"),
    [({"epoch": range(1, 31)}, "epoch 21"), ({"lr": [0.1] * 30}, "line 22 of metrics.csv")],
)
def test_lines_without_steps(tmp_path: Path, numbers: dict[str, Any], where: str) -> None:
    """If a table has no steps, the first NaN is named by its epoch or its line."""
    losses = [*falling(20), *[math.nan] * 10]
    table = write_table(tmp_path / "metrics.csv", {**numbers, "loss": losses})
    assert where in explained(table)["title"]


def test_a_loss_that_may_have_fallen_unseen_is_not_blamed(tmp_path: Path) -> None:
    """A flat loss whose first tenth was not logged has perhaps fallen there."""
    early = write_table(tmp_path / "a.csv", {"step": range(10, 1010, 10), "loss": flat(100)})
    late = write_table(tmp_path / "b.csv", {"step": range(100, 1100, 10), "loss": flat(100)})
    assert explained(early)["cause"] == NOT_LEARNED
    assert explained(late)["cause"] == NOT_JUDGED


def test_a_long_record_keeps_its_steps(tmp_path: Path) -> None:
    """Of 60,000 lines, the step of the first NaN and the number of values remain exact."""
    losses = [*(2.0 / (1 + step / 1000) for step in range(54_321)), *[math.nan] * 5_679]
    verdict = explained(write_table(tmp_path / "x.csv", {"step": range(60_000), "loss": losses}))
    assert "step 54321" in verdict["title"]
    assert "60,000 values" in verdict["summary"]


def test_a_series_is_bounded() -> None:
    """A million values take a few thousand points, with the extremes and the mean of all."""
    series = Series()
    for start in range(0, 1_000_000, 1000):
        series.extend(range(start, start + 1000), [float(start)] * 1000)
    points = series.points()
    assert len(points) <= 8192
    assert (series.low, series.high, series.end().size) == (0.0, 999_000.0, 1_000_000)
    assert sum(point.finite for point in points) == 1_000_000
    assert math.fsum(point.mean * point.finite for point in points) == pytest.approx(499_500e6)


def test_a_wandb_run_without_its_history_is_read_from_its_output(tmp_path: Path) -> None:
    """What is left is the printed loss by its lines, and the verdict says so."""
    files = tmp_path / "run-20261201_001102-abc" / "files"
    files.mkdir(parents=True)
    lines = [f"step {step} loss {loss:.4f}" for step, loss in enumerate(falling(40))]
    (files / "output.log").write_text("\n".join([*lines, "step 40 loss nan", "step 41 loss nan"]))
    (files / "wandb-summary.json").write_text('{"accuracy": 0.5, "_step": 41}')
    verdict = explained(files.parent)
    assert verdict["cause"] == LOST
    assert "line 41" in verdict["title"]
    assert len(verdict["missing"]) == 2


def test_options_of_runs_and_logs_are_refused() -> None:
    """A record has neither attempts nor an exit status."""
    assert refused("explain", LIGHTNING, "--status", 0) == USAGE
    assert refused("explain", WANDB, "--attempt", 0) == USAGE


def test_a_bundle_of_a_record_holds_its_evidence() -> None:
    """The bundle of a binary record is text, and has the numbers of the verdict."""
    result = call("explain", WANDB, "--bundle")
    assert result.exit_code == NUMERICS
    assert "train/loss" in result.output
    assert result.output.isprintable() or "\x00" not in result.output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b""),
        ("trainer_state.json", b"{}"),
        ("trainer_state.json", b'{"log_history": [3]}'),
        ("trainer_state.json", b'{"log_history": []}'),
        ("trainer_state.json", b'{"log_history": [{"loss": 1' + b"0" * 5000),
        ("events.out.tfevents.1.host", b""),
        ("events.out.tfevents.1.host", bytes(range(256)) * 40),
        ("metrics.csv", b""),
        ("metrics.csv", b"one line of text\n"),
        ("metrics.csv", b"a,b\nc,d\n"),
        ("metrics.csv", b"1,2\n3,4\n"),
        ("metrics.csv", b"\x00" * 5000),
        ("run-a.wandb", b""),
        ("run-a.wandb", b":W&B"),
        ("run-a.wandb", bytes(range(256)) * 40),
    ],
)
def test_files_that_hold_no_metrics_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """An empty, foreign or damaged file is one clear error, alone and in a directory."""
    path = tmp_path / name
    path.write_bytes(content)
    assert refused("explain", path) == UNREADABLE
    assert refused("explain", tmp_path) == UNREADABLE
    assert refused("compare", path, LIGHTNING) == UNREADABLE


@pytest.mark.parametrize("original", [TRAINER_LOST, LIGHTNING / "metrics.csv", WANDB, None])
def test_damage_anywhere_is_no_traceback(tmp_path: Path, original: Path | None) -> None:
    """A file that is cut off or overwritten at any place gets a verdict or a clear error."""
    if original is None:
        original = write_events(tmp_path / "events", {"loss": falling(50)})
    if original.is_dir():
        (original,) = original.glob("*.wandb")
    data = original.read_bytes()
    path = tmp_path / original.name
    for index in range(10):
        place = len(data) * index // 10
        for damaged in (data[:place], data[:place] + b"\xff\x00\xfe" + data[place + 3 :]):
            path.write_bytes(damaged)
            result = call("explain", path)
            assert isinstance(result.exception, SystemExit | None), (place, result.exception)
            assert result.exit_code in (0, 2, NUMERICS)


# --- compare --------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Path:
    pytest.importorskip("plotly")
    return tmp_path / "compare.html"


def test_records_are_compared_with_each_other_and_with_runs(tmp_path: Path, page: Path) -> None:
    """The judged losses share a row with those of a run; newest and best values are shown."""
    run = make_run(tmp_path / "run", steps=60)
    columns = {"step": range(60), "loss": falling(60), "val_acc": [0.1, *[0.9] * 30, *[0.5] * 29]}
    table = write_table(tmp_path / "metrics.csv", columns)
    result = call("compare", run, table, WANDB, TRAINER_LOST, "-o", page, "--json")
    assert result.exit_code == 0, result.output
    compared = json.loads(result.output)
    facts = compared["facts"]
    assert [verdict["cause"] for verdict in compared["verdicts"]][1:] == [FELL, LOST, LOST]
    assert facts["steps"] == ["60", "59", "240", "40"]
    assert facts["last loss"][1:] == ["0.309855", "not finite", "not finite"]
    assert facts["lowest loss"][3] == "4.57124"
    assert (facts["last val_acc"][1], facts["highest val_acc"][1]) == ("0.5", "0.9")
    assert facts["attempts"] == ["1", "", "", ""]
    assert page.stat().st_size > 0


def test_speed_is_not_compared_without_times(page: Path) -> None:
    """`--fail-on-regression` refuses records, because they hold no times of steps."""
    words = (LIGHTNING, WANDB, "-o", page, "--fail-on-regression", "5%")
    assert refused("compare", *words) == USAGE


def test_curves_of_a_record_keep_their_values() -> None:
    """A record of 24 steps has as many values, 18 of them finite, at the steps of its optimizer."""
    found = find_record(WANDB)
    assert found is not None
    points = read_record(found).series["train/loss"].points()
    assert [point.step for point in points] == list(range(10, 250, 10))
    assert [point.mean for point in points[:18]] == [2.0 / (1 + i / 10) for i in range(18)]
    assert all(point.nonfinite for point in points[18:])
