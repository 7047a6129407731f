"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import holdfast

MODULES = [found.name for found in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]


def test_examples() -> None:
    """Every example of every module gives the result that stands beside it."""
    modules = [importlib.import_module(name) for name in MODULES]
    failed = {
        each.__name__: doctest.testmod(each, optionflags=doctest.ELLIPSIS).failed
        for each in modules
    }
    assert {name: count for name, count in failed.items() if count} == {}


def test_there_are_examples() -> None:
    """The public face is shown in examples, not only described."""
    finder = doctest.DocTestFinder()
    shown = {
        name
        for name in ("Guard", "DataLoader", "Loss", "Policy")
        if any(test.examples for test in finder.find(getattr(holdfast, name)))
    }
    assert shown == {"Guard", "DataLoader", "Loss", "Policy"}
