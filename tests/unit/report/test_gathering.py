"""From run directories, whole or damaged, to pictures."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.unit.report.made_runs import (
    BEGAN,
    GONE,
    add_process,
    happened,
    make_run,
    sample,
    write_events,
)
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app
from holdfast.core.errors import RunDirectoryError
from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.run_files import PROCESSES_FOLDER, SUPERVISED_FILE, VERDICT_FILE
from holdfast.report.page.gathering import gather
from holdfast.report.sources import check_run, find_sources


def _train(run_dir: Path, steps: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"model": model, "optimizer": optimizer, "loader": [torch.ones(4, 2)] * steps}
    with holdfast.Guard(run_dir, **given, save_interval_steps=2, async_save=False) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda x: model(x).square().mean())


def test_a_supervised_run_is_gathered_whole(tmp_path):
    """Samples, events of all processes by time, the verdict, stacks and the end of the output
    are in the picture.
    """
    picture = gather(make_run(tmp_path, ranks=2))
    assert [lane.label for lane in picture.lanes] == ["rank 0", "rank 1"]
    lane = picture.lanes[1]
    assert (lane.last_step, lane.ended) == (300, pytest.approx(BEGAN + 35))
    assert lane.curves["loss"].values[0] == pytest.approx(2.55)
    assert lane.curves["wait_share"].values == pytest.approx(0.2)
    kinds = [seen.event.kind for seen in picture.events]
    assert kinds == ["attempt_started", "exception", "exception", "attempt_ended", "stopped"]
    assert picture.verdict.cause == "H970"
    assert picture.verdict.runner_up[0] == "H975"
    assert "forward (model.py:31)" in picture.stacks[0].text
    assert picture.output.splitlines()[1:3] == ["epoch 1", "RuntimeError: shapes differ"]
    assert picture.processes[0].phase is ProcessPhase.FORWARD_BACKWARD
    assert picture.problems == ()


def test_the_run_directory_of_a_plain_guard_is_a_run_too(tmp_path):
    """Steps, events and checkpoints come from the guard's own recording."""
    _train(tmp_path, 6)
    picture = gather(check_run(tmp_path))
    (lane,) = picture.lanes
    assert lane.last_step == 6
    assert len(lane.curves["loss"].values) == 6
    assert [each.global_step for each in picture.checkpoints] == [6, 4, 2]
    assert {each.status for each in picture.checkpoints} == {"complete"}
    assert all(each.size_bytes > 0 and each.saved > BEGAN - 1e9 for each in picture.checkpoints)
    assert "checkpoint_saved" in {seen.event.kind for seen in picture.events}


def test_a_guard_inside_an_observed_process_adds_its_events_and_checkpoints(tmp_path):
    """The run directory that the process named is read as well.

    Its steps are not drawn a second time.
    """
    _train(tmp_path / "guarded", 4)
    run = tmp_path / "run"
    add_process(
        run,
        [sample(step) for step in range(1, 5)],
        happened("guard", 2, path=str(tmp_path / "guarded")),
    )
    picture = gather(run)
    assert [lane.label for lane in picture.lanes] == [f"trainer {GONE}"]
    assert {"guard", "checkpoint_saved"} <= {seen.event.kind for seen in picture.events}
    assert [each.global_step for each in picture.checkpoints] == [4, 2, 0]


def test_processes_of_several_attempts_have_names_of_their_own(tmp_path):
    """The rank alone is not a name when a run was restarted, or when a launcher started a rank
    twice.
    """
    for pid, attempt in ((GONE, 0), (GONE + 1, 1), (GONE + 2, 1)):
        add_process(tmp_path, [sample(1)], pid=pid, rank=0, attempt=attempt, started=BEGAN + pid)
    add_process(
        tmp_path, pid=GONE + 3, rank=0, attempt=1, role="loader worker", started=BEGAN + 2 * GONE
    )
    labels = [source.label for source in find_sources(tmp_path)]
    assert len(set(labels)) == 4
    assert labels[0] == "rank 0, attempt 0"
    assert labels[3] == f"worker {GONE + 3} of rank 0, attempt 1"


def test_an_empty_or_foreign_directory_is_refused_by_name(tmp_path):
    """What holds no recording is an H731; a file, and a path that does not exist, is an H733."""
    (tmp_path / "file").write_text("x")
    for path, rule in (
        (tmp_path, "H731"),
        (tmp_path / "file", "H733"),
        (tmp_path / "none", "H733"),
    ):
        with pytest.raises(RunDirectoryError, match=re.escape(str(path))) as caught:
            check_run(path)
        assert caught.value.rule == rule


def test_damaged_json_files_leave_the_rest(tmp_path):
    """Junk for supervised.json, process.json and verdict.json is passed over."""
    run = make_run(tmp_path, ranks=2)
    (run / SUPERVISED_FILE).write_bytes(b"\xff\x00{")
    next((run / PROCESSES_FOLDER).glob("*/process.json")).write_text('{"pid": "x", "started": []}')
    (run / VERDICT_FILE).write_text(
        json.dumps({"cause": 7, "evidence": "x", "certainty": "high", "runner_up": 3})
    )
    picture = gather(run)
    assert len(picture.lanes) == 1
    assert (picture.verdict.cause, picture.verdict.family, picture.verdict.certainty) == (
        "7",
        "unknown",
        None,
    )


def test_events_that_make_no_sense_are_left_out(tmp_path):
    """A time that is a text, NaN or beyond all calendars would break the order and the axis."""
    write_events(
        tmp_path / "supervisor",
        happened("ok", 1),
        happened("nan", math.nan),
        happened("far", 1e300),
        happened("text", 0.0).__class__(kind="text", global_step="7", unix_seconds="now", data={}),
    )
    assert [seen.event.kind for seen in gather(tmp_path).events] == ["ok"]


def test_a_frequent_kind_of_event_does_not_hide_a_rare_one(tmp_path):
    """Of a thousand skips the first and last fifty are kept, with a count of the others."""
    events = [happened("skip_step", number, number, reason="nan") for number in range(1000)]
    write_events(tmp_path / "supervisor", *events[:500], happened("hang", 500.5), *events[500:])
    picture = gather(tmp_path)
    kinds = [seen.event.kind for seen in picture.events]
    assert kinds.count("hang") == 1
    assert kinds.count("skip_step") == 100
    assert picture.left_out_events == {"skip_step": 900}
    assert picture.events[-1].event.global_step == 999


def test_damaged_checkpoints_are_listed_as_what_they_are(tmp_path):
    """A checkpoint without a manifest and one that was moved aside do not end the listing."""
    _train(tmp_path, 6)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    shutil.rmtree(folders[0])
    folders[0].mkdir()
    folders[1].rename(folders[1].with_name("damaged-" + folders[1].name))
    status = {each.global_step: each.status for each in gather(tmp_path).checkpoints}
    assert status[6] == "complete"
    assert status[4] == "damaged, moved aside"
    assert status[2] not in ("complete", "damaged, moved aside")


def test_steps_that_are_not_recorded_any_more_are_said_everywhere(tmp_path):
    """A ring keeps the newest 32,768 steps.

    Page, events, watch, explain and metrics name the first that is left.
    """
    run = make_run(tmp_path / "run", steps=33_000, verdict=False)
    assert any("before step 233 " in each for each in gather(run).problems)
    for command in ("events", "explain", "watch --once", "metrics --jsonl /dev/null"):
        name, *options = command.split()
        result = CliRunner().invoke(make_app(name), [name, str(run), *options])
        assert "before step 233 " in " ".join(result.output.split()), command
