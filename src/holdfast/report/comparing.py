"""Several runs side by side.

Their curves over each other, what differs in their settings, and what came of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.report.environment import environment
from holdfast.report.figures import steps
from holdfast.report.offline_page import fill_page
from holdfast.report.page import facts_of_run
from holdfast.report.run_snapshot import Lane, RunSnapshot
from holdfast.report.series import LOGGED, Series
from holdfast.report.verdicts import how_sure

Table = Mapping[str, Sequence[str]]  # of each row what the runs have, in their order
_OF_EACH = frozenset({"run directory", "started", "supervisor_pid"})  # says nothing when it differs


class Comparison:
    """What `holdfast compare` shows of runs, which were gathered."""

    def __init__(self, runs: Sequence[RunSnapshot]) -> None:
        self.runs = runs
        above = os.path.commonpath([run.path.parent for run in runs])
        self.names = [os.path.relpath(run.path, above) for run in runs]
        named = list(zip(runs, self.names, strict=True))
        self.problems = [f"{name}: {problem}" for run, name in named for problem in run.problems]
        self.facts = _table(
            [{"verdict": _verdict(run), **facts_of_run(run), **_newest(run)} for run in runs]
        )
        settings = _table([_settings(run) for run in runs])
        self.differs = {name: values for name, values in settings.items() if len(set(values)) > 1}

    def page(self) -> str:
        """Return a page of it (H742 if plotly is not installed)."""
        drawn = steps(
            [
                each
                for run, name in zip(self.runs, self.names, strict=True)
                for each in _curves(run, name)
            ]
        )
        return fill_page(
            "compare.html",
            {} if drawn is None else {"steps": drawn},
            kind="comparison",
            name=", ".join(self.names),
            under=f"{len(self.runs)} runs",
            names=self.names,
            facts=self.facts,
            differs=self.differs,
            problems=self.problems,
        )

    def as_json(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            "runs": [str(run.path) for run in self.runs],
            "facts": self.facts,
            "differs": self.differs,
            "verdicts": [run.verdict and run.verdict.as_json() for run in self.runs],
            "problems": self.problems,
        }


def _table(every: Sequence[Mapping[str, str]]) -> Table:
    return {
        name: [each.get(name, "") for each in every]
        for name in dict.fromkeys(n for each in every for n in each)
    }


def _settings(run: RunSnapshot) -> dict[str, str]:
    groups = {name: dict(rows) for name, rows in environment(run).items()}
    groups["command"] = _arguments(run.command) | {
        k: v for k, v in groups["command"].items() if k != "command"
    }
    known = [(group, *row) for group, rows in groups.items() for row in rows.items()]
    return {f"{group}: {name}": value for group, name, value in known if name not in _OF_EACH}


def _arguments(command: str) -> dict[str, str]:
    """Return the options of a command with what follows each, and the words before the first by
    their places.
    """
    found: dict[str, str] = {}
    option = ""
    # Those too that a shell was given as one
    for number, word in enumerate(command.split(), start=1):
        name, is_set, value = word.partition("=")
        if re.match(r"--?[A-Za-z]", word) or (is_set and re.fullmatch(r"[\w+~./-]+", name)):
            option, word = name, value
        key = option or f"word {number}"
        found[key] = f"{found.get(key, '')} {word}".strip()
    return {key: value or "given" for key, value in found.items()}


def _verdict(run: RunSnapshot) -> str:
    words = (
        []
        if run.verdict is None
        else [f"{run.verdict.title} [{run.verdict.cause}]", how_sure(run.verdict)]
    )
    return ", ".join(filter(None, words)) or "none"


def _newest(run: RunSnapshot) -> dict[str, str]:
    """Return the newest loss and the newest of each number that was logged or validated."""
    found = {}
    for lane in _curves(run, ""):
        for name, series in lane.columns.items():
            known = series.values[np.isfinite(series.values)]
            if len(known) and (name == "loss" or name.startswith(LOGGED)):
                found[f"newest {name.removeprefix(LOGGED)}{lane.label}"] = f"{known[-1]:.6g}"
    return found


def _curves(run: RunSnapshot, name: str) -> list[Lane]:
    """Return the curves of the first rank of a run, its attempts one after the other, and of
    each optimizer.
    """
    first = [lane for lane in run.lanes if not lane.rank]
    return [
        replace(its[0], label=f"{name}, {optimizer}" if optimizer else name, columns=_joined(its))
        for optimizer in dict.fromkeys(lane.optimizer for lane in first)
        if (its := [lane for lane in first if lane.optimizer == optimizer])
    ]


def _joined(lanes: Sequence[Lane]) -> dict[str, Series]:
    found = {}
    for name in dict.fromkeys(name for lane in lanes for name in lane.columns):
        its, gap = (
            [lane.columns[name] for lane in lanes if name in lane.columns],
            np.array([np.nan]),
        )
        found[name] = (
            its[0]
            if len(its) == 1
            else Series(
                steps=np.concatenate([part for each in its for part in (each.steps, gap)]),
                values=np.concatenate([part for each in its for part in (each.values, gap)]),
                nonfinite=np.concatenate([each.nonfinite for each in its]),
                band=None,
                own_scale=its[0].own_scale,
            )
        )
    return found
