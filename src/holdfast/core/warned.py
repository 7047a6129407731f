"""Ignore irrelevant warnings without affecting other warnings."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_warnings(category: type[Warning], message: str = "") -> Iterator[None]:
    """Ignore warnings of a category if the regular expression matches the start of their text.

    `warnings.catch_warnings` marks the filters as changed, which makes every module forget the
    warnings that it has already shown, so warnings meant to be shown once would be repeated.
    Therefore the filter is inserted into the list directly.
    """
    pattern = re.compile(message, re.IGNORECASE) if message else None
    own_filter = ("ignore", pattern, category, None, 0)
    warnings.filters.insert(0, own_filter)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Other code may have emptied the list meanwhile.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(own_filter)  # type: ignore[attr-defined]
