"""Numbers that a script logged, as they are shown: panels, the live view, and every sink."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.report.made_runs import GONE, Clock, add_process, make_run, sample
from tests.unit.report.test_metrics import _tensorboard, copied

from holdfast.recorder.ring import HEADER_BYTES
from holdfast.recorder.scalars import SCALARS_FILE, Scalars, checked
from holdfast.report.figures import figures
from holdfast.report.gathering import gather
from holdfast.report.live import draw
from holdfast.report.page import render
from holdfast.report.watching import Watched

pytest.importorskip("plotly")


def log(folder: Path, step: int, **values: float) -> None:
    scalars = Scalars(lambda: folder, lambda event: None)
    scalars.write(checked(values, "", {}), step, None)
    scalars.close()


def titles(run: Path) -> list[str]:
    return [each["text"] for each in figures(gather(run))["steps"]["layout"]["annotations"]]


def curves(run: Path, axis: int) -> list[tuple[str, list[int], list[float | None]]]:
    data = figures(gather(run))["steps"]["data"]
    return [(each["name"], each["x"], each["y"]) for each in data if each["yaxis"] == f"y{axis}"]


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Return a run of two ranks, and their folders."""
    run = make_run(tmp_path / "run", steps=4, ranks=2)
    return run, [run / "processes" / f"{GONE + rank}-7" for rank in range(2)]


def test_each_name_is_a_panel_below_the_others(ranks) -> None:
    """Ranks that log alike are one curve, others two; NaN is marked, and a name is no HTML."""
    run, folders = ranks
    for rank, folder in enumerate(folders):
        for step in (1, 3):
            log(folder, step, **{"val/wer": 0.5 / step, "loss": rank + step, "<i>": math.nan if step == 3 else 1.0})
    shown = {title: number for number, title in enumerate(titles(run), start=1)}  # of "loss" the lower one
    assert curves(run, shown["<b>val/wer</b>"]) == [("all alike", [1, 3], [0.5, 0.1666667])]
    assert [name for name, *_ in curves(run, shown["<b>loss</b>"])] == ["rank 0", "rank 1"]
    assert curves(run, shown["<b>&lt;i&gt;</b>"])[1][:2] == ("not finite", [3])
    assert "val/wer" in render(gather(run))


def test_a_script_without_steps_and_a_guard_are_shown_too(tmp_path: Path) -> None:
    """What trains nothing that is seen, such as with another library, has its panel all the same."""
    run = tmp_path / "run"
    log(add_process(run), 2, accuracy=0.5)
    folder = run / "recorder" / "rank0"
    folder.mkdir(parents=True)
    log(folder, 7, accuracy=0.75)
    assert titles(run) == ["<b>accuracy</b>"]
    assert curves(run, 1) == [] == curves(run, 2)
    assert [each["x"] for each in figures(gather(run))["steps"]["data"]] == [[2], [7]]


def test_too_many_names_and_lost_values_are_said(tmp_path: Path) -> None:
    """24 panels are drawn, of the names that came first; the page says so, and what was overwritten."""
    run = tmp_path / "run"
    folder = add_process(run, [sample(1)])
    for number in range(30):
        log(folder, 1, **{f"name {number}": 1.0})
    assert [title for title in titles(run) if "name" in title][-1] == "<b>name 23</b>"
    assert "of trainer 4100000 the first 24 of 30 logged names are drawn" in gather(run).problems
    scalars = Scalars(lambda: folder, lambda event: None)
    scalars.write(checked({"a": 1.0}, "", {}) * 32_768, 5, None)
    scalars.close()
    (problem,) = gather(run).problems
    assert "the logged values before step 5 are not recorded any more: 30 older records were overwritten" in problem


@pytest.mark.parametrize("at", [0, 8, 20, HEADER_BYTES - 1, HEADER_BYTES + 40, HEADER_BYTES + 150])
@pytest.mark.parametrize("data", [b"", b"\xff" * 60])
def test_a_damaged_file_costs_its_values_only(tmp_path: Path, at: int, data: bytes) -> None:
    """Cut or overwritten anywhere, the page is made, and metrics are copied."""
    run = tmp_path / "run"
    folder = add_process(run, [sample(1)])
    log(folder, 1, a=1.0, b=2.0, c=3.0)
    whole = (folder / SCALARS_FILE).read_bytes()
    (folder / SCALARS_FILE).write_bytes(whole[:at] + (data + whole[at + len(data) :] if data else b""))
    assert len(gather(run).lanes) == 1
    assert copied(run, jsonl=tmp_path / "out").points == 1


def test_the_live_view_shows_the_newest_six(tmp_path: Path) -> None:
    """Newest first, whoever logged them; what a terminal could act on is made harmless."""
    run = tmp_path / "run"
    folder = add_process(run, [sample(1)])
    for number in range(7):
        log(folder, number, **{f"name-{number}": number / 8})
    log(folder, 9, **{"name-2": math.nan, "\x1b[31m": 1.0})
    screen = io.StringIO()
    Console(file=screen, width=100).print(draw(Watched(run, Clock()).look(), 100))
    lines = screen.getvalue().splitlines()
    first = next(index for index, line in enumerate(lines) if line.split() == ["logged", "value", "step"]) + 2
    shown = [line.split()[-3:] for line in lines[first : first + 6]]
    assert shown[1:] == [["name-2", "nan", "9"], ["name-6", "0.75", "6"], ["name-5", "0.625", "5"],
                         ["name-4", "0.5", "4"], ["name-3", "0.375", "3"]]  # fmt: skip
    assert "\x1b[31m" not in screen.getvalue()
    assert "name-1" not in screen.getvalue()


def test_every_sink_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under their names; one that is also ours is told apart where both would be one curve."""
    pytest.importorskip("tensorboardX")
    run = tmp_path / "run"
    log(add_process(run, [sample(1)], rank=3), 2, **{"val/wer": 0.25, "loss": math.nan})
    result = copied(run, jsonl=tmp_path / "out", tensorboard=tmp_path / "tb")
    assert (result.points, result.logged, result.failures) == (1, 2, ())
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    told = [{**line, "time": 0} for line in lines if line["kind"] == "scalar"]
    who = {"kind": "scalar", "time": 0, "process": "rank 3", "rank": 3, "attempt": 0, "step": 2, "epoch": None}
    assert told == [{**who, "name": "val/wer", "value": 0.25}, {**who, "name": "loss", "value": "NaN"}]
    written = [value for event in _tensorboard(tmp_path / "tb" / "rank_3") for value in event.summary.value]
    assert {value.tag: value.simple_value for value in written}["val/wer"] == 0.25
    assert [value.tag for value in written if "loss" in value.tag] == ["loss", "logged/loss"]
