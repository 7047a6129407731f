"""Write trees of state as one checkpoint, and read them back.

Two stages: `snapshot` gathers JSON and tensors, `write` puts them on the disk: data → read back and verify → manifest
→ rename. A snapshot into host buffers shares nothing with the live state, so that another thread may write it while
training goes on; one without holds the live tensors themselves and must be written before they change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.buffers import Groups, HostBuffers
from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.expanded import is_expanded
from holdfast.checkpoint.seal import HEADER, Extent, Manifest, damaged, read_manifest, unreadable, verify_file
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.durable import free_bytes, write_file
from holdfast.core.errors import CheckpointError

STATE_FILE = "state.json"
_SUFFIX = ".safetensors"
# Headers, the manifest and file system blocks; the manifest takes about 250 bytes for each tensor.
_SPARE_BYTES = 2**20
# Written and digested at once: long enough that the interpreter's lock is seldom asked for, short enough for caches.
_PIECE_BYTES = 4 * 2**20
# As the format spells them.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The trees of a state, taken apart: the live tensors, and the JSON part by component, which shares nothing."""

    tensors: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State that waits to be written: copies in host buffers, with the places of the live ones, or these."""

    global_step: int
    tensors: Groups
    state: Mapping[str, Any]
    places: Mapping[tuple[Any, ...], tuple[str, str]] = field(default_factory=dict)

    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a live tensor, or None if there is none."""
        found = self.places.get(_place(tensor)) if tensor.layout == torch.strided else None
        return None if found is None else self.tensors[found[0]][found[1]]


def encode(components: Mapping[str, Any]) -> Encoded:
    """Take trees apart, by the name of their component, without a copy of any tensor.

    Raises:
        CheckpointError: H310, if something cannot be stored without pickle.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for component, tree in components.items():
        encoder = Encoder(component)
        try:
            state[component] = encoder.encode(tree)
        except RecursionError as error:
            limit, fix = "a checkpoint holds trees", "let state_dict() return one where nothing contains itself."
            raise CheckpointError(f"{component} holds itself", limit=limit, fix=fix, rule="H310") from error
        tensors[component] = encoder.tensors
        for name, tensor in encoder.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{component}: {name} is a tensor of {tensor.dtype}",
                    limit=f"a checkpoint holds tensors of {', '.join(_DTYPES.values())}",
                    fix="let state_dict() return one of these, for instance its bytes: tensor.view(torch.uint8).",
                    rule="H310",
                )
    return Encoded(tensors=tensors, state=state)


def snapshot(
    components: Mapping[str, Any] | Encoded, global_step: int, buffers: HostBuffers | None = None
) -> Snapshot:
    """Gather the state of a step, of trees by component name or what `encode` made of them.

    Tensors are copied to `buffers`, if there are some; else the snapshot holds the live ones.

    Raises:
        CheckpointError: H310, if something cannot be stored without pickle.
    """
    parts = components if isinstance(components, Encoded) else encode(components)
    if buffers is None:
        return Snapshot(global_step=global_step, tensors=parts.tensors, state=parts.state)
    places = {
        _place(tensor): (component, name)
        for component, group in parts.tensors.items()
        for name, tensor in group.items()
    }
    return Snapshot(global_step=global_step, tensors=buffers.fill(parts.tensors), state=parts.state, places=places)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def write(store: Store, shot: Snapshot, *, unix_seconds: float) -> Entry:
    """Write a snapshot as a checkpoint that has been read back and verified.

    Raises:
        OSError: if the disk is full or fails; what was written is removed and older checkpoints are untouched.
        CheckpointError: H311, if what was read back is not what was written.
    """
    store.directory.mkdir(parents=True, exist_ok=True)
    needed, free = shot.size_bytes() + _SPARE_BYTES, free_bytes(store.directory)
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
            verify_file(draft, name, extents)
        about = Manifest(save_id=save_id, global_step=shot.global_step, unix_seconds=unix_seconds, files=files)
        return store.commit(draft, about)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Extent]:
    """Write one safetensors file, flush it, and return its extents; the digests are those of the tensors in memory.

    By hand, since the library makes no digests, and wants all tensors in one piece on the host at the same time.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # large types first: all aligned
    header, begin = {}, 0
    for name in names:
        tensor, end = tensors[name], begin + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    extents = {HEADER: Extent(begin=0, end=len(prefix), sha256=hashlib.sha256(prefix).hexdigest())}
    with path.open("wb") as file:
        file.write(prefix)
        for name in names:
            digest, begin = hashlib.sha256(), file.tell()
            for piece in _pieces(tensors[name]):
                file.write(piece)
                digest.update(piece)
            extents[name] = Extent(
                begin=begin,
                end=file.tell(),
                sha256=digest.hexdigest(),
                dtype=_DTYPES[tensors[name].dtype],
                shape=tuple(tensors[name].shape),
            )
        file.flush()
        os.fsync(file.fileno())
    return extents


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(content), _PIECE_BYTES):
            yield content[begin : begin + _PIECE_BYTES]


def read_components(entry: Entry, names: Iterable[str], into: Groups | None = None) -> dict[str, Any]:
    """Return the trees of these components of a checkpoint that was verified before; what is not there is left out.

    Args:
        entry: The checkpoint.
        names: Of the components.
        into: Live tensors by component and name. One of the saved type and shape is overwritten and returned, unless
            it is expanded; all others are made, on the host.

    Raises:
        CheckpointError: H311, if a file has lost its end meanwhile.
        RunDirectoryError: H307, if the system does not let it be read.
    """
    found = {}
    try:
        state = json.loads((entry.path / STATE_FILE).read_bytes())
        for name in names:
            if name in state:
                file = entry.path / (name + _SUFFIX)
                tensors = _read_tensors(file, (into or {}).get(name, {})) if file.exists() else {}
                found[name] = decode(state[name], tensors)
    except OSError as error:
        raise unreadable(entry.path, error) from error
    return found


def read_state(entry: Entry) -> dict[str, Any]:
    """Return the JSON part of a checkpoint by component, as `encode` made it."""
    state: dict[str, Any] = json.loads((entry.path / STATE_FILE).read_bytes())
    return state


def same_tensors(entry: Entry, component: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a component of a checkpoint holds these very tensors, by their digests; it may hold more.

    Raises:
        HoldfastError: as `read_manifest`.

    Cost: one pass over the tensors; of the checkpoint only the manifest is read.
    """
    if not tensors:
        return True
    saved = read_manifest(entry.path).files.get(component + _SUFFIX, {})
    return all(name in saved and _is_what(saved[name], tensor) for name, tensor in tensors.items())


def saved_names(entry: Entry, component: str) -> set[str]:
    """Return the names of the tensors that a checkpoint holds of a component."""
    return set(read_manifest(entry.path).files.get(component + _SUFFIX, {})) - {HEADER}


def _is_what(extent: Extent, tensor: torch.Tensor) -> bool:
    if (extent.dtype, extent.shape) != (_DTYPES[tensor.dtype], tuple(tensor.shape)):
        return False
    digest = hashlib.sha256()
    for piece in _pieces(tensor):
        digest.update(piece)
    return digest.hexdigest() == extent.sha256


def _read_tensors(path: Path, into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, each read to where it belongs: at most one of them is in memory twice.

    By hand, since the library maps the whole file, and a limit on memory may refuse that.
    """
    found = {}
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, place in header.items():
            dtype, shape = _TYPES[place["dtype"]], torch.Size(place["shape"])
            target = into.get(name)
            if target is None or (target.dtype, target.shape) != (dtype, shape) or is_expanded(target):
                target = torch.empty(shape, dtype=dtype)
            direct = target.device.type == "cpu" and target.is_contiguous()
            content = target if direct else torch.empty(shape, dtype=dtype)
            if content.numel():
                raw = content.reshape(-1).view(torch.uint8).numpy()
                file.seek(8 + size + place["data_offsets"][0])
                if file.readinto(raw.data) != raw.nbytes:
                    raise damaged(path.parent, f"{path.name} ends within {name}")
            found[name] = target if direct else target.copy_(content)
    return found
