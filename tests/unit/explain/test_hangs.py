"""From stacks and facts, kind and blame are found; what cannot be known is said to be unknown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.blame import HangDiagnosis, describe_frame, diagnose_hang
from holdfast.explain.hangs.frames import frame_to_show
from holdfast.explain.hangs.process_samples import (
    ExaminedProcess,
    ProcessSample,
    ThreadSample,
    WaitKind,
    classify_wait,
)

PYTHON = "/usr/lib/python3.11/"
TORCH = PYTHON + "site-packages/torch/"
TRAIN = ("/home/me/train.py", 40, "main")
DATA = ("/home/me/data.py", 12, "Samples.__getitem__")
LOADER = (TORCH + "utils/data/dataloader.py", 1480, "_MultiProcessingDataLoaderIter._try_get_data")
WORKER = (TORCH + "utils/data/_utils/worker.py", 250, "_worker_loop")
FETCH = (TORCH + "utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
QUEUES = (PYTHON + "multiprocessing/queues.py", 113, "Queue.get")
BOOTSTRAP = (PYTHON + "multiprocessing/process.py", 314, "BaseProcess._bootstrap")
ALL_REDUCE = (TORCH + "distributed/distributed_c10d.py", 2810, "all_reduce")
BACKWARD = (TORCH + "autograd/graph.py", 829, "_engine_run_backward")
LATER = ("/home/me/train.py", 41, "main")
LINEAR = (TORCH + "nn/modules/linear.py", 116, "forward")
SYNCHRONIZE = (TORCH + "cuda/__init__.py", 1040, "synchronize")
CASES = yaml.safe_load(Path(__file__).with_name("hangs.yaml").read_text(encoding="utf-8"))
FORKED = [TRAIN, (PYTHON + "multiprocessing/popen_fork.py", 71, "Popen._launch"), BOOTSTRAP]


def thread(
    frames: list[tuple[str, int, str]], waits: WaitKind = "futex", **more: Any
) -> ThreadSample:
    built = tuple(Frame(file=file, line=line, function=function) for file, line, function in frames)
    return ThreadSample(
        **{"tid": 1, "is_main": True, "frames": built, "waits": waits, "holds_gil": False, **more}
    )


def process(
    *threads: ThreadSample, second: ThreadSample | None = None, share: float = 0.0, **about: Any
) -> ExaminedProcess:
    """Return a process that was looked at twice, with the same threads unless another is given."""
    state, io = about.pop("state", "S"), about.pop("io", 0)
    samples = (
        ProcessSample(seconds=10.0, source="py-spy", state=state, cpu_seconds=1.0, threads=threads),
        ProcessSample(
            seconds=11.0,
            source="py-spy",
            state=state,
            cpu_seconds=1.0 + share,
            io_bytes=io,
            threads=threads if second is None else (second,),
        ),
    )
    return ExaminedProcess(
        **{
            "pid": 1,
            "judged": True,
            "phase": "forward/backward",
            "seconds": 31.0,
            "samples": samples,
            **about,
        }
    )


def frames_of(names: list[Any]) -> list[tuple[str, int, str]]:
    """Return the frames of a case.

    Constants by their names, files of Python's library with a function.
    """
    return [
        globals()[each] if isinstance(each, str) else (PYTHON + each[0], 100, each[1])
        for each in names
    ]


def judged(*processes: ExaminedProcess, suspect: int = 1, **more: Any) -> HangDiagnosis:
    return diagnose_hang(processes, suspect, **more)


@pytest.mark.parametrize("case", CASES["processes"], ids=str)
def test_a_process_is_called_by_how_it_stands_still(case: dict[str, Any]) -> None:
    """Frames say it where they can, else the kernel.

    The user's line is blamed, not that of a library.
    """
    more = {key: case[key] for key in ("share", "io", "uses_gpu") if key in case}
    if "native" in case:
        more["native"] = tuple(case["native"])
    if "source" in case:
        more["source_line"] = case["source"]
    held = case.get("holds_gil", False)
    second = thread(frames_of(case["second"]), case["waits"]) if "second" in case else None
    found = judged(
        process(
            thread(frames_of(case["frames"]), case["waits"], holds_gil=held), second=second, **more
        )
    )
    assert (found.kind, found.moving) == (case["kind"], case.get("moving", False))
    assert describe_frame(found.frame) == f"/home/me/train.py:{case.get('line', 40)} in main"
    assert case.get("sentence", "") in found.sentence


def test_a_thread_that_is_ready_to_run_but_has_no_cpu_is_slow_and_not_stuck() -> None:
    """The clock says nothing about a process that a busy machine does not let run."""
    ready = thread([TRAIN], "running", holds_gil=True)
    starved = judged(process(ready))
    assert (starved.kind, starved.moving, starved.starved) == ("merely slow", True, True)

    # The main thread waits for a native thread of torch, which has no CPU.
    in_torch = thread([TRAIN, LINEAR], "openmp")
    samples = [
        ProcessSample(
            seconds=seconds,
            threads=(in_torch,),
            native_threads=(ThreadSample(tid=2, waits="running", cpu_wait_seconds=waited),),
        )
        for seconds, waited in ((10.0, 3.0), (11.0, 3.9))
    ]
    assert judged(ExaminedProcess(pid=1, judged=True, samples=tuple(samples))).starved
    assert judged(process(in_torch)).kind == "OpenMP"

    # A rank that polls a collective waits for another rank, not for a CPU.
    polls = [rank(number, TRAIN, ALL_REDUCE, waits="running") for number in (0, 1)]
    assert judged(*polls, suspect=10).kind == "collective"


def test_a_wait_for_another_thread_is_blamed_on_that_thread() -> None:
    """Who joins a thread is not to blame, but what the thread does is.

    A sleeping heartbeat is not taken for it.
    """
    main = thread([TRAIN, (PYTHON + "threading.py", 1119, "Thread.join")])
    other = thread(
        [("/home/me/net.py", 5, "fetch")], "socket", tid=2, is_main=False, name="fetcher"
    )
    heart = thread([("/home/me/beat.py", 5, "beat")], "sleep", tid=3, is_main=False)
    found = judged(process(main, heart, other))
    assert (found.kind, describe_frame(found.frame)) == ("socket", "/home/me/net.py:5 in fetch")
    assert "fetcher" in found.sentence


def test_a_worker_that_is_stuck_is_blamed_and_not_the_loop_that_waits_for_it() -> None:
    """Workers that wait for work are passed over.

    The frame is of the dataset, not of the line that forked it.
    """
    trainer = process(thread([TRAIN, LOADER, (PYTHON + "queue.py", 180, "get")]), phase="data wait")
    idle = process(
        thread([*FORKED, WORKER, QUEUES], "poll"), pid=2, ppid=1, role="loader worker", judged=False
    )
    stuck = process(
        thread([*FORKED, WORKER, FETCH, DATA], "socket"),
        pid=3,
        ppid=1,
        role="loader worker",
        judged=False,
    )
    found = judged(trainer, idle, stuck)
    assert (found.kind, found.process.pid) == ("socket", 3)
    assert describe_frame(found.frame) == "/home/me/data.py:12 in Samples.__getitem__"
    assert "worker 3" in found.sentence


def test_of_two_busy_workers_the_stopped_one_and_then_the_blocked_one_is_blamed() -> None:
    """One that computes may only be slow."""
    trainer = process(thread([TRAIN, LOADER]), phase="data wait")
    slow = process(
        thread([WORKER, FETCH, DATA], "running"),
        pid=2,
        ppid=1,
        role="loader worker",
        share=0.9,
        judged=False,
    )
    stuck = process(
        thread([WORKER, FETCH, DATA], "futex"), pid=3, ppid=1, role="loader worker", judged=False
    )
    stopped = process(
        thread([WORKER, QUEUES], ""), pid=4, ppid=1, role="loader worker", state="T", judged=False
    )
    assert judged(trainer, slow, stuck).process.pid == 3
    assert judged(trainer, slow, stuck, stopped).kind == "stopped"
    assert judged(trainer, slow).moving


def test_idle_workers_mean_that_a_batch_was_lost() -> None:
    """If each worker waits for work and the loop waits for a batch, the batch is gone.

    The loop's line is blamed.
    """
    trainer = process(thread([TRAIN, LOADER]), phase="data wait")
    idle = process(
        thread([*FORKED, WORKER, QUEUES], "poll"), pid=2, ppid=1, role="loader worker", judged=False
    )
    found = judged(trainer, idle)
    assert (found.kind, describe_frame(found.frame)) == ("loader", "/home/me/train.py:40 in main")


def test_a_loader_that_heals_itself_is_said_from_one_that_does_not() -> None:
    """A loader of holdfast replaces a stuck worker, so nothing need be ended.

    A hang elsewhere is not healed.
    """
    import holdfast

    ours = (str(Path(holdfast.__file__).parent / "loader" / "loader.py"), 90, "Epoch.__next__")
    stuck = process(
        thread([WORKER, FETCH, DATA]), pid=3, ppid=1, role="loader worker", judged=False
    )
    assert judged(process(thread([TRAIN, ours, LOADER]), phase="data wait"), stuck).may_recover
    # Asks it for memory
    unpacks = (str(Path(holdfast.__file__).parent / "loader" / "fetch.py"), 40, "_unpack")
    found = judged(
        process(thread([TRAIN, ours, LOADER, unpacks], "socket"), phase="data wait"), stuck
    )
    assert (found.process.pid, found.may_recover) == (3, True)
    assert not judged(process(thread([TRAIN, LOADER]), phase="data wait"), stuck).may_recover
    assert not judged(process(thread([TRAIN, ours, FETCH, DATA]), phase="data wait")).may_recover


def rank(
    number: int, *frames: tuple[str, int, str], waits: WaitKind = "futex", **about: Any
) -> ExaminedProcess:
    return process(thread(list(frames), waits), pid=10 + number, rank=number, step=5, **about)


def test_the_rank_that_is_in_no_collective_is_the_odd_one_out() -> None:
    """Whoever is noticed first is mostly a victim.

    The one that does something else is blamed, with its line.
    """
    victims = [rank(0, TRAIN, ALL_REDUCE), rank(2, TRAIN, BACKWARD)]
    found = judged(*victims, rank(1, TRAIN, DATA, waits="sleep"), suspect=10)
    assert (found.kind, found.odd_one_out, found.process.pid) == ("sleep", 1, 11)
    assert "Rank 1" in found.sentence


def test_a_rank_that_has_ended_is_named() -> None:
    """Those that are left wait in a collective, and the verdict says for whom.

    A rank that is stuck on its own does not wait for it.
    """
    alone = judged(rank(0, TRAIN, DATA), suspect=10, gone_ranks=[1])
    assert (alone.kind, alone.odd_one_out) == ("lock", None)
    found = judged(rank(0, TRAIN, BACKWARD), suspect=10, gone_ranks=[1])
    assert (found.kind, found.odd_one_out) == ("collective", 1)
    assert "Rank 1" in found.sentence


def test_a_rank_whose_stack_is_unknown_is_not_blamed() -> None:
    """What a rank has not shown is not claimed, unless its own steps say that it is behind."""
    silent = process(ThreadSample(tid=1, is_main=True, waits="socket"), pid=11, rank=1, step=5)
    found = judged(rank(0, TRAIN, ALL_REDUCE), silent, suspect=10)
    assert (found.odd_one_out, found.process.pid) == (None, 10)

    behind = process(ThreadSample(tid=1, is_main=True, waits="socket"), pid=11, rank=1, step=4)
    assert judged(rank(0, TRAIN, ALL_REDUCE), behind, suspect=10).odd_one_out == 1


def test_of_ranks_that_all_wait_the_one_behind_or_elsewhere_is_the_odd_one() -> None:
    """A lower step decides; else another line of the script than that of most."""
    behind = process(thread([TRAIN, ALL_REDUCE]), pid=11, rank=1, step=4)
    assert judged(rank(0, TRAIN, ALL_REDUCE), behind, suspect=10).odd_one_out == 1
    assert judged(rank(0, TRAIN, BACKWARD), rank(1, DATA, ALL_REDUCE), suspect=10).odd_one_out == 1
    assert (
        judged(rank(0, TRAIN, ALL_REDUCE), rank(1, DATA, ALL_REDUCE), suspect=10).odd_one_out
        is None
    )
    other = rank(2, (TRAIN[0], 99, "main"), ALL_REDUCE)
    assert (
        judged(
            rank(0, TRAIN, ALL_REDUCE), rank(1, TRAIN, ALL_REDUCE), other, suspect=10
        ).odd_one_out
        == 2
    )


def test_a_rank_that_waits_in_a_call_of_the_guard_is_told_from_one_that_sleeps() -> None:
    """The wait is holdfast's own.

    The ranks that are in a collective meanwhile did not make that call.
    """
    ours = PYTHON + "site-packages/holdfast/guard/"
    validated = (ours + "guard.py", 360, "Guard.validated")
    wait = (ours + "ranks/messages.py", 250, "Messages._is_there")
    barrier = [
        (TORCH + "distributed/c10d_logger.py", 83, "wrapper"),
        (ALL_REDUCE[0], 5100, "barrier"),
    ]
    polled = (TORCH + "distributed/distributed_c10d.py", 1, "check")
    alone = rank(0, TRAIN, validated, wait, waits="sleep")

    found = judged(alone, rank(1, LATER, *barrier), suspect=11)
    assert (found.kind, found.odd_one_out, found.process.pid) == ("collective", 0, 10)
    assert re.search(r"Rank 0 .*guard\.validated.* rank 1 .*barrier", found.sentence)
    assert "H116" in found.sentence

    found = judged(alone, rank(1, TRAIN, DATA, waits="sleep"), suspect=10)
    assert (found.kind, found.odd_one_out) == ("sleep", 1)
    busy = process(
        thread([TRAIN, validated, wait], "running"),
        second=thread([TRAIN, validated, wait, polled], "running"),
        share=0.1,
    )
    assert judged(busy, rank(1, LATER, *barrier), suspect=1).kind == "collective"


def test_a_rank_whose_worker_is_stuck_leads_to_the_worker() -> None:
    """Blame goes from the victim to the odd rank, and from there to its worker."""
    waiting = rank(1, TRAIN, LOADER, phase="data wait")
    stuck = process(
        thread([WORKER, FETCH, DATA], "socket"), pid=30, ppid=11, role="loader worker", judged=False
    )
    found = judged(rank(0, TRAIN, BACKWARD), waiting, stuck, suspect=10)
    assert (found.kind, found.odd_one_out, found.process.pid) == ("socket", 1, 30)


def test_who_waits_for_a_process_that_works_is_slow() -> None:
    """A script that converts data by another program is no hang, as long as that program works."""
    waits = process(thread([TRAIN, (PYTHON + "subprocess.py", 1264, "Popen.wait")], "child"))
    works = process(thread([]), pid=3, ppid=2, share=0.9, judged=False)
    shell = process(thread([]), pid=2, ppid=1, judged=False)
    assert judged(waits, shell, works).kind == "merely slow"
    assert judged(waits, shell).kind == "process"


def test_without_any_stack_the_kernel_alone_is_asked() -> None:
    """No py-spy, no handler.

    A state and a system call still say something, and less surely where less is known.
    """
    blind = process(ThreadSample(tid=1, is_main=True, waits="socket"))
    assert (judged(blind).kind, judged(blind).frame) == ("socket", None)
    assert judged(process(ThreadSample(is_main=True), state="D")).kind == "I/O"
    nothing = judged(ExaminedProcess(pid=1, judged=True))
    assert (nothing.kind, nothing.certainty) == ("unknown", "a guess")


@pytest.mark.parametrize(("facts", "waits"), CASES["kernel"])
def test_the_kernel_s_view_is_translated(facts: dict[str, str], waits: str) -> None:
    """System call, channel, descriptor and library together say what a thread waits for."""
    assert classify_wait(**facts) == waits


def test_user_code_is_neither_a_library_nor_ours() -> None:
    """The blamed line is one that its reader can change, as far as there is one."""
    frames = [
        Frame(file=file, line=1, function="f")
        for file in ("/home/me/a.py", "<string>", "/srv/lib/mine/b.py")
    ]
    assert all(map(is_user_code, frames))
    others = [
        PYTHON + "json/decoder.py",
        TORCH + "nn/x.py",
        "<frozen importlib>",
        "/x/holdfast/guard/guard.py",
    ]
    assert not any(is_user_code(Frame(file=file, line=1, function="f")) for file in others)
    installed = Frame(file=PYTHON + "site-packages/fairseq/data.py", line=7, function="get")
    inside = Frame(file=TORCH + "utils/data/dataset.py", line=7, function="get")
    assert frame_to_show([installed, inside]) is installed
    assert frame_to_show([]) is None
