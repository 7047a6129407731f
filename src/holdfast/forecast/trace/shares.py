"""Who owns the peak of a step, in few numbers: modules that repeat are added up."""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.forecast.trace.events import Trace, owners_at_peak

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST = 6  # modules and lines that are named


def shares_of(trace: Trace, optimizer: str) -> dict[str, Mapping[str, int]]:
    """Return bytes at the live peak by owners, modules (numbers as ``*``) and lines of the user's, largest first."""
    modules: dict[str, int] = {}
    for name, size in owners_at_peak(trace, "module", optimizer).items():
        path = _NUMBER.sub("*", name)
        modules[path] = modules.get(path, 0) + size
    return {
        "owners": owners_at_peak(trace, "owner", optimizer),
        "modules": _largest(modules),
        "lines": _largest(owners_at_peak(trace, "line", optimizer)),
    }


def _largest(sizes: Mapping[str, int]) -> dict[str, int]:
    known = sorted(((size, name) for name, size in sizes.items() if name), reverse=True)
    return {name: size for size, name in known[:_MOST]}
