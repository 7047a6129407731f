"""Metrics in the formats of others, read back by their own readers, and a follower that nothing
stops.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.report.made_runs import (
    BEGAN,
    GONE,
    add_process,
    happened,
    make_run,
    sample,
    write_events,
)

from holdfast.core.errors import PolicyError
from holdfast.recorder.progress import SampleRing
from holdfast.recorder.run_files import SAMPLES_FILE
from holdfast.report.metrics.copying import MetricPoint, follow
from holdfast.report.metrics.sinks import open_sinks
from holdfast.report.sources import RecordedEvent


def copied(run: Path, **wanted: object):
    """Copy a run once."""
    at_once = threading.Event()
    at_once.set()
    return follow(
        run, open_sinks({kind: str(target) for kind, target in wanted.items()}, run), at_once
    )


def kept(run: Path, **options):
    """Copy a run once to a sink that remembers."""
    sink, at_once = _Kept(), threading.Event()
    at_once.set()
    follow(run, [sink], at_once, **options)
    return sink


def _with_nan(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    samples = [sample(step, grad_norm=None, loss=1.0 / step) for step in range(1, 4)]
    samples += [
        sample(4, grad_norm=2.0),
        sample(5, loss=math.nan, grad_norm=math.nan),
        sample(6, loss=math.inf),
    ]
    add_process(run, samples, happened("spike", 7, 6, loss=math.inf), rank=3)
    return run


class _Kept:
    """A sink that remembers, and may fail."""

    def __init__(self, name: str = "kept", fails_at: int | None = None) -> None:
        self.name = name
        self.points: list[MetricPoint] = []
        self.events: list[RecordedEvent] = []
        self.closed = 0
        self._fails_at = fails_at
        self._calls = 0

    def write(self, points, events):
        self._calls += 1
        if self._calls == self._fails_at:
            raise RuntimeError("the server is gone \x1b[31m")
        self.points += points
        self.events += events

    def close(self):
        self.closed += 1


def test_json_lines_hold_every_step_and_event_also_nan(tmp_path, capsys):
    """Each line is strict JSON; NaN and infinity are texts that float() reads.

    What nobody measured is absent.
    """
    run, out = _with_nan(tmp_path), tmp_path / "out.jsonl"
    result = copied(run, jsonl=out)
    assert (result.points, result.events, result.failures) == (6, 1, ())

    def refuse(name: str) -> float:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in out.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert (steps[0]["process"], steps[0]["rank"], steps[0]["attempt"]) == ("rank 3", 3, 0)
    assert steps[0]["time"] == pytest.approx(BEGAN + 5.1)
    assert "grad_norm" not in steps[2]
    assert (steps[3]["grad_norm"], steps[4]["grad_norm"], steps[4]["loss"]) == (2.0, "NaN", "NaN")
    assert math.isinf(float(steps[5]["loss"]))
    assert steps[0]["wait_share"] == pytest.approx(0.2)
    assert "device_allocated_bytes" not in steps[0]
    (event,) = [line for line in lines if line["kind"] == "event"]
    assert (event["event"], event["facts"]) == ("spike", {"loss": "Infinity"})
    copied(run, jsonl=out)
    assert len(out.read_text().splitlines()) == 14  # appended, nothing lost
    copied(run, jsonl="-")
    assert len(capsys.readouterr().out.splitlines()) == 7


def _tensorboard(folder: Path) -> list:
    """Return the events in the files of a folder: records of length, digest, protobuf, digest."""
    from tensorboardX.proto.event_pb2 import Event as Written

    found = []
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Written.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_files_hold_every_value_with_its_step_and_time(tmp_path, caplog):
    """Read back record by record, also NaN.

    Each process and attempt has a folder, and NaN is no warning.
    """
    pytest.importorskip("tensorboardX")
    run, out = _with_nan(tmp_path), tmp_path / "tb"
    add_process(run, [sample(7)], rank=3, attempt=1, pid=GONE + 1, started=BEGAN + 60)
    with caplog.at_level(logging.INFO):
        copied(run, tensorboard=out)
    assert {folder.name for folder in out.iterdir()} == {"rank_3", "rank_3-attempt1", "events"}
    losses = {
        event.step: (value.simple_value, event.wall_time)
        for event in _tensorboard(out / "rank_3")
        for value in event.summary.value
        if value.tag == "loss"
    }
    assert [losses[step][0] for step in (1, 2)] == [1.0, 0.5]
    assert math.isnan(losses[5][0])
    assert math.isinf(losses[6][0])
    assert losses[1][1] == pytest.approx(BEGAN + 5.1)
    texts = [
        value.tensor.string_val[0]
        for event in _tensorboard(out / "events")
        for value in event.summary.value
    ]
    assert len(texts) == 1
    assert b"    loss: inf" in texts[0]
    assert not caplog.records


def test_a_failing_sink_is_closed_and_the_others_go_on(tmp_path, caplog):
    """A client that raises is closed and named once, in text that does nothing, and nothing is
    raised.
    """
    bad, good = _Kept("bad", fails_at=1), _Kept("good")
    at_once = threading.Event()
    at_once.set()
    result = follow(_with_nan(tmp_path), [bad, good], at_once)
    assert (len(good.points), len(good.events), good.closed, bad.closed) == (6, 1, 1, 1)
    (failure,) = result.failures
    assert failure == "bad: RuntimeError: the server is gone "
    (record,) = caplog.records
    assert record.message.endswith(failure)


def test_following_starts_before_the_run_and_misses_nothing(tmp_path):
    """A run that begins, restarts and goes on while it is followed arrives whole and in order,
    under one name.
    """
    run, sink, stop = tmp_path / "run", _Kept(), threading.Event()
    thread = threading.Thread(
        target=follow, args=(run, [sink], stop), kwargs={"poll_seconds": 0.001}
    )
    thread.start()
    for attempt in range(2):
        folder = add_process(run, pid=GONE + attempt, attempt=attempt, started=BEGAN + attempt)
        ring = SampleRing(folder / SAMPLES_FILE)
        for step in range(1, 501):
            ring.write(*sample(step)[:-2])
        ring.close()
    stop.set()
    thread.join()
    assert [(point.attempt, point.step) for point in sink.points] == [
        (attempt, step) for attempt in range(2) for step in range(1, 501)
    ]
    assert {point.process for point in sink.points} == {"trainer"}


def test_a_guard_inside_an_observed_process_is_not_counted_twice(tmp_path):
    """Its steps are those of the process; its events are told."""
    run = tmp_path / "run"
    add_process(run, [sample(step) for step in range(1, 4)])
    from holdfast.recorder.black_box import BlackBox, StepMark

    box = BlackBox(run / "recorder" / "rank0")
    box.step(StepMark.COMMITTED, 1, 4, 0.5, 1.0, 0.1)
    box.close()
    write_events(run / "recorder" / "rank0", happened("checkpoint_saved", 1, 1))
    found = kept(run)
    assert [point.step for point in found.points] == [1, 2, 3]
    assert [each.event.kind for each in found.events] == ["checkpoint_saved"]


def test_a_target_that_cannot_be_is_refused_at_the_start(tmp_path):
    """A file that cannot be opened is an H743."""
    with pytest.raises(PolicyError, match="H743"):
        open_sinks({"jsonl": "/none/x/y"}, tmp_path)


def test_a_missing_client_names_its_package(tmp_path, monkeypatch):
    """Each optional client that is not there is an H742 that says what to install."""
    clients = {"tensorboard": "tensorboardX", "wandb": "wandb"}
    for kind, module in clients.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(PolicyError, match=f"pip install {module}") as caught:
            open_sinks({kind: str(tmp_path / "target")}, tmp_path)
        assert caught.value.rule == "H742"


def test_weights_and_biases_gets_every_step(tmp_path, monkeypatch):
    """Its own client, offline, keeps the newest values of each curve in its summary."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = make_run(tmp_path / "run", steps=5)
    seen = kept(run)
    (sink,) = open_sinks({"wandb": "speech"}, run)
    sink.write(seen.points, seen.events)
    summary = dict(sink._run.summary)
    settings = sink._run.settings
    assert (settings.console, settings.disable_git, settings.x_disable_meta) == ("off", True, True)
    sink.close()
    assert summary["trainer/loss"] == pytest.approx(2.5 / math.sqrt(5))
    assert summary["step"] == 5
    assert summary["events/exception"] == 1
