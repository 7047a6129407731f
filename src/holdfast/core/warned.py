"""Warnings that are nobody's concern, left out without an effect on others."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def ignoring(category: type[Warning], message: str = "") -> Iterator[None]:
    """Ignore the warnings of a class whose text begins with `message`, a regular expression.

    `warnings.catch_warnings` marks the filters as changed, whereupon each module forgets what it
        has warned of: what
    is to be shown once would be shown once more after each use. So the filter is put into the list
    as it is.
    """
    own = ("ignore", re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    warnings.filters.insert(0, own)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has emptied the list meanwhile
            warnings.filters.remove(own)  # type: ignore[attr-defined]
