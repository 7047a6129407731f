"""Describe a run's environment as text: machine, versions, code, policy and hyperparameters.

The supervisor, the processes and the guards record this information when they start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from holdfast.core.text import as_json_value, moment, size
from holdfast.report.page.gathered_run import GatheredRun

# Groups of rows, keyed by title. Each group maps the names of its rows to their values.
Environment = Mapping[str, Mapping[str, str]]

COMMAND = "command"
_MACHINE = ("hostname", "cpus", "memory_bytes", "gpus", "gpu_driver", "python")
_POLICY_PREFIX = "policy."
# Matches settings that are not hyperparameters: the policy (which has its own group), private
# values, and learning rates that schedulers use internally.
_NO_HYPERPARAMETER = re.compile(r"^policy\.|\._|\.(initial_lr|base_lrs)$")
# Maximum number of rows in a group. An optimizer may have many parameter groups, each with its own
# settings.
_MAX_ROWS = 200


def environment(run: GatheredRun) -> Environment:
    """Return the environment of a run, keyed by group and name, without empty groups."""
    start = _readable_start(run.start)
    machine = {name: start.pop(name) for name in _MACHINE if name in start}
    versions = start.pop("versions", None)
    git = start.pop("git", None)
    groups: dict[str, object] = {
        COMMAND: {"command": run.command, "run directory": str(run.path), **start},
        "machine": machine,
        "versions": versions,
        "code (git)": git,
        "policy, where it is not the usual": _policy(run.settings),
        "hyperparameters": _hyperparameters(run),
    }
    return {
        title: {str(name): _shown(value) for name, value in islice(rows.items(), _MAX_ROWS)}
        for title, rows in groups.items()
        if isinstance(rows, dict) and rows
    }


def _readable_start(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return a start record in which times and sizes are formatted as text."""
    values = {name: value for name, value in start.items() if name not in ("format", "argv")}
    if isinstance(values.get("started"), (int, float)):
        values["started"] = f"{moment(values['started'])} UTC"
    if isinstance(values.get("memory_bytes"), (int, float)):
        values["memory_bytes"] = size(values["memory_bytes"])
    return values


def _policy(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(_POLICY_PREFIX): value
        for name, value in settings.items()
        if name.startswith(_POLICY_PREFIX)
    }


def _hyperparameters(run: GatheredRun) -> dict[str, Any]:
    values = {}
    for name, value in run.settings.items():
        if _NO_HYPERPARAMETER.search(name):
            continue
        is_rate = name.endswith(".lr") and isinstance(value, (int, float))
        values[name] = _rate_as_set(run, name, value) if is_rate else value
    return values


def _rate_as_set(run: GatheredRun, name: str, first_rate: float) -> object:
    """Return the learning rate that the script has set, or the best estimate of it.

    The recorded setting is only the rate of the first step, which may be part of a warm-up. If a
    scheduler has recorded ``initial_lr``, that rate is exact. Otherwise, the largest recorded rate
    is the best estimate.

    Args:
        run: The run.
        name: Name of the recorded setting, which ends in "lr".
        first_rate: The learning rate of the first step.
    """
    initial_rate = run.settings.get(f"{name.removesuffix('lr')}initial_lr")
    if initial_rate:
        return initial_rate
    largest = _largest_rate(run, name)
    is_larger = largest > first_rate * (1 + 1e-6)
    return f"{largest:.6g} (the largest seen)" if is_larger else first_rate


def _largest_rate(run: GatheredRun, name: str) -> float:
    """Return the largest recorded learning rate of the optimizer that a setting is about.

    Returns 0 if `name` is not the setting of an optimizer's first parameter group.
    """
    largest = 0.0
    for lane in run.lanes:
        # Curves contain only the learning rate of the first parameter group.
        optimizer = lane.optimizer or name.removesuffix(".0.lr")
        curve = lane.curves.get("learning_rate")
        if name == f"{optimizer}.0.lr" and curve is not None:
            largest = max(largest, float(curve.finite.max(initial=0)))
    return largest


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return " ".join(str(item) for item in value) or "none"
    if isinstance(value, dict) and not any(
        isinstance(item, (dict, list)) for item in value.values()
    ):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return json.dumps(as_json_value(value), ensure_ascii=False)
