"""Suppress irrelevant warnings without affecting how other warnings are shown."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_warnings(category: type[Warning], message: str = "") -> Iterator[None]:
    """Ignore some warnings while the ``with`` block runs.

    The filter is inserted into `warnings.filters` directly. `warnings.catch_warnings` would mark
    the filters as changed, and Python would then repeat warnings that it normally shows only once.

    Args:
        category: The class of the warnings to ignore.
        message: A regular expression that must match the beginning of the warning's text. If empty,
            all warnings of the category are ignored.
    """
    pattern = re.compile(message, re.IGNORECASE) if message else None
    own_filter = ("ignore", pattern, category, None, 0)
    warnings.filters.insert(0, own_filter)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Other code may have removed the filter in the meantime.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(own_filter)  # type: ignore[attr-defined]
