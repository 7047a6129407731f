"""Functions of the user's that a command is given by name: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.user_modules import import_user_module


def load_factory(factory: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` or ``file.py:function`` names.

    Raises:
        PolicyError: H703.
    """
    place, _, name = factory.rpartition(":")
    if not place or not name:
        raise unusable_factory(factory, "there is no function after a colon")
    try:
        found = getattr(import_user_module(place), name)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        fix = "correct what the message names, in the module or in the function."
        raise unusable_factory(factory, f"{type(error).__name__}: {error}", fix) from error
    if not callable(found):
        raise unusable_factory(factory, f"it is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def unusable_factory(
    factory: str, why: str, fix: str = "write package.module:build or path/to/file.py:build."
) -> PolicyError:
    """Return the error that says why a factory cannot be used: H703."""
    return PolicyError(
        f"factory {factory!r} cannot be used ({why})",
        limit="it names a function of a module, or of a file that ends with .py",
        fix=fix,
        rule="H703",
    )
