"""Numbers that a script logged, as they are shown: panels, the live view, and every sink."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.report.made_runs import GONE, Clock, add_process, make_run, sample
from tests.unit.report.test_metrics import _tensorboard, copied

from holdfast.recorder.ring import HEADER_BYTES
from holdfast.recorder.scalars import SCALARS_FILE, Scalars, check_scalars
from holdfast.report.live.view import PANELS, draw
from holdfast.report.live.watching import Watched
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import figures


def log(folder: Path, step: int, **values: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scalars = Scalars(lambda: folder, lambda event: None)
    scalars.write(check_scalars(values, "", {}), step, None)
    scalars.close()


def panels(run: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """Return names and steps of the curves of each panel.

    Of panels with the same title the lowest.
    """
    steps = figures(gather(run))["steps"]
    axes = {int(each["yaxis"][1:] or 1): [] for each in steps["data"]}
    for each in steps["data"]:
        axes[int(each["yaxis"][1:] or 1)].append((each["name"], each["x"]))
    return {
        text["text"].partition("&nbsp;")[0]: axes[number]
        for number, text in enumerate(steps["layout"]["annotations"], start=1)
    }


def test_each_name_is_a_panel_below_the_others(tmp_path: Path) -> None:
    """Ranks that log alike are one curve, others two; NaN is marked, and a name is no HTML.

    A guard is one more.
    """
    run = make_run(tmp_path / "run", steps=4, ranks=2)
    for rank in range(2):
        for step in (1, 3):
            odd = {"loss": rank + step, "<i>": math.nan if step == 3 else 1.0}
            log(run / "processes" / f"{GONE + rank}-7", step, **{"val/wer": 0.5 / step}, **odd)
    log(run / "recorder" / "rank0", 7, accuracy=0.75)
    found = panels(run)
    assert found["<b>val/wer</b>"] == [("all alike", [1, 3])]
    assert found["<b>loss</b>"] == [("rank 0", [1, 3]), ("rank 1", [1, 3])]
    assert found["<b>&lt;i&gt;</b>"] == [("all alike", [1, 3]), ("not finite", [3])]
    assert found["<b>accuracy</b>"] == [("guard rank0", [7])]


def test_steps_on_another_scale_have_an_axis_of_their_own(tmp_path: Path) -> None:
    """Epochs and samples as steps neither squeeze the other curves nor are squeezed.

    These share one axis.
    """
    run = make_run(tmp_path / "run", steps=400)
    for name, step in (("by sample", 25_600), ("by epoch", 3), ("by step", 390)):
        log(run / "processes" / f"{GONE}-7", step, **{name: 1.0})
    steps = figures(gather(run))["steps"]
    titles = [each["text"] for each in steps["layout"]["annotations"]][-3:]
    names = [re.sub(r"</?b>| \(.*\)", "", title) for title in titles]
    assert names == ["by step", "by sample", "by epoch"]
    assert ["own" in title for title in titles] == [False, True, True]
    count = len(steps["layout"]["annotations"])
    assert steps["layout"]["xaxis"]["anchor"] == f"y{count - 2}"
    own = {
        each["yaxis"]: each.get("xaxis")
        for each in steps["data"]
        if each["x"] in ([25_600], [3], [390])
    }
    assert own == {
        f"y{count - 2}": None,
        f"y{count - 1}": f"x{count - 1}",
        f"y{count}": f"x{count}",
    }
    assert steps["layout"][f"xaxis{count}"]["anchor"] == f"y{count}"


def test_too_many_names_and_lost_values_are_said(tmp_path: Path) -> None:
    """Without a step too, 24 panels are drawn, of the names that came first, and what was
    overwritten is said.
    """
    folder = add_process(tmp_path)
    for number in range(30):
        log(folder, 1, **{f"name {number}": 1.0})
    assert list(panels(tmp_path)) == [f"<b>name {number}</b>" for number in range(24)]
    (problem,) = gather(tmp_path).problems
    assert {str(GONE), "24", "30"} <= set(re.findall(r"\d+", problem))
    scalars = Scalars(lambda: folder, lambda event: None)
    scalars.write(check_scalars({"a": 1.0}, "", {}) * 32_768, 5, None)
    scalars.close()
    (problem,) = gather(tmp_path).problems
    assert {str(GONE), "5", "30"} <= set(re.findall(r"\d+", problem))


def test_a_peak_among_many_values_is_seen(tmp_path: Path) -> None:
    """Of many values a curve has means, and the least and most of each stretch.

    What is not finite is marked.
    """
    folder = add_process(tmp_path)
    scalars = Scalars(lambda: folder, lambda event: None)
    for step in range(1, 5001):
        value = {2000: 99.0, 3000: -99.0, 4000: math.inf}.get(step, 1.0)
        scalars.write(check_scalars({"often": value}, "", {}), step, None)
    scalars.close()
    (lane,) = gather(tmp_path).lanes
    curve = lane.curves["logged: often"]
    assert 500 < len(curve.values) <= 1000
    assert (curve.finite.min(), curve.finite.max()) == (-99.0, 99.0)
    assert [4000 - 8 < step <= 4000 for step in curve.nonfinite] == [True]
    assert (lane.begun, lane.ended, lane.last_step) == (None, None, 0)


@pytest.mark.parametrize("at", [0, 8, 20, HEADER_BYTES + 40, HEADER_BYTES + 150])
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_file_costs_its_values_only(tmp_path: Path, at: int, cut: bool) -> None:
    """Cut or overwritten anywhere, the page is made, and steps are copied."""
    folder = add_process(tmp_path, [sample(1)])
    log(folder, 1, a=1.0, b=2.0, c=3.0)
    whole = (folder / SCALARS_FILE).read_bytes()
    (folder / SCALARS_FILE).write_bytes(
        whole[:at] + (b"" if cut else b"\xff" * 60 + whole[at + 60 :])
    )
    assert len(gather(tmp_path).lanes) == 1
    assert copied(tmp_path, jsonl=tmp_path / "out").points == 1


def test_the_live_view_shows_the_newest_six(tmp_path: Path) -> None:
    """Newest first; what a terminal could act on is made harmless."""
    folder = add_process(tmp_path, [sample(1)])
    for number in range(7):
        log(folder, number, **{f"name-{number}": number / 8})
    log(folder, 9, **{"name-2": math.nan, "\x1b[31m": 1.0})
    screen = io.StringIO()
    Console(file=screen, width=100).print(draw(Watched(tmp_path, Clock()).look(), 100))
    rows = [line.split() for line in screen.getvalue().splitlines()]
    shown = rows[rows.index(["logged", "value", "step"]) + 3 :][:5]
    assert shown == [
        ["name-2", "nan", "9"],
        *([f"name-{n}", f"{n / 8:g}", f"{n}"] for n in (6, 5, 4, 3)),
    ]
    assert "\x1b[31m" not in screen.getvalue()


def test_a_panel_of_the_live_view_shows_all(tmp_path: Path) -> None:
    """A key leads to all names; where something else is shown there are none; JSON has them too."""
    folder = add_process(tmp_path, [sample(1)])
    for number in range(9):
        log(folder, number, **{f"name-{number}": number / 8})
    seen = Watched(tmp_path, Clock()).look()
    shown = {}
    for panel in PANELS:
        screen = io.StringIO()
        Console(file=screen, width=100).print(draw(seen, 100, panel))
        shown[panel] = screen.getvalue().count("name-")
    assert shown == {"all": 6, "processes": 0, "training": 9, "events": 0}
    newest = seen.as_json()["scalars"][-1]
    assert {**newest, "unix_seconds": 0} == {
        "name": "name-8",
        "value": 1.0,
        "step": 8,
        "epoch": None,
        "unix_seconds": 0,
    }


def test_every_sink_gets_them(tmp_path: Path) -> None:
    """JSON lines name them, and elsewhere they come after "logged/".

    A loss of the script's own is not ours.
    """
    pytest.importorskip("tensorboardX")
    log(add_process(tmp_path, [sample(1)], rank=3), 2, **{"val/wer": 0.25, "loss": math.nan})
    result = copied(tmp_path, jsonl=tmp_path / "out", tensorboard=tmp_path / "tb")
    assert (result.points, result.failures) == (1, ())
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    told = [{**line, "time": 0} for line in lines if line["kind"] == "scalar"]
    who = {
        "kind": "scalar",
        "time": 0,
        "process": "rank 3",
        "rank": 3,
        "attempt": 0,
        "step": 2,
        "epoch": None,
    }
    assert told == [
        {**who, "name": "val/wer", "value": 0.25},
        {**who, "name": "loss", "value": "NaN"},
    ]
    written = [
        value for event in _tensorboard(tmp_path / "tb" / "rank_3") for value in event.summary.value
    ]
    assert {value.tag: value.simple_value for value in written}["logged/val/wer"] == 0.25
    assert [value.tag for value in written if "loss" in value.tag] == ["loss", "logged/loss"]
