"""Try the fixes of signatures on programs that really fail.

    python -m evals.fixes [NAME ...]

For each case, the failing program runs first: `holdfast explain` must name exactly this signature
for its output. Then the same program runs with the fix applied, and must end well. With names, such
as H942 or H978-entry, only these cases run, and the output of what went wrong is printed. The
outcomes are kept in ``recorded.jsonl``, and the result file counts all that are there: those of
cases that have changed since are left out.

The programs need Linux, a torch without CUDA, gcc, and the right to mount file systems in a
namespace of their own.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.results_file import Result, add_options, options_of

from evals.fixes import (
    Case,
    Outcome,
    Run,
    all_cases,
    all_sources,
    open_signatures,
    record,
    recorded_outcomes,
    signatures_with_a_fix,
)
from evals.fixes.running import run_command

_QUICK_EVERY = 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these cases")
    parser.add_argument("--missing", action="store_true", help="only cases without a record")
    add_options(parser)
    arguments = parser.parse_args()
    cases = all_cases()
    if arguments.names:
        cases = [
            case
            for case in cases
            if case.name in arguments.names or case.signature_id in arguments.names
        ]
    elif arguments.missing:
        recorded = {outcome.case.name for outcome in recorded_outcomes()}
        cases = [case for case in cases if case.name not in recorded]
    elif arguments.quick:
        cases = cases[::_QUICK_EVERY]
    outcomes = []
    for case in cases:
        outcome = _try(case, verbose=len(cases) < len(all_cases()))
        outcomes.append(outcome)
        if not arguments.quick:
            record(outcome)
    _write_result(outcomes if arguments.quick else recorded_outcomes(), arguments)
    return 0 if all(outcome.recognized and outcome.helped for outcome in outcomes) else 1


def _try(case: Case, *, verbose: bool) -> Outcome:
    """Run both programs of a case, and print what came of them."""
    outcome = Outcome(
        case=case,
        failing=run_command(case, case.fails),
        fixed=run_command(case, case.fixed),
    )
    print(
        f"{case.name}: {_words(outcome.failing, ok=outcome.recognized)}; with the fix:"
        f" {_words(outcome.fixed, ok=outcome.helped)}",
        flush=True,
    )
    for run, as_expected in (
        (outcome.failing, outcome.recognized),
        (outcome.fixed, outcome.helped),
    ):
        if verbose and not as_expected:
            print(run.output)
    return outcome


def _words(run: Run, *, ok: bool) -> str:
    words = f"status {run.status}, {run.cause} {run.title}"
    return words if ok else f"NOT AS EXPECTED ({words})"


def _write_result(outcomes: list[Outcome], arguments: argparse.Namespace) -> None:
    cases = all_cases()
    signatures = signatures_with_a_fix()
    sources = {source.signature_id for source in all_sources()}
    result = Result(
        options=options_of("fixes", arguments), parameters={"signatures": len(signatures)}
    )
    recognized = [outcome for outcome in outcomes if outcome.recognized]
    helped = [outcome for outcome in recognized if outcome.helped]
    tried = {outcome.case.signature_id for outcome in helped}
    result.add_count(
        "failing programs whose signature is named first",
        len(recognized),
        len(cases),
        expected=len(cases),
    )
    result.add_count(
        "fixes after which the program ends well", len(helped), len(cases), expected=len(cases)
    )
    result.add_count("signatures whose fix was tried", len(tried), len(signatures))
    result.add_count(
        "signatures whose fix was not tried, but has a source",
        len(sources - tried),
        len(signatures),
    )
    result.add_count("signatures that are still open", len(open_signatures()), len(signatures))
    result.samples["cases"] = [
        [
            *(outcome.case.name, outcome.failing.status, outcome.failing.cause),
            *(outcome.fixed.status, outcome.fixed.cause),
        ]
        for outcome in outcomes
    ]
    result.write()


if __name__ == "__main__":
    sys.exit(main())
