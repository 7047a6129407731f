"""Load the trees of a verified checkpoint."""

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
# The beginnings of torch's out-of-memory messages.
_OUT_OF_MEMORY = ("[enforce fail", "CUDA out of memory")


def all_rows(_component: str, _name: str, _shape: torch.Size) -> Share | None:
    """Return None: read all rows of every tensor."""
    return None


def read_components(
    entry: Entry,
    names: Iterable[str],
    into: Groups | None = None,
    share_of: Callable[[str, str, torch.Size], Share | None] = all_rows,
) -> dict[str, Any]:
    """Return the trees of the requested components, skipping those not in the checkpoint.

    Args:
        entry: The checkpoint.
        names: Names of the components to read.
        into: Live tensors by component and name, to be overwritten in place. A new tensor is
            created on the host where no live tensor has the saved dtype and shape, or where it is
            expanded.
        share_of: Given a tensor's component, name and shape, returns the rows to read, or None for
            all rows.

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
        # The bytes were verified before, so they are not damaged.
        raise out_of_reach_now(entry.path, error) from error
    except RuntimeError as error:
        if str(error).startswith(_OUT_OF_MEMORY):
            raise
        raise not_ours(entry.path, error) from error
    return trees


def _tensor_files_of(entry: Entry, component: str) -> list[Path]:
    """Return a component's files in the order of their writers' ranks.

    A tensor's rows are in the same order.
    """
    rank_folders = sorted(
        entry.path.glob("rank*/"), key=lambda folder: int(folder.name.removeprefix("rank"))
    )
    paths = [folder / (component + SUFFIX) for folder in (entry.path, *rank_folders)]
    return [path for path in paths if path.exists()]


def read_state(entry: Entry) -> dict[str, Any]:
    """Return the JSON part of a checkpoint: each component's tree as encoded by ``saver.encode``.

    Raises:
        CheckpointError: H311 if the file is not JSON.
        OSError: The file cannot be read.
    """
    data = read_file(entry.path / STATE_FILE, _MAX_STATE_BYTES)
    with reading(entry.path):
        return dict(json.loads(data))


def same_tensors(entry: Entry, component: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a checkpoint already contains these tensors, by comparing digests.

    The component may contain further tensors. This reads each tensor once. Of the checkpoint, it
    only reads the manifest.

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
    """Return the names of a component's tensors in a checkpoint."""
    return set(_extents_of(entry, component)) - {HEADER}


def _extents_of(entry: Entry, component: str) -> Extents:
    return read_manifest(entry.path).files.get(component + SUFFIX, {})
