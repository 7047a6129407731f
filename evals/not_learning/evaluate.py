"""Does `watch` find why a run does not learn, and is it silent where a run is well?

    python -m evals.not_learning.evaluate [--set NAME] [--seeds 3] [--only NAME] [--processes 1]

How: every program of a set runs with every seed under the watch, and its findings are compared with
what was planted. All counts are by program, so that no program weighs more for its seeds. A program
is *detected* if most of its runs have an error or an advice among the ids that are right for it.
Its cause *comes first* if in most of its runs the first error or advice names the cause; a program
whose fault has no number in the catalogue can never reach this, and one whose fault shows no
symptom that has a number can never be detected. It raises a false *alarm* if any of its runs has
one. *Precision* is the share of right ones among all different pairs of a program and the id of an
error or advice in any of its runs; in a healthy program every one is wrong. A program or a watch
that raises counts as not detected, and in a healthy program as an alarm of level error.

To reach: 0 errors in healthy programs, advice in at most 2 % of them; >= 85 % detected, >= 60 %
with the cause first, precision >= 0.9.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import pkgutil
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.forks import single_threaded
from benchmarks.results_file import Figure, Options, Result, without_paths

from evals.not_learning.program import Program, Programs, programs_in

SETS = ("design", "held_out_2", "held_out_3", "unseen_1", "unseen_2")
_LOUD = ("error", "advice")

# One run: program, healthy, seed, causes, detects, found (pairs of id and severity, in order),
# on_request (ids of errors and advice that are only reported to those who ask), crash.
Row = dict[str, Any]


def programs_of(corpus: str) -> list[Program]:
    """Return the programs of one of `SETS`, the healthy ones first."""
    package = importlib.import_module(f"evals.not_learning.{corpus}")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return programs_in(
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Programs) and each is not Programs
    )


def run_once(program: Program, seed: int) -> Row:
    """Run a program under the watch, and return what was found, as plain data."""
    from holdfast.learning.watch import watch

    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    watches: list[Any] = []

    def kept(*given: Any, **options: Any) -> Any:
        watches.append(watch(*given, **options))
        return watches[-1]

    found: list[tuple[str, str]] = []
    on_request: set[str] = set()
    crash = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program.train(kept, seed)
            found = [
                (finding.rule, finding.severity) for made in watches for finding in made.findings()
            ]
            asked = [finding for made in watches for finding in made.diagnose()]
            loud = {finding.rule for finding in asked if finding.severity in _LOUD}
            on_request = loud - {rule for rule, _ in found}
        except Exception as error:  # noqa: BLE001 - a crash is a result, and is reported as one
            last = traceback.extract_tb(error.__traceback__)[-1]
            crash = (
                f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}:"
                f" {without_paths(str(error))}"
            )
    return {
        "program": program.name,
        "healthy": program.healthy,
        "seed": seed,
        "causes": program.causes,
        "detects": program.detects,
        "found": found,
        "on_request": sorted(on_request),
        "crash": crash,
    }


def evaluate(programs: Sequence[Program], seeds: Sequence[int], processes: int = 1) -> list[Row]:
    """Run every program with every seed, so many at once.

    Return a row for each run, program by program.
    """
    pairs = [(program, seed) for program in programs for seed in seeds]
    if processes == 1:
        return [run_once(program, seed) for program, seed in pairs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=single_threaded) as pool:
        return list(pool.map(run_once, *zip(*pairs, strict=True)))


def judge(rows: Sequence[Row]) -> Row:
    """Return the verdict on one program from all of its runs."""
    detects, causes = set(rows[0]["detects"]), set(rows[0]["causes"])
    loud = [[rule for rule, severity in row["found"] if severity in _LOUD] for row in rows]
    named = {rule for rules in loud for rule in rules}
    severities = {severity for row in rows for _, severity in row["found"]}
    crashes = sorted({row["crash"] for row in rows if row["crash"]})
    asked = [[*rules, *row["on_request"]] for rules, row in zip(loud, rows, strict=True)]
    return {
        "program": rows[0]["program"],
        "healthy": rows[0]["healthy"],
        "detected": sum(bool(detects & set(rules)) for rules in loud) > len(rows) / 2,
        "cause_first": sum(bool(rules) and rules[0] in causes for rules in loud) > len(rows) / 2,
        "detected_if_asked": sum(bool(detects & set(rules)) for rules in asked) > len(rows) / 2,
        "on_request": sorted({rule for row in rows for rule in row["on_request"]}),
        "right": sorted(named & detects),
        "wrong": sorted(named - detects),
        "error": "error" in severities or bool(crashes),
        "advice": "advice" in severities,
        "crashes": crashes,
        "found": [[f"{rule} {severity}" for rule, severity in row["found"]] for row in rows],
    }


def judge_all(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts on all programs, in the order of the rows."""
    by_program: dict[str, list[Row]] = {}
    for row in rows:
        by_program.setdefault(row["program"], []).append(row)
    return [judge(runs) for runs in by_program.values()]


def line_of(verdict: Row) -> str:
    """Return a line about one program.

    What was found in its first run, and what is wrong with that.
    """
    if verdict["healthy"]:
        mark = "ALARM " if verdict["error"] else "advice" if verdict["advice"] else "      "
    else:
        mark = "cause " if verdict["cause_first"] else "found " if verdict["detected"] else "MISSED"
    wrong = f"  wrong: {' '.join(verdict['wrong'])}" if verdict["wrong"] else ""
    if verdict["on_request"]:
        wrong += f"  on request: {' '.join(verdict['on_request'])}"
    crash = f"  crash: {verdict['crashes'][0]}" if verdict["crashes"] else ""
    return f"  {mark} {verdict['program']:40} {', '.join(verdict['found'][0])}{wrong}{crash}"


def add_share(result: Result, what: str, count: int, of: int, at_least: float) -> None:
    """Add the share of some cases, with the share to reach."""
    if not of:
        result.notes.append(f"no case of: {what}")
        return
    share = count / of
    figure = Figure(
        what=what,
        unit="share",
        value=round(share, 4),
        samples=of,
        to_reach=f">= {at_least:g}",
        reached=share >= at_least,
    )
    result.figures.append(figure)
    print(
        f"  {what}: {count} of {of} = {share:.3f} "
        f" {'reached' if figure.reached else 'NOT REACHED'}",
        flush=True,
    )


def add_totals(result: Result, verdicts: Sequence[Row]) -> None:
    """Add the figures of a set to its result."""
    healthy = [verdict for verdict in verdicts if verdict["healthy"]]
    faulty = [verdict for verdict in verdicts if not verdict["healthy"]]
    right = sum(len(verdict["right"]) for verdict in verdicts)
    wrong = sum(len(verdict["wrong"]) for verdict in verdicts)
    detected = sum(verdict["detected"] for verdict in faulty)
    add_share(result, "faulty programs detected", detected, len(faulty), 0.85)
    if_asked = sum(verdict["detected_if_asked"] for verdict in faulty)
    result.add_count("faulty programs detected, with rules on request", if_asked, len(faulty))
    first = sum(verdict["cause_first"] for verdict in faulty)
    add_share(result, "faulty programs whose cause is named first", first, len(faulty), 0.6)
    add_share(result, "precision of errors and advice", right, right + wrong, 0.9)
    quiet = sum(not verdict["error"] and not verdict["advice"] for verdict in healthy)
    add_share(result, "healthy programs without error and advice", quiet, len(healthy), 0.98)
    alarms = sum(verdict["error"] for verdict in healthy)
    result.add_count("healthy programs with an error", alarms, len(healthy), expected=0)
    asked = sum(bool(verdict["on_request"]) for verdict in healthy)
    result.add_count("healthy programs with a finding on request", asked, len(healthy))
    advised = sum(verdict["advice"] for verdict in healthy)
    result.add_count("healthy programs with an advice", advised, len(healthy))
    crashed = sum(bool(verdict["crashes"]) for verdict in verdicts)
    result.add_count("programs that raised under the watch", crashed, len(verdicts), expected=0)
    for verdict in verdicts:
        result.samples[verdict["program"]] = {
            key: value for key, value in verdict.items() if key != "program"
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=SETS, default="held_out_2", help="whose programs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each program")
    parser.add_argument("--only", help="one program, by name; nothing is written then")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--quick", action="store_true", help="one seed; the result goes beside the full ones"
    )
    given = parser.parse_args()
    single_threaded()
    seeds = range(1 if given.quick else given.seeds)
    programs = [program for program in programs_of(given.set) if given.only in (None, program.name)]
    if not programs:
        parser.error(f"no program of the set {given.set} is named {given.only}")
    quick = len(seeds) < 3
    name = f"not_learning_{given.set}"
    folder = Path(benchmarks.__path__[0]) / "results" / ("quick" if quick else "")
    options = Options(name=name, quick=quick, out=folder / f"{name}.json")
    parameters = {"set": given.set, "programs": len(programs), "seeds": len(seeds)}
    result = Result(options=options, parameters=parameters)
    verdicts = judge_all(evaluate(programs, seeds, given.processes))
    for verdict in verdicts:
        print(line_of(verdict))
    add_totals(result, verdicts)
    if given.only is None:
        result.write()


if __name__ == "__main__":
    main()
