"""Why a run is slow, as `holdfast explain`, `watch` and `report` show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.made_runs import BEGAN, GONE, add_process, happened, sample, write_events
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.explain.signatures import WELL
from holdfast.recorder.progress import LoopTimes, ProcessPhase, ProgressBoard
from holdfast.recorder.run_files import BOARD_FILE, SUPERVISED_FILE, SUPERVISOR_FOLDER

# A loop of 100 s in which forward, backward and optimizer take what the other parts leave.
LOOP = LoopTimes(steps=1000, epochs=2, seconds=100.0)
BUSY_WORKERS = {"workers": 2.0, "worker_busy": 0.96, "cpus": 8.0, "cpus_wanted": 2.4}
SLEEPING_WORKERS = {**BUSY_WORKERS, "worker_busy": 0.1, "cpus_wanted": 0.6}
FULL_MACHINE = {**BUSY_WORKERS, "cpus": 2.0, "cpus_wanted": 1.98}
NO_WORKERS = {"workers": 0.0, "cpus": 8.0, "cpus_wanted": 1.0, "waits_seen": 100}


def compute(loop: LoopTimes, backward_share: float = 0.6) -> LoopTimes:
    """Return the loop with a backward pass that takes a share of the time that is left."""
    rest = loop.own_share * loop.seconds
    return loop._replace(
        backward_seconds=backward_share * rest, optimizer_seconds=0.1 * backward_share * rest
    )


def make_run(
    run: Path,
    *loops: LoopTimes,
    resources: dict[str, Any] | None = None,
    stacks: dict[str, Any] | None = None,
    status: int | None = 0,
) -> Path:
    """Make a run of one attempt whose loss fell, with one rank per loop."""
    run.mkdir()
    (run / SUPERVISED_FILE).write_text(
        json.dumps({"format": 1, "argv": ["python", "train.py"], "started": BEGAN})
    )
    events = [happened("attempt_started", 0, attempt=0, argv=["python"])]
    if resources is not None:
        facts = {"attempt": 0, "seconds": 90.0, **resources}
        events.append(happened("resources_used", 90, **facts))
    if stacks is not None:
        events.append(happened("stacks_sampled", 91, attempt=0, pid=GONE, **stacks))
    if status is not None:
        ended = {"attempt": 0, "status": status, "steps": 300, "seconds": 100.0}
        events.append(happened("attempt_ended", 100, **ended))
    write_events(run / SUPERVISOR_FOLDER, *events)
    for rank, loop in enumerate(loops):
        folder = add_process(
            run,
            [sample(step) for step in range(1, 301)],
            pid=GONE + rank,
            rank=rank if len(loops) > 1 else None,
        )
        board = ProgressBoard(folder / BOARD_FILE)
        board.enter(ProcessPhase.ENDING)
        counts = [int(value) for value in loop[:5]]
        board.write_loop_times(*counts, *(round(1e9 * seconds) for seconds in loop[5:]))
        board.close()
    return run


def explained(run: Path) -> dict[str, Any]:
    done = CliRunner().invoke(make_app("explain"), ["explain", str(run), "--json"])
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


@pytest.mark.parametrize(
    ("resources", "loop", "cause", "fix"),
    [
        (BUSY_WORKERS, LOOP, "too few workers", "num_workers=6"),
        (NO_WORKERS | {"waits_running": 95}, LOOP, "too few workers", "num_workers=2"),
        (NO_WORKERS | {"waits_running": 5}, LOOP, "disk or network", "local disk"),
        (SLEEPING_WORKERS, LOOP, "disk or network", "local disk"),
        (FULL_MACHINE, LOOP, "decoding", "Decode once"),
        (
            BUSY_WORKERS,
            LOOP._replace(epochs=50, restart_seconds=50.0),
            "workers restart",
            "persistent_workers=True",
        ),
        (None, LOOP, "waits for data", "num_workers"),
        # More workers than CPUs would not load faster if they compute.
        (BUSY_WORKERS | {"cpus": 4.0}, LOOP, "too few workers", "num_workers=4 "),
    ],
)
def test_a_run_that_waits_for_its_loader_is_told_why_and_what_to_do(
    tmp_path: Path, resources: dict[str, Any] | None, loop: LoopTimes, cause: str, fix: str
) -> None:
    """A run that waited for 63 % of its time is not told that nothing needs to be done."""
    waiting = compute(loop._replace(wait_seconds=63.0))
    verdict = explained(make_run(tmp_path / "run", waiting, resources=resources))
    assert verdict["cause"] == "H1627"
    assert verdict["fix"] != WELL.fix
    speed = verdict["speed"][0]
    assert (speed["rule"], speed["cause"], speed["share"]) == ("H1627", cause, 0.63)
    assert fix in speed["fix"]


@pytest.mark.parametrize(
    ("loop", "rule", "share"),
    [
        (LOOP._replace(saving_seconds=40.0, saves=20), "H1631", 0.4),
        (LOOP._replace(evaluation_seconds=50.0, evaluations=40), "H1632", 0.5),
    ],
)
def test_frequent_saves_and_evaluations_are_named(
    tmp_path: Path, loop: LoopTimes, rule: str, share: float
) -> None:
    """The share is that of the whole loop, and the verdict on the run names the rule."""
    verdict = explained(make_run(tmp_path / "run", compute(loop)))
    assert verdict["cause"] == rule
    assert [finding["share"] for finding in verdict["speed"]] == [share]


def test_python_code_in_the_loop_is_named_with_its_line(tmp_path: Path) -> None:
    """The share cannot exceed what the clock leaves for the loop's own code."""
    stacks = {"samples": 40, "in_python": 36, "place": "train.py:7 in crop", "at_place": 30}
    loop = compute(LOOP, backward_share=0.2)
    verdict = explained(make_run(tmp_path / "run", loop, stacks=stacks))
    finding = verdict["speed"][0]
    assert finding["rule"] == "H1629"
    assert finding["share"] == pytest.approx(loop.own_share)
    assert "train.py:7 in crop" in finding["fix"]


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """The fast rank waits in its backward pass, so neither rank is told to load faster."""
    slow = LOOP._replace(wait_seconds=50.0, backward_seconds=30.0)
    fast = LOOP._replace(backward_seconds=80.0)
    verdict = explained(make_run(tmp_path / "run", fast, slow, resources=NO_WORKERS))
    assert [finding["rule"] for finding in verdict["speed"]] == ["H1630"]
    assert verdict["speed"][0]["share"] == pytest.approx(0.5)
    assert "rank 1" in verdict["speed"][0]["title"]


@pytest.mark.parametrize(
    "loops",
    [
        (compute(LOOP),),
        (compute(LOOP._replace(wait_seconds=20.0)),),
        (compute(LOOP._replace(saving_seconds=60.0, saves=1)),),
        # A frozen teacher is switched to eval mode in every step.
        (compute(LOOP._replace(evaluation_seconds=50.0, evaluations=1000)),),
        (compute(LOOP), compute(LOOP, backward_share=0.7)),
        # Too short to be worth a word.
        (LOOP._replace(steps=9, wait_seconds=80.0),),
        (LOOP._replace(seconds=1.0, wait_seconds=0.9),),
    ],
)
def test_a_run_that_is_not_slow_is_told_of_no_problem(
    tmp_path: Path, loops: tuple[LoopTimes, ...]
) -> None:
    """It ended well, and at most a plain statement says where its time went."""
    verdict = explained(make_run(tmp_path / "run", *loops, resources=BUSY_WORKERS))
    assert verdict["cause"] == WELL.id
    assert not any(finding["is_problem"] for finding in verdict["speed"])


def test_a_long_forward_pass_is_not_called_python_code(tmp_path: Path) -> None:
    """Without stack samples, nobody knows which of the two it was."""
    verdict = explained(make_run(tmp_path / "run", compute(LOOP, backward_share=0.1)))
    assert [finding["cause"] for finding in verdict["speed"]] == ["not known"]


def test_a_loop_that_computes_outside_of_its_steps_is_not_said_to_compute_them(
    tmp_path: Path,
) -> None:
    """Operations on tensors in the loop's own code do not show in samples of Python code."""
    stacks = {"samples": 50, "in_python": 5, "place": "", "at_place": 0}
    verdict = explained(make_run(tmp_path / "run", compute(LOOP, 0.1), stacks=stacks))
    speed = verdict["speed"][0]
    assert (speed["cause"], speed["is_problem"]) == ("not known", False)
    assert speed["share"] == pytest.approx(0.89)


def test_steps_that_sleep_are_not_said_to_compute(tmp_path: Path) -> None:
    """A hook of the optimizer that waits counts as the optimizer's time."""
    resources = NO_WORKERS | {"cpus_wanted": 0.1}
    verdict = explained(make_run(tmp_path / "run", compute(LOOP), resources=resources))
    assert verdict["speed"][0]["cause"] == "not known"


def test_a_run_that_goes_on_is_judged_too_and_every_view_shows_it(tmp_path: Path) -> None:
    """`watch`, the page and the text of `explain` show the cause and the fix."""
    run = make_run(
        tmp_path / "run",
        compute(LOOP._replace(wait_seconds=63.0)),
        resources=BUSY_WORKERS,
        status=None,
    )
    watched = CliRunner().invoke(make_app("watch"), ["watch", str(run), "--json"])
    assert json.loads(watched.stdout)[0]["speed"][0]["cause"] == "too few workers"
    text = CliRunner().invoke(make_app("watch"), ["watch", str(run), "--once"]).stdout
    assert "num_workers=6" in text
    assert "num_workers=6" in CliRunner().invoke(make_app("explain"), ["explain", str(run)]).stdout
    page = tmp_path / "page.html"
    CliRunner().invoke(make_app("report"), ["report", str(run), "--out", str(page)])
    assert "num_workers=6" in page.read_text()


def test_damaged_measurements_are_left_out(tmp_path: Path) -> None:
    """Facts of the wrong type count as not recorded."""
    run = make_run(
        tmp_path / "run",
        compute(LOOP._replace(wait_seconds=63.0)),
        resources={"workers": "many", "cpus": None, "cpus_wanted": True},
        stacks={"samples": -1, "in_python": "x", "place": ["\x1b[31m"], "at_place": 2.5},
    )
    assert explained(run)["speed"][0]["cause"] == "waits for data"
