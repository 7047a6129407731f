"""The first inputs of each kind that ``python -m evals.fuzz`` makes of a seed.

An hour of it is run by hand.
"""

from __future__ import annotations

import pytest
from evals.fuzz.__main__ import fuzz
from evals.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow


def test_hostile_inputs_are_read_or_refused():
    """No bare error, no hang, at most 1 GiB, nothing started, and nothing written outside of an
    input's folder.
    """
    found = fuzz(7, list(TARGETS), seconds=600, count=4)
    assert found["inputs"] == 4 * len(TARGETS)
    assert found["findings"] == []
