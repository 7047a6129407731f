"""Hangs that are really planted into a small training.

Ways to stand still, and places where it happens.

    python -m benchmarks.hang_cases CASE FOLDER

trains a few steps and then hangs for ever, until killed. The line that hangs is marked with ``#
here``; it is what a watchdog must name. NFS that does not answer cannot be had without a server:
the opening of a named pipe that nobody opens at its other end, and a lock on a file that another
descriptor holds, block in the kernel too, but can be interrupted, which NFS cannot: no process here
is in state D.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import fcntl
import itertools
import math
import multiprocessing
import os
import queue
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import DataLoader

FOREVER = 1e6
STRIKES_AT = 8
"""Samples that are read, or steps that are made, before it hangs.

It is past the first step then.
"""
_BATCH_SIZE = 2
fork_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A way to stand still."""

    act: Callable[[Path], Any]
    kind: str
    frame: str = ""
    prepare: Callable[[], Any] | None = None
    places: tuple[str, ...] = ("dataset", "worker", "forward", "callback", "collate", "evaluation")


# --- locks and queues


def deadlock(_: Path) -> None:
    first, second = threading.Lock(), threading.Lock()

    def other() -> None:
        with second:
            time.sleep(0.1)
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        time.sleep(0.2)
        second.acquire()  # here


def lock_twice(_: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    with lock:  # here
        pass


def process_lock_twice(_: Path) -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    lock.acquire()  # here


def hold_fork_lock() -> None:
    """Hold a lock in another thread while workers are forked."""
    held = threading.Event()

    def hold() -> None:
        with fork_lock:
            held.set()
            time.sleep(FOREVER)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()


def lock_held_at_fork(_: Path) -> None:
    with fork_lock:  # here
        pass


def event_wait(_: Path) -> None:
    threading.Event().wait()  # here


def condition_wait(_: Path) -> None:
    condition = threading.Condition()
    with condition:
        condition.wait()  # here


def barrier_wait(_: Path) -> None:
    threading.Barrier(2).wait()  # here


def queue_get(_: Path) -> None:
    queue.Queue().get()  # here


def queue_put(_: Path) -> None:
    full: queue.Queue[int] = queue.Queue(1)
    full.put(1)
    full.put(2)  # here


def process_queue_get(_: Path) -> None:
    multiprocessing.get_context("fork").Queue().get()  # here


def receive_in_thread(one: socket.socket) -> None:
    one.recv(1)  # here


def thread_join(_: Path) -> None:
    one, _other = socket.socketpair()
    thread = threading.Thread(target=receive_in_thread, args=(one,), daemon=True)
    thread.start()
    thread.join()


def future_result(_: Path) -> None:
    one, _other = socket.socketpair()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(receive_in_thread, one).result()


# --- native code


def hold_gil(_: Path) -> None:
    ctypes.PyDLL(None).sleep(1_000_000)  # here


def regex(_: Path) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # here


def compiled_regex(_: Path) -> None:
    pattern = re.compile(r"^(\w+\s?)*$")
    pattern.match("word " * 12 + "!")  # here


def endless_sum(_: Path) -> None:
    sum(itertools.repeat(1))  # here


def openmp_in_parent() -> None:
    torch.set_num_threads(2)
    torch.ones(2_000_000).sin()


def openmp_after_fork(_: Path) -> None:
    torch.set_num_threads(2)
    torch.ones(2_000_000).sin()  # here


# --- loops


def counting_loop(_: Path) -> None:
    number = 0
    while number >= 0:  # here
        number += 1  # here


def one_line_loop(_: Path) -> None:
    while True: pass  # fmt: skip # noqa: E701 # here


def drawing_loop(_: Path) -> None:
    while True:  # here
        value = random.random() * 2  # here
        if value > 3:  # here
            break


def _nearer(value: float) -> float:
    return math.sqrt(value + 1)  # here


def helper_loop(_: Path) -> None:
    value = 2.0
    while value > 1:  # here
        value = _nearer(value)  # here


def retry_loop(_: Path) -> None:
    while True:  # here
        try:  # here
            int("x")  # here
        except ValueError:  # here
            continue  # here


def sleeping(_: Path) -> None:
    time.sleep(FOREVER)  # here


def native_sleeping(_: Path) -> None:
    ctypes.CDLL(None).sleep(1_000_000)  # here


def wait_for_file(place: Path) -> None:
    while not (place / "never").exists():  # here
        time.sleep(0.05)  # here


def wait_for_signal(_: Path) -> None:
    signal.pause()  # here


# --- files, pipes, connections, processes


def open_fifo(place: Path) -> None:
    path = place / f"fifo{os.getpid()}"
    os.mkfifo(path)
    os.open(path, os.O_RDONLY)  # here


def lock_file(place: Path) -> None:
    path = place / f"lock{os.getpid()}"
    with path.open("w") as one, path.open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)  # here


def full_pipe(_: Path) -> None:
    _reading, writing = os.pipe()
    while True:
        os.write(writing, b"x" * 65_536)  # here


def empty_pipe(_: Path) -> None:
    reading, _writing = os.pipe()
    os.read(reading, 1)  # here


def connection_receive(_: Path) -> None:
    one, _other = multiprocessing.Pipe()
    one.recv()  # here


def socket_receive(_: Path) -> None:
    one, _other = socket.socketpair()
    one.recv(1)  # here


def socket_accept(_: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()  # here


def socket_select(_: Path) -> None:
    one, _other = socket.socketpair()
    select.select([one], [], [])  # here


def silent_server(_: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/shard")  # here


def event_loop(_: Path) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    asyncio.run(wait())  # here


def subprocess_wait(_: Path) -> None:
    subprocess.Popen(["sleep", "100000"]).wait()  # here


def subprocess_output(_: Path) -> None:
    subprocess.run(["sleep", "100000"], capture_output=True)  # here


def unread_subprocess(_: Path) -> None:
    talker = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    talker.wait()  # here


def pool_apply(_: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(time.sleep, (FOREVER,))  # here


def stop_itself(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # here


class CannotBeSent:
    """A result that fails on its way to the training process."""

    def __reduce__(self) -> Any:
        raise TypeError("holds a handle")


def lose_result(_: Path) -> CannotBeSent:
    return CannotBeSent()


_ALONE = ("dataset", "forward", "callback", "evaluation")
MECHANISMS: dict[str, Mechanism] = {
    "deadlock": Mechanism(act=deadlock, kind="lock"),
    "lock twice": Mechanism(act=lock_twice, kind="lock"),
    "process lock twice": Mechanism(act=process_lock_twice, kind="lock"),
    "lock held at fork": Mechanism(
        act=lock_held_at_fork, kind="lock", prepare=hold_fork_lock, places=("worker", "collate")
    ),
    "event": Mechanism(act=event_wait, kind="lock"),
    "condition": Mechanism(act=condition_wait, kind="lock"),
    "barrier": Mechanism(act=barrier_wait, kind="lock"),
    "queue get": Mechanism(act=queue_get, kind="queue"),
    "queue put": Mechanism(act=queue_put, kind="queue"),
    "process queue": Mechanism(act=process_queue_get, kind="queue"),
    "thread join": Mechanism(act=thread_join, kind="socket", frame="receive_in_thread"),
    "future": Mechanism(act=future_result, kind="socket", frame="receive_in_thread"),
    "GIL held in C": Mechanism(act=hold_gil, kind="native code"),
    "regex": Mechanism(act=regex, kind="native code"),
    "compiled regex": Mechanism(act=compiled_regex, kind="native code"),
    "endless sum": Mechanism(act=endless_sum, kind="native code"),
    "OpenMP after fork": Mechanism(
        act=openmp_after_fork, kind="OpenMP", prepare=openmp_in_parent, places=("worker", "collate")
    ),
    "counting loop": Mechanism(act=counting_loop, kind="Python loop"),
    "one-line loop": Mechanism(act=one_line_loop, kind="Python loop"),
    "drawing loop": Mechanism(act=drawing_loop, kind="Python loop"),
    "helper loop": Mechanism(act=helper_loop, kind="Python loop", frame="helper_loop"),
    "retry loop": Mechanism(act=retry_loop, kind="Python loop"),
    "sleep": Mechanism(act=sleeping, kind="sleep"),
    "native sleep": Mechanism(act=native_sleeping, kind="sleep"),
    "wait for a file": Mechanism(act=wait_for_file, kind="sleep"),
    "wait for a signal": Mechanism(act=wait_for_signal, kind="sleep", places=_ALONE),
    "fifo": Mechanism(act=open_fifo, kind="I/O"),
    "file lock": Mechanism(act=lock_file, kind="I/O"),
    "full pipe": Mechanism(act=full_pipe, kind="pipe"),
    "empty pipe": Mechanism(act=empty_pipe, kind="pipe"),
    "connection": Mechanism(act=connection_receive, kind="pipe"),
    "socket": Mechanism(act=socket_receive, kind="socket"),
    "accept": Mechanism(act=socket_accept, kind="socket"),
    "select": Mechanism(act=socket_select, kind="socket"),
    "silent server": Mechanism(act=silent_server, kind="socket"),
    "event loop": Mechanism(act=event_loop, kind="socket"),
    "subprocess wait": Mechanism(act=subprocess_wait, kind="process"),
    "subprocess output": Mechanism(act=subprocess_output, kind="process"),
    "subprocess not read": Mechanism(act=unread_subprocess, kind="process"),
    "pool": Mechanism(act=pool_apply, kind="process", places=_ALONE),
    "stopped worker": Mechanism(act=stop_itself, kind="stopped", places=("worker", "collate")),
    "lost result": Mechanism(act=lose_result, kind="loader", frame="train", places=("worker",)),
}
PHASES = {
    "dataset": "data wait",
    "worker": "data wait",
    "collate": "data wait",
    "healed worker": "data wait",
    "forward": "forward/backward",
    "backward": "forward/backward",
    "callback": "forward/backward",
    "evaluation": "evaluation",
    "saving": "saving",
    "end of epoch": "end of epoch",
    "start": "starting",
    "ending": "ending",
}
_ONCE = (
    ("sleep", "saving"),
    ("file lock", "saving"),
    ("socket", "end of epoch"),
    ("counting loop", "end of epoch"),
    ("socket", "start"),
    ("deadlock", "start"),
    ("subprocess wait", "ending"),
    ("lock twice", "backward"),
    ("GIL held in C", "backward"),
    ("helper loop", "backward"),
    ("socket", "healed worker"),
    ("regex", "healed worker"),
)
_PLACES_FOR_EACH = 2


def names() -> list[str]:
    """Return all cases with one process that trains.

    Each mechanism in two places, in turn, and some more.
    """
    found = []
    for number, (name, mechanism) in enumerate(MECHANISMS.items()):
        places = mechanism.places
        chosen = [
            places[(number + k * max(1, len(places) // 2)) % len(places)]
            for k in range(_PLACES_FOR_EACH)
        ]
        found += [f"{name}/{place}" for place in dict.fromkeys(chosen)]
    return found + [f"{name}/{place}" for name, place in _ONCE]


# --- the training


class Samples(torch.utils.data.Dataset[Any]):
    """Samples, one of which may hang."""

    def __init__(self, strike: Callable[[], Any] | None) -> None:
        self.strike = strike

    def __len__(self) -> int:
        return 4 * STRIKES_AT

    def __getitem__(self, index: int) -> Any:
        if self.strike is not None and index == STRIKES_AT:
            lost = self.strike()
            if lost is not None:
                return lost
        return torch.full((4,), float(index))


class Model(nn.Module):
    """A linear layer that may hang."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.strike: Callable[[], Any] | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares."""
        if self.strike is not None:
            self.strike()
        result: torch.Tensor = self.layer(batch).square().mean()
        return result


class Saved:
    """A part of a checkpoint whose writing hangs."""

    def __init__(self, strike: Callable[[], Any]) -> None:
        self.strike = strike

    def __reduce__(self) -> Any:
        self.strike()
        return (int, ())


def collate(strike: Callable[[], Any], samples: list[Any]) -> Any:
    """Stack samples; the batch in which `STRIKES_AT` is hangs."""
    if any(float(sample[0]) == STRIKES_AT for sample in samples):
        strike()
    return torch.stack(samples)


def pass_on(samples: list[Any]) -> Any:
    """Stack samples if that is possible."""
    return (
        torch.stack(samples)
        if all(isinstance(sample, torch.Tensor) for sample in samples)
        else samples
    )


def loader_of(place: str, strike: Callable[[], Any]) -> Any:
    """Return the loader of a case.

    Torch's, or holdfast's, which would replace its worker after a minute.
    """
    if place == "healed worker":
        return DataLoader(Samples(strike), batch_size=_BATCH_SIZE, num_workers=2)
    in_dataset = place in ("dataset", "worker")
    return torch.utils.data.DataLoader(
        Samples(strike if in_dataset else None),
        batch_size=_BATCH_SIZE,
        num_workers=2 if place in ("worker", "collate") else 0,
        multiprocessing_context="fork" if place in ("worker", "collate") else None,
        collate_fn=partial(collate, strike) if place == "collate" else pass_on,
    )


def train(place: str, strike: Callable[[], Any], folder: Path) -> None:
    """Train, and hang at one place."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(loader_of(place, strike)):
        if place == "forward" and number == STRIKES_AT:
            model.strike = strike
        loss = model(batch)
        if place == "backward" and number == STRIKES_AT:
            loss.register_hook(lambda _: strike())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == STRIKES_AT:
            if place == "callback":
                strike()
            if place == "evaluation":
                evaluate(model, strike)
            if place == "saving":
                torch.save(
                    {"state": model.state_dict(), "more": Saved(strike)}, folder / "checkpoint.pt"
                )
    if place == "end of epoch":
        strike()


@torch.no_grad()
def evaluate(model: Model, strike: Callable[[], Any]) -> None:
    """Evaluate a few batches, and hang."""
    model.eval()
    for number, batch in enumerate(
        torch.utils.data.DataLoader(Samples(None), batch_size=_BATCH_SIZE)
    ):
        model(batch)
        if number == 3:
            strike()


# --- several ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRanks:
    """What one of several ranks does while the others wait for it."""

    act: Callable[[Path], Any]
    kind: str
    frame: str


def leave(_: Path) -> None:
    """End, but leave a child that keeps the connections open.

    Else gloo tells the others at once.
    """
    if os.fork() == 0:
        time.sleep(FOREVER)
    os._exit(0)


def skip_step(_: Path) -> bool:
    return True


def other_collective(_: Path) -> None:
    import torch.distributed as dist

    dist.broadcast(torch.zeros(1), src=0)  # here


RANKS: dict[str, OfRanks] = {
    "rank sleeps": OfRanks(act=sleeping, kind="sleep", frame="sleeping"),
    "rank loops": OfRanks(act=counting_loop, kind="Python loop", frame="counting_loop"),
    "rank waits for a socket": OfRanks(act=socket_receive, kind="socket", frame="socket_receive"),
    "rank is stopped": OfRanks(act=stop_itself, kind="stopped", frame="stop_itself"),
    "rank waits for a lock": OfRanks(act=lock_twice, kind="lock", frame="lock_twice"),
    "rank has left": OfRanks(act=leave, kind="collective", frame="train_ranks"),
    "rank is in another collective": OfRanks(
        act=other_collective, kind="collective", frame="other_collective"
    ),
    "rank skips a step": OfRanks(act=skip_step, kind="collective", frame="train_ranks"),
    "rank waits for a file lock": OfRanks(act=lock_file, kind="I/O", frame="lock_file"),
    "rank opens a pipe": OfRanks(act=open_fifo, kind="I/O", frame="open_fifo"),
    "rank waits for a queue": OfRanks(act=queue_get, kind="queue", frame="queue_get"),
    "rank waits for a program": OfRanks(
        act=subprocess_wait, kind="process", frame="subprocess_wait"
    ),
}
ODD = {2: 1, 3: 0, 4: 2}
"""Which of so many ranks it is."""


def of_ranks(case: str) -> tuple[str, int]:
    """Return the key in `RANKS` of a case such as "rank sleeps of 3", and the number of ranks.

    Without one 2.
    """
    name, _, size = case.rpartition(" of ")
    return (name, int(size)) if size.isdecimal() else (case, 2)  # not "socket/end of epoch"


def train_ranks(strike: Callable[[], Any]) -> None:
    """Train as one of several ranks under gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(10 * STRIKES_AT):
        if number == STRIKES_AT and dist.get_rank() == ODD[dist.get_world_size()] and strike():
            continue
        model(torch.ones(2, 4)).backward()
        optimizer.step()
    dist.barrier()


def marked_lines() -> dict[str, set[int]]:
    """Return the lines of each function that are marked with ``# here``."""
    found: dict[str, set[int]] = {}
    function = ""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1):
        if (
            match := re.match(r"\s*(?:async )?def (\w+)", line)
        ) is not None and not line.startswith(" " * 8):
            function = match[1] if not line.startswith(" ") else function
        if line.rstrip().endswith("# here"):
            found.setdefault(function, set()).add(number)
    return found


def struck(act: Callable[[Path], Any], folder: Path) -> Any:
    """Note when it hangs, by a clock that all processes share, and hang."""
    (folder / f"struck-{os.getpid()}").write_text(repr(time.monotonic()))
    return act(folder)


def main(case: str, folder: Path) -> None:
    """Run one case."""
    torch.set_num_threads(1)
    if (name := of_ranks(case)[0]) in RANKS:
        train_ranks(partial(struck, RANKS[name].act, folder))
        return
    name, _, place = case.partition("/")
    mechanism = MECHANISMS[name]
    strike = partial(struck, mechanism.act, folder)
    if mechanism.prepare is not None:
        mechanism.prepare()
    if place == "start":
        strike()
    if place == "ending":
        atexit.register(strike)
    train(place, strike, folder)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], Path(sys.argv[2]))
