"""The verdict of a run as reports show it: read from ``verdict.json``, else judged now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from holdfast.core.text import sanitise
from holdfast.explain.signature import FAMILIES, Restart
from holdfast.explain.signatures.endings import ENDED_WELL, NOT_JUDGED
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import VERDICT_FILE
from holdfast.report.sources import read_json

_SURE = (
    (0.9, "almost certain"),
    (0.75, "very likely"),
    (0.6, "likely"),
    (0.4, "a guess"),
    (0.0, "a weak guess"),
)


def verdict_of(run: Path, problems: list[str]) -> Verdict | None:
    """Return why a run ended, or None if nobody can tell.

    `problems` gets a sentence about what cannot be judged.
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
    """Return a verdict from JSON values, whatever they are.

    What has the wrong kind is shown as text or left out.
    """
    runner_up, rank, step = values.get("runner_up"), values.get("rank"), values.get("step")
    evidence = [each for each in _items(values, "evidence") if isinstance(each, Mapping)]
    changes = [
        each
        for each in _items(values, "changes")
        if isinstance(each, (list, tuple)) and len(each) == 2
    ]
    return Verdict(
        **{name: _text(values, name) for name in ("cause", "title", "summary", "fix", "where")},
        family=values["family"] if values.get("family") in FAMILIES else "unknown",
        confidence=_share(values.get("confidence")),
        class_confidence=_share(values.get("class_confidence", values.get("confidence"))),
        evidence=tuple(map(_exhibit, evidence)),
        runner_up=(
            (str(runner_up[0]), str(runner_up[1]), _share(runner_up[2]))
            if isinstance(runner_up, (list, tuple)) and len(runner_up) == 3
            else None
        ),
        tried=tuple(map(str, _items(values, "tried"))),
        missing=tuple(map(str, _items(values, "missing"))),
        restart=values["restart"] if values.get("restart") in get_args(Restart) else "stop",
        changes=tuple((str(name), str(value)) for name, value in changes),
        rank=rank if isinstance(rank, int) else None,
        step=step if isinstance(step, int) else None,
    )


def _exhibit(values: Mapping[str, Any]) -> Exhibit:
    return Exhibit(
        text=_text(values, "text"),
        source=_text(values, "source"),
        role=_text(values, "role") or "fact",
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _items(values: Mapping[str, Any], name: str) -> list[Any] | tuple[Any, ...]:
    value = values.get(name)
    return value if isinstance(value, (list, tuple)) else []


def _share(value: object) -> float:
    return (
        min(max(float(value), 0.0), 1.0)
        if isinstance(value, (int, float)) and value == value
        else 0.0
    )


def how_sure(verdict: Verdict) -> str:
    """Return how sure a verdict is of its cause, and of its class where it names one.

    Empty if it names neither, or if the cause is an exception that was seen, which is a fact.
    """
    if not verdict.confidence or verdict.names_an_exception:
        return ""
    cause, share = _in_words(verdict.confidence), f"{verdict.confidence:.0%}"
    of_class = _in_words(verdict.class_confidence)
    if (
        verdict.family in ("unknown", "ended well")
        or verdict.class_confidence == verdict.confidence
    ):
        return f"{cause} ({share})"
    if cause == of_class:
        return f"{cause} ({share}, of its class {verdict.class_confidence:.0%})"
    return f"{cause} ({share}), its class {of_class} ({verdict.class_confidence:.0%})"


def tone(verdict: Verdict) -> str:
    """Return how a run is to be looked at.

    "well"; "unjudged" of an end of which nobody can tell whether it is one; "unknown" of one that
    something speaks against, or that is no failure of the run's own; or "failed".
    """
    if verdict.cause == NOT_JUDGED:
        return "unjudged"
    # In doubt the title says what speaks against it, after a comma
    if verdict.family == "ended well":
        return "well" if verdict.cause == ENDED_WELL and ", " not in verdict.title else "unknown"
    return "unknown" if verdict.family in ("unknown", "preempted") else "failed"


def _in_words(share: float) -> str:
    return next(words for least, words in _SURE if share >= least)
