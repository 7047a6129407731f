"""Copy a batch to an accelerator when the training loop requests it.

The copy is queued behind the work that the loop has already submitted to the device. If the batch
is in pinned memory, the host does not wait for the copy, and torch keeps the pinned memory alive
until the copy has finished.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import LoaderError


def find_copy_target(device: torch.device | str | None) -> torch.device | None:
    """Return the device to which batches are copied, or None if they stay on the CPU.

    Args:
        device: The user's ``device`` argument.

    Raises:
        LoaderError: H607 if the device does not exist.
    """
    if device is None:
        return None
    try:
        target = torch.device(device)
        problem = _find_problem(target)
    except (RuntimeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    if problem:
        raise LoaderError(
            f"device={device!r} cannot be used ({problem})",
            limit="the loader copies every batch to this device",
            fix=(
                "pass 'cuda', 'cuda:0' or another available device, or omit device= to keep batches"
                " on the CPU."
            ),
            rule="H607",
        )
    return None if target.type == "cpu" else target


def _find_problem(target: torch.device) -> str:
    """Return why batches cannot be copied to a device, or "" if they can."""
    if target.type == "cpu":
        return ""
    try:
        module: Any = torch.get_device_module(target)
    except RuntimeError:
        # A device without a backend, such as "meta", has no module and is always usable.
        return ""
    if hasattr(module, "is_available") and not module.is_available():
        return "torch does not find this device"
    if target.index is not None and target.index >= module.device_count():
        return f"there are only {module.device_count()} such devices, numbered from 0"
    return ""


def move_to_device(node: Any, target: torch.device | None) -> Any:
    """Return a tree in which every tensor has been copied to a device.

    Tensors are found in dicts, lists, tuples, named tuples and dataclasses. Objects that have a
    ``to`` method are moved by calling this method. Parts of the tree without tensors are not
    copied.

    Args:
        node: The tree, such as a batch.
        target: The device, or None to return the tree unchanged.
    """
    if target is None:
        return node
    # Objects with a `to` method move themselves. The exception is UserDict: the `to` method of a
    # subclass, such as Hugging Face's BatchEncoding, changes the object in place.
    if callable(getattr(node, "to", None)) and not isinstance(node, (type, UserDict)):
        # Only on CUDA does torch guarantee that later work waits for a non-blocking copy.
        is_tensor = isinstance(node, (torch.Tensor, PackedSequence))
        if is_tensor and target.type == "cuda":
            return node.to(target, non_blocking=True)
        return node.to(target)
    children = children_of(node)
    if children is None:
        return node
    moved_children = {key: move_to_device(child, target) for key, child in children.items()}
    if all(moved_children[key] is child for key, child in children.items()):
        return node
    return rebuild(node, moved_children, checked=False)
