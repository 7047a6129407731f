"""Compare runs side by side: curves, differing settings and outcomes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.report.page.environment import COMMAND, environment
from holdfast.report.page.figures.steps import step_figure
from holdfast.report.page.final_values import joined_lanes, last_and_best_values
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.page.offline_page import fill_page
from holdfast.report.page.run_page import key_figures
from holdfast.report.run_snapshot import Lane

# The rows of a table, keyed by name, each with one value per run.
Table = Mapping[str, Sequence[str]]
# Settings that differ between any two runs, so a comparison does not show them.
_ALWAYS_DIFFERENT = frozenset({"run directory", "started", "supervisor_pid"})
# Matches options such as ``--lr`` and ``-n``, but not negative numbers.
_OPTION = re.compile(r"--?[A-Za-z]")
# Matches the name in a setting such as ``optimizer.lr=0.1``.
_SETTING = re.compile(r"[\w+~./-]+")


class Comparison:
    """The comparison that `holdfast compare` shows.

    Args:
        runs: The runs to compare.

    Attributes:
        names: The path of each run, relative to their common parent directory.
        facts: A table of the runs' key figures.
        differs: A table of the settings that differ between the runs.
        problems: One sentence for each part of a run that could not be read.
    """

    def __init__(self, runs: Sequence[GatheredRun]) -> None:
        self.runs = runs
        common_folder = os.path.commonpath([run.path.parent for run in runs])
        self.names = [os.path.relpath(run.path, common_folder) for run in runs]
        self.problems = [
            f"{name}: {problem}"
            for run, name in zip(runs, self.names, strict=True)
            for problem in run.problems
        ]
        self.facts = _table([_facts(run) for run in runs])
        settings = _table([_settings(run) for run in runs])
        self.differs = {name: values for name, values in settings.items() if len(set(values)) > 1}

    def page(self, plotly_addresses: Sequence[str] = ()) -> str:
        """Return the comparison as an HTML page. Raises H742 if plotly is not installed.

        Args:
            plotly_addresses: See `fill_page`.
        """
        lanes: list[Lane] = []
        for run, name in zip(self.runs, self.names, strict=True):
            lanes += joined_lanes(run, name)
        figure = step_figure(lanes)
        return fill_page(
            "compare.html",
            {} if figure is None else {"steps": figure},
            plotly_addresses=plotly_addresses,
            kind="comparison",
            name=", ".join(self.names),
            under=f"{len(self.runs)} runs",
            names=self.names,
            facts=self.facts,
            differs=self.differs,
            problems=self.problems,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the output of `holdfast compare --json`."""
        return {
            "runs": [str(run.path) for run in self.runs],
            "facts": self.facts,
            "differs": self.differs,
            "verdicts": [
                None if run.verdict is None else run.verdict.as_json() for run in self.runs
            ],
            "problems": self.problems,
        }


def _table(columns: Sequence[Mapping[str, str]]) -> Table:
    """Return a table with one column per run, its rows in the order in which names first appear."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "") for column in columns] for name in names}


def _facts(run: GatheredRun) -> dict[str, str]:
    facts = {"verdict": _verdict(run)}
    if run.tool:
        # A record of another tool has none of the other key figures.
        facts["recorded by"] = run.tool
        facts["steps"] = f"{max(lane.last_step for lane in run.lanes):,}"
    else:
        facts |= key_figures(run)
    facts |= last_and_best_values(run)
    if run.verdict is not None and run.verdict.speed:
        finding = run.verdict.speed[0]
        facts["speed"] = f"{finding.title} ({finding.cause})"
    return facts


def _verdict(run: GatheredRun) -> str:
    if run.verdict is None:
        return "none"
    parts = [f"{run.verdict.title} [{run.verdict.cause}]", run.verdict.certainty]
    return ", ".join(part for part in parts if part)


def _settings(run: GatheredRun) -> dict[str, str]:
    """Return all settings of a run, with names of the form "group: name"."""
    groups = {title: dict(rows) for title, rows in environment(run).items()}
    # Compare the arguments of commands one by one. Comparing whole commands would show only that
    # they differ.
    other_rows = {name: value for name, value in groups[COMMAND].items() if name != "command"}
    groups[COMMAND] = {**_arguments(run.command), **other_rows}
    return {
        f"{title}: {name}": value
        for title, rows in groups.items()
        for name, value in rows.items()
        if name not in _ALWAYS_DIFFERENT
    }


def _arguments(command: str) -> dict[str, str]:
    """Return the options of a command, keyed by name, with their values.

    Words before the first option are named by their position, such as "word 2". A command that was
    passed to a shell as a single string is also split into words.
    """
    values: dict[str, list[str]] = {}
    option = ""
    for position, word in enumerate(command.split(), start=1):
        name, equals_sign, value = word.partition("=")
        if _OPTION.match(word) or (equals_sign and _SETTING.fullmatch(name)):
            option = name
            word = value
        key = option or f"word {position}"
        values.setdefault(key, []).append(word)
    return {
        key: " ".join(word for word in words if word) or "given" for key, words in values.items()
    }
