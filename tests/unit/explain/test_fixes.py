"""The fixes of signatures: each is tried on a real program, has a source, or is listed as open."""

from __future__ import annotations

import pytest
from evals import fixes
from evals.fixes.running import run_command

from holdfast.explain.signatures import all_signatures

CASES = {case.name: case for case in fixes.all_cases()}


def test_every_signature_is_tried_or_has_a_source_or_is_open() -> None:
    """A new signature needs a case, a source or an entry under ``open``, and only one of them."""
    tried = {case.signature_id for case in CASES.values()}
    sources = {source.signature_id for source in fixes.all_sources()}
    still_open = set(fixes.open_signatures())
    assert tried | sources | still_open == set(fixes.signatures_with_a_fix())
    assert not tried & sources
    assert not tried & still_open
    assert not sources & still_open


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_tries_what_the_signature_advises(case: fixes.Case) -> None:
    """If the text of a fix changes, its case must be looked at again."""
    assert case.tried in all_signatures()[case.signature_id].fix


def test_every_case_is_recorded_as_it_is_now() -> None:
    """``recorded.jsonl`` has an outcome of each case, made with its present programs."""
    outcomes = {outcome.case.name: outcome for outcome in fixes.recorded_outcomes()}
    assert outcomes.keys() == CASES.keys()
    failed = [
        name for name, outcome in outcomes.items() if not (outcome.recognized and outcome.helped)
    ]
    assert not failed


def test_every_folder_belongs_to_a_case() -> None:
    """No program lies about that no case runs."""
    assert {folder.name for folder in fixes.PROGRAMS.iterdir()} == CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H942", "H965", "H978"])
def test_the_program_fails_as_its_signature_says_and_the_fix_helps(name: str) -> None:
    """Three cases from end to end: a batch, a shape, and a checkpoint."""
    case = CASES[name]
    failing = run_command(case, case.fails)
    fixed = run_command(case, case.fixed)
    outcome = fixes.Outcome(case=case, failing=failing, fixed=fixed)
    assert outcome.recognized, failing
    assert outcome.helped, fixed
