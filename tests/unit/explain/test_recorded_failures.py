"""What is judged of outputs that were really printed: the corpus of ``evals/failures``."""

from __future__ import annotations

import pytest
from evals.failures import all_failures, all_healthy
from evals.verdicts import Outcome, judged


@pytest.mark.slow
def test_nearly_every_recorded_failure_gets_its_cause_and_no_healthy_run_one() -> None:
    """At most 3 of more than 1,100 verdicts are wrong, none of them on a run that trained well."""
    failures = all_failures()
    outcomes = [
        Outcome(failure=each, bare=judged(each.log), known=judged(each.log, each.status)) for each in failures
    ]
    assert len(outcomes) > 1_100
    wrong = [outcome.failure.name for outcome in outcomes if not outcome.right(outcome.known)]
    assert len(wrong) <= 3, wrong
    healthy = {each.name: judged(each.log).family for each in all_healthy()}
    assert set(healthy.values()) <= {"ended well", "unknown"}, healthy
