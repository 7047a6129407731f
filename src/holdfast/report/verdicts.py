"""Load the verdict on a run from ``verdict.json``, or determine it on demand.

``explain`` determines verdicts. This module only loads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from holdfast.core.text import sanitise
from holdfast.explain.certainty import CERTAINTIES
from holdfast.explain.signatures.ids import NOT_JUDGED
from holdfast.explain.signatures.signature import FAMILIES, NO_FAILURES, Restart
from holdfast.explain.speed_finding import CAUSES, SpeedFinding
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import VERDICT_FILE
from holdfast.report.sources import read_json

Tone: TypeAlias = Literal["well", "unjudged", "unknown", "failed"]


def verdict_of(run: Path, problems: list[str]) -> Verdict | None:
    """Return the verdict on a run, or None if it cannot be determined.

    Args:
        run: The run directory.
        problems: A list to which a sentence is appended if the verdict cannot be determined.
    """
    values = read_json(run / VERDICT_FILE)
    if values:
        return verdict_from(values)
    try:
        from holdfast.explain.collecting import collect
        from holdfast.explain.judging import judge

        return judge(collect(run))
    except Exception as error:  # noqa: BLE001 - a report without a verdict is better than no report
        problems.append(f"the run could not be judged: {sanitise(error, most=200)}")
        return None


def verdict_from(values: Mapping[str, Any]) -> Verdict:
    """Create a verdict from JSON values, which may be malformed.

    A value of the wrong type is converted to text or replaced by a default.
    """
    certainty = values.get("certainty")
    return Verdict(
        cause=_text(values, "cause"),
        title=_text(values, "title"),
        summary=_text(values, "summary"),
        fix=_text(values, "fix"),
        where=_text(values, "where"),
        family=values["family"] if values.get("family") in FAMILIES else "unknown",
        certainty=certainty if certainty in CERTAINTIES else None,
        evidence=tuple(
            _exhibit(item) for item in _items(values, "evidence") if isinstance(item, Mapping)
        ),
        runner_up=_runner_up(values.get("runner_up")),
        tried=tuple(str(item) for item in _items(values, "tried")),
        missing=tuple(str(item) for item in _items(values, "missing")),
        restart=values["restart"] if values.get("restart") in get_args(Restart) else "stop",
        changes=tuple(
            (str(item[0]), str(item[1]))
            for item in _items(values, "changes")
            if isinstance(item, (list, tuple)) and len(item) == 2
        ),
        rank=_integer(values, "rank"),
        step=_integer(values, "step"),
        speed=tuple(
            _speed_finding(item) for item in _items(values, "speed") if isinstance(item, Mapping)
        ),
    )


def _exhibit(values: Mapping[str, Any]) -> Exhibit:
    return Exhibit(
        text=_text(values, "text"),
        source=_text(values, "source"),
        role=_text(values, "role") or "fact",
    )


def _speed_finding(values: Mapping[str, Any]) -> SpeedFinding:
    return SpeedFinding(
        rule=_text(values, "rule"),
        cause=values["cause"] if values.get("cause") in CAUSES else "not known",
        share=_share(values.get("share")),
        title=_text(values, "title"),
        evidence=_text(values, "evidence"),
        fix=_text(values, "fix"),
        is_problem=values.get("is_problem") is True,
    )


def _runner_up(value: object) -> tuple[str, str] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    cause, title = value
    return str(cause), str(title)


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _integer(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None


def _items(values: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = values.get(name)
    return value if isinstance(value, (list, tuple)) else []


def _share(value: object) -> float:
    """Clip a value to the range from 0 to 1; return 0 if it is not a number."""
    # NaN is the only value that differs from itself.
    is_nan = value != value
    if not isinstance(value, (int, float)) or is_nan:
        return 0.0
    return float(min(max(value, 0.0), 1.0))


def tone(verdict: Verdict) -> Tone:
    """Return the tone in which views present a run, for example by a color.

    Returns:
        "well" if the run ended well without reservations, "unjudged" if it could not be judged
        whether the model has learned, "unknown" for any other good ending, an unknown cause or a
        preemption, and "failed" otherwise.
    """
    if verdict.cause == NOT_JUDGED:
        return "unjudged"
    if verdict.is_plain_success:
        return "well"
    if verdict.family in (*NO_FAILURES, "unknown", "preempted"):
        return "unknown"
    return "failed"
