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

_MOST_STATE_BYTES = 1 << 30
# How torch's messages about a lack of memory begin.
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
    """Return the trees of some components. Components that the checkpoint lacks are left out.

    Args:
        entry: The checkpoint.
        names: The components.
        into: Live tensors by component and name. A tensor with the saved dtype and shape is
            overwritten and returned, unless it is expanded; all others are created on the host.
        share_of: Returns the rows of a tensor to read, given its component, name and shape; None
            for all.

    Raises:
        CheckpointError: H311 if a file was truncated since it was verified, or holdfast did not
            write the content.
        RunDirectoryError: H307 if it cannot be read now.
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
        # The bytes were verified, so they are not damaged.
        raise out_of_reach_now(entry.path, error) from error
    except RuntimeError as error:
        if str(error).startswith(_OUT_OF_MEMORY):
            raise
        raise not_ours(entry.path, error) from error
    return trees


def _tensor_files_of(entry: Entry, component: str) -> list[Path]:
    """Return the files of a component in the order of the writers, which is that of their rows."""
    rank_folders = sorted(
        entry.path.glob("rank*/"), key=lambda folder: int(folder.name.removeprefix("rank"))
    )
    paths = [folder / (component + SUFFIX) for folder in (entry.path, *rank_folders)]
    return [path for path in paths if path.exists()]


def read_state(entry: Entry) -> dict[str, Any]:
    """Return the JSON part of a checkpoint by component, as returned by ``saver.encode``.

    Raises:
        CheckpointError: H311 if it is not JSON.
        OSError: It cannot be read.
    """
    data = read_file(entry.path / STATE_FILE, _MOST_STATE_BYTES)
    with reading(entry.path):
        return dict(json.loads(data))


def same_tensors(entry: Entry, component: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a component of a checkpoint holds exactly these tensors, by their digests.

    It may hold further tensors. Cost: one pass over the tensors; only the checkpoint's manifest is
    read, whose errors are raised.
    """
    if not tensors:
        return True
    extents = _extents_of(entry, component)
    return all(
        name in extents and is_saved_as(tensor, extents[name]) for name, tensor in tensors.items()
    )


def saved_names(entry: Entry, component: str) -> set[str]:
    """Return the names of the tensors that a checkpoint holds for a component."""
    return set(_extents_of(entry, component)) - {HEADER}


def _extents_of(entry: Entry, component: str) -> Extents:
    return read_manifest(entry.path).files.get(component + SUFFIX, {})
