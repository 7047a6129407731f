"""Copy a batch to an accelerator when the loop requests it.

The copy is queued behind the work that the loop has already submitted. If the batch is in pinned
memory, the host does not wait, and torch keeps the memory until the copy has ended.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import LoaderError


def find_copy_target(device: torch.device | str | None) -> torch.device | None:
    """Return the device to copy to, or None if no device is given or it is the CPU.

    Raises:
        LoaderError: H607 for a device that does not exist.
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
            limit="batches are copied to it",
            fix=(
                "pass 'cuda', 'cuda:0' or another device that torch finds, or omit it to keep"
                " batches on the CPU."
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
        # A device without a backend, such as "meta", has no module.
        return ""
    if hasattr(module, "is_available") and not module.is_available():
        return "torch finds no such device"
    if target.index is not None and target.index >= module.device_count():
        return f"only {module.device_count()} exist, numbered from 0"
    return ""


def move_to_device(node: Any, target: torch.device | None) -> Any:
    """Return a tree with every tensor on a device.

    Tensors are found in dicts, lists, tuples, named tuples and dataclasses; objects with a method
    ``to`` are moved by it. Parts without tensors are returned as the same objects.

    Args:
        node: The tree, such as a batch.
        target: The device; None to leave everything where it is.
    """
    if target is None:
        return node
    # Objects with a method `to` move themselves. The exception is a UserDict, such as Hugging
    # Face's BatchEncoding, whose `to` changes it in place.
    if callable(getattr(node, "to", None)) and not isinstance(node, (type, UserDict)):
        # Only for tensors, and only on CUDA, does torch guarantee that later work waits for the
        # copy.
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
