"""Verdicts from run directories: a lost loss, leaks, first-ended ranks, killed workers, hangs left alone, exits."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.events import Event
from holdfast.explain.collecting import collect
from holdfast.explain.evidence import Ending, Facts, Frame, Statement
from holdfast.explain.judging import judge
from holdfast.explain.runs.curves import find_lost
from holdfast.explain.runs.statements import already_tried, of_kernel
from holdfast.explain.signatures import all_signatures
from holdfast.explain.verdict import Verdict
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.progress import Phase, ProgressBoard, SampleRing, StepSample
from holdfast.recorder.run_files import (
    ATTEMPT_LINE,
    BOARD_FILE,
    OUTPUT_FILE,
    SAMPLES_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    write_process,
)

NAN, INFINITE = math.nan, math.inf
LEAK = {
    "what": "list of Tensor ()",
    "held_by": "losses[...] in t.py",
    "retained_at": "",
    "allocated_at": "t.py:6 in f",
}
WORKER = "DataLoader worker (pid 4713) is killed by signal: Killed. "
COMMAND = {"signal_sent_by_us": None, "asked_by": None, "oom_kills": 0}


def sample(step: int, loss: float | None) -> StepSample:
    return StepSample(
        step=step, micro_steps=1, loss=loss, grad_norm=None, learning_rate=0.1, seconds=0.1, wait_seconds=0.0
    )


def samples(*losses: float | None) -> list[StepSample]:
    return [sample(step, loss) for step, loss in enumerate(losses, start=1)]


def event(kind: str, /, at: float = 10.0, **data: Any) -> Event:
    return Event(kind=kind, global_step=0, unix_seconds=at, data=data)


def tell(folder: Path, *events: tuple[str, dict[str, Any]]) -> None:
    box = BlackBox(folder)
    for kind, data in events:
        box.event(Event(kind=kind, global_step=0, unix_seconds=time.time(), data=data))
    box.close()


def a_run(
    path: Path, status: int, *, output: str = "", losses: tuple[float, ...] = (), said: tuple[Any, ...] = ()
) -> Path:
    """Write a run directory of one attempt with one trainer, with the writers of supervisor and observer."""
    path.mkdir()
    (path / SUPERVISED_FILE).write_text(json.dumps({"format": 1, "argv": ["python", "t.py"], "started": 1.0}))
    (path / OUTPUT_FILE).write_text(f"{ATTEMPT_LINE.format(number=0)}\n{output}")
    info = ProcessInfo(pid=7, ticks=1, ppid=1, argv=["python"], started=1.0, role="trainer")
    folder = write_process(path, info)
    board = ProgressBoard(folder / BOARD_FILE)
    board.enter(Phase.FORWARD_BACKWARD)
    board.close()
    tell(folder, ("torch_imported", {}), *said)
    ring = SampleRing(folder / SAMPLES_FILE)
    for each in samples(*losses):
        ring.append(each)
    ring.close()
    tell(
        path / SUPERVISOR_FOLDER,
        ("attempt_started", {"attempt": 0}),
        ("process_ended", {"pid": 7, "status": status, "oom_kills": 0}),
        ("attempt_ended", {"attempt": 0, "status": status, **COMMAND}),
    )
    return path


def of_run(*args: Any, **more: Any) -> Verdict:
    return judge(collect(a_run(*args, **more)))


GAN = [value for step in range(100) for value in (0.7 + 0.01 * step, -30.0 * step)]


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ((NAN,), 1),
        ((INFINITE, NAN, NAN), 1),
        ((1.0, 0.9, *[NAN] * 5), 3),
        ((1.0, 0.9, 0.8, INFINITE, NAN), 4),
        ((2.3, 1e9, 1e18, 1e27, 1e36), 2),  # the first is all that is left of its level
        ((*[0.5] * 300, *[10.0**power for power in range(37)]), 307),
        ((3e5, *[0.01] * 60, *[4e7] * 10), 62),
        ((*[1.0] * 20, *[1e9, NAN] * 4), 21),
        (GAN, None),
        ((1.0, 0.9, NAN), None),  # one batch
        ((1.0, NAN, 0.9, 0.8), None),  # it came back
        ((1e-12, 0.1, *[1.0] * 30), None),  # a loss that begins at 0
        ((*[0.002] * 50, *[2000.0] * 50), None),  # a part of it was switched on
        ((-1.0, -20.0, *[-1e9] * 50), None),  # a return that grows
        ((*[1.0] * 50, 1e12, 1.0), None),  # a spike
        ([1e10 * (number % 7 / 7) ** 8 for number in range(200)], None),  # of single samples, not scaled
        ((), None),
    ],
)
def test_a_training_is_lost_if_nothing_good_comes_after_losses_that_are_not_finite_or_exploded(losses, since):
    """The end decides; what is legitimate, such as a GAN's losses or a curriculum's, is not lost."""
    lost = find_lost(list(enumerate(losses, start=1)))
    assert (None if lost is None else lost.since) == since


def test_a_run_whose_training_was_lost_did_not_end_well(tmp_path):
    """Status 0 is no good end where the loss was lost, from the first step or later; no value at all says nothing."""
    verdict = of_run(tmp_path / "run", 0, losses=(1.0, 0.8, 0.7, *[NAN] * 20))
    assert (verdict.cause, verdict.family, verdict.exit_code) == ("H1617", "numerics", 19)
    assert verdict.title == "ended with status 0, but the loss is not finite since step 4"
    assert "not finite since step 4" in verdict.summary
    assert "holdfast.watch" in verdict.fix
    assert any("since step 4" in each.text for each in verdict.evidence)
    assert "from the beginning" in of_run(tmp_path / "first", 0, losses=[NAN] * 3).title
    assert "rose from 1 to 1e+36, since step 3" in of_run(tmp_path / "up", 0, losses=(1.0, 1.0, *[1e36] * 9)).title
    for name, losses in {"well": (1.0, 0.8, 0.7), "unread": [None] * 30}.items():
        well = of_run(tmp_path / name, 0, losses=losses)
        assert (well.title, well.fix) == ("ended well", "Nothing is to be done.")
        assert "caught" not in well.summary


@pytest.mark.parametrize(
    ("output", "lost"),
    [
        ("step 1 loss 0.5\nstep 2 loss nan\nstep 3 loss nan\ndone\n", "the loss is not finite since line 3"),
        ("epoch 1: loss=inf\n", "the loss is not finite from the beginning"),
        ("Training loss: tensor(nan, grad_fn=<A>)\n", "the loss is not finite from the beginning"),
        ("{'loss': 0.0, 'grad_norm': nan, 'epoch': 1.0}\n" * 3, "the gradients are not finite from the beginning"),
        ('{"step": 1, "train/loss": NaN}\n' * 2, "the loss is not finite from the beginning"),
        ("loss 2.0\nloss 1e9\nloss 3e36\n", "the loss rose from 2 to 3e+36, since line 3"),
        ("loss 0.5\nValidation: loss nan\nval_loss=nan\n{'eval_loss': nan}\nTest set: loss: nan\n", ""),
        ("epoch 1 train loss 0.3, val loss nan\nepoch 2 train loss 0.2, val loss nan\n", ""),
        ("loss 0.5, aux_loss nan\nloss 0.4, aux_loss nan\n", ""),
        ("loss scale 65536\nloss_scale: inf\nloss 0.5\nloss nan, step skipped\nloss 0.4\n", ""),
        ("loss=0.5 note: nan in row 3\n", ""),
    ],
)
def test_a_loss_that_is_only_printed_says_that_a_training_was_lost(tmp_path, output, lost):
    """Where nobody saw a loss the lines of the log count, but not those of an evaluation."""
    verdict = of_run(tmp_path / "run", 0, output=output)
    assert verdict.cause == ("H1617" if lost else "H1601"), verdict.title
    assert lost in verdict.title
    assert of_run(tmp_path / "seen", 0, output=output, losses=(0.5, 0.4)).cause == "H1601"  # what was seen is surer


def test_a_leak_of_a_run_that_ended_well_is_told():
    """Its place stands in the evidence, the summary and the fix; a trend alone in the summary, unless it is over."""
    ending = (Ending(status=0),)
    verdict = judge(Facts(events=(event("leak", **LEAK),), endings=ending))
    assert "t.py:6 in f" in verdict.summary
    assert "t.py:6 in f" in verdict.fix
    assert any("t.py:6 in f" in each.text for each in verdict.evidence)
    trend = event("memory_trend", what="host", bytes_per_step=2_000_000)
    over = event("memory_trend", at=20.0, what="host", bytes_per_step=0)
    assert "memory grew" in judge(Facts(events=(trend,), endings=ending)).summary
    assert "memory grew" not in judge(Facts(events=(trend, over), endings=ending)).summary


FINDING = {
    "rule": "H825", "severity": "advice", "about": "cause", "confidence": 0.8, "what": "the weights moved too far",
    "fix": "lower the learning rate.", "where": "",
}  # fmt: skip


def test_a_fault_of_the_training_is_told_of_a_run_that_ended_well():
    """What a Guard found stands in title, summary, evidence and fix, a cause before a symptom however severe."""
    symptom = {
        **FINDING,
        "rule": "H804",
        "severity": "error",
        "about": "symptom",
        "what": "NaN in w",
        "confidence": 0.9,
    }
    warning = event("preflight", rule="H630", what="num_workers=64 on 2 processors", fix="pass 2.")
    events = (event("finding", **symptom), event("finding", **FINDING), event("note", **FINDING), warning)
    verdict = judge(Facts(events=events, endings=(Ending(status=0),)))
    assert (verdict.cause, verdict.exit_code) == ("H1601", 0)
    assert verdict.title == "ended well, but its training has a fault: learning rate too high"
    assert "the weights moved too far [H825]" in verdict.summary
    assert verdict.fix.startswith("Lower the learning rate.")
    quoted = [each.text for each in verdict.evidence]
    assert [text.partition("]")[0][-4:] for text in quoted if "[H" in text] == ["H825", "H804", "H630"]
    broken = (
        event("finding", rule=["H825"], what=None),
        event("preflight", rule=5),
        event("finding", rule="H9", what=""),
    )
    assert judge(Facts(events=broken, endings=(Ending(status=0),))).exit_code == 0, "damaged events cost no verdict"


def test_a_fault_of_the_training_is_evidence_where_the_run_failed():
    """A Guard that stopped for divergence is the cause, with what it had found before beside it."""
    stop = Statement(text="the loss has run away", source="guard", fatal=True, rule="H503")
    verdict = judge(Facts(statements=(stop,), events=(event("finding", **FINDING),), endings=(Ending(status=1),)))
    assert verdict.cause == "H503"
    assert any("[H825]" in each.text for each in verdict.evidence)


def test_what_a_guard_did_is_told_with_the_newest_reason():
    """The last line of why stands behind what was done, whatever key an event keeps it under."""
    events = [
        event("skip_step", reason="first"),
        event("skip_step", reason="NaN in the batch; sample 4"),
        event("sample_quarantined", evidence="Traceback\n  File\nValueError: 7.png cannot be read"),
        event("loader_healed", cause="worker 1 was killed by SIGKILL"),
        event("retry", reason=None),
    ]
    assert already_tried(events) == [
        "a Guard tried again after freeing memory",
        "a Guard skipped the step, 2 times: NaN in the batch; sample 4",
        "a Guard replaced the workers of the loader: worker 1 was killed by SIGKILL",
        "a Guard quarantined a sample that could not be loaded: ValueError: 7.png cannot be read",
    ]


def test_a_rank_that_was_killed_beats_the_abort_of_another():
    """The rank that ended first was killed from outside; an abort of another follows from it, not its own."""
    aborted = Statement(text="terminate called without an active exception", source="a.log:3", position=3)
    killed = Ending(status=-9, pid=8, rank=1, role="trainer", unix_seconds=5.0)
    command = Ending(status=1, role="command", unix_seconds=6.0, oom_kills=0)
    verdict = judge(Facts(statements=(aborted,), endings=(killed, command)))
    assert (verdict.cause, verdict.rank) == ("H1602", 1)
    assert verdict.summary.startswith("Rank 1 was ended by SIGKILL. ")
    own = Ending(status=-6, pid=8, rank=1, role="trainer", unix_seconds=5.0)
    assert judge(Facts(statements=(aborted,), endings=(own, command))).cause == "H1342"


def test_a_hang_that_was_left_alone_is_told_where_no_step_came_after_it():
    """A run that was ended by the user while it hung says so, with the place; one that had gone on does not."""
    hang = event(
        "hang", remedy="wait", step=40, kind="Python loop", frame="t.py:38 in f", seconds=48, limit=6.0,
        phase="forward/backward",
    )  # fmt: skip
    ended = (Ending(status=-15, role="command", sent_by="user"),)
    verdict = judge(Facts(events=(hang,), endings=ended, extra={"asked_by": 15, "steps": 40}))
    assert verdict.cause == "H1603"
    assert "hung at t.py:38 in f (Python loop)" in verdict.summary
    assert any("no progress" in each.text for each in verdict.evidence)
    went_on = judge(Facts(events=(hang,), endings=ended, extra={"asked_by": 15, "steps": 90}))
    assert "hung" not in went_on.summary
    assert not any("no progress" in each.text for each in went_on.evidence)


def test_lines_of_the_kernel_about_other_processes_are_no_evidence():
    """Kills and crashes count for own processes; lines about no process, such as of hardware, count always."""
    lines = [
        "python invoked oom-killer: gfp_mask=0xcc0",
        "[1.0] oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/other,task=python,pid=6023,uid=0",
        "[1.0] Memory cgroup out of memory: Killed process 6023 (python) total-vm:1kB",
        "python[6023]: segfault at 0 ip 0000",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    ]
    told = [event("kernel_log", lines=lines)]
    assert [each.text for each in of_kernel(told, {5})] == [lines[-1]]
    assert [each.text for each in of_kernel(told, {6023})] == lines


def test_how_a_process_left_is_told_as_it_was_recorded(tmp_path):
    """The message of sys.exit is quoted, past progress bars; one that never ended in order left as by os._exit."""
    text = "step 1\n\x1b[31mno more data\x1b[0m\n\repoch 1:  34%|###   | 10/29 [00:00<00:00, 282.50it/s]"
    exiting = ("exiting", {"how": "sys.exit", "status": 1})
    verdict = of_run(tmp_path / "exit", 1, output=text, said=(exiting,))
    assert verdict.cause == "H1607"
    assert "`sys.exit`, and its last line is: no more data." in verdict.summary
    assert "os._exit" in of_run(tmp_path / "os", 7, output=text).summary


def test_changes_that_the_attempt_had_are_not_offered_again():
    """A verdict offers what is new only."""
    offered = next(each for each in all_signatures().values() if each.changes and each.role == "root")
    statement = Statement(
        text=offered.example.split(": ", 1)[-1], kind="exception", exception="RuntimeError", fatal=True
    )
    facts = Facts(statements=(statement,), endings=(Ending(status=1),))
    first = judge(facts)
    assert first.changes
    again = judge(Facts(statements=(statement,), endings=facts.endings, extra={"changed": dict(first.changes)}))
    assert again.cause == first.cause
    assert again.changes == ()


def test_the_place_is_the_users_own_line_also_where_the_root_has_none():
    """A handler inside torch raised it; what it broke into names the line of the user."""
    torch = Frame(file="/x/site-packages/torch/utils/data/_utils/signal_handling.py", line=73, function="handler")
    own = Frame(file="/home/me/train.py", line=27, function="<module>")
    bar = Frame(file="/home/me/.local/tqdm/std.py", line=1186, function="__iter__")
    root = Statement(
        text=WORKER, kind="exception", exception="RuntimeError", frames=(torch,), cause=True, source="a:1"
    )
    outer = Statement(
        text="DataLoader worker (pid(s) 4713) exited unexpectedly", kind="exception", exception="RuntimeError",
        frames=(own, bar, torch), fatal=True, source="a:9",
    )  # fmt: skip
    verdict = judge(Facts(statements=(root, outer), endings=(Ending(status=1),)))
    assert verdict.cause == "H930"
    assert verdict.where == "/home/me/train.py:27 in <module>"
