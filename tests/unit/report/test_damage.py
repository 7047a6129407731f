"""Runs with random damage in any file: every report goes on, and none raises."""

from __future__ import annotations

import io
import json
import random
import shutil
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.report.made_runs import Clock, happened, make_run, write_events

from holdfast.core.text import as_json_value
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.report.figures import figures
from holdfast.report.gathering import gather
from holdfast.report.live import draw
from holdfast.report.metrics.copying import follow
from holdfast.report.metrics.sinks import open_sinks
from holdfast.report.watching import Watched


def _damaged(data: bytes, chance: random.Random, *, is_json: bool) -> bytes:
    """Return the bytes cut, with flipped bytes anywhere or in the header, painted over, or replaced."""
    kind = chance.randint(0, 5 if is_json else 4)
    found = bytearray(data)
    if kind == 0:
        return data[: chance.randint(0, len(data))]
    if kind == 1:
        for _ in range(chance.randint(1, 200)):
            found[chance.randrange(min(len(found), 20_000))] = chance.randrange(256)
    elif kind == 2:
        for _ in range(chance.randint(1, 10)):
            found[chance.randrange(min(len(found), 40))] = chance.choice([0, 1, 127, 128, 255])
    elif kind == 3:
        count = max(0, min(16_000, len(found) - 4096))
        found[4096 : 4096 + count] = bytes(chance.choices([0, 127, 128, 255], k=count))
    elif kind == 4:
        return chance.randbytes(chance.randint(0, 6000))
    else:
        text = data.decode()
        for old, new in (("0", '"x"'), ("1", "1e999"), ("null", "[]"), ('"', "{"), ("1", "NaN"), ("[", "[[")):
            text = text.replace(old, new, chance.choice([0, 0, 1, 3]))
        return text.encode()
    return bytes(found)


def _look_at(run: Path, watched: Watched) -> None:
    for seen in (watched.look(), Watched(run, Clock()).look()):
        Console(file=io.StringIO(), width=80).print(draw(seen, 80))
    json.dumps(as_json_value(figures(gather(run)), depth=12), allow_nan=False)
    at_once = threading.Event()
    at_once.set()
    assert follow(run, open_sinks(["jsonl=/dev/null"], run), at_once).failures == ()


@pytest.mark.slow
def test_a_run_with_random_damage_is_reported(tmp_path):
    """Before the damage, while it is watched, and afterwards: a picture, a figure and points, never an exception."""
    whole = _whole_run(tmp_path / "whole")
    for seed in range(25):
        run, chance = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(whole, run)
        watched = Watched(run, Clock())
        _look_at(run, watched)
        for path in chance.sample(sorted(p for p in run.rglob("*") if p.is_file()), chance.randint(1, 4)):
            path.write_bytes(_damaged(path.read_bytes(), chance, is_json=path.suffix == ".json"))
        _look_at(run, watched)
        shutil.rmtree(run)


def _whole_run(path: Path) -> Path:
    run = make_run(path, steps=60, ranks=2)
    write_events(run / "recorder" / "rank0", happened("spike", 3, 3, loss=1.0))
    box = BlackBox(run / "recorder" / "rank0")
    for step in range(20):
        box.step(StepMark.COMMITTED, step, 1, 0.5, 0.5, 0.1)
    box.close()
    return run
