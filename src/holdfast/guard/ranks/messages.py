"""Infrequent messages between ranks, sent through the store of the process group.

The ranks exchange values, and tell each other about the first error on any of them. Each guard uses
its own prefix for keys.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import safetensors.torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError, distributed_c10d

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.saver import Writers, on_all
from holdfast.core.errors import HoldfastError, RankError
from holdfast.core.standard_streams import write_to_stderr
from holdfast.guard.ranks.waiting import collective_of_main_thread

# The shortest and longest time between two checks for a key, in seconds. The store's own `wait` is
# not used, because it logs a warning when it times out.
_SHORTEST = 0.001
_LONGEST = 0.05
# How long a process may still wait in a collective after another rank has failed.
_GRACE_SECONDS = 3.0
# A rank that has waited this long tells the others where it is waiting, in case they never get
# there.
_LATE_SECONDS = 1.0
# How long another rank may take to answer that it is alive. Native code may keep its threads from
# running for a while.
_ANSWER_SECONDS = 30.0
# The text that asks a rank whether it is alive.
_ASK = "ask"
# How long a collective may take to complete once all ranks have started it.
_COLLECTIVE_SECONDS = 5.0
# The key under which the first error is published.
_TROUBLE = "trouble"
# Words in error messages that may be consequences of the end of another rank.
_OF_A_PEER = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
_LEFT = "this rank has left the group after an error, or this is a fork of its process"
_DAY = timedelta(days=1)
# The store closes the connection for values over 8 MiB, so larger ones are sent in pieces of this
# size.
_PIECE_BYTES = 4 * 2**20
# How long the first rank waits at the end until all ranks have read its last values.
_DRAIN_SECONDS = 10.0
# How long a failing rank waits until all ranks have read its error.
_HEARD_SECONDS = 1.0
# How long a rank waits for the text of another rank's error.
_TEXT_SECONDS = 2.0
_T = TypeVar("_T")
# Numbers the guards of this process. A guard has the same number on all ranks, since all of them
# create the same guards.
_guards = itertools.count()


class Messages:
    """The connection of one guard on this rank to those on the other ranks.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    # The number of steps and exchanges that all guards of this process have started. It is the same
    # on all ranks.
    calls = 0
    # The error with which another rank has failed, in any guard of this process.
    found: RankError | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._ranks = range(world_size)
        self.others = [other for other in self._ranks if other != rank]
        self.guard = next(_guards)
        # If all ranks have caught an error, their numbers of calls may differ. A new guard makes
        # them equal again.
        Messages.calls = self.guard << 40
        # torchrun keeps its store when it restarts all ranks, so the keys of earlier attempts are
        # still there.
        self._name = f"holdfast/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{self.guard}"
        self._store = self._connection()
        # The timeout of the process group. No wait for another rank takes longer.
        store: Any = distributed_c10d._get_default_store()
        self.timeout_seconds: float = store.timeout.total_seconds()
        # The number of the next exchange, by the name of the thread; "" is the main thread.
        self._numbers: defaultdict[str, int] = defaultdict(int)
        # The number of steps and epoch ends that were started. In these, the ranks wait for each
        # other in collectives, not in exchanges.
        self.steps = 0
        # Whether this rank has left its loop early, which the others may not know.
        self.was_left = False
        # Whether this rank has closed its guard after all others had read its messages.
        self.has_parted = False
        # The error with which another rank has failed.
        self._heard: RankError | None = None
        # Whether this rank has failed.
        self.has_left = False
        # When this rank was first seen to wait in a collective of the script while other ranks wait
        # for it in the guard, as monotonic time; None if it is not.
        self._meets_since: float | None = None
        # The `sys.excepthook` that ours has replaced.
        self._excepthook: Any = None
        # The keys that threads of this process are waiting for.
        self._waited: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._is_ending = False
        atexit.register(self._end_threads)
        os.register_at_fork(after_in_child=self._be_silent)
        self.start(self._watch, "holdfast-ranks")

    def start(self, run: Callable[[Any], None], name: str) -> None:
        """Start a thread with its own connection to the store.

        Threads cannot share a connection, because a wait blocks it.
        """
        self.start_alone(partial(run, self._connection()), name)

    def start_alone(self, run: Callable[[], None], name: str) -> None:
        """Start a thread that does not use the store."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _connection(self) -> Any:
        store: Any = distributed_c10d._get_default_store()
        return PrefixStore(self._name, store.clone())

    def said(self, key: str) -> str | None:
        """Return the value of a key, or None if it is not set.

        Raises:
            RankError: The error with which another rank has failed.
        """
        if self._heard is not None:
            raise self._heard
        return self._store.get(key).decode() if self._store.check([key]) else None

    def call(self, key: str, text: str) -> None:
        """Send a text to each rank, to the thread that waits for this key in `called`."""
        for rank in self._ranks:
            self._store.set(f"{key}/{rank}", text)

    def called(self, store: Any, key: str) -> str | None:
        """Wait in a thread for a text sent by `call`; return None if this process is exiting."""
        own = f"{key}/{self.rank}"
        self._waited.add(own)
        while not self._is_ending:
            # If the run is longer than the wait, wait again.
            with contextlib.suppress(DistStoreError):
                store.wait([own], _DAY)
                break
        self._waited.discard(own)
        return None if self._is_ending else bytes(store.get(own)).decode()

    def _end_threads(self) -> None:
        """Wake the threads at exit.

        If the store were destroyed while they wait for it, torch would abort the process.
        """
        self._is_ending = True
        if not self.has_left:
            self._say_place("has ended", ends=True)
        with contextlib.suppress(RuntimeError):
            for key in [*self._waited]:
                self._store.set(key, "")
        for thread in self._threads:
            thread.join(_HEARD_SECONDS)

    def _be_silent(self) -> None:
        """Send no messages from a forked process, since its end does not concern the rank."""
        self.has_left = True
        self._waited = set()
        self._threads = []

    def open(self) -> None:
        """Start reporting an error that ends this process to the other ranks."""
        self.has_parted = False
        if self._excepthook is None:
            self._excepthook = sys.excepthook
            sys.excepthook = self._uncaught

    def close(self, *, in_order: bool) -> None:
        """Stop reporting errors to the other ranks.

        Args:
            in_order: Whether to wait until all ranks have read the messages of this one, because
                the store ends with the first rank. False if the loop is left by ``break``, or by an
                error that `sys.excepthook` has yet to receive.
        """
        if self.has_parted:
            return
        self.was_left = not in_order
        if in_order or self.has_left:
            if self._excepthook is not None and sys.excepthook == self._uncaught:
                sys.excepthook = self._excepthook
            self._excepthook = None
            self.has_parted = True
        if not self.has_left:
            self._say_place("has left its loop or closed its guard")
            with contextlib.suppress(RuntimeError):
                if in_order:
                    number = self._next("")
                    self._put(f"{number}/{self.rank}", _packed(("the end", None)))
                    if self.rank == 0:
                        self._is_there([f"{number}/{rank}" for rank in self._ranks], _DRAIN_SECONDS)

    def begin_step(self) -> None:
        """Count a step or the end of an epoch, in which the ranks will wait for each other."""
        self.steps += 1
        self._count()

    def _count(self) -> int | None:
        """Count a step or an exchange, and return how many there were before it.

        Outside the main thread, return None, since exchanges there have no order relative to
        others.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        Messages.calls += 1
        return Messages.calls - 1

    def _next(self, among: str) -> int:
        self._numbers[among] += 1
        return self._numbers[among] - 1

    def exchange(
        self, topic: str, value: Any, among: str = "", *, late: str | None = None
    ) -> list[Any]:
        """Send a value to all ranks, and return the values of all ranks, in order of rank.

        All ranks must call this at the same point in the program.

        Args:
            topic: The purpose in words. It must be the same on all ranks.
            value: The value of this rank.
            among: The name of the thread that calls this; empty for the main thread.
            late: What this rank is doing, for the error about a rank that does not arrive; None
                says that it is waiting.

        Raises:
            RankError: H114 if another rank has failed or does not arrive; H116 if another rank is
                at a different point in the program.
        """
        self.check_here()
        number = self._next(among)
        calls = None if among else self._count()
        if not among:
            # All ranks are together again.
            self.was_left = False
        self._put(f"{among}{number}/{self.rank}", _packed((topic, value)))
        values = []
        for rank in self._ranks:
            receivers = [] if among else [rank]
            doing = late or f"waits for the others in {topic}"
            say_late = partial(self._say_place, doing, receivers, number, calls)
            key = f"{among}{number}/{rank}"
            other_topic, other_value = _unpacked(
                self._wait_for(rank, key, doing, say_late, in_thread=bool(among))
            )
            if other_topic != topic:
                raise out_of_step(
                    f"rank {rank} is at {other_topic!r}, and rank {self.rank} at {topic!r}"
                )
            values.append(other_value)
        if number >= 2:
            # All ranks have arrived here, so they have read the exchange before the last one.
            self._delete(f"{among}{number - 2}/{self.rank}")
        return values

    def to_first(self, topic: str, value: Any) -> list[Any] | None:
        """Send the value of each rank, which may be large, to the first rank.

        All ranks must call this at the same point in the program. Only the first one waits.

        Returns:
            On the first rank the values of all ranks, in order of rank; None on the others.
        """
        self.check_here()
        number = self._next("")
        calls = self._count()
        if self.rank != 0:
            self._put(f"{number}/{self.rank}", _packed((topic, value)))
            return None
        values = [value]
        for rank in self.others:
            key = f"{number}/{rank}"
            doing = f"waits for the others in {topic}"
            late = partial(self._say_place, doing, [rank], number, calls)
            _, value_of_rank = _unpacked(self._wait_for(rank, key, doing, late, in_thread=False))
            values.append(value_of_rank)
            self._delete(key)
        return values

    def _put(self, key: str, data: bytes) -> None:
        """Set a key to a value of any size.

        A large value is stored in pieces under additional keys. The first piece is set last, with
        the number of pieces, so that once the key exists, all pieces do.
        """
        count = max(1, -(-len(data) // _PIECE_BYTES))
        for piece in range(count - 1, -1, -1):
            begin = piece * _PIECE_BYTES
            prefix = struct.pack("<Q", count) if piece == 0 else b""
            self._store.set(_piece_of(key, piece), prefix + data[begin : begin + _PIECE_BYTES])

    def _get(self, key: str) -> bytes:
        """Return a value that was set by `_put`."""
        first = bytes(self._store.get(key))
        (count,) = struct.unpack("<Q", first[:8])
        others = [bytes(self._store.get(_piece_of(key, piece))) for piece in range(1, count)]
        return b"".join([first[8:], *others])

    def _delete(self, key: str) -> None:
        if not self._store.check([key]):
            return
        (count,) = struct.unpack("<Q", bytes(self._store.get(key))[:8])
        for piece in range(count):
            self._store.delete_key(_piece_of(key, piece))

    def _wait_for(
        self, rank: int, key: str, doing: str, late: Callable[[], None], *, in_thread: bool
    ) -> bytes:
        """Wait until a rank has set a key, and return the value.

        A thread that writes a checkpoint may have to wait for the slow disks of other ranks, so it
        waits as long as they answer that they are alive.

        Args:
            rank: The rank.
            key: The key.
            doing: What this rank is doing, in words.
            late: Called if the rank is late.
            in_thread: Whether this is not the main thread.

        Raises:
            RankError: H114, if the rank does not arrive before the timeout of the process group.
        """
        try:
            if not self._is_there([key], _LATE_SECONDS):
                late()
            while not self._is_there([key], self.timeout_seconds):
                if self._heard is not None:
                    raise self._heard
                if not (in_thread and self._answers(rank)):
                    seconds = f"{self.timeout_seconds:g} s, the timeout of the process group"
                    self.lose(
                        rank, f"has not arrived within {seconds}, while rank {self.rank} {doing}"
                    )
            return self._get(key)
        except RankError:
            raise
        except RuntimeError as error:
            gone = self._gone("the store of the ranks is gone, so the rank that hosts it has ended")
            # The rank that hosts the store may have reported its error before it ended.
            raise self._heard or Messages.found or gone from error

    def _answers(self, rank: int) -> bool:
        """Ask another rank whether it is alive, and return whether its listening thread answers."""
        before = self._store.add(f"answers/{rank}", 0)
        self._wake(rank, _ASK)
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            if self._store.add(f"answers/{rank}", 0) > before:
                return True
            time.sleep(_LONGEST)
        return False

    def lose(self, rank: int, how: str) -> None:
        """Report H114 about a lost rank to all ranks. From now on, waiting for a rank raises it."""
        error = self._gone(f"rank {rank} {how}")
        self._heard = Messages.found = self._heard or error
        with contextlib.suppress(RuntimeError):
            self._post(error)

    def _is_there(
        self, keys: list[str], seconds: float = math.inf, *, heeds_trouble: bool = True
    ) -> bool:
        """Wait for keys of the store.

        Args:
            keys: The keys.
            seconds: The longest time to wait.
            heeds_trouble: Whether to stop when another rank has failed.

        Returns:
            Whether all keys are set.
        """
        until = time.monotonic() + seconds
        pause = _SHORTEST
        while not self._store.check(keys):
            if (heeds_trouble and self._heard is not None) or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return True

    def check_here(self) -> None:
        """Raise H114 if this rank or another one has failed."""
        if self._heard is not None:
            raise self._heard
        if self.has_left:
            raise self._gone(_LEFT)

    # --- errors

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends. Only the first error on any rank counts."""
        self.has_left = True
        with contextlib.suppress(RuntimeError):
            self._post(error)
            # The store may end with this process, so wait until the others have read the error.
            self._is_there(
                [f"heard/{rank}" for rank in self._ranks], _HEARD_SECONDS, heeds_trouble=False
            )
        # This makes threads of this process stop waiting for other ranks.
        self._heard = self._heard or self._gone(_LEFT)

    def _read(self, store: Any) -> RankError | None:
        """Return the error that another rank has published; None if this rank has."""
        rank, text, out_of_step_by = json.loads(store.get(_TROUBLE))
        if rank == self.rank:
            return None
        if out_of_step_by is not None:
            # All ranks that are out of step share the error, not only the one that noticed it.
            return out_of_step(out_of_step_by)
        return RankError(
            f"rank {rank} has failed with {text}",
            limit=(
                "the others cannot continue without it; their weights are those of the last"
                " committed step"
            ),
            fix=f"fix the error of rank {rank}, and start all ranks again.",
            rule="H114",
        )

    def lost(self, error: BaseException) -> RankError | None:
        """Return the error of another rank that is the cause of an error, or None."""
        may_be_caused_by_a_peer = any(word in str(error) for word in _OF_A_PEER)
        if isinstance(error, HoldfastError) or not isinstance(error, RuntimeError):
            return None
        if not may_be_caused_by_a_peer:
            return None
        with contextlib.suppress(RuntimeError):
            if self._is_there([_TROUBLE], _TEXT_SECONDS):
                return self._heard or self._read(self._store)
        return (
            self._heard
            or Messages.found
            or self._gone("another rank has ended without reporting an error")
        )

    def _gone(self, what: str) -> RankError:
        return RankError(
            what,
            limit="the others cannot continue without it",
            fix=(
                "check the end of each rank's output to see whether it was killed or exited, and"
                " start all ranks again."
            ),
            rule="H114",
        )

    def _post(self, error: BaseException) -> None:
        out_of_step_by = None
        if isinstance(error, RankError) and error.rule == "H116":
            out_of_step_by = error.what
        trouble = [self.rank, f"{type(error).__name__}: {error}", out_of_step_by]
        self._store.compare_set(_TROUBLE, "", json.dumps(trouble))
        for rank in self._ranks:
            self._wake(rank, "")

    def _wake(self, rank: int, text: str) -> None:
        number = self._store.add(f"calls/{rank}", 1) - 1
        self._store.set(f"wake{number}/{rank}", text)

    def _say_place(
        self,
        what: str,
        receivers: Sequence[int] | None = None,
        number: int | None = None,
        calls: int | None = None,
        *,
        ends: bool = False,
    ) -> None:
        """Tell other ranks where this one is, and that it will not continue before they get there.

        Args:
            what: What this rank is doing there, in words.
            receivers: The ranks to tell. With None, the first rank tells all others, and the others
                tell the first rank.
            number: The number of the exchange in which it is waiting; None if it is not waiting.
            calls: The number of calls of all guards before this point. None if this rank may still
                call other guards.
            ends: Whether its process is ending.
        """
        place = _Place(
            rank=self.rank,
            number=self._numbers[""] if number is None else number,
            steps=self.steps,
            calls=calls,
            what=what,
            ends=ends,
            waits=number is not None,
        )
        if receivers is None:
            receivers = self.others if self.rank == 0 else [0]
        with contextlib.suppress(RuntimeError):
            for rank in receivers:
                self._wake(rank, json.dumps(place))

    def _watch(self, store: Any) -> None:
        """In a thread, exit this process if another rank has failed or will not arrive.

        The main thread has a few seconds to notice the error and end regularly.
        """
        try:
            error = self._listen(store)
            self._heard = error or self._heard
            Messages.found = error or Messages.found
            store.set(f"heard/{self.rank}", "")
        except RuntimeError:
            # The store is gone, so the run is over.
            return
        if error is None:
            return
        # If the main thread is in a collective of the script, torch may end the process with an
        # error about a connection as soon as the other ranks end. So print the cause first.
        is_printed = collective_of_main_thread() is not None
        if is_printed:
            _print(error)
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            if self.has_left:
                return
            time.sleep(0.05)
        if not is_printed:
            _print(error)
        os._exit(1)

    def _listen(self, store: Any) -> RankError | None:
        """Wait for an error: of another rank, or about a rank that waits where this one never gets.

        Returns:
            The error, or None if this process is ending.
        """
        places: list[tuple[float, _Place]] = []
        for count in itertools.count():
            while places and not self._is_ending and not store.check([f"wake{count}/{self.rank}"]):
                # Places are judged with a delay, because a rank that leaves its loop with an error
                # sends its place before the error.
                due = [place for heard, place in places if time.monotonic() > heard + _LATE_SECONDS]
                missed = [error for place in due if (error := self._missed(place)) is not None]
                error = missed[0] if missed else self._meets_elsewhere(due)
                if error is not None:
                    self._post(error)
                    return error
                places = [
                    (heard, place)
                    for heard, place in places
                    if place.ends or self._numbers[""] <= place.number
                ]
                time.sleep(_LONGEST)
            text = self.called(store, f"wake{count}")
            if text == _ASK:
                store.add(f"answers/{self.rank}", 1)
                continue
            if not text:
                return None if text is None else self._read(store)
            places.append((time.monotonic(), _Place(*json.loads(text))))
        return None

    def _missed(self, place: _Place) -> RankError | None:
        """Return H116 if another rank is at a place that this rank will not get to, or None.

        Args:
            place: Where the other rank waits or has ended.
        """
        # These are read before the number of the exchange, which changes last when this rank gets
        # to the place.
        has_begun_step = self.steps > place.steps
        is_elsewhere = place.calls is not None and Messages.calls > place.calls
        is_beyond = self._numbers[""] > place.number
        if is_beyond:
            if not place.ends:
                return None
            action = "waits for it"
        elif has_begun_step:
            action = "makes another step"
        elif is_elsewhere:
            action = "calls another guard"
        else:
            return None
        return out_of_step(f"rank {place.rank} {place.what}, and rank {self.rank} {action}")

    def _meets_elsewhere(self, places: Sequence[_Place]) -> RankError | None:
        """Return H116 if this rank waits for others in a collective, while they wait in the guard.

        If the collective synchronizes all ranks, one rank that waits in the guard proves this.
        Otherwise that rank may have completed the collective already, so all others must be waiting
        in the guard.

        Args:
            places: Where the other ranks are.
        """
        next_exchange = self._numbers[""]
        waiting = {
            place.rank: place for place in places if place.waits and next_exchange <= place.number
        }
        collective = collective_of_main_thread() if waiting else None
        all_others_wait = len(waiting) == len(self.others)
        if collective is None or not (collective.synchronizes or all_others_wait):
            self._meets_since = None
            return None
        # The collective may just be completing, so give it some time.
        if self._meets_since is None:
            self._meets_since = time.monotonic()
        if time.monotonic() < self._meets_since + _COLLECTIVE_SECONDS:
            return None
        place = waiting[min(waiting)]
        return out_of_step(
            f"rank {place.rank} {place.what}, and rank {self.rank} is in {collective.name}"
        )

    def _uncaught(self, kind: Any, error: BaseException, traceback: Any) -> None:
        """Report an uncaught exception to the other ranks; installed as `sys.excepthook`."""
        cause = None
        if not self.has_left:
            cause = self.lost(error)
            self.publish(cause or error)
        (self._excepthook or sys.__excepthook__)(kind, error, traceback)
        if cause is not None:
            _print(cause)


class _Place(NamedTuple):
    """Where a rank is in the program. It sends this to ranks that have not got there yet.

    Attributes:
        rank: The rank.
        number: The number of its next exchange. A rank with a larger number has passed this place.
        steps: How many steps it has started.
        calls: How many calls of all guards it has made; None if it may still call other guards.
        what: What it is doing there, in words.
        ends: Whether its process is ending.
        waits: Whether it waits for the ranks to which it sends this.
    """

    rank: int
    number: int
    steps: int
    calls: int | None
    what: str
    ends: bool
    waits: bool


class SharedWriters(Writers):
    """The writers of a checkpoint if each rank writes a share of it."""

    are_several = True

    def __init__(self, rank: int, messages: Messages) -> None:
        self.rank = rank
        self._messages = messages

    def all(self, work: Callable[[], _T]) -> list[_T]:
        """Return the results of all ranks, which must be plain values.

        An error on one rank is raised on all.
        """

        def exchange(result: Any) -> list[Any]:
            return self._messages.exchange("share of a checkpoint", result, among="saves/")

        return on_all(work, exchange)

    def first(self, work: Callable[[], _T]) -> _T:
        """Do work on the first rank, and return its result or raise its error on all ranks."""
        results: list[Any] = self.all(work if self.rank == 0 else lambda: None)
        first_result: _T = results[0]
        return first_result


def _print(error: RankError) -> None:
    write_to_stderr(f"holdfast: {error}\n")


def out_of_step(what: str) -> RankError:
    """Return H116 for ranks that do not make the same calls with the same batches."""
    return RankError(
        what,
        limit="all ranks must call the guard in the same order, with the same batches",
        fix=(
            "call guard.step, validated and close on all ranks, and leave the loop on all ranks,"
            " for example with request_stop. If one rank has to skip a batch, skip it on all ranks."
        ),
        rule="H116",
    )


def _piece_of(key: str, piece: int) -> str:
    return f"{key}/{piece}" if piece else key


def _packed(value: Any) -> bytes:
    encoder = Encoder("ranks")
    tree = json.dumps(encoder.encode(value)).encode()
    # safetensors refuses tensors that share memory, so copy them.
    tensors = {
        name: tensor.to("cpu", copy=True).contiguous() for name, tensor in encoder.tensors.items()
    }
    return struct.pack("<Q", len(tree)) + tree + safetensors.torch.save(tensors)


def _unpacked(data: bytes) -> Any:
    (size,) = struct.unpack("<Q", data[:8])
    return decode(json.loads(data[8 : 8 + size]), safetensors.torch.load(data[8 + size :]))
