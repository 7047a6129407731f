"""The threads of the supervisor that look at a run while it goes on.

The watchdog, and the trend of memory.

A fault in one of them is recorded and ends that thread, never the supervisor. They do not act: see
    ``Attempt``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Hang, WatchingFailed
from holdfast.supervise.watch.limits import HangLimits

# A slope over minutes is wanted; reading the samples of a run costs some milliseconds
_TREND_SECONDS = 10.0
# Until there is somebody to watch: a command that is over by then needs none of it
_FIRST_SECONDS = 1.0
_JOIN_SECONDS = 5.0  # a dump of stacks may be under way; the thread is a daemon


@contextmanager
def watching(
    run: Path,
    attempt: int,
    limits: HangLimits,
    *,
    emit: Callable[[EventData], None],
    on_hang: Callable[[Hang], None],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Look at one attempt while the context lasts."""
    stop = threading.Event()

    def watch_progress() -> None:
        if stop.wait(_FIRST_SECONDS):
            return
        from holdfast.supervise.watch.watchdog import Watchdog

        Watchdog(run, limits=limits, emit=emit, on_hang=on_hang, say=say, attempt=attempt).run(stop)

    def follow_memory() -> None:
        trends = None
        began = time.monotonic()
        while not stop.wait(_TREND_SECONDS):
            from holdfast.supervise.watch.trends import Trends

            trends = trends or Trends(run, emit=emit, say=say, attempt=attempt)
            trends.look()
        if time.monotonic() - began >= _FIRST_SECONDS:
            from holdfast.supervise.watch.trends import Trends

            (trends or Trends(run, emit=emit, say=say, attempt=attempt)).look_back()

    def guarded(name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 - training goes on unwatched, and the recording says so
            with suppress(Exception):
                emit(WatchingFailed(what=name, error=f"{type(error).__name__}: {error}"))
                say(f"the {name} is not watched any more: {type(error).__name__}: {error}"[:300])

    bodies = {"watchdog": watch_progress, "memory trend": follow_memory}
    threads = [
        threading.Thread(target=guarded, args=each, name=f"holdfast {each[0]}", daemon=True)
        for each in bodies.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
