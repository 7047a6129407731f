"""`Messages`: infrequent messages between ranks, sent through the store of the process group.

The ranks exchange values, and tell each other about the first error on any rank. The parts are:

    Messages        exchanges values, and waits for the values of other ranks
    ├── RankStore   one connection to the store; documents the keys
    ├── Progress    how far this rank has got, so that others can tell whether it will arrive
    ├── Inbox       tells another rank where this one is waiting, or that it has failed
    ├── Failures    the first failure on any rank
    ├── StoreThreads
    │   └── Listener    reads the inbox of this rank in a thread
    └── ExceptHook  reports an exception that ends this process
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import safetensors.torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.core.errors import RankError
from holdfast.guard.ranks.except_hook import ExceptHook
from holdfast.guard.ranks.failures import Failures, out_of_step
from holdfast.guard.ranks.inbox import Inbox
from holdfast.guard.ranks.listener import Listener
from holdfast.guard.ranks.progress import GUARDS, Progress, Whereabouts
from holdfast.guard.ranks.store import RankStore
from holdfast.guard.ranks.threads import StoreThreads

# After this many seconds of waiting for a rank, tell it where it is awaited, in case it will never
# reach that point.
_LATE_SECONDS = 1.0
# How long the first rank waits, when it closes its guard, for all ranks to read its last values, in
# seconds.
_DRAIN_SECONDS = 10.0


@final
class Messages:
    """The connection of a guard on this rank to the same guard on the other ranks.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._ranks = range(world_size)
        self.others = [other for other in self._ranks if other != rank]
        # The number of this guard in this process. It is the same on all ranks, since they all
        # create the same guards.
        self.guard = GUARDS.number_of_new_guard()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        self._store = RankStore(f"holdfast/{restarts}/{self.guard}")
        self._inbox = Inbox(self._store)
        self._progress = Progress()
        self._failures = Failures(rank, self._ranks, self._store, self._inbox)
        self._hook = ExceptHook(self._failures)
        self._threads = StoreThreads(self._store)
        # Whether this rank has left its loop early, which the other ranks may not know.
        self.loop_was_left = False
        # Whether this rank has closed its guard after all other ranks had read its messages.
        self.is_closed = False
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._be_silent)
        listener = Listener(
            rank=rank,
            other_ranks=len(self.others),
            threads=self._threads,
            progress=self._progress,
            failures=self._failures,
        )
        self._threads.start(listener.run, "holdfast-ranks")

    @property
    def timeout_seconds(self) -> float:
        """Return the timeout of the process group, the longest time to wait for another rank."""
        return self._store.timeout_seconds

    @property
    def steps(self) -> int:
        """Return the number of steps and epoch ends that this guard has started."""
        return self._progress.steps

    # --- opening and closing

    def open(self) -> None:
        """From now on, inform the other ranks about any error that ends this process."""
        self.is_closed = False
        self._hook.install()

    def close(self, *, in_order: bool) -> None:
        """Stop informing the other ranks about errors.

        Args:
            in_order: Whether to wait until all ranks have read this rank's messages, because the
                store disappears when the first rank exits. False if the loop was left with
                ``break``, or with an error that has not reached `sys.excepthook` yet.
        """
        if self.is_closed:
            return
        self.loop_was_left = not in_order
        if in_order or self.has_failed:
            self._hook.uninstall()
            self.is_closed = True
        if self.has_failed:
            return
        self._tell_whereabouts("has left its loop or closed its guard")
        if in_order:
            with contextlib.suppress(RuntimeError):
                self._wait_until_read()

    def _wait_until_read(self) -> None:
        """Send a last value and, on the first rank, wait for the last values of all ranks.

        A rank that has sent its last value has read all other values.
        """
        end = _Exchange(number=self._progress.number_of_new_exchange())
        self._store.put(end.key(self.rank), _packed(("the end", None)))
        if self.rank == 0:
            self._poll([end.key(rank) for rank in self._ranks], _DRAIN_SECONDS)

    def _end(self) -> None:
        """Tell the other ranks that this process is exiting, and stop its threads."""
        if not self.has_failed:
            self._tell_whereabouts("has ended", is_ending=True)
        self._threads.end()

    def _be_silent(self) -> None:
        """Disable messages from a forked process."""
        self._failures.be_silent()
        self._threads.forget()

    # --- threads and their requests

    def start_thread(self, run: Callable[[RankStore], None], name: str) -> None:
        """Start a thread that calls `run` with its own connection to the store."""
        self._threads.start(run, name)

    def start_thread_without_store(self, run: Callable[[], None], name: str) -> None:
        """Start a thread that calls `run` and does not use the store."""
        self._threads.start_without_store(run, name)

    def request(self, key: str, text: str) -> None:
        """Send a text to the thread on each rank that waits for it in `wait_for_request`.

        Args:
            key: A key that no other request uses.
            text: The text to send.
        """
        for rank in self._ranks:
            self._store.set_text(f"{key}/{rank}", text)

    def request_once(self, queue: str, text: str) -> None:
        """Append a text to a queue of requests, unless a rank has already sent the same text.

        The threads receive the requests in `wait_for_request`, under the keys ``{queue}/0``,
        ``{queue}/1`` and so on.

        Args:
            queue: The name of the queue.
            text: The text to send.
        """
        is_first = self._store.add(f"{queue}/senders of {text}", 1) == 1
        if is_first:
            number = self._store.add(f"{queue}/length", 1) - 1
            self.request(f"{queue}/{number}", text)

    def wait_for_request(self, store: RankStore, key: str) -> str | None:
        """Wait for a text sent by `request`, and return it. Return None if this process is exiting.

        Call this from a thread other than the main thread.

        Args:
            store: The store connection of the calling thread.
            key: The key of the request.
        """
        return self._threads.wait_for_text(store, f"{key}/{self.rank}")

    def read(self, key: str) -> str | None:
        """Return the text that is stored under a key, or None if the key is not set.

        Raises:
            RankError: The error with which another rank has failed.
        """
        if self._failures.known is not None:
            raise self._failures.known
        return self._store.text(key)

    # --- exchanges

    def begin_step(self) -> None:
        """Count a step or the end of an epoch, at which the ranks will wait for each other."""
        self._progress.begin_step()

    def exchange(
        self, topic: str, value: Any, *, thread: str = "", action: str | None = None
    ) -> list[Any]:
        """Send a value to all ranks, and return the values of all ranks in order of rank.

        All ranks must call this at the same point in the program.

        Args:
            topic: A description of the purpose, which must be the same on all ranks.
            value: The value of this rank.
            thread: The name of the calling thread. Empty for the main thread.
            action: What this rank is doing, as a verb phrase for the error about a rank that does
                not arrive. None means that it is waiting.

        Raises:
            RankError: H114 if another rank has failed or does not arrive. H116 if another rank is
                at a different point in the program.
        """
        exchange = self._begin_exchange(topic, thread=thread, action=action)
        if not thread:
            # This exchange brings all ranks to the same point again.
            self.loop_was_left = False
        self._store.put(exchange.key(self.rank), _packed((topic, value)))
        values = []
        for rank in self._ranks:
            other_topic, other_value = _unpacked(self._receive(exchange, rank))
            if other_topic != topic:
                raise out_of_step(
                    f"rank {rank} is at {other_topic!r}, and rank {self.rank} at {topic!r}"
                )
            values.append(other_value)
        if exchange.number >= 2:
            # All ranks have reached this exchange, so they have read the one before the last.
            self._store.delete(exchange.key(self.rank, before=2))
        return values

    def to_first(self, topic: str, value: Any) -> list[Any] | None:
        """Send a value, which may be large, to the first rank.

        All ranks must call this at the same point in the program. Only the first rank waits.

        Args:
            topic: A description of the purpose, which must be the same on all ranks.
            value: The value of this rank.

        Returns:
            On the first rank, the values of all ranks in order of rank. None on the other ranks.
        """
        exchange = self._begin_exchange(topic)
        if self.rank != 0:
            self._store.put(exchange.key(self.rank), _packed((topic, value)))
            return None
        values = [value]
        for rank in self.others:
            _, value_of_rank = _unpacked(self._receive(exchange, rank))
            values.append(value_of_rank)
            self._store.delete(exchange.key(rank))
        return values

    def _begin_exchange(
        self, topic: str, *, thread: str = "", action: str | None = None
    ) -> _Exchange:
        """Count a new exchange, and return its description. The arguments are as in `exchange`."""
        self.check_here()
        # The number changes first, because the listener reads it last.
        number = self._progress.number_of_new_exchange(thread)
        calls = None if thread else GUARDS.count_call()
        action = action or f"waits for the others in {topic}"
        return _Exchange(number=number, calls=calls, thread=thread, action=action)

    def _receive(self, exchange: _Exchange, rank: int) -> bytes:
        """Wait for the value that a rank sends in an exchange, and return it.

        After a second, this tells the rank where it is awaited, so that it can report an error if
        it will never reach this point. After the process group's timeout, the rank counts as lost.
        However, a thread that writes a checkpoint continues to wait as long as the rank answers
        that it is alive, since its disk may be slow.

        Raises:
            RankError: H114 if the rank does not arrive, or another rank has failed.
        """
        key = exchange.key(rank)
        try:
            if not self._poll([key], _LATE_SECONDS) and not exchange.thread:
                self._tell_whereabouts(exchange.action, [rank], exchange)
            while not self._poll([key], self.timeout_seconds):
                if self._failures.known is not None:
                    raise self._failures.known
                if not (exchange.thread and self._inbox.answers(rank)):
                    raise self._lose_late(rank, exchange.action)
            return self._store.get(key)
        except RankError:
            raise
        except RuntimeError as error:
            # The rank that hosts the store may have reported an error before it exited.
            raise self._failures.known_or(
                "the store of the ranks is gone, so the rank that hosts it has ended"
            ) from error

    def _poll(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all keys are set or another rank has failed. Return whether all keys are set.

        Args:
            keys: The keys to wait for.
            seconds: The longest time to wait.
        """
        return self._store.poll(keys, seconds, lambda: self._failures.known is not None)

    def _lose_late(self, rank: int, action: str) -> RankError:
        """Report that a rank has not arrived in time, and return the error to raise."""
        seconds = f"{self.timeout_seconds:g} s, the timeout of the process group"
        how = f"has not arrived within {seconds}, while rank {self.rank} {action}"
        return self._failures.lose(rank, how)

    def _tell_whereabouts(
        self,
        action: str,
        receivers: Sequence[int] | None = None,
        exchange: _Exchange | None = None,
        *,
        is_ending: bool = False,
    ) -> None:
        """Tell other ranks where this rank is, so that they notice if they will never reach it.

        Args:
            action: What this rank is doing, as a verb phrase that follows its name.
            receivers: The ranks to tell. With None, the first rank tells all other ranks, and the
                other ranks tell the first one.
            exchange: The exchange in which this rank is waiting. None if it is not waiting; it may
                then still call other guards.
            is_ending: Whether the process of this rank is exiting.
        """
        whereabouts = Whereabouts(
            rank=self.rank,
            exchange=self._progress.next_exchange if exchange is None else exchange.number,
            steps=self._progress.steps,
            calls=None if exchange is None else exchange.calls,
            action=action,
            is_ending=is_ending,
            is_waiting=exchange is not None,
        )
        if receivers is None:
            receivers = self.others if self.rank == 0 else [0]
        with contextlib.suppress(RuntimeError):
            for rank in receivers:
                self._inbox.send_whereabouts(rank, whereabouts)

    # --- failures

    @property
    def has_failed(self) -> bool:
        """Return whether this rank has failed, or this process is a fork of a rank."""
        return self._failures.has_failed

    def check_here(self) -> None:
        """Raise H114 or H116 if this rank or another one has failed."""
        self._failures.check()

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks why this one exits. Only the first error on any rank is kept."""
        self._failures.publish(error)

    def cause_of(self, error: BaseException) -> RankError | None:
        """Return the error of another rank that caused an error on this rank, or None."""
        return self._failures.cause_of(error)

    def lose(self, rank: int, how: str) -> None:
        """Report to all ranks that a rank is lost; see `Failures.lose`."""
        self._failures.lose(rank, how)


class _Exchange(NamedTuple):
    """An exchange in which all ranks take part.

    Attributes:
        number: The number of the exchange, counted separately for each thread.
        calls: How many calls to all guards came earlier. None outside of the main thread.
        thread: The name of the thread. Empty for the main thread.
        action: What this rank is doing, as a verb phrase that follows its name.
    """

    number: int
    calls: int | None = None
    thread: str = ""
    action: str = ""

    def key(self, rank: int, *, before: int = 0) -> str:
        """Return the key under which a rank sends its value.

        Args:
            rank: The rank that sends the value.
            before: How many exchanges to go back from this one. 0 for this exchange.
        """
        key = f"{self.number - before}/{rank}"
        return f"{self.thread}/{key}" if self.thread else key


def _packed(value: Any) -> bytes:
    encoder = Encoder("ranks")
    tree = json.dumps(encoder.encode(value)).encode()
    # safetensors refuses tensors that share memory, so copy them.
    tensors = {
        name: tensor.to("cpu", copy=True).contiguous() for name, tensor in encoder.tensors.items()
    }
    # Write the length of the JSON tree as 8 bytes, then the tree and its tensors.
    return struct.pack("<Q", len(tree)) + tree + safetensors.torch.save(tensors)


def _unpacked(data: bytes) -> Any:
    # The first 8 bytes are the length of the JSON tree; see `_packed`.
    (size,) = struct.unpack("<Q", data[:8])
    return decode(json.loads(data[8 : 8 + size]), safetensors.torch.load(data[8 + size :]))
