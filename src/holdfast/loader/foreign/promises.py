"""Determine how exactly a run can resume with another library's loader.

The result is a promise: "bit-exact", "none, because ..." or "not known, because ...". The last two
state the reason and, where possible, what the user can do about it.
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
    """Return the promise for a loader, which states how exactly a run can resume with it."""
    if isinstance(loader, Iterator):
        return (
            "none, because an iterator cannot be restarted. A resume can only drop batches of a new"
            " iterator up to the position. Pass the iterable that the iterator was created from"
        )
    if is_stateful(loader):
        return (
            "not known, because it depends on the loader's own state_dict and load_state_dict."
            " Test them with holdfast.testing.check_resumable"
        )
    if isinstance(loader, (list, tuple)) and any(
        isinstance(entry, (DataLoader, Iterator)) for entry in loader
    ):
        return (
            "none, because this is a list of loaders, and a checkpoint does not contain their"
            " positions. Pass one of them as loader=, and the others as holdfast.DataLoader in"
            ' state={"labelled": loader}'
        )
    if isinstance(loader, PLAIN_SEQUENCES):
        return EXACT
    torch_loader = torch_loader_of(loader)
    if torch_loader is not None:
        return _promise_for_torch_loader(torch_loader)
    return (
        f"not known, because holdfast does not know how {type(loader).__name__} makes its batches."
        " A resume reads and drops batches up to the position. This is exact if the loader makes"
        " each batch only when requested, using global random numbers or generators in its"
        " attributes. Otherwise add state_dict and load_state_dict to the loader"
    )


def _promise_for_torch_loader(loader: DataLoader[Any]) -> str:
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"not known, because {type(loader).__name__} overrides __iter__ of torch's DataLoader"
        )
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return (
            "none, because with in_order=False batches arrive in the order in which workers finish"
            " them, which differs from run to run"
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            "not known, because the samples come from an IterableDataset"
            f" ({type(loader.dataset).__name__}), which may carry a position or a random state from"
            " epoch to epoch. A resume reads and drops batches up to the position."
            " holdfast.DataLoader saves the dataset's state_dict instead"
        )
    for sampler in samplers_of(loader):
        name = type(sampler).__name__
        if is_stateful(sampler):
            return (
                f"not known, because {name} determines the order. Its state_dict is saved, which is"
                " exact unless the sampler draws from torch's global generator during training"
            )
        if not has_no_state(sampler):
            return (
                f"not known, because {name} may carry state from epoch to epoch, and without"
                " state_dict and load_state_dict, that state cannot be saved"
            )
    if keeps_workers(loader):
        return (
            "not known, because with persistent_workers=True the workers carry their random state"
            " from epoch to epoch, and a checkpoint does not contain it. After a resume beyond the"
            " first epoch, the order is exact, but random augmentation in the workers is not."
            " holdfast.DataLoader restores both"
        )
    return EXACT


def keeps_by_state_dict(loader: object) -> bool:
    """Return whether a loader or one of its samplers has ``state_dict`` and ``load_state_dict``."""
    return is_stateful(loader) or any(is_stateful(sampler) for sampler in samplers_of(loader))
