"""What a ring of steps does not hold any more.

Kept in short, through kills, damage and a full disk.
"""

from __future__ import annotations

import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.unit.report.made_runs import add_process
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.recorder.black_box import STEPS_FILE
from holdfast.recorder.history import SUFFIX, read_history
from holdfast.recorder.progress import SampleRing
from holdfast.recorder.reader import describe_lost_steps, read_steps
from holdfast.recorder.run_files import SAMPLES_FILE
from holdfast.report.curves import curves_of_steps, thinned
from holdfast.report.page.gathering import gather

_STEPS = 1_000_000


def _write(path: Path, steps: range, **losses: float) -> None:
    ring = SampleRing(path)
    for step in steps:
        ring.write(
            step,
            1,
            losses.get(f"at_{step}", 1.0 + 100.0 / step),
            2.0,
            0.1,
            0.01,
            0.002,
            0 if step % 7 else step,
            0,
            0,
            0,
        )
    ring.close()


def test_a_page_of_a_million_steps_shows_all_of_them_and_stays_small(tmp_path: Path) -> None:
    """From the first step to the last, with a single peak and a single NaN long ago, in 2 MB
    beside the script.
    """
    pytest.importorskip("plotly")
    path = add_process(run := tmp_path / "run") / SAMPLES_FILE
    _write(path, range(1, _STEPS + 1), at_123456=5000.0, at_300000=math.nan)
    assert 0 < path.with_name(path.name + SUFFIX).stat().st_size <= 1 << 20
    result = CliRunner().invoke(make_app("report"), ["report", str(run)])
    assert (result.exit_code, "not recorded" in result.output) == (0, False)
    page = (run / "report.html").read_text()
    assert len(page.encode()) <= 2_000_000
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', page)[0])
    band, line, crosses = [trace for trace in figures["steps"]["data"] if trace["yaxis"] == "y"][:3]
    assert (line["x"][0], line["x"][-1] > _STEPS - 100) == (1, True)
    (place,) = np.flatnonzero(np.array(band["y"]) == 5000.0)
    assert band["x"][place] <= 123_456 < band["x"][place + 1]
    assert 0 <= 300_000 - crosses["x"][0] < 2048
    assert gather(run).lanes[0].curves["host_bytes"].finite.max() == _STEPS - _STEPS % 7
    copied = CliRunner().invoke(make_app("metrics"), ["metrics", str(run), "--jsonl", "-"])
    steps = [
        json.loads(text)["step"]
        for text in copied.output.splitlines()
        if text.startswith('{"kind":"step"')
    ]
    assert (steps[0], steps[-1], steps == sorted(steps)) == (1, _STEPS, True)
    assert "not recorded" not in copied.output


_WRITER = """
import sys, pathlib
from holdfast.recorder.black_box import BlackBox, StepMark
box, number = BlackBox(pathlib.Path(sys.argv[1])), int(sys.argv[2])
while True:
    for _ in range(5_000):
        number += 1
        box.step(StepMark.COMMITTED, number, 1, float(number), None, 0.01)
    print("wrote 5,000 steps", flush=True)
"""


def test_killed_again_and_again_it_loses_nothing(tmp_path: Path) -> None:
    """After SIGKILLs at random moments the history and the ring together hold each mark of a
    guard once.
    """
    chance, number, newest = random.Random(1), 0, 0
    while newest < 40_000:
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            # On a busy machine the writer gets further in each of its lives, too.
            assert writer.stdout.readline() == b"wrote 5,000 steps\n"
            time.sleep(0.3 * chance.random())
            writer.send_signal(signal.SIGKILL)
        held = read_steps(tmp_path)
        number = held[-1].global_step
        rows, newest, missing = read_history(tmp_path / STEPS_FILE)
        total = (rows["mean"][:, 0] * rows["finite"][:, 0]).sum()
        assert (rows["finite"][:, 0].sum(), missing) == (newest, 0)
        assert total == pytest.approx(newest * (newest + 1) / 2)
        assert held[0].global_step <= newest + 1
        assert describe_lost_steps(tmp_path) == ""


def test_a_damaged_history_is_never_an_error(tmp_path: Path) -> None:
    """Cut and overwritten anywhere, it is read as far as it is whole, and drawn."""
    ring, chance = add_process(tmp_path) / SAMPLES_FILE, random.Random(1)
    _write(ring, range(1, 33_000))
    whole = (history := ring.with_name(ring.name + SUFFIX)).read_bytes()
    for _ in range(300):
        at, junk = (
            chance.randrange(len(whole)) // chance.choice((1, 1000)),
            chance.randbytes(chance.randrange(400)),
        )
        history.write_bytes(
            (whole[:at] + junk + whole[at + len(junk) :])[: chance.randrange(2 * len(whole))]
        )
        rows = read_history(ring).rows
        assert len(rows) <= 256
        with np.errstate(all="ignore"):
            curves_of_steps(thinned(rows, rows[:0], 200))


def test_what_cannot_be_written_stops_nothing_and_is_said(tmp_path: Path) -> None:
    """The page has what the ring holds and says what is gone.

    The next half is kept once there is a place for it.
    """
    ring = add_process(tmp_path) / SAMPLES_FILE
    blocked = ring.with_name(f".{ring.name}{SUFFIX}")
    blocked.mkdir()
    _write(ring, range(1, 33_000))
    picture = gather(tmp_path)
    assert picture.lanes[0].curves["loss"].steps[0] == 232
    (problem,) = picture.problems
    assert {"232", "231"} <= set(re.findall(r"\d+", problem))
    blocked.rmdir()
    _write(ring, range(33_000, 50_000))
    assert read_history(ring)[1:] == (32_767, 16_383)
