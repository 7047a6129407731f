"""Workers of torch's own ``DataLoader`` that live from epoch to epoch (``persistent_workers=True``).

The first epoch starts the workers, and draws a seed for them before the sampler draws its own. Later epochs find the
workers there, and draw the sampler's seed only. A process that resumes in a later epoch has no workers yet: without
what is here it would draw one number too many, and with that another order.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from holdfast.loader.random_state import isolated


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the workers of this loader live from epoch to epoch."""
    return bool(loader.persistent_workers) and loader.num_workers > 0


def has_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the next ``iter(loader)`` finds the workers of an epoch before."""
    return keeps_workers(loader) and getattr(loader, "_iterator", None) is not None


def match_workers(loader: DataLoader[Any], *, started: bool) -> None:
    """Have workers, or none, as the undisturbed run had when it began the epoch; global random state stays as it is.

    The loader's own ``generator`` may be drawn from.
    """
    if not keeps_workers(loader) or has_workers(loader) == started:
        return
    if started:
        _start_idle_workers(loader)
    else:
        # The iterator owns the workers, and ends them when it is collected.
        loader._iterator = None


def _start_idle_workers(loader: DataLoader[Any]) -> None:
    """Start the workers without a batch to make: an epoch of nothing, from a sampler without indices."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    # Torch refuses to set these after construction, since an epoch that is under way would not follow.
    object.__setattr__(loader, name, ())
    try:
        with isolated():
            iter(loader)
    finally:
        object.__setattr__(loader, name, sampler)
    iterator: Any = loader._iterator
    iterator._index_sampler = sampler
