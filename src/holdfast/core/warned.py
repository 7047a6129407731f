"""Ignore warnings that concern nobody, without an effect on other warnings."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def ignoring(category: type[Warning], message: str = "") -> Iterator[None]:
    """Ignore the warnings of a class whose text begins with `message`, a regular expression.

    `warnings.catch_warnings` marks the filters as changed, and then every module forgets which
    warnings it has shown: those that are shown once would be shown again after each use. Therefore
    the filter is inserted into the list directly.
    """
    pattern = re.compile(message, re.IGNORECASE) if message else None
    own_filter = ("ignore", pattern, category, None, 0)
    warnings.filters.insert(0, own_filter)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Somebody may have emptied the list meanwhile.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(own_filter)  # type: ignore[attr-defined]
