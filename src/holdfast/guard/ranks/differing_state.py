"""Find buffers and ``state=`` objects that differ between ranks.

The ranks exchange digests of these entries. Only entries with different digests are sent to the
first rank, which writes them into the checkpoint.

The module ``replicated`` decides which buffers are broadcast in each step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from holdfast.checkpoint.codec import Encoder

EntriesByKind = Mapping[str, Mapping[str, Any]]
"""The entries of a rank, by kind (see `KINDS`) and name.

Entries of ``"buffers"`` are tensors, and entries of ``"states"`` are nested state.
"""
KINDS = ("buffers", "states")


@final
class Digests:
    """Computes the digests of a rank's entries, and caches those of constant buffers."""

    def __init__(self) -> None:
        self._of_constants: dict[str, str] = {}

    def compute(self, entries: EntriesByKind, constant: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the digest of each entry, by kind and name.

        Args:
            entries: The entries of this rank.
            constant: The names of buffers that no step has changed, whose digests are computed only
                once.
        """
        constants = {name for name in constant if name in entries["buffers"]}
        for name in self._of_constants.keys() - constants:
            del self._of_constants[name]
        for name in constants - self._of_constants.keys():
            self._of_constants[name] = _digest(entries["buffers"][name])
        buffers = {
            name: _digest(tensor)
            for name, tensor in entries["buffers"].items()
            if name not in constants
        }
        states = {name: _digest(tree) for name, tree in entries["states"].items()}
        return {"buffers": {**buffers, **self._of_constants}, "states": states}


def differing_names(digests: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Return the names whose digests are not the same on all ranks, by kind.

    Args:
        digests: The return value of `Digests.compute` on each rank.
    """
    names_by_kind = {}
    for kind in KINDS:
        names = dict.fromkeys(name for rank_digests in digests for name in rank_digests[kind])
        names_by_kind[kind] = [
            name
            for name in names
            if len({rank_digests[kind].get(name) for rank_digests in digests}) > 1
        ]
    return names_by_kind


def select(entries: EntriesByKind, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return those entries of this rank whose names are in `names`."""
    selected = {}
    for kind in KINDS:
        own = entries[kind]
        selected[kind] = {name: own[name] for name in names[kind] if name in own}
    return selected


def _digest(tree: Any) -> str:
    """Return the SHA-256 digest of nested state, including the bytes of its tensors.

    Raises:
        CheckpointError: H310 if the state contains a value that no checkpoint can hold.
    """
    encoder = Encoder("state")
    digest = hashlib.sha256(json.dumps(encoder.encode(tree)).encode())
    for name, tensor in encoder.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
