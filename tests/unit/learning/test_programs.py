"""Whole training programs, each with one fault or none, and what `watch` says of them."""

from __future__ import annotations

import pytest
from evals.not_learning.evaluate import judge, programs_of, run_once
from evals.not_learning.program import Program


@pytest.mark.slow
@pytest.mark.parametrize("program", programs_of("design"), ids=lambda program: program.name)
def test_a_fault_is_named_and_a_healthy_program_is_left_in_peace(program: Program) -> None:
    """What is loud is the planted fault or what it shows, and nothing at all where there is
    none.
    """
    found = judge([run_once(program, seed=0)])
    assert not found["crashes"]
    assert not found["wrong"]
    assert found["detected_if_asked"] is not program.healthy
    assert not (program.healthy and found["on_request"])
