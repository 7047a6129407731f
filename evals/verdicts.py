"""Verdicts on recorded failures, and on healthy runs: how often the cause is right.

Each output in ``evals/failures`` was really printed by a program of its own. It is judged alone,
and with the exit status, and compared with the label. An exception that needs no signature is right
if it is itself the verdict. *Held out* are failures whose authors had not seen the signatures;
signatures were corrected after their first score. Baselines get the same text: the signature whose
title and meaning share most words with the last line of the traceback; the exit status with the
label that is most frequent for it in this very corpus, which favours it; the first keyword of a
list. Texts of other versions of torch are those that the signatures quote: a check that they still
match, no more.
"""

from __future__ import annotations

import collections
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.results_file import Figure, Result, read_options

from evals.failures import Recorded, all_failures, all_healthy
from holdfast.explain.certainty import CERTAINTIES
from holdfast.explain.collecting import collect_stream
from holdfast.explain.judging import judge
from holdfast.explain.signatures import all_signatures
from holdfast.explain.signatures.ids import UNCAUGHT
from holdfast.explain.verdict import Verdict

_QUICK_EVERY = 60
_TO_REACH = 0.95

# What people search logs for, most telling first; ids of the signatures that mean it.
_KEYWORDS = (
    ("cuda out of memory", "H901"),
    ("can't allocate memory", "H906"),
    ("unable to allocate", "H907"),
    ("memoryerror", "H907"),
    ("bad_alloc", "H908"),
    ("oom-kill", "H909"),
    ("device-side assert", "H911"),
    ("illegal memory access", "H913"),
    ("not compiled with cuda", "H917"),
    ("same device", "H919"),
    ("timeout", "H921"),
    ("connection reset", "H922"),
    ("nccl", "H923"),
    ("finished reduction", "H925"),
    ("process group", "H926"),
    ("address already in use", "H927"),
    ("no space left", "H981"),
    ("worker", "H929"),
    ("too many open files", "H936"),
    ("pickle", "H940"),
    ("stack expects", "H942"),
    ("inplace operation", "H948"),
    ("second time", "H949"),
    ("does not require grad", "H950"),
    ("scalar outputs", "H951"),
    ("leaf variable", "H952"),
    ("inf checks", "H956"),
    ("non-finite", "H959"),
    ("nan", "H963"),
    ("cannot be multiplied", "H965"),
    ("groups=", "H966"),
    ("must match", "H968"),
    ("is invalid for input", "H969"),
    ("out of range", "H970"),
    ("dtype", "H971"),
    ("empty parameter", "H975"),
    ("size mismatch", "H977"),
    ("missing key", "H978"),
    ("central directory", "H979"),
    ("weights_only", "H982"),
    ("no such file", "H988"),
    ("permission denied", "H988"),
    ("no module named", "H985"),
    ("segmentation fault", "H991"),
    ("recursion", "H992"),
    ("keyerror", "H992"),
    ("indexerror", "H992"),
    ("killed", "H909"),
    ("sigterm", "H990"),
    ("keyboardinterrupt", "H1604"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One failure, and what was made of it: from its log alone, and with its exit status."""

    failure: Recorded
    bare: Verdict
    known: Verdict

    def right(self, verdict: Verdict) -> bool:
        """Return whether a verdict is the label, or one that is as right.

        Of an exception, that very one.
        """
        if verdict.cause in self.failure.also:
            return True
        named = verdict.cause != UNCAUGHT or _begins_alike(verdict.title, self.failure.exception)
        return named and verdict.cause == self.failure.cause


def _begins_alike(title: str, exception: str) -> bool:
    """Return whether a title, which may be cut, is the first line of an exception.

    True if that is not known.
    """
    return not exception or exception.startswith(title.removesuffix("...")[:100])


def main() -> None:
    options = read_options("verdicts", __doc__ or "")
    chosen = all_failures()[:: _QUICK_EVERY if options.quick else 1]
    result = Result(
        options=options, parameters={"failures": len(chosen), "signatures": len(all_signatures())}
    )
    outcomes = [
        Outcome(failure=each, bare=judged(each.log), known=judged(each.log, each.status))
        for each in chosen
    ]
    _count_corpus(outcomes, result)
    _judge_failures(outcomes, result)
    _judge_splits(outcomes, result)
    _judge_other_wordings(result)
    _compare_with_baselines(outcomes, result)
    _judge_healthy(result)
    result.write()


def judged(log: str, status: int | None = None) -> Verdict:
    """Return the verdict on a log, with the exit status if that is known."""
    return judge(
        collect_stream(io.BytesIO(log.encode(errors="replace")), name="run.log", status=status)
    )


def _count_corpus(outcomes: Sequence[Outcome], result: Result) -> None:
    seen = {
        cause for outcome in outcomes for cause in (outcome.failure.cause, *outcome.failure.also)
    }
    known = [each.id for each in all_signatures().values()]
    result.add_count(
        "signatures with a failure that reproduces them",
        sum(each in seen for each in known),
        len(known),
    )
    texts = {
        (each.failure.cause, re.sub(r"[\d.]+|0x\w+|'[^']*'", "", last_line(each.failure.log)))
        for each in outcomes
    }
    _add_ratio(
        result,
        "distinct failures: labels with last lines, without numbers and names",
        len(texts),
        outcomes,
    )


def _judge_failures(outcomes: Sequence[Outcome], result: Result) -> None:
    heard = [outcome for outcome in outcomes if not outcome.failure.silent]
    bare = [(outcome, outcome.bare) for outcome in heard]
    known = [(outcome, outcome.known) for outcome in outcomes]
    for what, answers in (("from the bare log", bare), ("from the log and the exit status", known)):
        _add_answers(result, what, answers)
    for what, with_signature in (
        ("that have a signature", True),
        ("that are their own verdict", False),
    ):
        group = [each for each in known if (each[0].failure.cause != UNCAUGHT) is with_signature]
        result.add_count(
            f"right causes, failures {what}", sum(one.right(it) for one, it in group), len(group)
        )
    silent = [outcome.failure.name for outcome in outcomes if outcome.failure.silent]
    result.notes.append(f"without a word in their log, so left out of the bare log: {silent}")
    result.samples["failures"] = [
        [
            *(
                outcome.failure.name,
                outcome.failure.cause,
                outcome.failure.author,
                outcome.failure.status,
            ),
            *(
                outcome.bare.cause,
                outcome.bare.certainty,
                outcome.known.cause,
                outcome.known.certainty,
            ),
        ]
        for outcome in outcomes
    ]
    for outcome, verdict in known:
        if not outcome.right(verdict):
            runner = verdict.runner_up[0] if verdict.runner_up else None
            print(
                f"    {outcome.failure.cause} {outcome.failure.name}: {verdict.cause}"
                f" {verdict.title} (next {runner})"
            )
    for certainty in CERTAINTIES:
        group = [each for each in known if each[1].certainty == certainty]
        right = sum(outcome.right(verdict) for outcome, verdict in group)
        result.add_count(f'right causes that are called "{certainty}"', right, len(group))


def _judge_splits(outcomes: Sequence[Outcome], result: Result) -> None:
    for what, held_out in (("own failures", False), ("held-out failures", True)):
        _add_answers(
            result,
            what,
            [(each, each.known) for each in outcomes if each.failure.held_out is held_out],
        )
    for author in sorted({outcome.failure.author for outcome in outcomes}):
        group = [outcome for outcome in outcomes if outcome.failure.author == author]
        right = sum(outcome.right(outcome.known) for outcome in group)
        result.add_count(f"right causes, failures by author {author}", right, len(group))


def _add_answers(result: Result, what: str, answers: Sequence[tuple[Outcome, Verdict]]) -> None:
    """Add how many verdicts are right, and their macro-F1."""
    named = [
        (one.failure.cause, one.failure.cause if one.right(verdict) else f"wrong {verdict.cause}")
        for one, verdict in answers
    ]
    result.add_count(
        f"right causes, {what}", sum(label == answer for label, answer in named), len(named)
    )
    _add_ratio(result, f"macro-F1, {what}", macro_f1(named), named, "ratio", _TO_REACH)


def _judge_other_wordings(result: Result) -> None:
    texts = [(each.id, text) for each in all_signatures().values() for text in each.also.values()]
    causes = [(cause, judged(text, 1).cause, text) for cause, text in texts]
    for cause, found, text in causes:
        if found != cause:
            print(f"    other wording of {cause}: {found}: {text[:90]!r}")
    right = sum(cause == found for cause, found, _ in causes)
    result.add_count("right causes, texts of other versions", right, len(texts))


def _compare_with_baselines(outcomes: Sequence[Outcome], result: Result) -> None:
    by_status: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        by_status[outcome.failure.status][outcome.failure.cause] += 1
    titles = _Titles()
    baselines: tuple[tuple[str, Callable[[Recorded], str]], ...] = (
        ("last line of the traceback", lambda failure: titles.nearest(last_line(failure.log))),
        ("exit status", lambda failure: by_status[failure.status].most_common(1)[0][0]),
        ("keyword search", lambda failure: _by_keyword(failure.log)),
    )
    with_signature = [outcome.failure for outcome in outcomes if outcome.failure.cause != UNCAUGHT]
    for what, choose in baselines:
        answers = [(each, choose(each)) for each in with_signature]
        named = [
            (each.cause, each.cause if it in (each.cause, *each.also) else it)
            for each, it in answers
        ]
        right = sum(label == answer for label, answer in named)
        result.add_count(
            f"baseline {what}: right causes, failures that have a signature", right, len(named)
        )
        _add_ratio(result, f"baseline {what}: macro-F1", macro_f1(named), named, "ratio")


def macro_f1(named: Sequence[tuple[str, str]]) -> float:
    """Return the mean F1 over the labels, from pairs of a label and an answer."""
    scores = []
    for label in {label for label, _ in named}:
        hits = sum(each == label == answer for each, answer in named)
        given = sum(answer == label for _, answer in named)
        meant = sum(each == label for each, _ in named)
        scores.append(2 * hits / (given + meant))
    return sum(scores) / len(scores) if scores else math.nan


class _Titles:
    """Titles of signatures, with what they mean, as bags of words; rare words count more."""

    def __init__(self) -> None:
        self._words = {
            each.id: _words(f"{each.title} {each.means}") for each in all_signatures().values()
        }
        self._found = collections.Counter(word for words in self._words.values() for word in words)

    def nearest(self, line: str) -> str:
        """Return the id whose title shares most with a line."""
        given = _words(line)
        weights = {
            each: sum(1 / self._found[word] for word in words & given) / math.sqrt(len(words) or 1)
            for each, words in self._words.items()
        }
        return max(weights, key=lambda each: weights[each])


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 2)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception|Interrupt)\b", line)]
    return (errors or lines or [""])[-1]


def _by_keyword(text: str) -> str:
    lowered = text.lower()
    return next((cause for word, cause in _KEYWORDS if word in lowered), "H1600")


def _judge_healthy(result: Result) -> None:
    healthy = all_healthy()
    wrong = well = 0
    for each in healthy:
        verdict = judged(each.log)
        well += verdict.family == "ended well"
        if verdict.family not in ("ended well", "unknown"):
            wrong += 1
            print(f"    healthy {each.name}: {verdict.cause} {verdict.title}")
            result.notes.append(f"healthy {each.name} was taken for {verdict.cause}")
    result.add_count(
        "healthy runs with a verdict of failure, from the bare log", wrong, len(healthy), expected=0
    )
    result.add_count(
        "healthy runs that ended well by their bare log; else unknown", well, len(healthy)
    )


def _add_ratio(
    result: Result,
    what: str,
    value: float,
    group: Sequence[object],
    unit: str = "count",
    least: float | None = None,
) -> None:
    figure = Figure(
        what=what,
        unit=unit,
        value=round(value, 4),
        samples=len(group),
        to_reach=None if least is None else f">= {least:g}",
        reached=None if least is None else value >= least,
    )
    result.figures.append(figure)
    verdict = {None: "", True: "  reached", False: "  NOT REACHED"}[figure.reached]
    print(f"  {what}: {figure.value:g} {unit}{verdict}", flush=True)


if __name__ == "__main__":
    main()
