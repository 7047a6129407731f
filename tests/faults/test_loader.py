"""Whatever befalls a loader's workers, the epoch's batches are those of an undisturbed one, and
the cause is told.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.loader_cases import KINDS, Samples, children, fork_lock, why_not_here
from benchmarks.loader_runs import digest, run_case, undisturbed
from tests.prepared import Prepared, run_prepared

from holdfast.core.errors import LoaderError
from holdfast.core.events.data import EventData
from holdfast.loader.loader import DataLoader
from holdfast.loader.quarantine import FILE_NAME, read_ledger
from holdfast.loader.workers import recovery

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # A lost worker interrupts what the main thread does in its wait, and that may be a destructor.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_ROOT = Path(__file__).parents[2]
_TIMEOUT_SECONDS = 120.0
_PARENT = Path(__file__).parent / "programs" / "loader_parent.py"
_OWN_PROCESS = ("/dev/shm is full", "file descriptors")  # these change the process that they run in
_HERE = [name for name in KINDS if name not in _OWN_PROCESS]
_ALONE = [name for name, kind in KINDS.items() if kind.alone]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no worker outlives its test."""
    # A process that python keeps, once workers were started by spawn
    resource_tracker.ensure_running()
    before = set(children(os.getpid()))
    yield
    _wait_until(lambda: set(children(os.getpid())) <= before, "workers are left")


def _wait_until(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(problem)
        time.sleep(0.01)


def _run(name: str, seed: int, workers: int, place: Path) -> dict[str, Any]:
    """Return the outcome of a case as plain values."""
    if (reason := why_not_here(name)) is not None:
        pytest.skip(reason)
    if name not in _OWN_PROCESS:
        outcome = run_case(name, seed, workers, place)
        return {field: getattr(outcome, field) for field in outcome.__slots__}
    ended = run_prepared(
        ["-m", "benchmarks.loader_runs", name, seed, workers], cwd=_ROOT, timeout=_TIMEOUT_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def _check(name: str, workers: int, outcome: dict[str, Any]) -> None:
    assert outcome["ended"], outcome
    assert outcome["identical"], outcome
    assert outcome["struck"] or name == "killed from outside", (
        "nothing happened, so nothing is proved"
    )
    cause = KINDS[name].cause
    if cause is not None and workers and outcome["struck"] and name != "killed from outside":
        assert any(re.search(cause, each) for each in outcome["causes"]), outcome
    if cause is None:
        assert not outcome["causes"], "no worker need be lost for an exception"
    assert "sample_quarantined" not in outcome["other_events"], (
        "what struck once is no fault of the sample"
    )


@pytest.mark.parametrize(
    "name", [*_HERE, *(pytest.param(name, marks=pytest.mark.slow) for name in _OWN_PROCESS)]
)
def test_a_fault_in_a_worker_changes_nothing(name: str, tmp_path: Path) -> None:
    """Indices, values and augmentation of the epoch are bit for bit those of an undisturbed one."""
    _check(name, 2, _run(name, 0, 2, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"), list(zip(KINDS, itertools.cycle([1, 4]), strict=False))
)
def test_a_fault_anywhere_with_other_numbers_of_workers_changes_nothing(
    name: str, workers: int, tmp_path: Path
) -> None:
    """The same holds at other samples, and with one or four workers."""
    _check(name, workers, _run(name, 1, workers, tmp_path))


@pytest.mark.parametrize("name", _ALONE)
def test_an_exception_without_workers_changes_nothing(name: str, tmp_path: Path) -> None:
    """In the main process too an exception that comes once is survived, whatever kind of
    exception it is.
    """
    _check(name, 0, _run(name, 3, 0, tmp_path))


def test_a_worker_that_hangs_is_found_without_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``timeout`` a stuck worker is replaced too, after the automatic limit.

    Here less than its minute.
    """
    monkeypatch.setattr(recovery, "_LIMIT_SECONDS", 1.0)
    events: list[dict[str, Any]] = []
    quiet, struck = (Samples(KINDS["endless sleep"], at, tmp_path / "struck") for at in (-1, 21))
    expected = [digest(batch) for batch in _loader(quiet)]
    loader = _loader(struck, num_workers=2)
    loader.attach(lambda data: events.append({"kind": data.kind, **data.facts()}), tmp_path)
    assert [digest(batch) for batch in loader] == expected
    (heal,) = (event for event in events if event["kind"] == "loader_healed")
    assert heal["sample"] == 21


def test_what_keeps_shared_files_outlives_a_worker(tmp_path: Path) -> None:
    """Where tensors are shared by files, torch's keeper of them is a child of some worker, and
    needed by the loop.
    """
    quiet, struck = (Samples(KINDS["SIGKILL"], at, tmp_path / "struck") for at in (-1, 21))
    expected = [digest(batch) for batch in _loader(quiet)]
    loader = _loader(struck, num_workers=2)
    loader._recovery.settings.share_by_file = True
    assert [digest(batch) for batch in list(loader)] == expected
    assert (tmp_path / "struck").exists()


def _loader(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 5, **options})


# --- faults that stay

_LENGTH = 22


def _raise() -> None:
    raise ValueError("corrupt")


_STAYING: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "exits": lambda: os._exit(0),
    "hangs": lambda: time.sleep(1e6),
}


class Damaged:
    """Some samples have a fault each time that they are read, but not in the process that made
    this.
    """

    def __init__(self, fault: str, bad: set[int]) -> None:
        self.fault = fault
        self.bad = bad
        self.here = os.getpid()

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index in self.bad:
            if self.fault != "raises":
                assert os.getpid() != self.here, (
                    "what kills a worker was tried in the training process"
                )
            _STAYING[self.fault]()
        return index, torch.rand(3)


def _replaced(order: list[int], bad: set[int], batch_size: int) -> list[list[int]]:
    """Return the batches in which each bad sample gives way to the next one of the order that is
    good.
    """
    batches = []
    for first in range(0, len(order), batch_size):
        batch, used = [], set(bad)
        own = order[first : first + batch_size]
        following = order[first + batch_size :] + order[:first]
        for offset, index in enumerate(own):
            chosen = index
            if index in bad:
                chosen = next(each for each in (*own[offset:], *following) if each not in used)
            batch.append(chosen)
        batches.append(batch)
    return batches


_POSITIONS = {"first": 0, "middle": 9, "last": _LENGTH - 1}
_CASES = [
    *itertools.product(["raises", "SIGKILL"], _POSITIONS, (1, 2)),
    *(
        (fault, *place)
        for fault in _STAYING
        for place in [("first", 1), ("middle", 2), ("last", 2)]
    ),
    ("raises", "middle", 0),
]


@pytest.mark.parametrize(("fault", "position", "workers"), sorted(set(_CASES)), ids=str)
def test_a_sample_that_stays_bad_is_set_aside(
    fault: str, position: str, workers: int, tmp_path: Path
) -> None:
    """Wherever it lies, it is replaced by the next of the order, told, written down, and the
    same after a resume.
    """
    order = [batch.item() for batch in DataLoader(range(_LENGTH), shuffle=True, seed=5)]  # type: ignore[arg-type]
    bad = {order[_POSITIONS[position]]}
    events: list[dict[str, Any]] = []

    def make(place: Path, timeout: float = 0.0) -> DataLoader:
        loader = _loader(Damaged(fault, bad), num_workers=workers, timeout=timeout)
        loader.attach(lambda data: events.append({"kind": data.kind, **data.facts()}), place)
        return loader

    loader = make(tmp_path, timeout=0.5 if fault == "hangs" else 0.0)
    states, found = [loader.state_dict()], []
    for batch in loader:
        found.append(batch)
        states.append(loader.state_dict())
    assert [batch[0].tolist() for batch in found] == _replaced(order, bad, 4)
    (sample,) = read_ledger(tmp_path / FILE_NAME).values()
    assert {sample.index} == bad
    assert [event["sample"] for event in events if event["kind"] == "sample_quarantined"] == [*bad]
    events.clear()
    resumed = make(tmp_path)
    before = _POSITIONS[position] // 4
    resumed.load_state_dict(states[before])
    assert [digest(batch) for batch in resumed] == [digest(batch) for batch in found[before:]]
    assert not {"loader_healed", "sample_quarantined"} & {event["kind"] for event in events}, (
        "what the ledger knows costs no worker a second time"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_more_bad_samples_than_allowed_end_the_epoch(workers: int) -> None:
    """The sample that is one too many is named with its evidence, and so are those that are set
    aside already.
    """
    loader = _loader(Damaged("raises", {3, 8, 11}), num_workers=workers, quarantine=2)
    loader._record = lambda data: None
    with pytest.raises(LoaderError, match="corrupt") as caught:
        list(loader)
    assert caught.value.rule == "H612"


def test_a_sample_that_was_read_after_all_is_not_suspected_for_ever(tmp_path: Path) -> None:
    """Two kills in two epochs that happen to hit workers at the same sample do not set it aside."""
    marker = tmp_path / "strike"

    class Struck(Damaged):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            if index == 13 and marker.exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    loader = _loader(Struck("raises", set()), num_workers=2)
    kinds: list[str] = []
    loader._record = lambda data: kinds.append(data.kind)
    for _ in range(3):
        marker.touch()
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(
            range(_LENGTH)
        )
    assert kinds.count("loader_healed") == 3
    assert "sample_quarantined" not in kinds


@pytest.mark.slow
def test_a_lock_that_is_held_at_every_fork_ends_the_use_of_workers(tmp_path: Path) -> None:
    """Where every worker is blocked at whatever it reads, no sample is blamed, and the main
    process reads on.
    """
    kind = KINDS["lock held at the fork"]
    samples = Samples(kind, -1, tmp_path / "marker")
    expected = [digest(batch) for batch in _loader(samples)]
    loader = _loader(samples, num_workers=2, timeout=0.3)
    events: list[tuple[str, Any]] = []

    def record(data: EventData) -> None:
        events.append((data.kind, data.facts().get("workers")))
        if events[-1][1] == 0:
            fork_lock.release()

    loader.attach(record, tmp_path)
    fork_lock.acquire()
    assert [digest(batch) for batch in loader] == expected
    assert "sample_quarantined" not in {event for event, _ in events}
    assert events[-1] == ("loader_healed", 0)


class Heavy:
    """Samples that are more than a pipe holds, for workers that are not forked."""

    def __init__(self) -> None:
        self.numbers = torch.arange(2**18).tolist()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_before_it_has_read_its_dataset_blocks_nobody(number: int) -> None:
    """As by the kernel while it imports.

    Who writes the dataset into its pipe would wait for ever.
    """
    before = set(children(os.getpid()))
    struck: list[int] = []

    def strike() -> None:
        while not struck:
            time.sleep(0.001)
            for pid in set(children(os.getpid())) - before:
                with contextlib.suppress(OSError):
                    if not struck and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, number)
                        struck.append(pid)

    loader = _loader(Heavy(), num_workers=2, multiprocessing_context="spawn")
    healed: list[str] = []
    loader._record = lambda data: healed.append(str(data.facts().get("cause")))
    threading.Thread(target=strike, daemon=True).start()
    assert sorted(item for batch in loader for item in batch.tolist()) == list(range(8))
    assert len(struck) == 1
    assert re.search("SIGKILL" if number == signal.SIGKILL else "stopped", healed[0])


class Calling:
    """Samples that are read by a program, which hangs once."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.marker.exists():
            program = subprocess.Popen(["sleep", "1000"])
            self.marker.write_text(str(program.pid))
            program.wait()
        return index


def test_a_program_that_a_stuck_worker_waits_for_ends_with_it(tmp_path: Path) -> None:
    """A sample that is read by a program that hangs leaves no program behind when its worker is
    replaced.
    """
    loader = _loader(Calling(tmp_path / "pid"), num_workers=2, timeout=0.5)
    assert sorted(item for batch in loader for item in batch.tolist()) == list(range(8))
    program = (tmp_path / "pid").read_text()
    _wait_until(lambda: not _is_alive(int(program)), "the program is left")


# --- errors that are the program's


def _functions(samples: list[Any]) -> Any:
    return lambda: samples


def _bad_start(worker: int) -> None:
    raise RuntimeError(f"worker {worker} has no licence")


def test_a_batch_that_cannot_be_sent_is_a_clear_error() -> None:
    """Plain torch waits for ever for a batch that cannot be pickled.

    Here its own error comes, with the samples.
    """
    with pytest.raises((AttributeError, TypeError), match="pickle") as caught:
        list(_loader(list(range(8)), collate_fn=_functions, num_workers=2))
    assert "samples" in "".join(caught.value.__notes__)
    del caught  # it holds the iterator, and with it the workers, for whoever wants to go on
    gc.collect()


def test_an_error_of_worker_init_fn_is_raised_as_it_is() -> None:
    """What the program's own start of a worker raises is no fault to heal."""
    loader = _loader(list(range(8)), worker_init_fn=_bad_start, num_workers=2)
    events: list[str] = []
    loader._record = lambda data: events.append(data.kind)
    with pytest.raises(RuntimeError, match="has no licence"):
        list(loader)
    assert "loader_healed" not in events


def test_the_epoch_after_a_hopeless_one_starts_anew(tmp_path: Path) -> None:
    """Once what blocked every worker is repaired, a loader that keeps its workers goes on with
    the next epoch.
    """
    blocked = tmp_path / "blocked"
    blocked.touch()

    def collate(samples: list[Any]) -> Any:
        while blocked.exists():
            time.sleep(0.01)
        return torch.utils.data.default_collate(samples)

    loader = _loader(
        list(range(8)), collate_fn=collate, num_workers=1, timeout=0.3, persistent_workers=True
    )
    kinds: list[str] = []
    loader._record = lambda data: kinds.append(data.kind)
    with pytest.raises(LoaderError, match="batch 0") as caught:
        list(loader)
    assert caught.value.rule == "H614"
    assert kinds.count("loader_healed") == 1
    blocked.unlink()
    assert len(list(loader)) == 2
    loader.close()


# --- processes and threads


def _is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _start(mode: str) -> tuple[subprocess.Popen[str], list[int]]:
    parent = Prepared([_PARENT, mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    return parent, workers


def _check_that_all_end(workers: list[int]) -> None:
    try:
        _wait_until(lambda: not any(map(_is_alive, workers)), "workers outlive their parent")
    finally:
        for pid in filter(_is_alive, workers):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "looping",
        "sleeping",
        "stopped",
        "waiting",
        "served locked",
        "threaded locked",
        "threaded stopped",
    ],
)
def test_no_worker_outlives_a_killed_parent(mode: str) -> None:
    """After SIGKILL of the training process its workers are gone, whatever they were doing."""
    parent, workers = _start(mode)
    parent.kill()
    parent.wait()
    _check_that_all_end(workers)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("raising", 1), ("leaving", 0)])
def test_a_program_that_leaves_an_iterator_behind_ends(mode: str, code: int) -> None:
    """Neither an exception in the loop nor an iterator that is never finished keeps a process
    from ending.
    """
    parent, workers = _start(mode)
    try:
        assert parent.wait(_TIMEOUT_SECONDS) == code
    finally:
        parent.kill()
        parent.wait()
    _check_that_all_end(workers)


class Slow(Samples):
    """Samples that take a moment, so that an epoch is not over before it is disturbed."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(0.002)
        return super().__getitem__(index)


def _kill_a_worker(here: set[int]) -> int:
    """Kill one of the children that were not here before; return its pid."""
    pid = min(set(children(os.getpid())) - here)
    os.kill(pid, signal.SIGKILL)
    return pid


def _open_temporary_files() -> set[str]:
    links = (each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return {str(link) for link in links if link.parent == Path(tempfile.gettempdir())}


def _busy_step(dying: int) -> None:
    """Compute until a child has died, which is when its signal comes, and for a while longer."""
    until = math.inf
    while time.monotonic() < until:
        torch.rand(20, 20) @ torch.rand(20, 20)
        if until == math.inf and not _is_alive(dying):
            until = time.monotonic() + 0.3


def test_a_worker_that_dies_does_not_interrupt_a_training_step() -> None:
    """Plain torch raises in the middle of the step.

    Here the step ends, and the next batches are right.
    """
    dataset, here = Slow(None, -1, Path()), set(children(os.getpid()))
    theirs = iter(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2))
    next(theirs)
    with pytest.raises(RuntimeError, match="killed by signal"):
        _busy_step(_kill_a_worker(here))
    del theirs
    here = set(children(os.getpid()))
    loader = _loader(dataset, num_workers=2)
    loader._record = lambda data: None
    found = []
    for number, batch in enumerate(loader):
        found.append(digest(batch))
        if number == 1:
            _busy_step(_kill_a_worker(here))
    assert found == [digest(batch) for batch in _loader(dataset)]


@pytest.mark.slow  # torch looks after its workers every 5 s where no signal can wake it
def test_threads_may_consume_and_the_main_thread_is_left_alone(tmp_path: Path) -> None:
    """Loaders that are read in other threads heal too, and nothing is raised in the main thread
    meanwhile.
    """
    expected = {name: undisturbed(name, 4) for name in ("SIGKILL", "endless sleep")}
    in_main = iter(_loader(list(range(8)), num_workers=1))
    next(in_main)  # from now on the main thread listens for its workers
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_case, name, 4, 2, tmp_path, expected=expected[name])
            for name in expected
        ]
        while not all(each.done() for each in runs):
            time.sleep(0.001)
    in_main.close()  # type: ignore[attr-defined] # it is a generator
    for outcome in (each.result() for each in runs):
        assert outcome.ended, outcome.error
        assert outcome.identical
        assert len(outcome.causes) == 1


def test_two_loaders_heal_beside_each_other() -> None:
    """Losses of one loader do not disturb another that is read in turns with it."""
    here = set(children(os.getpid()))
    datasets = [Slow(None, -1, Path()), Slow(None, -1, Path())]
    expected = [
        [digest(batch) for batch in _loader(each, seed=seed)] for seed, each in enumerate(datasets)
    ]
    loaders = [_loader(each, seed=seed, num_workers=2) for seed, each in enumerate(datasets)]
    for loader in loaders:
        loader._record = lambda data: None
    found: list[list[str]] = [[], []]
    for number, pair in enumerate(zip(*loaders, strict=True)):
        for place, batch in enumerate(pair):
            found[place].append(digest(batch))
        if number in (2, 6):
            for pid in sorted(set(children(os.getpid())) - here)[:4:2]:
                os.kill(pid, signal.SIGKILL)
    assert found == expected


@pytest.mark.slow
def test_losses_leak_neither_descriptors_nor_threads() -> None:
    """After 30 losses the process has as many open files and threads as after 10, within what is
    being closed.

    None of the files is temporary: torch makes ten where a batch cannot be read, and a loss would
    interrupt it there.
    """

    class Endless(Slow):
        def __len__(self) -> int:
            return 10_000

    here, temporary = set(children(os.getpid())), _open_temporary_files()
    loader = _loader(Endless(None, -1, Path()), num_workers=2, persistent_workers=False)
    loader._record = lambda data: None
    batches, counts = iter(loader), []
    for loss in range(30):
        for _ in range(20):  # so far apart that they do not count as repeated
            next(batches)
        _kill_a_worker(here)
        next(batches)
        if loss in (9, 29):
            until = time.monotonic() + _TIMEOUT_SECONDS
            while True:
                time.sleep(0.3)
                gc.collect()  # a lost generation lies in a reference cycle
                now = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
                if not counts or (now[0] <= counts[0][0] + 15 and now[1] <= counts[0][1] + 1):
                    break
                # What is being closed is closed by then
                assert time.monotonic() < until, (counts[0], now)
            counts.append(now)
    assert _open_temporary_files() <= temporary
    batches.close()  # type: ignore[attr-defined] # it is a generator


class DiesEarly:
    """Samples of which one ends its worker as soon as it is read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os._exit(3)
        return index


class Interrupted:
    """Ctrl-C is pressed when the first worker runs and the second one is about to."""

    interrupts = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index

    def __getstate__(self) -> dict[str, Any]:
        if self.interrupts and multiprocessing.active_children():
            self.interrupts = False
            raise KeyboardInterrupt
        return self.__dict__


def test_workers_that_were_not_all_started_are_not_kept() -> None:
    """The next epoch has all of its own, also where workers are kept from one epoch to the next."""
    loader = _loader(
        Interrupted(), num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    for _ in range(2):
        assert sorted(item for batch in loader for item in batch.tolist()) == list(range(16))
    loader.close()


@pytest.mark.slow
def test_workers_that_die_while_others_start_never_block_the_loop() -> None:
    """Forty epochs with early deaths come to their end.

    One in some hundred hung when torch raised in a queue.
    """
    for _ in range(40):
        found = [item for batch in _loader(DiesEarly(), num_workers=2) for item in batch.tolist()]
        assert len(found) == 40
        assert 5 not in found


class OnceCopied:
    """Samples that can be read only where ``_prepare`` has been."""

    ready = False

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if not self.ready:
            raise FileNotFoundError("nothing was copied")
        return index


def _prepare(worker: int) -> None:
    """Take several times the limit of a sample."""
    time.sleep(1.5)
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.ready = True


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_workers_that_take_long_to_prepare_are_waited_for(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``worker_init_fn`` does would be missing without workers: it is no sample that hangs."""
    monkeypatch.setattr(recovery, "_LIMIT_SECONDS", 0.4)
    loader = _loader(OnceCopied(), num_workers=2, timeout=timeout, worker_init_fn=_prepare)
    assert sorted(item for batch in loader for item in batch.tolist()) == list(range(16))
    assert loader._recovery.settings.workers == 2
