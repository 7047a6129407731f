"""Imports of frameworks that may not be installed, and what is said when one cannot be used."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from holdfast.core.errors import PolicyError

_log = logging.getLogger("holdfast")


def load(name: str) -> Any:
    """Import a module of a framework.

    Raises:
        PolicyError: H111, saying which extra to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PolicyError(
            f"{name.partition('.')[0]} cannot be imported ({error})",
            limit="this integration works inside it",
            fix='install the extra: pip install "holdfast[integrations]".',
            rule="H111",
        ) from error


def excluded(what: str, why: str, fix: str) -> PolicyError:
    """Return the error about a setting of a framework that a guarded step cannot keep its promises with."""
    return PolicyError(what, limit=why, fix=fix, rule="H111")


def tell(note: Callable[..., None] | None, kind: str, **facts: Any) -> None:
    """Record an event by what a guard gave for it, or log it where no guard is there yet."""
    if note is not None:
        note(kind, **facts)
    else:
        _log.warning("%s: %s", kind, ", ".join(f"{name}={value}" for name, value in facts.items()))
