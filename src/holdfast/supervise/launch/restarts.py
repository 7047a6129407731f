"""Whether a command is started again.

Pure rules over the verdict, what came before, and the budgets.

the command ended well, or nothing can be helped    stop
a user's error                                      stop
taken back by the scheduler                         its own budget
the same cause again at the same place              stop, unless something new can be changed
out of memory                                       again at once, with what the verdict changes
anything else that may pass                         again after a delay that doubles
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.explain.signature import Restart as Kind
from holdfast.explain.verdict import Verdict

LONG_SECONDS = 600.0
"""An attempt that ran so long got somewhere.

Kubelet forgets its back-off after 10 minutes without a crash.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How often and how fast."""

    # Not counting preemptions: the default of torch's ``LaunchConfig.max_restarts``
    max_restarts: int = 3
    max_preemptions: int = 10  # a machine that is taken back every hour of a night
    # Progress below this between two failures of one cause is none: no checkpoint keeps it
    least_steps: int = 10
    first_delay_seconds: float = 10.0  # as the kubelet's ``CrashLoopBackOff``, doubled each time
    most_delay_seconds: float = 300.0  # as the kubelet's


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An attempt that has ended."""

    cause: str  # id of the verdict's cause
    kind: Kind  # what the verdict allows
    at_step: int | None = None  # where it failed, as the training counts; None if unknown
    steps: int | None = None  # how many it made itself; None if unknown
    seconds: float = 0.0  # how long it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Start the command again, after a delay and with some environment variables changed from
    now on.
    """

    cause: str
    why: str
    delay_seconds: float = 0.0
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Do not start the command again."""

    why: str


def decide_restart(
    verdict: Verdict, history: Sequence[Past], budgets: Budgets, environment: Mapping[str, str]
) -> Again | Stop:
    """Return what to do after an attempt."""
    if verdict.family == "ended well":
        return Stop(why="the command ended well")
    if verdict.restart == "stop":
        return Stop(why="starting it again would not help")
    preempted = [past for past in history if past.kind == "preempted"]
    if verdict.restart == "preempted":
        if len(preempted) > budgets.max_preemptions:
            return Stop(why=f"all {budgets.max_preemptions} restarts after a preemption are used")
        delay = _delay_seconds(preempted, budgets)
        return Again(
            cause=verdict.cause,
            why="it was stopped from outside and can go on",
            delay_seconds=delay,
        )
    changes = new_changes(environment, dict(verdict.changes))
    if verdict.restart == "remedy" and not changes:
        return Stop(why="there is nothing left to change that would help")
    failures = [past for past in history if past.kind != "preempted"]
    if not changes and (why := _repeats(failures, budgets)):
        return Stop(why=why)
    if len(failures) > (most := budgets.max_restarts):
        return Stop(why=f"all {most} restarts are used" if most else "no restarts are allowed")
    if changes:
        named = ", ".join(f"{name}={value}" for name, value in changes.items())
        return Again(cause=verdict.cause, why=f"something is changed: {named}", changes=changes)
    delay = _delay_seconds(failures, budgets)
    return Again(cause=verdict.cause, why="the cause may have passed", delay_seconds=delay)


def _repeats(failures: Sequence[Past], budgets: Budgets) -> str | None:
    """Return why the newest failure is the one before over again; None if it is not."""
    if len(failures) < 2 or failures[-1].cause != failures[-2].cause:
        return None
    before, now = failures[-2:]
    if before.at_step is not None and now.at_step is not None:
        if now.at_step == before.at_step:
            return f"the same failure came twice at step {now.at_step}"
        if abs(now.at_step - before.at_step) < budgets.least_steps:
            return f"the same failure came twice within {budgets.least_steps} steps"
    if now.steps is not None and now.steps < budgets.least_steps:
        return f"the same failure came again after {now.steps} steps"
    if now.steps is None and now.seconds < LONG_SECONDS:
        return "the same failure came again, and no progress was seen between"
    return None


def _delay_seconds(failures: Sequence[Past], budgets: Budgets) -> float:
    """Return the delay after the newest of these.

    Doubled for each since the last attempt that ran long.
    """
    row = 0
    for past in failures:
        row = 1 if past.seconds >= LONG_SECONDS else row + 1
    most = max(budgets.most_delay_seconds, budgets.first_delay_seconds)
    return min(most, budgets.first_delay_seconds * 2.0 ** min(row - 1, 32))


def new_changes(environment: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return what of these variables would really change, merged with what is set.

    The allocator's settings are a list of ``key:value``: the keys that are not named keep their
    values.
    """
    found = {}
    for name, value in changes.items():
        merged = _merge(environment.get(name, ""), value) if name.endswith("ALLOC_CONF") else value
        if environment.get(name) != merged:
            found[name] = merged
    return found


def _merge(present: str, wanted: str) -> str:
    entries = {}
    # A value may be a list in brackets
    for entry in re.split(r",(?![^\[]*\])", f"{present},{wanted}"):
        key, colon, value = entry.strip().partition(":")
        if key:
            entries[key] = f"{colon}{value}"
    return ",".join(f"{key}{value}" for key, value in entries.items())
