"""Write trees of state as one checkpoint, and read them back.

Two stages, so that the second can move to a background thread: `snapshot` gathers JSON and tensors on the host,
`write` puts them on the disk: data → read back and verify → manifest → rename → prune.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.manifest import Extent, Manifest, verify_extents
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.durable import free_bytes, fsync_path, write_file

STATE_FILE = "state.json"
_SUFFIX = ".safetensors"
# Headers, the manifest and file system blocks; the manifest takes about 250 bytes for each tensor.
_SPARE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State that waits to be written.

    Args:
        global_step: Optimizer steps committed.
        tensors: Host tensors by component and name. They alias the live ones where those lie on the host.
        state: The JSON part by component.
    """

    global_step: int
    tensors: Mapping[str, dict[str, torch.Tensor]]
    state: Mapping[str, Any]

    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())


def snapshot(components: Mapping[str, Any], global_step: int) -> Snapshot:
    """Gather state from live objects.

    Args:
        components: Trees by component name; the tensors of each lie in one file of that name.
        global_step: Optimizer steps committed.

    Raises:
        CheckpointError: H310, if something cannot be stored without pickle.

    Cost: copies device tensors to the host; host tensors are not copied.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for name, tree in components.items():
        encoder = Encoder(name)
        state[name] = encoder.encode(tree)
        tensors[name] = _on_host(encoder.tensors)
    return Snapshot(global_step=global_step, tensors=tensors, state=state)


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors on the host, no two of which share memory: safetensors refuses those that do."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        there = tensor.cpu().contiguous()
        place = there.untyped_storage().data_ptr()
        found[key] = there.clone() if place in seen else there
        seen.add(place)
    return found


def write(store: Store, shot: Snapshot, *, unix_seconds: float, written_by: str) -> Entry:
    """Write a snapshot as a checkpoint that has been read back and verified.

    Raises:
        OSError: if the disk is full or fails; what was written is removed and older checkpoints are untouched.
        CheckpointError: H311, if what was read back is not what was written.
    """
    store.directory.mkdir(parents=True, exist_ok=True)
    needed = shot.size_bytes() + _SPARE_BYTES
    free = free_bytes(store.directory)
    if free < needed:
        raise OSError(f"No space left on device: the checkpoint needs {needed} bytes and {free} are free")
    draft, save_id = store.begin(shot.global_step)
    try:
        files = {}
        for component, tensors in shot.tensors.items():
            if tensors:
                files[component + _SUFFIX] = _write_tensors(draft / (component + _SUFFIX), tensors)
        body = json.dumps(shot.state, separators=(",", ":"), allow_nan=False).encode()
        write_file(draft / STATE_FILE, body)
        files[STATE_FILE] = {"json": Extent(begin=0, end=len(body), sha256=hashlib.sha256(body).hexdigest())}
        for name, extents in files.items():
            verify_extents(draft / name, extents)
        manifest = Manifest(
            save_id=save_id,
            global_step=shot.global_step,
            unix_seconds=unix_seconds,
            files=files,
            written_by=written_by,
        )
        return store.commit(draft, manifest)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Extent]:
    """Write one safetensors file and return its extents; the digests are those of the tensors in memory."""
    from safetensors import SafetensorError

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    fsync_path(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        prefix += file.read(struct.unpack("<Q", prefix)[0])
    header = json.loads(prefix[8:])
    header.pop("__metadata__", None)
    extents = {"header of the file": Extent(begin=0, end=len(prefix), sha256=hashlib.sha256(prefix).hexdigest())}
    for name, found in header.items():
        begin, end = found["data_offsets"]
        tensor = tensors[name]
        content = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        extents[name] = Extent(
            begin=len(prefix) + begin,
            end=len(prefix) + end,
            sha256=hashlib.sha256(content).hexdigest(),
            dtype=found["dtype"],
            shape=tuple(found["shape"]),
        )
    return extents


def read_components(entry: Entry, names: Iterable[str]) -> dict[str, Any]:
    """Return trees of a checkpoint that was verified before, with their tensors on the host.

    Args:
        entry: The checkpoint.
        names: Components to read; one that is not there is left out.
    """
    state = json.loads((entry.path / STATE_FILE).read_bytes())
    found = {}
    for name in names:
        if name in state:
            file = entry.path / (name + _SUFFIX)
            # Copies, since load_file maps the file: state must not hang on to a checkpoint that is pruned.
            tensors = {key: value.clone() for key, value in load_file(file).items()} if file.exists() else {}
            found[name] = decode(state[name], tensors)
    return found
