"""Copy batches to an accelerator: which device is meant, and a batch on it, whatever containers it is made of."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import LoaderError


def find_device(device: torch.device | str | None) -> torch.device | None:
    """Return where batches are copied to, None for a CPU or nowhere; H607 if it is not there."""
    try:
        target = None if device is None else torch.device(device)
        if target is None or target.type == "cpu":
            return None
        module = _module_of(target)
        there = module is None or not hasattr(module, "is_available") or module.is_available()
        why = "torch finds none of this kind" if not there else ""
        if module is not None and there and target.index is not None and target.index >= module.device_count():
            why = f"there are {module.device_count()}, counted from 0"
    except (RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise LoaderError(
            f"device={device!r} cannot be used ({why})",
            limit="batches are copied to it",
            fix="pass 'cuda', 'cuda:0' or another one that torch finds, or leave it out to keep batches on the CPU.",
            rule="H607",
        )
    return target


def _module_of(device: torch.device) -> Any:
    """Return torch's module of a device, None for one that computes nothing, as "meta"."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def moved(batch: Any, target: torch.device) -> Any:
    """Return a batch with every tensor on a device; a part in which nothing moved is the same object.

    It may be any tree of dicts, lists, tuples, named tuples and dataclasses. The host does not wait for copies from
    pinned memory, which torch keeps until they have ended.
    """
    # What has a `to` knows best how; but Hugging Face's BatchEncoding, a UserDict, would move in place.
    if callable(getattr(batch, "to", None)) and not isinstance(batch, (type, UserDict)):
        plain = isinstance(batch, (torch.Tensor, PackedSequence))
        return batch.to(target, non_blocking=True) if plain else batch.to(target)
    children = children_of(batch)
    if children is None:
        return batch
    there = {key: moved(child, target) for key, child in children.items()}
    same = all(there[key] is child for key, child in children.items())
    return batch if same else rebuilt(batch, there, checked=False)
