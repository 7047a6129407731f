"""What a resume can promise for a loader of another library.

The promise is "bit-exact", "none, because ..." or "not known, because ...": a sentence that tells a
user what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.loader.foreign.torch_workers import keeps_workers
from holdfast.loader.samplers import (
    PLAIN_SEQUENCES,
    has_no_state,
    is_stateful,
    samplers_of,
    torch_loader_of,
)

EXACT = "bit-exact"


def resume_promise(loader: object) -> str:
    """Return what a resume can promise for a loader. The first condition that applies decides."""
    if isinstance(loader, Iterator):
        return (
            "none, because an iterator cannot be restarted: a resume can only drop as many batches"
            " of a new one. Pass the iterable that it was made from"
        )
    if is_stateful(loader):
        return (
            "not known, because the loader's own state_dict and load_state_dict decide it; "
            "holdfast.testing.check_resumable tries them"
        )
    if isinstance(loader, (list, tuple)) and any(
        isinstance(entry, (DataLoader, Iterator)) for entry in loader
    ):
        return (
            "none, because this is a list of loaders, and no checkpoint holds the positions in"
            " them. Pass one as loader=, and the others as holdfast.DataLoader in"
            ' state={"labelled": loader}'
        )
    if isinstance(loader, PLAIN_SEQUENCES):
        return EXACT
    torch_loader = torch_loader_of(loader)
    if torch_loader is not None:
        return _promise_for_torch_loader(torch_loader)
    return (
        f"not known, because {type(loader).__name__} makes its batches in its own way. A resume"
        " reads and drops batches up to the position, which is exact if each is made only when it"
        " is requested, from global random numbers or generators that are attributes of the"
        " loader. Otherwise give it state_dict and load_state_dict"
    )


def _promise_for_torch_loader(loader: DataLoader[Any]) -> str:
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"not known, because {type(loader).__name__} overrides __iter__ of torch's DataLoader"
        )
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return (
            "none, because in_order=False returns batches in the order in which workers finish"
            " them, which differs from run to run"
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            "not known, because the samples come from an IterableDataset"
            f" ({type(loader.dataset).__name__}), which may carry a position or random numbers from"
            " epoch to epoch. A resume reads and drops batches up to the position;"
            " holdfast.DataLoader saves the dataset's state_dict instead"
        )
    for sampler in samplers_of(loader):
        name = type(sampler).__name__
        if is_stateful(sampler):
            return (
                f"not known, because the order comes from {name}: its state_dict is saved, which is"
                " exact unless it draws from torch's global random numbers during training"
            )
        if not has_no_state(sampler):
            return (
                f"not known, because {name} may carry state from epoch to epoch, and has no"
                " state_dict and load_state_dict for a checkpoint"
            )
    if keeps_workers(loader):
        return (
            "not known, because with persistent_workers=True the workers carry random numbers from"
            " epoch to epoch, and no checkpoint holds them: after a resume beyond the first epoch"
            " the order is exact, but random augmentation in the workers is not."
            " holdfast.DataLoader restores both"
        )
    return EXACT


def keeps_by_state_dict(loader: object) -> bool:
    """Return whether a loader or its sampler has a ``state_dict``, so that its author has
    provided for a resume.
    """
    return is_stateful(loader) or any(is_stateful(sampler) for sampler in samplers_of(loader))
