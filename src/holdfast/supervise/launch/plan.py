"""What is to be run and how, and the same in words for ``holdfast run --dry-run``."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.recorder.progress import Phase
from holdfast.supervise.launch.commands import find_launcher, make_environment
from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.process_tree import MARK_VARIABLE
from holdfast.supervise.watch.limits import HangLimits, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run, and how.

    Args:
        command: Its words.
        program: The file that the first word means.
        run: The run directory.
        budgets: Of restarts.
        limits: Of hangs; None: nobody watches.
        observe: Whether Python processes record themselves.
        grace_seconds: Between asking the command to end and SIGKILL.
        most_log_bytes: Size of the log of what it prints.
    """

    command: tuple[str, ...]
    program: str
    run: Path
    budgets: Budgets = field(default_factory=Budgets)
    limits: HangLimits | None = field(default_factory=HangLimits)
    observe: bool = True
    grace_seconds: float = 25.0
    most_log_bytes: int = 256 << 20


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the parts of a plan in words, as JSON values."""
    out, err = ("a terminal" if os.isatty(each) else "a pipe" for each in (1, 2))
    found = make_environment(os.environ, plan.run, 0, "", observe=plan.observe)
    changed = {name: each for name, each in found.items() if os.environ.get(name) != each and name != MARK_VARIABLE}
    return {
        "command": shlex.join(plan.command),
        "program": plan.program,
        "record in": str(plan.run.expanduser().absolute()),
        "output": f"stdout is {out}, stderr is {err}; at most {plan.most_log_bytes:,} bytes in output.log",
        "environment": changed or {"": "as it is"},
        "hang limits": {"": "nobody watches"} if plan.limits is None else _limits(plan.limits),
        "at a signal": f"passed on; SIGKILL to what still runs {plan.grace_seconds:g} s after SIGINT or SIGTERM",
        "restarts": _restarts(plan),
    }


def _limits(limits: HangLimits) -> dict[str, str]:
    found = {}
    for phase in Phase:
        seconds = limits.floor(phase)
        learned = "" if limits.limit(phase, 1e9) == seconds else f", or {limits.factor:g} x its longest lately"
        found[name_of(phase)] = "no limit" if math.isinf(seconds) else f"{seconds:g} s{learned}"
    left_alone = "for ever" if math.isinf(limits.moving_seconds) else f"{limits.moving_seconds:g} s"
    found["moving"] = f"{left_alone}, for which a process that still computes is left alone"
    return found


def _restarts(plan: Plan) -> str:
    budgets, launcher = plan.budgets, find_launcher(plan.command)
    if launcher is not None and launcher.restarts:
        return f"left to {launcher.name}, which restarts its workers {launcher.restarts} times"
    return (
        f"at most {budgets.max_restarts}, after {budgets.first_delay_seconds:g} s, doubled each time up to "
        f"{budgets.most_delay_seconds:g} s; {budgets.max_preemptions} more if stopped from outside; none after a "
        f"user's error, or the same cause at the same step or within {budgets.least_steps} steps"
    )
