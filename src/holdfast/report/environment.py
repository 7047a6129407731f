"""What a run was started with.

Machine, versions, code, policy and hyperparameters, by group and name, as text.

Does not: find it out. The supervisor, each process and each guard wrote it down when they began.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice

from holdfast.core.text import as_json_value, moment, size
from holdfast.report.run_snapshot import RunSnapshot

_MACHINE = ("hostname", "cpus", "memory_bytes", "gpus", "gpu_driver", "python")
_NOT_SET = re.compile(r"^policy\.|\._|\.(initial_lr|base_lrs)$")  # by people, or shown elsewhere
_MOST = 200  # rows of a group: an optimizer may have many groups of parameters
Environment = Mapping[str, Mapping[str, str]]


def environment(run: RunSnapshot) -> Environment:
    """Return groups of rows; a group without a row is left out."""
    known = {name: value for name, value in run.start.items() if name not in ("format", "argv")}
    for name, shown in (("started", lambda at: f"{moment(at)} UTC"), ("memory_bytes", size)):
        if isinstance(known.get(name), (int, float)):
            known[name] = shown(known[name])
    versions, git = known.pop("versions", None), known.pop("git", None)
    machine = {name: known.pop(name) for name in _MACHINE if name in known}
    policy = {
        name.removeprefix("policy."): v
        for name, v in run.settings.items()
        if name.startswith("policy.")
    }
    settings = {**run.settings, **_rates(run)}
    groups: dict[str, object] = {
        "command": {"command": run.command, "run directory": str(run.path), **known},
        "machine": machine,
        "versions": versions,
        "code (git)": git,
        "policy, where it is not the usual": policy,
        "hyperparameters": {name: v for name, v in settings.items() if not _NOT_SET.search(name)},
    }
    sound = {
        name: islice(rows.items(), _MOST)
        for name, rows in groups.items()
        if isinstance(rows, dict) and rows
    }
    return {name: {str(key): _shown(value) for key, value in rows} for name, rows in sound.items()}


def _rates(run: RunSnapshot) -> dict[str, object]:
    """Return learning rates as they were set.

    What was written down is that of the first step, of a warm-up maybe.
    """
    found: dict[str, object] = {}
    for name, value in run.settings.items():
        if name.endswith(".lr") and isinstance(value, (int, float)):
            its = (
                lane
                for lane in run.lanes
                if name == f"{lane.optimizer or name.removesuffix('.0.lr')}.0.lr"
            )
            curves = [
                lane.columns["learning_rate"] for lane in its if "learning_rate" in lane.columns
            ]
            most = max((curve.finite.max(initial=0) for curve in curves), default=0.0)
            larger = f"{most:.6g} (the largest seen)" if most > value * (1 + 1e-6) else value
            found[name] = run.settings.get(f"{name.removesuffix('lr')}initial_lr") or larger
    return found


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(each, (str, int, float)) for each in value):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict) and not any(
        isinstance(each, (dict, list)) for each in value.values()
    ):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(as_json_value(value), ensure_ascii=False)
