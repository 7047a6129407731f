"""Warnings are left out without making others come again."""

from __future__ import annotations

import warnings

import pytest
import torch._dynamo  # noqa: F401 - so that `eager` has something to do

from holdfast.core.warned import ignore_warnings
from holdfast.numerics.eager import eager


@pytest.mark.parametrize(
    "inside", [lambda: ignore_warnings(DeprecationWarning), eager], ids=["ignoring", "eager"]
)
def test_what_was_shown_once_is_not_shown_again(inside: object) -> None:
    """A warning that comes in each step is shown once, however often others are left out
    meanwhile.
    """
    registry: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        filters = list(warnings.filters)
        for _ in range(5):
            with inside():  # type: ignore[operator]
                (
                    warnings.warn_explicit("left out", DeprecationWarning, "a.py", 1)
                    if inside is not eager
                    else None
                )
            warnings.warn_explicit("broadcast", UserWarning, "b.py", 2, registry=registry)
        assert list(warnings.filters) == filters
    assert [str(each.message) for each in shown] == ["broadcast"]
