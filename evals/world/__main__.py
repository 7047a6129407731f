"""Verdicts on failures from public threads, compared with the cause that the thread found, and with
the last line.

*Right* is a verdict whose signature states the cause, or one that is itself a line of the log,
where that line states it. *Right class* is one of which only the class is right; one that leaves
the class open is *unknown*; all others are *wrong*. The baseline is the last line of the log that
looks like an exception. Rules were written from the first half of ``design.jsonl`` and looked at on
the second. Where ``sealed.jsonl`` is unpacked, the result is called ``world_first_look``: it was
opened once, after that, and the first figures are those that count. Since then rules were written
from it too. For each word of certainty, the figures say how many of its verdicts are right.
"""

from __future__ import annotations

import collections
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.results_file import Result, read_options

from evals.verdicts import judged, last_line
from evals.world import Report, all_endings, all_reports
from holdfast.explain.certainty import CERTAINTIES
from holdfast.explain.collecting import collect_stream
from holdfast.explain.judging import judge
from holdfast.explain.verdict import Verdict

Score = Literal["right", "right class", "unknown", "wrong"]
_BIG_LOG = 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A report, and what was made of it."""

    report: Report
    verdict: Verdict

    @property
    def score(self) -> Score:
        """Return how right the verdict is."""
        report, verdict = self.report, self.verdict
        if verdict.cause in report.accept or _states(report, quoted_by(verdict)):
            return "right"
        if verdict.family in report.classes:
            return "right class"
        return "unknown" if verdict.family == "unknown" else "wrong"

    @property
    def by_last_line(self) -> Score:
        """Return how right the last line of an exception is: it claims no class."""
        return "right" if _states(self.report, last_line(self.report.log)) else "unknown"


def quoted_by(verdict: Verdict) -> str:
    """Return the text that a verdict quotes as the cause.

    Empty where it says a cause in words of its own.
    """
    text = verdict.evidence[0].text if verdict.evidence else ""
    return text if text.startswith(verdict.title.removesuffix("...")) else ""


def _states(report: Report, text: str) -> bool:
    return report.line is not None and " ".join(report.line.split()) in " ".join(text.split())


def main() -> None:
    sealed = all_reports("sealed")
    options = read_options("world_first_look" if sealed else "world", __doc__ or "")
    parts = {
        "design, second half": [each for each in all_reports() if each.second_half],
        "design, first half": [each for each in all_reports() if not each.second_half],
        "sealed": sealed,
    }
    result = Result(
        options=options, parameters={what: len(reports) for what, reports in parts.items()}
    )
    for what, reports in parts.items():
        if reports:
            outcomes = [
                Outcome(report=each, verdict=judged(each.log, each.status)) for each in reports
            ]
            _count(what, outcomes, result)
    _count_endings(result)
    _time_big_log(result)
    result.write()


def _count(what: str, outcomes: Sequence[Outcome], result: Result) -> None:
    """Add the figures of one part, and print what is not right."""
    number = len(outcomes)
    scores = collections.Counter(each.score for each in outcomes)
    baseline = sum(each.by_last_line == "right" for each in outcomes)
    result.add_count(f"{what}: right cause", scores["right"], number)
    result.add_count(
        f"{what}: right cause or right class", scores["right"] + scores["right class"], number
    )
    result.add_count(f"{what}: unknown", scores["unknown"], number)
    result.add_count(f"{what}: wrong", scores["wrong"], number)
    result.add_count(f"{what}: right cause by the last line of an exception", baseline, number)
    families = sorted({each.report.family for each in outcomes})
    below = 0
    for family in families:
        group = [each for each in outcomes if each.report.family == family]
        right = sum(each.score == "right" for each in group)
        result.add_count(f"{what}, {family}: right cause", right, len(group))
        by_line = sum(each.by_last_line == "right" for each in group)
        below += right < by_line
        result.add_count(
            f"{what}, {family}: right cause by the last line of an exception", by_line, len(group)
        )
    result.add_count(
        f"{what}: families in which the last line is right more often",
        below,
        len(families),
        expected=0,
    )
    for certainty in CERTAINTIES:
        group = [each for each in outcomes if each.verdict.certainty == certainty]
        right = sum(each.score == "right" for each in group)
        result.add_count(f'{what}: right causes that are called "{certainty}"', right, len(group))
    result.samples[what] = [
        [
            each.report.name,
            each.verdict.cause,
            each.score,
            each.verdict.certainty,
        ]
        for each in outcomes
    ]


def _count_endings(result: Result) -> None:
    """Add what runs that ended with status 0 are told, from the log with the status and from the
    bare log.

    A healthy run is never called a failure; one that is dead is not called well.
    """
    for name in ("healthy", "dead"):
        for grounds in ("with status 0", "bare"):
            told: dict[str, list[str]] = {
                "well": [],
                "well, with a doubt": [],
                "unknown": [],
                "a failure": [],
            }
            for each in all_endings(name):
                verdict = judged(each.log, each.status if grounds == "with status 0" else None)
                said = {"ended well": "well", "unknown": "unknown"}.get(verdict.family, "a failure")
                said = (
                    "well, with a doubt"
                    if said == "well" and "ended well" not in verdict.title
                    else said
                )
                told[said].append(f"{each.id}: {verdict.cause} {verdict.title[:80]}")
            wrong = "a failure" if name == "healthy" else "well"
            for said, runs in told.items():
                what = f"{name} runs, {grounds}: told {said}"
                result.add_count(
                    what,
                    len(runs),
                    sum(map(len, told.values())),
                    expected=0 if said == wrong else None,
                )
            for line in told[wrong]:
                print(f"    {line}")
            result.samples[f"{name} runs, {grounds}: told {wrong}"] = [told[wrong]]


def _time_big_log(result: Result) -> None:
    """Add the CPU seconds for 10 MB: progress, warnings that repeat, and a traceback at the end."""
    lines = [
        f"epoch 1 step {number} loss 0.{number % 97:02d} lr 1e-4 12.3 it/s"
        for number in range(150_000)
    ]
    lines[::100] = [
        f"data.py:{number}: UserWarning: cannot read image {number}" for number in range(1500)
    ]
    end = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n   '
        " main()\nKeyError: 'x'\n"
    )
    text = ("\n".join(lines) + "\n").encode()
    log = (text * (_BIG_LOG // len(text) + 1))[: _BIG_LOG - len(end)] + b"\n" + end.encode()
    judged("warm up\n")
    began = time.process_time()
    judge(collect_stream(io.BytesIO(log), name="run.log", status=1))
    result.add_samples(
        "a log of 10 MB", "s of CPU time", [time.process_time() - began], at_most=1.0
    )


if __name__ == "__main__":
    main()
