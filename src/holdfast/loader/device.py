"""Copy a batch to an accelerator when the loop asks for it, in the order of the loop's own work.

From pinned memory the host does not wait for the copy, and torch keeps that memory until the copy
has ended.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import LoaderError


def target_of(device: torch.device | str | None) -> torch.device | None:
    """Return where to copy to, None for nowhere: no device was named, or a CPU.

    H607 for one that is not there.
    """
    try:
        target = None if device is None else torch.device(device)
        if target is None or target.type == "cpu":
            return None
        module = _module_of(target)
        there = module is None or not hasattr(module, "is_available") or module.is_available()
        why = "torch finds none of this kind" if not there else ""
        if (
            module is not None
            and there
            and target.index is not None
            and target.index >= module.device_count()
        ):
            why = f"there are {module.device_count()}, counted from 0"
    except (RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise LoaderError(
            f"device={device!r} cannot be used ({why})",
            limit="batches are copied to it",
            fix=(
                "pass 'cuda', 'cuda:0' or another one that torch finds, or leave it out to keep"
                " batches on the CPU."
            ),
            rule="H607",
        )
    return target


def _module_of(device: torch.device) -> Any:
    """Return torch's module of a device, None for one that computes nothing, as "meta"."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def moved(node: Any, target: torch.device | None) -> Any:
    """Return a tree with every tensor on a device, and all else as the same object, such as any
    part without tensors.

    Moved are tensors in dicts, lists, tuples, named tuples and dataclasses, and what has a method
    ``to``.
    """
    if target is None:
        return node
    # What has a `to` knows best how; but Hugging Face's BatchEncoding, a UserDict, would move in
    # place.
    if callable(getattr(node, "to", None)) and not isinstance(node, (type, UserDict)):
        # Only on CUDA does torch promise that later work there waits for the copy, and only of
        # tensors.
        asynchronous = isinstance(node, (torch.Tensor, PackedSequence)) and target.type == "cuda"
        return node.to(target, non_blocking=True) if asynchronous else node.to(target)
    children = children_of(node)
    if children is None:
        return node
    there = {key: moved(child, target) for key, child in children.items()}
    same = all(there[key] is child for key, child in children.items())
    return node if same else rebuilt(node, there, checked=False)
