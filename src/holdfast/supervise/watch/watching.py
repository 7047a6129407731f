"""The threads of the supervisor that look at a run while it goes on: the watchdog, and the trend of memory.

A fault in one of them is recorded and ends that thread, never the supervisor.

Does not: act. What hangs is told to the attempt, which ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.core.control_groups import memory_available_bytes
from holdfast.supervise.watch.limits import HangLimits

if TYPE_CHECKING:
    from holdfast.explain.hangs.blame import Hang

_TREND_SECONDS = 10.0  # a slope over minutes is wanted; reading the samples of a run costs some milliseconds
_JOIN_SECONDS = 5.0  # a dump of stacks may be under way; the thread is a daemon


class Watching:
    """Look at one attempt while the context lasts.

    Args:
        run: The run directory.
        attempt: Its number.
        limits: Of hangs.
        tell: Records an event; from any thread.
        on_hang: Takes a hang; from any thread.
        say: Prints a line; from any thread.
    """

    def __init__(
        self,
        run: Path,
        attempt: int,
        *,
        limits: HangLimits,
        tell: Callable[..., None],
        on_hang: Callable[[Hang], None],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._attempt, self._limits = run, attempt, limits
        self._tell, self._on_hang, self._say = tell, on_hang, say
        self._stop = threading.Event()
        self._threads = [
            self._thread("watchdog", self._watch_progress),
            self._thread("memory trend", self._follow_memory),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except Exception as error:  # noqa: BLE001 - training goes on unwatched, and the recording says so
                with suppress(Exception):
                    self._tell("watching_failed", what=name, error=f"{type(error).__name__}: {error}")
                    self._say(f"the {name} is not watched any more: {type(error).__name__}: {error}"[:300])

        return threading.Thread(target=run, name=f"holdfast {name}", daemon=True)

    def _watch_progress(self) -> None:
        from holdfast.supervise.watch.watchdog import (
            Watchdog,  # here, while the command starts, which is not kept waiting
        )

        watchdog = Watchdog(
            self._run,
            limits=self._limits,
            tell=self._tell,
            on_hang=self._on_hang,
            say=self._say,
            attempt=self._attempt,
        )
        watchdog.run(self._stop)

    def _follow_memory(self) -> None:
        from holdfast.supervise.watch.trends import Trends

        trends = Trends(
            self._run,
            tell=self._tell,
            clock=time.monotonic,
            available_bytes=memory_available_bytes,
            say=self._say,
            attempt=self._attempt,
        )
        while not self._stop.wait(_TREND_SECONDS):
            trends.look()
