"""`RankStore`: the key-value store of the process group, through which ranks send messages.

All keys of a guard begin with ``holdfast/<restart>/<guard>/``. ``<restart>`` is the number of times
that torchrun has restarted the ranks. torchrun keeps its store, so the keys of earlier attempts
still exist. The prefix is followed by:

=================================  =================================================================
``<exchange>/<rank>``              The value that a rank sends in an exchange of the main threads.
``<thread>/<exchange>/<rank>``     The same in an exchange of other threads, such as ``saves``.
``failure``                        The first failure on any rank; see `Failures`.
``failure/read/<rank>``            Set once this rank has read the failure.
``inbox/<rank>/length``            How many messages this rank was sent; see `Inbox`.
``inbox/<rank>/<position>``        One of these messages.
``alive/<rank>``                   How often this rank has answered that it is alive.
``tape/<failures>/<rank>``         A request for the tape of this rank; see `Tape`.
``tape/<failures>/<rank>/...``     The answer to this request, entry by entry.
=================================  =================================================================

A value that is too large for the store is split into pieces. The keys of the further pieces are the
key of the first piece followed by ``/<piece>``.

Every method raises `RuntimeError` once the store is gone, that is, when the process that hosts it
has exited.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

# The shortest and longest time between two checks for a key, in seconds. The main thread does not
# use the store's own `wait`, because `wait` logs a warning when it times out.
_SHORTEST = 0.001
LONGEST_PAUSE_SECONDS = 0.05
# The store closes the connection if a value is larger than 8 MiB, so large values are sent in
# pieces of this size.
_PIECE_BYTES = 4 * 2**20


@final
class RankStore:
    """One connection to the store, for the keys of one guard.

    All methods except `wait` return immediately or poll, so threads may share a connection. `wait`
    blocks its connection, so a thread that calls it needs a connection of its own.

    Args:
        prefix: The prefix of all keys of the guard.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        store: Any = distributed_c10d._get_default_store()
        # The timeout of the process group, the longest time to wait for another rank.
        self.timeout_seconds: float = store.timeout.total_seconds()
        # torch's type stub does not allow values of type bytes.
        self._store: Any = PrefixStore(prefix, store.clone())

    def connect_again(self) -> RankStore:
        """Return a new connection with the same prefix, for a thread that calls `wait`."""
        return RankStore(self._prefix)

    # --- texts

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._store.check(list(keys)))

    def text(self, key: str) -> str | None:
        """Return the text that is stored under a key, or None if the key is not set."""
        return bytes(self._store.get(key)).decode() if self.has(key) else None

    def set_text(self, key: str, text: str) -> None:
        """Set a key to a short text."""
        self._store.set(key, text)

    def set_first_text(self, key: str, text: str) -> None:
        """Set a key to a text, unless a rank has already set it."""
        self._store.compare_set(key, "", text)

    def add(self, key: str, number: int) -> int:
        """Add a number to a counter, which starts at 0, and return its new value."""
        return int(self._store.add(key, number))

    # --- values of any size

    def put(self, key: str, data: bytes) -> None:
        """Set a key to a value of any size.

        A large value is stored in pieces under additional keys. The first piece, which contains the
        number of pieces, is set last. Once its key exists, all pieces exist.
        """
        # Round up. An empty value has one empty piece.
        count = max(1, -(-len(data) // _PIECE_BYTES))
        for piece in range(count - 1, -1, -1):
            begin = piece * _PIECE_BYTES
            header = struct.pack("<Q", count) if piece == 0 else b""
            self._store.set(_key_of_piece(key, piece), header + data[begin : begin + _PIECE_BYTES])

    def get(self, key: str) -> bytes:
        """Return a value that was set by `put`."""
        # The first 8 bytes of the first piece are the number of pieces.
        first = bytes(self._store.get(key))
        (count,) = struct.unpack("<Q", first[:8])
        others = [bytes(self._store.get(_key_of_piece(key, piece))) for piece in range(1, count)]
        return b"".join([first[8:], *others])

    def delete(self, key: str) -> None:
        """Delete a value that was set by `put`, if it exists."""
        if not self.has(key):
            return
        (count,) = struct.unpack("<Q", bytes(self._store.get(key))[:8])
        for piece in range(count):
            self._store.delete_key(_key_of_piece(key, piece))

    # --- waiting

    def poll(
        self, keys: Sequence[str], seconds: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all keys are set, and return whether they are.

        Args:
            keys: The keys to wait for.
            seconds: The longest time to wait.
            is_cancelled: Function that returns whether to stop waiting.
        """
        until = time.monotonic() + seconds
        pause = _SHORTEST
        while not self.has(*keys):
            if is_cancelled() or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def wait(self, key: str, timeout: timedelta) -> None:
        """Wait until a key is set. Call this from a thread with its own connection.

        Raises:
            DistStoreError: If the key is not set in time.
        """
        self._store.wait([key], timeout)


def _key_of_piece(key: str, piece: int) -> str:
    return f"{key}/{piece}" if piece else key
