"""The registry of signatures: every known way to fail, by its id. The signatures lie in the modules beside this file.

Each module holds a tuple ``SIGNATURES``. Does not: match them against anything (see ``matching``).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from holdfast.explain.signature import Signature


@functools.cache
def all_signatures() -> dict[str, Signature]:
    """Return every signature by its id, in the order of the ids.

    Raises:
        ValueError: if two have the same id: a mistake of ours.
    """
    found: dict[str, Signature] = {}
    for module in pkgutil.iter_modules(__path__):
        signatures: tuple[Signature, ...] = importlib.import_module(f"{__name__}.{module.name}").SIGNATURES
        for signature in signatures:  # a module may hand on those of another that it was split from
            if found.get(signature.id, signature) is not signature:
                raise ValueError(f"two signatures are called {signature.id}")
            found[signature.id] = signature
    return dict(sorted(found.items(), key=lambda pair: int(pair[0][1:])))
