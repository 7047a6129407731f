"""Verdicts on failures that are really reproduced, and on healthy runs: how often the cause is right.

Every function in ``benchmarks/failures`` fails in a process of its own. Its output alone, and its output with the
exit status, are judged and compared with the label. *Held out* are the modules ``held_out_*``: their authors had not
seen the signatures, and labelled from titles alone; signatures were mended after their first score. Baselines get the
same text: the signature whose title and meaning share most words with the last line of the traceback; the exit status
with the label that is most frequent for it in this very corpus, which favours it; the first keyword of a list. Texts
of other versions of torch, which
cannot be reproduced here, are those that the signatures quote: a check that they still match, no more.
"""

from __future__ import annotations

import collections
import concurrent.futures
import io
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.failures import Failure, Reproduced, all_failures, reproduce
from benchmarks.healthy_runs import HEALTHY
from benchmarks.results_file import Figure, Result, read_options
from holdfast.explain.collecting import collect_stream
from holdfast.explain.judging import judge
from holdfast.explain.signatures import all_signatures
from holdfast.explain.verdict import Verdict

_ROOT = Path(__file__).resolve().parents[1]
_QUICK_EVERY = 120
_TO_REACH = 0.95
_LEAST_FAILURES = 300

# What people search logs for, most telling first; ids of the signatures that mean it.
_KEYWORDS = (
    ("cuda out of memory", "H901"), ("can't allocate memory", "H906"), ("unable to allocate", "H907"),
    ("memoryerror", "H907"), ("bad_alloc", "H908"), ("oom-kill", "H909"), ("device-side assert", "H911"),
    ("illegal memory access", "H913"), ("not compiled with cuda", "H917"), ("same device", "H919"),
    ("timeout", "H921"), ("connection reset", "H922"), ("nccl", "H923"), ("finished reduction", "H925"),
    ("process group", "H926"), ("address already in use", "H927"), ("no space left", "H981"),
    ("worker", "H929"), ("too many open files", "H936"), ("pickle", "H940"), ("stack expects", "H942"),
    ("inplace operation", "H948"), ("second time", "H949"), ("does not require grad", "H950"),
    ("scalar outputs", "H951"), ("leaf variable", "H952"), ("inf checks", "H956"), ("non-finite", "H959"),
    ("nan", "H963"), ("cannot be multiplied", "H965"), ("groups=", "H966"), ("must match", "H968"),
    ("is invalid for input", "H969"), ("out of range", "H970"), ("dtype", "H971"), ("empty parameter", "H975"),
    ("size mismatch", "H977"), ("missing key", "H978"), ("central directory", "H979"), ("weights_only", "H982"),
    ("no such file", "H988"), ("permission denied", "H988"), ("no module named", "H985"),
    ("segmentation fault", "H991"), ("recursion", "H992"), ("keyerror", "H992"), ("indexerror", "H992"),
    ("killed", "H909"), ("sigterm", "H990"), ("keyboardinterrupt", "H1604"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One failure, what it left, and what was made of it."""

    failure: Failure
    left: Reproduced
    bare: Verdict
    known: Verdict

    def right(self, cause: str) -> bool:
        """Return whether a cause is the label, or one that is as right."""
        return cause == self.failure.label or cause in self.failure.also


def main() -> None:
    options = read_options("verdicts", __doc__ or "")
    chosen = [failure for failure in all_failures().values() if failure.possible]
    passed_over = len(all_failures()) - len(chosen)
    if options.quick:
        chosen = chosen[::_QUICK_EVERY]
    result = Result(
        options=options,
        parameters={"failures": len(chosen), "signatures": len(all_signatures()), "cannot_run_here": passed_over},
    )
    outcomes = _reproduced(chosen, result)
    _judge_failures(outcomes, result)
    _judge_splits(outcomes, result)
    _judge_other_wordings(result)
    _compare_with_baselines(outcomes, result)
    _judge_healthy(list(HEALTHY)[:: 6 if options.quick else 1], result)
    result.write()


def _reproduced(chosen: Sequence[Failure], result: Result) -> list[Outcome]:
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        left = list(pool.map(reproduce, chosen))
    outcomes = []
    for failure, each in zip(chosen, left, strict=True):
        if each.failed:
            bare, known = _judged(each, None), _judged(each, each.status)
            outcomes.append(Outcome(failure=failure, left=each, bare=bare, known=known))
        else:
            result.notes.append(f"did not fail as meant: {failure.name}, status {each.status}")
    result.add_count("failures that a script really reproduced", len(outcomes), len(chosen))
    texts = {
        (outcome.failure.label, re.sub(r"[\d.]+|0x\w+|'[^']*'", "", _last_line(outcome.left.text)))
        for outcome in outcomes
    }
    least = None if result.options.quick else _LEAST_FAILURES
    seen = {cause for outcome in outcomes for cause in (outcome.failure.label, *outcome.failure.also)}
    known = [each.id for each in all_signatures().values()]
    result.add_count(
        "signatures with a failure that reproduces them", sum(each in seen for each in known), len(known)
    )
    what = "distinct failures: labels with last lines, without numbers and names"
    _add_ratio(result, what, len(texts), len(outcomes), "count", least)
    return outcomes


def _judged(left: Reproduced, status: int | None) -> Verdict:
    return judge(collect_stream(io.BytesIO(left.text), name="run.log", status=status))


def _judge_failures(outcomes: Sequence[Outcome], result: Result) -> None:
    for what, choose in _CHOICES:
        with_status = "status" in what
        group = [each for each in outcomes if with_status or not each.failure.silent]
        answers = [(outcome, choose(outcome)) for outcome in group]
        right = sum(outcome.right(answer) for outcome, answer in answers)
        result.add_count(f"right causes, {what}", right, len(group))
        _add_ratio(result, f"macro-F1, {what}", macro_f1(answers), len(group), "ratio", _TO_REACH)
    silent = [outcome.failure.name for outcome in outcomes if outcome.failure.silent]
    result.notes.append(f"without a word in their log, so left out of the bare log: {silent}")
    result.samples["failures"] = [
        [
            outcome.failure.name, outcome.failure.label, outcome.failure.author, outcome.left.status,
            outcome.bare.cause, outcome.bare.confidence, outcome.known.cause, outcome.known.confidence,
        ]
        for outcome in outcomes
    ]  # fmt: skip
    for outcome in outcomes:
        if not outcome.right(outcome.known.cause):
            runner = outcome.known.runner_up[0] if outcome.known.runner_up else None
            print(f"    {outcome.failure.label} {outcome.failure.name}: {outcome.known.cause} (next {runner})")
    bands: dict[int, list[bool]] = collections.defaultdict(list)
    for outcome in outcomes:
        bands[min(int(outcome.known.confidence * 10), 9)].append(outcome.right(outcome.known.cause))
    for band, rights in sorted(bands.items()):
        what = f"right causes with a confidence of {band / 10:.1f} to {band / 10 + 0.1:.1f}"
        result.add_count(what, sum(rights), len(rights))


def _judge_splits(outcomes: Sequence[Outcome], result: Result) -> None:
    for what, held_out in (("own failures", False), ("held-out failures", True)):
        group = [outcome for outcome in outcomes if (".held_out" in f".{outcome.failure.name}") is held_out]
        if not group:
            continue
        answers = [(outcome, outcome.known.cause) for outcome in group]
        right = sum(outcome.right(answer) for outcome, answer in answers)
        result.add_count(f"right causes, {what}", right, len(group))
        _add_ratio(result, f"macro-F1, {what}", macro_f1(answers), len(group), "ratio", _TO_REACH)
    for author in sorted({outcome.failure.author for outcome in outcomes}):
        group = [outcome for outcome in outcomes if outcome.failure.author == author]
        right = sum(outcome.right(outcome.known.cause) for outcome in group)
        result.add_count(f"right causes, failures by author {author}", right, len(group))


def _judge_other_wordings(result: Result) -> None:
    texts = [(each.id, text) for each in all_signatures().values() for text in each.also.values()]
    right = 0
    for cause, text in texts:
        verdict = judge(collect_stream(io.BytesIO(text.encode()), name="run.log", status=1))
        right += verdict.cause == cause
        if verdict.cause != cause:
            print(f"    other wording of {cause}: {verdict.cause}: {text[:90]!r}")
    result.add_count("right causes, texts of other versions", right, len(texts))


def _compare_with_baselines(outcomes: Sequence[Outcome], result: Result) -> None:
    by_status = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        by_status[outcome.left.status][outcome.failure.label] += 1
    titles = _Titles()
    baselines: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
        ("last line of the traceback", lambda outcome: titles.nearest(_last_line(outcome.left.text))),
        ("exit status", lambda outcome: by_status[outcome.left.status].most_common(1)[0][0]),
        ("keyword search", lambda outcome: _by_keyword(outcome.left.text)),
    )
    for what, choose in baselines:
        answers = [(outcome, choose(outcome)) for outcome in outcomes]
        right = sum(outcome.right(answer) for outcome, answer in answers)
        result.add_count(f"baseline {what}: right causes", right, len(outcomes))
        _add_ratio(result, f"baseline {what}: macro-F1", macro_f1(answers), len(outcomes), "ratio", None)


_CHOICES: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("from the bare log", lambda outcome: outcome.bare.cause),
    ("from the log and the exit status", lambda outcome: outcome.known.cause),
)


def macro_f1(answers: Sequence[tuple[Outcome, str]]) -> float:
    """Return the mean F1 over the labels; an answer that is as right as the label counts as the label."""
    named = [
        (outcome.failure.label, outcome.failure.label if outcome.right(answer) else answer)
        for outcome, answer in answers
    ]
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
        self._words = {each.id: _words(f"{each.title} {each.means}") for each in all_signatures().values()}
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


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception|Interrupt)\b", line)]
    return (errors or lines or [""])[-1]


def _by_keyword(text: bytes) -> str:
    lowered = text.decode(errors="replace").lower()
    return next((cause for word, cause in _KEYWORDS if word in lowered), "H1600")


def _judge_healthy(names: Sequence[str], result: Result) -> None:
    wrong = well = ended = 0
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [sys.executable, "-m", "benchmarks.healthy_runs", name],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        ended += run.returncode == 0
        verdict = judge(collect_stream(io.BytesIO(run.stdout), name="run.log"))
        well += verdict.family == "ended well"
        if verdict.family not in ("ended well", "unknown"):
            wrong += 1
            print(f"    healthy {name}: {verdict.cause} {verdict.title}")
            result.notes.append(f"healthy {name} was taken for {verdict.cause}")
    result.add_count("healthy runs that ended with status 0", ended, len(names), expected=len(names))
    result.add_count("healthy runs with a verdict of failure, from the bare log", wrong, len(names), expected=0)
    result.add_count("healthy runs that ended well by their bare log; else unknown", well, len(names))


def _add_ratio(result: Result, what: str, value: float, samples: int, unit: str, least: float | None) -> None:
    figure = Figure(
        what=what,
        unit=unit,
        value=round(value, 4),
        samples=samples,
        to_reach=None if least is None else f">= {least:g}",
        reached=None if least is None else value >= least,
    )
    result.figures.append(figure)
    verdict = {None: "", True: "  reached", False: "  NOT REACHED"}[figure.reached]
    print(f"  {what}: {figure.value:g} {unit}{verdict}", flush=True)


if __name__ == "__main__":
    main()
