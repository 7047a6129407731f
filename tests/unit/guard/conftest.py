"""What the tests of the guard may ask for."""

from __future__ import annotations

import pytest


@pytest.fixture
def unchecked_splits(clean_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard finds out in forks whether a step may be split: they take longer than all else in a small run.

    For tests of what is saved and resumed. Those that kill runs (`tests/faults/test_kills.py`) have the forks too.
    """
    monkeypatch.setenv("HOLDFAST_CHECK_SPLIT", "false")
