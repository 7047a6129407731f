"""The table of confidences in ``explain.candidate``.

How often each kind of grounds was right on reports not yet seen.

    python -m evals.world.calibrate

The second half of the design reports was met once by rules that had been written from the first
half alone, and the sealed reports once by rules that had been written from all of the design
reports. What was said then is kept in `_FIRST_LOOKS`, since rules that know a report say nothing of
others by being right on it. A share is that of both looks together, drawn towards `_MEANS` as if
`_AS_IF` more reports had been as these. For comparison the counts of today's rules are printed.
"""

from __future__ import annotations

import collections
import io

from evals.world import all_reports
from evals.world.__main__ import Outcome
from holdfast.explain.collecting import collect_stream
from holdfast.explain.judging import reach_judgement
from holdfast.explain.wording.verdict_words import in_words

_AS_IF = (10, 20)
"""More reports: of causes, of classes."""
_MEANS = (0.65, 0.9)
"""Of right causes: all of the first looks.

Of right classes: 188 other failures, before rules knew them.
"""
_BY_TYPE = 0.61
"""Of the class that a type suggests: how many reports of the first half accept "user code"."""
_FIRST_LOOKS = {
    "signature": ((19, 18, 19, 19), (56, 50, 56, 56)),
    "symptom": ((27, 12, 27, 24), (58, 27, 58, 52)),
    "cascade": ((5, 5, 5, 5), (3, 1, 2, 1)),
    "words": ((24, 14, 24, 24), (56, 38, 56, 51)),
    # Those of the first look had no class then: that of today
    "type": ((5, 5, 5, 5), (6, 3, 6, 6)),
    "open words": ((5, 4, 0, 0), (1, 0, 0, 0)),
    # At the first look with those of which the class was left open
    "line": ((6, 1, 2, 2), (14, 9, 14, 12)),
    "open line": ((0, 0, 0, 0), (4, 0, 0, 0)),
}
"""By grounds, of the second half of the design reports and of the sealed ones.

Reports, right causes; reports with a
class, right classes. Of 15 and 15 reports nothing was said, or only what a signal or a status says.
"""


def main() -> None:
    for grounds, looks in _FIRST_LOOKS.items():
        reports, causes, named, classes = map(sum, zip(*looks, strict=True))
        cause = (causes + _AS_IF[0] * _MEANS[0]) / (reports + _AS_IF[0])
        mean = _BY_TYPE if grounds == "type" else _MEANS[1]
        family = (classes + _AS_IF[1] * mean) / (named + _AS_IF[1])
        print(
            f"{grounds}: first looks {causes} of {reports} causes, {classes} of {named}:"
            f" {cause:.2f}, {family:.2f}"
        )
    found: dict[str, list[tuple[bool, bool]]] = collections.defaultdict(list)
    for report in all_reports():
        stream = io.BytesIO(report.log.encode())
        judgement = reach_judgement(collect_stream(stream, name="run.log", status=report.status))
        verdict = in_words(judgement)
        if judgement.candidate is not None:
            right = Outcome(report=report, verdict=verdict).score == "right"
            found[judgement.candidate.grounds].append((right, verdict.family in report.classes))
    for grounds, group in sorted(found.items()):
        cause, family = sum(right for right, _ in group), sum(right for _, right in group)
        print(
            f"today, {grounds}: {len(group)} reports, {cause} right causes, {family} right classes"
        )


if __name__ == "__main__":
    main()
