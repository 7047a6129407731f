"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import holdfast

MODULES = [
    found.name
    for found in pkgutil.walk_packages(holdfast.__path__, "holdfast.")
    if found.name not in ("holdfast.chaos.digits", "holdfast.chaos.attempt")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    """Every example of this module gives the result that stands beside it."""
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.failed == 0


def test_there_are_examples() -> None:
    """The public face is shown in examples, not only described."""
    finder = doctest.DocTestFinder()
    shown = {
        name
        for name in ("Guard", "DataLoader", "Loss", "Policy")
        if any(test.examples for test in finder.find(getattr(holdfast, name)))
    }
    assert shown == {"Guard", "DataLoader", "Loss", "Policy"}
