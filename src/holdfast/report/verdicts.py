"""The verdict of a run as reports show it: read from ``verdict.json``, else judged now.

Does not: judge (``diagnose.judging``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from holdfast.core.text import sanitise
from holdfast.explain.signature import FAMILIES, Restart
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import VERDICT_FILE
from holdfast.report.sources import read_json

# Between the confidences of the tiers of evidence in ``diagnose.weighing``: 0.97 and 0.93, 0.80, 0.70, 0.40.
_SURE = ((0.9, "almost certain"), (0.75, "very likely"), (0.6, "likely"), (0.4, "a guess"), (0.0, "a weak guess"))


def verdict_of(run: Path, problems: list[str]) -> Verdict | None:
    """Return why a run ended, or None if nobody can tell.

    Args:
        run: The run directory.
        problems: Gets a sentence if something cannot be read or judged.
    """
    values = read_json(run / VERDICT_FILE)
    if values:
        return verdict_from(values)
    try:
        from holdfast.explain.collecting import collect
        from holdfast.explain.judging import judge

        return judge(collect(run))
    except Exception as error:  # noqa: BLE001 - a report of what is known is better than none; the reason is shown
        problems.append(f"no verdict could be made: {sanitise(error, most=200)}")
        return None


def verdict_from(values: Mapping[str, Any]) -> Verdict:
    """Return a verdict from JSON values, whatever they are: what has the wrong kind is shown as text or left out."""
    family = values.get("family")
    restart: Restart = next((each for each in get_args(Restart) if each == values.get("restart")), "stop")
    runner_up = values.get("runner_up")
    rank, step = values.get("rank"), values.get("step")
    return Verdict(
        cause=_text(values, "cause"),
        family=family if family in FAMILIES else "unknown",
        title=_text(values, "title"),
        summary=_text(values, "summary"),
        fix=_text(values, "fix"),
        confidence=_share(values.get("confidence")),
        evidence=tuple(_exhibit(each) for each in _list(values, "evidence") if isinstance(each, Mapping)),
        runner_up=(
            (str(runner_up[0]), str(runner_up[1]), _share(runner_up[2]))
            if isinstance(runner_up, (list, tuple)) and len(runner_up) == 3
            else None
        ),
        tried=tuple(map(str, _list(values, "tried"))),
        missing=tuple(map(str, _list(values, "missing"))),
        restart=restart,
        changes=tuple(
            (str(pair[0]), str(pair[1]))
            for pair in _list(values, "changes")
            if isinstance(pair, (list, tuple)) and len(pair) == 2
        ),
        where=_text(values, "where"),
        rank=rank if isinstance(rank, int) else None,
        step=step if isinstance(step, int) else None,
    )


def _exhibit(values: Mapping[str, Any]) -> Exhibit:
    seconds, rank = values.get("unix_seconds"), values.get("rank")
    return Exhibit(
        text=_text(values, "text"),
        source=_text(values, "source"),
        role=_text(values, "role") or "fact",
        unix_seconds=float(seconds) if isinstance(seconds, (int, float)) else None,
        rank=rank if isinstance(rank, int) else None,
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _list(values: Mapping[str, Any], name: str) -> list[Any] | tuple[Any, ...]:
    value = values.get(name)
    return value if isinstance(value, (list, tuple)) else []


def _share(value: object) -> float:
    return min(max(float(value), 0.0), 1.0) if isinstance(value, (int, float)) and value == value else 0.0


def how_sure(verdict: Verdict) -> str:
    """Return how sure a verdict is, in words and as a number.

    Empty if the cause is unknown: how sure it is that nothing is known would be read as how sure the verdict is.
    """
    if verdict.family == "unknown":
        return ""
    words = next(words for least, words in _SURE if verdict.confidence >= least)
    return f"{words} ({verdict.confidence:.0%})"
