"""Load the state of each component from a verified checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.buffers import Groups
from holdfast.checkpoint.codec import decode
from holdfast.checkpoint.manifest import HEADER, Extents, read_manifest
from holdfast.checkpoint.read_errors import not_ours, out_of_reach_now, reading
from holdfast.checkpoint.saver import STATE_FILE
from holdfast.checkpoint.store import Entry
from holdfast.checkpoint.tensor_files import SUFFIX, Share, is_saved_as, read_tensors
from holdfast.core.files import read_file

_MAX_STATE_BYTES = 1 << 30
# Prefixes of torch's out-of-memory messages.
_OUT_OF_MEMORY = ("[enforce fail", "CUDA out of memory")


def all_rows(_component: str, _name: str, _shape: torch.Size) -> Share | None:
    """Return None, so that all rows of every tensor are read."""
    return None


def read_components(
    entry: Entry,
    names: Iterable[str],
    into: Groups | None = None,
    share_of: Callable[[str, str, torch.Size], Share | None] = all_rows,
) -> dict[str, Any]:
    """Return the state trees of the requested components that are in a checkpoint, by name.

    Args:
        entry: The checkpoint.
        names: Names of the components to read.
        into: Live tensors by component and name, to be overwritten in place. A new tensor is
            created on the host if there is no live tensor with the saved dtype and shape, or if the
            live tensor is expanded.
        share_of: Given a tensor's component, name and full shape, returns the rows to read, or None
            for all rows.

    Raises:
        CheckpointError: H311 if a file was truncated after it was verified, or if the contents were
            not written by holdfast.
        RunDirectoryError: H307 if the checkpoint is temporarily unreadable.
    """
    trees = {}
    try:
        state = read_state(entry)
        for name in names:
            if name not in state:
                continue
            paths = _tensor_files_of(entry, name)
            live = (into or {}).get(name, {})
            with reading(entry.path, name):
                tensors = read_tensors(paths, live, partial(share_of, name))
                trees[name] = decode(state[name], tensors)
    except OSError as error:
        # The bytes have already been verified, so the checkpoint is not damaged.
        raise out_of_reach_now(entry.path, error) from error
    except RuntimeError as error:
        if str(error).startswith(_OUT_OF_MEMORY):
            raise
        raise not_ours(entry.path, error) from error
    return trees


def _tensor_files_of(entry: Entry, component: str) -> list[Path]:
    """Return a component's files, ordered by the rank that wrote them.

    A tensor's rows, read from the files in this order, are in their original order.
    """
    rank_folders = sorted(
        entry.path.glob("rank*/"), key=lambda folder: int(folder.name.removeprefix("rank"))
    )
    paths = [folder / (component + SUFFIX) for folder in (entry.path, *rank_folders)]
    return [path for path in paths if path.exists()]


def read_state(entry: Entry) -> dict[str, Any]:
    """Return the JSON part of a checkpoint: the encoded tree of each component (``saver.encode``).

    Raises:
        CheckpointError: H311 if the file is not a JSON object.
        OSError: The file cannot be read.
    """
    data = read_file(entry.path / STATE_FILE, _MAX_STATE_BYTES)
    with reading(entry.path):
        return dict(json.loads(data))


def same_tensors(entry: Entry, component: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a checkpoint already contains tensors with the same names and digests.

    The component in the checkpoint may contain other tensors as well. Each given tensor is read
    once. Only the manifest of the checkpoint is read.

    Raises:
        HoldfastError: See `read_manifest`.
    """
    if not tensors:
        return True
    extents = _extents_of(entry, component)
    return all(
        name in extents and is_saved_as(tensor, extents[name]) for name, tensor in tensors.items()
    )


def saved_names(entry: Entry, component: str) -> set[str]:
    """Return the names of the tensors that a checkpoint contains for a component."""
    return set(_extents_of(entry, component)) - {HEADER}


def _extents_of(entry: Entry, component: str) -> Extents:
    return read_manifest(entry.path).files.get(component + SUFFIX, {})
