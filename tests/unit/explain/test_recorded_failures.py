"""What is judged of outputs that were really printed: the corpus of ``evals/failures``."""

from __future__ import annotations

import pytest
from evals.failures import Recorded, all_failures, all_healthy
from evals.verdicts import Outcome, judged

from holdfast.explain.verdict import Verdict


def _is_right(failure: Recorded, verdict: Verdict) -> bool:
    return Outcome(failure=failure, bare=verdict, known=verdict).right(verdict)


@pytest.mark.slow
def test_nearly_every_recorded_failure_gets_its_cause_and_no_healthy_run_one() -> None:
    """At most 3 of more than 1,100 verdicts are wrong, none of them on a run that trained well."""
    verdicts = [(each, judged(each.log, each.status)) for each in all_failures()]
    assert len(verdicts) > 1_100
    wrong = [each.name for each, verdict in verdicts if not _is_right(each, verdict)]
    assert len(wrong) <= 3, wrong
    healthy = {each.name: judged(each.log).family for each in all_healthy()}
    assert set(healthy.values()) <= {"ended well", "unknown"}, healthy
