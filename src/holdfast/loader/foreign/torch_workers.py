"""Let torch's ``DataLoader`` with ``persistent_workers=True`` resume in the original order.

In the first epoch, torch starts the workers and draws a seed for them before the sampler draws its
own seed. Later epochs reuse the workers and only draw the sampler's seed. A process that resumes in
a later epoch has no workers yet. If it simply began the epoch, torch would draw one extra random
number, and the sampler would return a different order. The workers are therefore started before the
epoch begins.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from holdfast.loader.random_state import isolated


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Return whether a loader keeps its workers from epoch to epoch."""
    return bool(loader.persistent_workers) and loader.num_workers > 0


def has_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the next ``iter(loader)`` will reuse the workers of an earlier epoch."""
    return keeps_workers(loader) and getattr(loader, "_iterator", None) is not None


def match_workers(loader: DataLoader[Any], *, started: bool) -> None:
    """Start or end a loader's persistent workers, to match the run that is being resumed.

    The global random state does not change, but starting workers may draw from the loader's own
    ``generator``.

    Args:
        loader: The loader, before the epoch begins. A loader without persistent workers is not
            changed.
        started: Whether that run had workers at this point.
    """
    if not keeps_workers(loader) or has_workers(loader) == started:
        return
    if started:
        _start_idle_workers(loader)
    else:
        # The iterator owns the workers and ends them when it is garbage-collected.
        loader._iterator = None


def _start_idle_workers(loader: DataLoader[Any]) -> None:
    """Start the workers without loading data, by beginning an epoch with an empty sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    # torch's `__setattr__` refuses to change the sampler after construction.
    object.__setattr__(loader, name, ())
    try:
        with isolated():
            iter(loader)
    finally:
        object.__setattr__(loader, name, sampler)
    # From the next epoch on, the iterator must use the loader's own sampler again.
    iterator: Any = loader._iterator
    iterator._index_sampler = sampler
