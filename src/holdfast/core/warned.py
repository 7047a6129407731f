"""Ignore irrelevant warnings without affecting other warnings."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_warnings(category: type[Warning], message: str = "") -> Iterator[None]:
    """Ignore warnings of a category whose text starts with a match of the regular expression.

    The filter is inserted into `warnings.filters` directly. `warnings.catch_warnings` would mark
    the filters as changed, and Python would then repeat warnings that it shows only once.
    """
    pattern = re.compile(message, re.IGNORECASE) if message else None
    own_filter = ("ignore", pattern, category, None, 0)
    warnings.filters.insert(0, own_filter)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Other code may have cleared the list in the meantime.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(own_filter)  # type: ignore[attr-defined]
