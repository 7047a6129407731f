"""What a plan would do, for ``holdfast run --dry-run``: the command, its environment, limits and rules of restart.

Does not: start or write anything.
"""

from __future__ import annotations

import math
import os
import shlex
from typing import Any

from holdfast.recorder.progress import Phase
from holdfast.supervise.launch.launching import find_launcher, make_environment
from holdfast.supervise.process_tree import MARK_VARIABLE
from holdfast.supervise.supervisor import Plan
from holdfast.supervise.watch.limits import name_of


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the parts of a plan, in the order in which they are told, as JSON values."""
    return {
        "command": shlex.join(plan.command),
        "program": plan.program,
        "record in": str(plan.run.expanduser().absolute()),
        "output": _streams(plan),
        "environment": _environment(plan),
        "hang limits": _limits(plan),
        "at a signal": f"passed on; SIGKILL to what still runs {plan.grace_seconds:g} s after SIGINT or SIGTERM",
        "restarts": _restarts(plan),
    }


def _streams(plan: Plan) -> str:
    kinds = ["a terminal" if os.isatty(each) else "a pipe" for each in (1, 2)]
    return f"stdout is {kinds[0]}, stderr is {kinds[1]}; at most {plan.most_log_bytes:,} bytes in output.log"


def _environment(plan: Plan) -> dict[str, str]:
    """Return the variables that differ from ours."""
    found = make_environment(os.environ, plan.run, 0, "", observe=plan.observe)
    return {
        name: value for name, value in found.items() if os.environ.get(name) != value and name != MARK_VARIABLE
    } or {"": "as it is"}


def _limits(plan: Plan) -> dict[str, str]:
    if plan.limits is None:
        return {"": "nobody watches"}
    found = {}
    for phase in Phase:
        seconds = plan.limits.floor(phase)
        learned = "" if plan.limits.limit(phase, 1e9) == seconds else f", or {plan.limits.factor:g} x its longest"
        found[name_of(phase)] = "no limit" if math.isinf(seconds) else f"{seconds:g} s{learned}"
    least, moving = plan.limits.floor_seconds, plan.limits.moving_seconds
    found["floor"] = "30 s for each phase of a step" if least is None else f"{least:g} s for each phase of a step"
    found["factor"] = f"{plan.limits.factor:g} x the longest that a phase took lately"
    left_alone = "for ever" if math.isinf(moving) else f"{moving:g} s"
    found["moving"] = f"{left_alone}, for which a process that still computes is left alone"
    return found


def _restarts(plan: Plan) -> dict[str, str]:
    budgets, launcher = plan.budgets, find_launcher(plan.command)
    if launcher is not None and launcher.restarts:
        return {
            "workers": f"left to {launcher.name}, which restarts them {launcher.restarts} times",
            "command": "none",
        }
    return {
        "a cause that may pass": f"at most {budgets.max_restarts}, after {budgets.first_delay_seconds:g} s, doubled "
        f"each time up to {budgets.most_delay_seconds:g} s",
        "out of memory": "counted with these, at once, only if something can be changed",
        "stopped from outside": f"at most {budgets.max_preemptions}",
        "a user's error": "none",
        "the same cause again": f"none at the same step, or with less than {budgets.least_steps} steps between",
    }
