"""What each rank has for itself although all train one model: buffers that nobody sends, and the caller's ``state=``.

Ranks say the digests of theirs; only what differs from one rank to another is sent to the first rank, which writes it
into the checkpoint. Where nothing differs, nothing is sent.

Does not: know which buffers are sent in each step (see ``replicated``), or write a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.codec import Encoder

Kinds = Mapping[str, Mapping[str, Any]]
"""Trees by name, of each kind: ``"buffers"`` (tensors) and ``"states"``."""
KINDS = ("buffers", "states")


class Digests:
    """The digests of what one rank has for itself."""

    def __init__(self) -> None:
        self._of_constants: dict[str, str] = {}

    def of(self, own: Kinds, constant: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return a digest for each tree.

        Args:
            own: The trees of this rank.
            constant: Names of buffers that no step has changed; the digest of each is made once.
        """
        constants = {name for name in constant if name in own["buffers"]}
        for name in self._of_constants.keys() - constants:
            del self._of_constants[name]
        for name in constants - self._of_constants.keys():
            self._of_constants[name] = _digest(own["buffers"][name])
        buffers = {name: _digest(tensor) for name, tensor in own["buffers"].items() if name not in constants}
        states = {name: _digest(tree) for name, tree in own["states"].items()}
        return {"buffers": {**buffers, **self._of_constants}, "states": states}


def differing(digests: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Return the names of each kind whose digest is not the same on all ranks."""
    found = {}
    for kind in KINDS:
        names = dict.fromkeys(name for of_rank in digests for name in of_rank[kind])
        found[kind] = [name for name in names if len({of_rank[kind].get(name) for of_rank in digests}) > 1]
    return found


def chosen(own: Kinds, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return the trees of these names, as far as this rank has them."""
    return {kind: {name: own[kind][name] for name in names[kind] if name in own[kind]} for kind in KINDS}


def _digest(tree: Any) -> str:
    """Return the SHA-256 of a tree: of its tensors' bytes and of what else it holds. H310 if it cannot be saved."""
    encoder = Encoder("state")
    digest = hashlib.sha256(json.dumps(encoder.encode(tree)).encode())
    for name, tensor in encoder.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
