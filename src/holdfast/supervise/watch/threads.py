"""The supervisor's threads that watch a running attempt: watchdog, memory trend and resources.

An error in one of the threads is recorded and ends only that thread. The threads report what they
find, and ``launch.attempt`` acts on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from holdfast.core.events.process_events import WatchingFailed
from holdfast.supervise.watch.attempt_watch import AttemptWatch

# Watching starts after this delay, so that a short command is not slowed down by the imports.
_START_DELAY_SECONDS = 1.0
# Interval between tests of the memory trend. The trend is measured over minutes, and reading a
# run's samples takes a few milliseconds.
_TREND_INTERVAL_SECONDS = 10.0
# How long to wait at the end for a thread, which may be sampling stacks. The threads are daemons,
# so they cannot delay the exit of the interpreter.
_MAX_JOIN_SECONDS = 5.0
_MAX_MESSAGE_LENGTH = 300


@contextmanager
def watching(watch: AttemptWatch) -> Iterator[None]:
    """Context manager that detects hangs and leaks of an attempt, and measures what it uses."""
    stop = threading.Event()
    threads = [
        _start_thread("watchdog", watch_for_hangs, watch, stop),
        _start_thread("memory trend", watch_memory, watch, stop),
        _start_thread("resource watch", watch_resources, watch, stop),
    ]
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_MAX_JOIN_SECONDS)


def watch_for_hangs(watch: AttemptWatch, stop: threading.Event) -> None:
    """Run the watchdog until `stop` is set."""
    if stop.wait(_START_DELAY_SECONDS):
        return
    from holdfast.supervise.watch.watchdog import Watchdog

    Watchdog(watch).run(stop)


def watch_memory(watch: AttemptWatch, stop: threading.Event) -> None:
    """Test the trainers' memory for leaks until `stop` is set, and once more at the end."""
    if stop.wait(_START_DELAY_SECONDS):
        return
    from holdfast.supervise.leaks.trends import MemoryTrends

    trends = MemoryTrends(watch.run_path, emit=watch.emit, say=watch.say, attempt=watch.attempt)
    while not stop.wait(_TREND_INTERVAL_SECONDS):
        trends.update()
    trends.finish()


def watch_resources(watch: AttemptWatch, stop: threading.Event) -> None:
    """Measure what the training processes use until `stop` is set."""
    if stop.wait(_START_DELAY_SECONDS):
        return
    from holdfast.supervise.watch.resources import UPDATE_SECONDS, ResourceWatch

    resources = ResourceWatch(watch.run_path, watch.attempt, watch.emit)
    while not stop.wait(UPDATE_SECONDS):
        resources.update()
    resources.finish()


def _start_thread(
    name: str,
    body: Callable[[AttemptWatch, threading.Event], None],
    watch: AttemptWatch,
    stop: threading.Event,
) -> threading.Thread:
    def run() -> None:
        try:
            body(watch, stop)
        except Exception as error:  # noqa: BLE001 - training continues unwatched
            _report_failure(name, error, watch)

    thread = threading.Thread(target=run, name=f"holdfast {name}", daemon=True)
    thread.start()
    return thread


def _report_failure(name: str, error: Exception, watch: AttemptWatch) -> None:
    why = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        watch.emit(WatchingFailed(what=name, error=why))
        watch.say(f"the {name} stopped after an error: {why}"[:_MAX_MESSAGE_LENGTH])
