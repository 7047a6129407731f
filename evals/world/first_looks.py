"""Verdicts on public reports that had never been used to write a signature, judged by a reader.

    python -m evals.world.first_looks

``first_looks.jsonl`` has one line per report: the look that it belongs to, its address, the family
of its cause, the certainty of the verdict, and how a reader graded the verdict, the last line of
the log alone, and the advice. Collectors of the reports wrote their causes down before any verdict
was made, and the readers knew these causes but not the signatures. The logs belong to other
projects and are not kept here.

A look is made once: 1 with commit 6740b2cd on 2026-11-30, and on 2026-12-01 2 with a827753e, 3 with
124fe9ee, 4 with 711126e8 and 5 with 0a9f19e7. After each of them the signatures were changed
because of its reports, so these can never be a first look again.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from benchmarks.results_file import Result, read_options

from holdfast.explain.certainty import CERTAINTIES

_REPORTS = Path(__file__).with_suffix(".jsonl")
_LOOKS = (1, 2, 3, 4, 5)
_GRADES = ("right", "partly", "unknown", "wrong")
_GRADES_OF_ADVICE = ("fixes", "helps", "useless", "harmful", "none")


def main() -> None:
    options = read_options("first_looks", __doc__ or "")
    reports = [json.loads(line) for line in _REPORTS.read_text("utf-8").splitlines()]
    result = Result(options=options, parameters={"reports": len(reports)})
    for look in _LOOKS:
        _count_grades([report for report in reports if report["look"] == look], look, result)
    _count_by_certainty(reports, "", result)
    newest = [report for report in reports if report["look"] == _LOOKS[-1]]
    _count_by_certainty(newest, f"look {_LOOKS[-1]}: ", result)
    _count_families(reports, result)
    for grade in _GRADES_OF_ADVICE:
        count = sum(report["advice"] == grade for report in reports)
        result.add_count(f"advice: {grade}", count, len(reports))
    result.write()


def _count_grades(reports: list[dict[str, Any]], look: int, result: Result) -> None:
    for grade in _GRADES:
        count = sum(report["verdict"] == grade for report in reports)
        result.add_count(f"look {look}: verdicts that are {grade}", count, len(reports))
    by_last_line = sum(report["last_line"] == "right" for report in reports)
    result.add_count(
        f"look {look}: last lines of the log that are right", by_last_line, len(reports)
    )


def _count_by_certainty(reports: list[dict[str, Any]], prefix: str, result: Result) -> None:
    for certainty in (*CERTAINTIES, None):
        group = [report for report in reports if report["certainty"] == certainty]
        right = sum(report["verdict"] == "right" for report in group)
        words = "have no word of certainty" if certainty is None else f'are called "{certainty}"'
        result.add_count(f"{prefix}right verdicts that {words}", right, len(group))


def _count_families(reports: list[dict[str, Any]], result: Result) -> None:
    """Count the families of causes in which the last line of the log is right more often."""
    lead = collections.Counter[str]()
    for report in reports:
        lead[report["family"]] += report["verdict"] == "right"
        lead[report["family"]] -= report["last_line"] == "right"
    worse = [family for family, difference in lead.items() if difference < 0]
    result.add_count("families in which the last line is right more often", len(worse), len(lead))
    result.notes.append(f"the last line is right more often in: {', '.join(sorted(worse))}")


if __name__ == "__main__":
    main()
