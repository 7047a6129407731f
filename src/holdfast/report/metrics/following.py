"""Copy what a run records to sinks, while it goes on or after its end.

Does not: decide when a run has ended (the caller sets an event), know any client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.text import sanitise
from holdfast.report.metrics.points import Happened, Naming, Sink
from holdfast.report.run_follower import News, RunFollower

POLL_SECONDS = 1.0
_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What was handed to sinks.

    Args:
        points: Steps of all processes.
        events: Of all processes.
        lost: Steps that were overwritten in a ring before they were read.
        failures: Sinks that were set aside, and why.
        gone: Which steps are not recorded any more, one sentence for each process.
    """

    points: int
    events: int
    lost: int
    failures: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def follow(
    run: Path,
    sinks: Sequence[Sink],
    stop: threading.Event,
    *,
    poll_seconds: float = POLL_SECONDS,
    first_attempt: int = 0,
    since: float = 0.0,
) -> Copied:
    """Copy everything recorded so far, then what is new every second, until told to stop; then close the sinks.

    Never raises for what a sink does: one that fails is set aside with a line in the log.

    Args:
        run: The run directory; it may be empty as yet.
        sinks: From `open_sinks`.
        stop: Ends it, after a last look. Set already: one copy is made.
        poll_seconds: Between two looks.
        first_attempt: Processes of earlier attempts are passed over.
        since: Unix time: what the supervisor and guards recorded earlier is passed over. Each of them has one ring
            for all attempts.
    """
    follower, naming = RunFollower(run, first_attempt=first_attempt), Naming()
    working = list(sinks)
    failures: list[str] = []
    counts = {"points": 0, "events": 0, "lost": 0}
    while True:
        last = stop.is_set()
        all_news = [_later(news, since) for news in _look(follower, failures, last=last)]
        points = [point for news in all_news for point in naming.points(news)]
        events = [
            Happened(process=news.source.label, attempt=news.source.attempt, event=event)
            for news in all_news
            for event in news.events
        ]
        events.sort(key=lambda happened: happened.event.unix_seconds)
        counts["points"] += len(points)
        counts["events"] += len(events)
        counts["lost"] += sum(news.lost for news in all_news)
        for sink in list(working) if points or events else ():
            try:
                sink.write(points, events)
            except Exception as error:  # noqa: BLE001 - a client of another project must not end the supervisor
                working.remove(sink)
                failures.append(_failed(sink, error))
                _close(sink, failures)
        if last:
            break
        stop.wait(poll_seconds)
    for sink in working:
        _close(sink, failures)
    gone = tuple(text for key, text in follower.problems.items() if key.endswith(" lost"))
    return Copied(**counts, failures=tuple(failures), gone=gone)


def _look(follower: RunFollower, failures: list[str], *, last: bool) -> list[News]:
    try:
        return follower.new(hold_back=not last)
    except Exception as error:  # noqa: BLE001 - whatever lies in the run directory: the supervisor lives on
        told = f"the run directory cannot be read: {type(error).__name__}: {sanitise(error, most=300)}"
        if told not in failures:
            failures.append(told)
            _log.warning("%s", told)
        return []


def _later(news: News, since: float) -> News:
    """Return the news without what the supervisor or a guard recorded before this time; of processes, all."""
    if news.source.kind == "process":
        return news
    return replace(
        news,
        samples=[sample for sample in news.samples if sample.unix_seconds >= since],
        events=[event for event in news.events if event.unix_seconds >= since],
    )


def _close(sink: Sink, failures: list[str]) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - as above
        failures.append(_failed(sink, error))


def _failed(sink: Sink, error: Exception) -> str:
    told = f"{sink.name}: {type(error).__name__}: {sanitise(error, most=300)}"
    _log.warning("metrics are not written any more to %s", told)
    return told
