"""`StoreThreads`: threads that wait for other ranks, and stop cleanly when the process exits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import final

from torch.distributed import DistStoreError

from holdfast.guard.ranks.store import RankStore

_DAY = timedelta(days=1)
# How long the process waits for each thread at exit, in seconds.
_JOIN_SECONDS = 1.0


@final
class StoreThreads:
    """The threads of one guard.

    Args:
        store: A connection to the store. Each thread that uses the store gets one of its own.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._threads: list[threading.Thread] = []
        # The keys that threads are waiting for.
        self._awaited: set[str] = set()
        # Whether this process is exiting.
        self.is_ending = False

    def start(self, run: Callable[[RankStore], None], name: str) -> None:
        """Start a thread that calls `run` with its own connection to the store."""
        self.start_without_store(partial(run, self._store.connect_again()), name)

    def start_without_store(self, run: Callable[[], None], name: str) -> None:
        """Start a thread that calls `run` and does not use the store."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait_for_text(self, store: RankStore, key: str) -> str | None:
        """Wait until a key is set, and return its text, or None if this process is exiting.

        Args:
            store: The store connection of the calling thread.
            key: The key to wait for.
        """
        self._awaited.add(key)
        while not self.is_ending:
            # In a long run, the wait may time out, so repeat it.
            with contextlib.suppress(DistStoreError):
                store.wait(key, _DAY)
                break
        self._awaited.discard(key)
        return None if self.is_ending else store.text(key)

    def end(self) -> None:
        """Wake the waiting threads at exit.

        If the store were destroyed while threads are waiting for it, torch would abort the process.
        """
        self.is_ending = True
        with contextlib.suppress(RuntimeError):
            for key in [*self._awaited]:
                self._store.set_text(key, "")
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def forget(self) -> None:
        """Discard the list of threads in a forked process, in which the threads do not run."""
        self._awaited = set()
        self._threads = []
