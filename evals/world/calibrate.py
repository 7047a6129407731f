"""The table of confidences in ``explain.weighing``: how often each kind of grounds was right on the design reports.

    python -m evals.world.calibrate

For each kind: reports, right causes, right classes, and both shares drawn towards the share of all kinds as if ten
more reports had been as these are, less what was lost when the rules of the first half first met the second: no kind
is surer than its few reports allow. The sealed reports are not read.
"""

from __future__ import annotations

import collections
import io

from evals.world import all_reports
from evals.world.__main__ import Outcome
from holdfast.explain import judging
from holdfast.explain.collecting import collect_stream
from holdfast.explain.wording import Judgement, in_words

_AS_IF = 10
_LOST = (0.05, 0.03)
"""Of right causes and right classes: how far the second half was below both now, before a rule was written for it."""


def main() -> None:
    found: dict[str, list[tuple[bool, bool]]] = collections.defaultdict(list)
    for report in all_reports():
        made: list[Judgement] = []
        judging.in_words = lambda judgement, kept=made: kept.append(judgement) or in_words(judgement)
        stream = io.BytesIO(report.log.encode())
        verdict = judging.judge(collect_stream(stream, name="run.log", status=report.status))
        if made[0].candidate is not None:
            right = Outcome(report=report, verdict=verdict).score == "right"
            found[made[0].candidate.grounds].append((right, verdict.family in report.classes))
    judging.in_words = in_words
    rows = [row for group in found.values() for row in group]
    named = [row for grounds, group in found.items() if not grounds.startswith("open") for row in group]
    causes = sum(right for right, _ in rows) / len(rows)
    classes = sum(right for _, right in named) / len(named)
    print(f"all: {len(rows)} reports, right cause {causes:.2f}, right class where one is named {classes:.2f}")
    for grounds, group in sorted(found.items()):
        cause, family = sum(right for right, _ in group), sum(right for _, right in group)
        shares = [cause + _AS_IF * causes, family + _AS_IF * classes]
        sure = ", ".join(
            f"{share / (len(group) + _AS_IF) - lost:.2f}" for share, lost in zip(shares, _LOST, strict=True)
        )
        print(f"{grounds}: {len(group)} reports, {cause} right causes, {family} right classes: {sure}")


if __name__ == "__main__":
    main()
