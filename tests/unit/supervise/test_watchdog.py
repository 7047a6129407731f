"""A hang is told once its limit is over, with the right process and remedy.

What is no hang is not told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.events.process_events import Hang
from holdfast.recorder.progress import ProcessPhase, ProgressBoard
from holdfast.recorder.run_files import BOARD_FILE, ProcessInfo, write_process
from holdfast.supervise.process_tree import read_process
from holdfast.supervise.watch.attempt_watch import AttemptWatch
from holdfast.supervise.watch.limits import HangLimits
from holdfast.supervise.watch.py_spy import PySpy
from holdfast.supervise.watch.stacks import StackSampler
from holdfast.supervise.watch.watchdog import Watchdog

LIMIT = 10.0
SLEEP = "import time; time.sleep(1e6)"
BURN = "while True: sum(range(100))"
# Waits as a rank does in a collective: in a function of a file of torch.distributed.
IN_COLLECTIVE = (
    "import time\n"
    "file = '/x/site-packages/torch/distributed/distributed_c10d.py'\n"
    "exec(compile('def all_reduce(): time.sleep(1e6)', file, 'exec'))\n"
    "all_reduce()\n"
)


class Scene:
    """A run directory with real processes, whose boards the test writes, and a watchdog that
    looks when told to.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.events: list[Any] = []
        self.hangs: list[Hang] = []
        self.said: list[str] = []
        self.children: list[subprocess.Popen[bytes]] = []
        self.computing: list[int] = []
        self.boards: dict[int, ProgressBoard] = {}
        self.during: Callable[[], Any] = lambda: None  # between the two looks at stacks
        self.now = time.monotonic()
        self.watchdog = self.new_watchdog()

    def new_watchdog(self, *settings: str, attempt: int = 0) -> Watchdog:
        self.watchdog = Watchdog(
            AttemptWatch(
                run_path=self.run,
                attempt=attempt,
                limits=HangLimits.parse([f"all={LIMIT}", *settings]),
                emit=self.events.append,
                on_hang=self.hangs.append,
                say=self.said.append,
            ),
            clock=lambda: self.now,
            stacks=StackSampler(self.run, pause=self._pause),
        )
        return self.watchdog

    def _pause(self, seconds: float) -> None:
        """Sleep until CPU time shows, in ticks of 0.01 s, of each process that computes."""
        self.during()
        before = {pid: cpu_ticks(pid) for pid in self.computing}
        time.sleep(0.15)
        while any(cpu_ticks(pid) < ticks + 5 for pid, ticks in before.items()):
            time.sleep(0.01)

    def start(
        self,
        program: str = SLEEP,
        *,
        phase: ProcessPhase = ProcessPhase.FORWARD_BACKWARD,
        **more: Any,
    ) -> int:
        """Start a process that is a trainer, unless told otherwise, and return its pid."""
        child = subprocess.Popen([sys.executable, "-S", "-c", program])
        self.children.append(child)
        if program == BURN:
            self.computing.append(child.pid)
        found = read_process(child.pid)
        assert found is not None
        about = {
            "role": "trainer",
            "torch": "2.13",
            "started": time.time(),
            "ppid": os.getpid(),
            **more,
        }
        folder = write_process(
            self.run, ProcessInfo(pid=child.pid, ticks=found.ticks, argv=[], **about)
        )
        self.boards[child.pid] = ProgressBoard(folder / BOARD_FILE)
        self.boards[child.pid].enter(phase)
        while program == SLEEP and "nanosleep" not in Path(f"/proc/{child.pid}/wchan").read_text():
            time.sleep(0.005)  # it still starts
        return child.pid

    def look(self, seconds: float) -> None:
        """Let time pass, in small steps as a thread does, and look at each."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.watchdog.check(self.now)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def cpu_ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for child in made.children:
        child.kill()
        child.wait()


def test_a_trainer_that_stands_still_is_told_once_with_its_line(scene: Scene) -> None:
    """Nothing is told before the limit.

    Then stacks, kind, line, remedy and the files that hold the stacks.
    """
    pid = scene.start()
    scene.boards[pid].step = 7
    scene.boards[pid].enter(scene.boards[pid].phase)
    scene.look(LIMIT - 1)
    assert scene.events == []
    scene.look(30)
    assert scene.kinds() == ["hang_suspected", "stacks", "hang"]
    (hang,) = scene.hangs
    assert (hang.pid, hang.step, hang.phase, hang.hang_kind, hang.signature) == (
        pid,
        7,
        "forward/backward",
        "sleep",
        "H1413",
    )
    assert hang.remedy == "restart"
    assert LIMIT < hang.seconds < LIMIT + 1
    assert hang.frame == "<string>:1 in <module>"
    assert [(scene.run / "stacks" / name).is_file() for name in hang.files] == [True, True]
    assert scene.events[-1] is hang


def wait_for_state(pid: int, state: str) -> None:
    while (found := read_process(pid)) is not None and found.state != state:
        time.sleep(0.005)


def test_what_moves_while_its_stacks_are_taken_is_no_hang(scene: Scene) -> None:
    """The second before the verdict is one in which it may go on."""
    pid = scene.start()
    scene.during = lambda: scene.boards[pid].enter(scene.boards[pid].phase)
    scene.look(LIMIT + 1)
    assert scene.kinds()[:2] == ["hang_suspected", "hang_over"]
    assert scene.hangs == []
    # Else years of slow checkpoints fill a disk
    assert list((scene.run / "stacks").iterdir()) == []


def test_a_time_in_which_nobody_ran_is_not_counted(scene: Scene) -> None:
    """After a laptop was shut or a container was paused, each process has its whole limit again."""
    scene.start()
    scene.look(1)
    scene.now += 3_600
    scene.look(LIMIT - 1)
    assert scene.kinds() == ["watchdog_suspended"]
    scene.look(2)
    assert len(scene.hangs) == 1


def test_a_trainer_that_is_stopped_by_its_user_is_not_hanging(scene: Scene) -> None:
    """That a signal stopped it, and that it goes on, is told once each, and after it the limit
    begins anew.
    """
    pid = scene.start()
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    scene.look(10 * LIMIT)
    scene.look(1)
    scene.look(10 * LIMIT)
    assert scene.kinds() == ["process_stopped"]
    os.kill(pid, signal.SIGCONT)
    scene.look(LIMIT / 2)
    assert scene.kinds() == ["process_stopped", "process_continued"]
    assert scene.events[1].seconds > 10 * LIMIT
    assert scene.hangs == []
    scene.look(2 * LIMIT)
    assert len(scene.hangs) == 1


def test_who_computes_is_left_alone_for_longer_each_time(scene: Scene) -> None:
    """It is told, as a loop or as native code, and ended only when the patience for such is
    over.
    """
    scene.new_watchdog("moving=70")
    scene.start(BURN)
    scene.look(100)
    assert [hang.remedy for hang in scene.hangs] == ["wait", "wait", "wait", "restart"]
    assert all(
        hang.hang_kind in ("Python loop", "native code", "merely slow") for hang in scene.hangs
    )
    assert [round(hang.seconds / LIMIT) for hang in scene.hangs] == [1, 2, 4, 8]
    waited = {(hang.hang_kind, hang.frame) for hang in scene.hangs if hang.remedy == "wait"}
    assert len(scene.said) == len(waited), "once for each place"
    assert all("1.17 min" in line and "--hang-limit moving" in line for line in scene.said)


@pytest.mark.parametrize(
    ("phase", "torch", "remedy"),
    [
        (ProcessPhase.STARTING, None, "wait"),
        (ProcessPhase.STARTING, "2.13", "restart"),
        (ProcessPhase.ENDING, "2.13", "end"),
        (ProcessPhase.DATA_WAIT, "2.13", "restart"),
    ],
)
def test_the_remedy_follows_the_phase(
    scene: Scene, phase: ProcessPhase, torch: str | None, remedy: str
) -> None:
    """A training that is over is not begun again, and of a program without torch nothing is
    known.
    """
    scene.start(phase=phase, torch=torch)
    scene.look(LIMIT + 1)
    assert [hang.remedy for hang in scene.hangs] == [remedy]


def test_a_worker_that_is_stopped_is_to_go_on_and_only_then_to_be_ended(scene: Scene) -> None:
    """SIGCONT costs nothing; if it helps nobody, the next remedy is dearer."""
    program = (
        "import os, signal, time\n"
        "pid = os.fork()\n"
        "if not pid: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(pid, flush=True)\n"
        "def _try_get_data(): time.sleep(1e6)\n"
        "_try_get_data()\n"
    )
    pid = scene.start(program, phase=ProcessPhase.DATA_WAIT)
    workers: list[int] = []
    while not workers:
        workers = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    wait_for_state(workers[0], "T")
    worker = read_process(workers[0])
    assert worker is not None
    try:
        write_process(
            scene.run,
            ProcessInfo(
                pid=worker.pid, ticks=worker.ticks, ppid=pid, argv=[], role="loader worker"
            ),
        )
        scene.watchdog = scene.new_watchdog()
        # Without frames, the phase says that the trainer waits for its workers
        scene.watchdog._stacks._py_spy = PySpy("")
        scene.look(2 * LIMIT + 2)
    finally:
        os.kill(worker.pid, signal.SIGKILL)
    assert [(hang.hang_kind, hang.blamed_pid, hang.remedy) for hang in scene.hangs] == [
        ("stopped", worker.pid, "continue"),
        ("stopped", worker.pid, "restart"),
    ]


def test_a_rank_may_wait_for_another_that_is_within_its_limit(scene: Scene) -> None:
    """While rank 0 evaluates or saves alone, the others stand in a collective, and nothing is
    told.
    """
    scene.new_watchdog("saving=60")
    scene.start(rank=1, world_size=2)
    scene.start(rank=0, world_size=2, phase=ProcessPhase.SAVING)
    scene.look(50)
    assert scene.events == []
    scene.look(20)
    assert len(scene.hangs) == 1, "one hang of both"


def test_a_rank_that_has_ended_is_named_as_the_one_that_is_missing(scene: Scene) -> None:
    """The one that waits in a collective cannot go on without it."""
    scene.start(IN_COLLECTIVE, rank=0, world_size=2)
    scene.start(rank=1, world_size=2)
    scene.look(1)
    scene.children[1].kill()
    wait_for_state(scene.children[1].pid, "Z")
    scene.look(LIMIT + 1)
    assert [hang.odd_one_out for hang in scene.hangs] == [1]


def test_a_rank_is_only_missing_if_it_has_ended_and_another_waits_for_it(scene: Scene) -> None:
    """A rank that sleeps on its own line does not wait for another, and a program that a rank has
    started is no rank.
    """
    trainer = scene.start(rank=0, world_size=2)
    scene.start(rank=1, world_size=2)
    scene.start(rank=0, world_size=2, role="other", ppid=trainer)
    scene.look(1)
    scene.children[1].kill()
    wait_for_state(scene.children[1].pid, "Z")
    scene.look(LIMIT + 1)
    (hang,) = scene.hangs
    assert (hang.blamed_pid, hang.blamed_rank, hang.odd_one_out) == (trainer, 0, None)
    assert hang.ranks == ()


def test_each_rank_is_listed_with_its_own_step_and_line(scene: Scene) -> None:
    """The rank that was noticed is often not the one that is blamed."""
    first = scene.start(IN_COLLECTIVE, rank=0, world_size=2)
    second = scene.start(rank=1, world_size=2)
    for pid, step in ((first, 5), (second, 4)):
        scene.boards[pid].step = step
        scene.boards[pid].enter(ProcessPhase.FORWARD_BACKWARD)
    scene.look(LIMIT + 1)
    (hang,) = scene.hangs
    assert (hang.blamed_pid, hang.blamed_rank, hang.odd_one_out) == (second, 1, 1)
    places = {standing.pid: (standing.rank, standing.step) for standing in hang.ranks}
    assert places == {first: (0, 5), second: (1, 4)}
    frames = {standing.rank: standing.frame.rpartition(" ")[2] for standing in hang.ranks}
    assert frames == {0: "<module>", 1: "<module>"}


def test_processes_of_other_attempts_and_of_other_people_are_passed_over(scene: Scene) -> None:
    """A process file may name any pid.

    Who is not of this command is neither looked at nor signalled.
    """
    scene.start(attempt=3)
    stranger = read_process(os.getppid())
    assert stranger is not None
    about = {"role": "trainer", "torch": "2.13", "stacks_signal": int(signal.SIGUSR1)}
    folder = write_process(
        scene.run,
        ProcessInfo(pid=stranger.pid, ticks=stranger.ticks, ppid=1, argv=[], **about),  # type: ignore[arg-type]
    )
    ProgressBoard(folder / BOARD_FILE).enter(ProcessPhase.DATA_WAIT)
    scene.look(5 * LIMIT)
    assert scene.hangs == []
    assert not list((scene.run / "stacks").glob("*"))


def test_the_thread_goes_on_after_a_failure_and_ends_when_it_is_told(scene: Scene) -> None:
    """Whatever goes wrong in one look is told, and the next look is made."""
    stop, looks = threading.Event(), []

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) > 1:
            stop.set()
        raise KeyError("anything")

    scene.watchdog.check = look  # type: ignore[method-assign]
    scene.watchdog.run(stop)
    assert len(looks) == 2
    assert scene.kinds() == ["watching_failed", "watching_failed"]
    assert scene.events[0].error.startswith("KeyError: 'anything', ")
