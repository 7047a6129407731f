"""Write and read safetensors files with digests, using little memory.

The safetensors library is not used, for three reasons. It does not compute digests. To write a
file, it needs all tensors on the host at the same time. To read one, it maps the whole file into
memory, which may exceed a memory limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.codec import SAVED_AS
from holdfast.checkpoint.expanded import is_expanded
from holdfast.checkpoint.manifest import HEADER, Extent
from holdfast.checkpoint.read_errors import damaged
from holdfast.checkpoint.safetensors_header import tensor_places
from holdfast.core.files import SHARED, create_file, open_to_read

SUFFIX = ".safetensors"
# Number of bytes written and hashed at a time. It is large enough that the GIL is rarely acquired,
# and small enough that the bytes fit into the CPU caches.
_CHUNK_BYTES = 4 * 2**20
_DTYPES = {name: dtype for dtype, name in SAVED_AS.items()}
# The format requires the header's length to be a multiple of this number of bytes.
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows ``[begin, end)`` of a sharded tensor that are stored in this process.

    The remaining rows are stored in other processes.
    """

    begin: int
    end: int
    # Wraps these rows in the sharded tensor (DTensor) that they belong to.
    whole: Callable[[torch.Tensor], torch.Tensor]


# Given a tensor's name and full shape, returns the rows to read, or None for all rows.
ShareOf = Callable[[str, torch.Size], Share | None]


# --- writing


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Extent]:
    """Write a safetensors file, flush it to disk, and return its extents by name.

    The digests in the extents are computed from the tensors in memory.

    Raises:
        OSError: The disk is full or fails.
    """
    # Tensors are sorted by decreasing element size, so that each tensor is aligned in the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(names, tensors)
    extents = {HEADER: Extent(begin=0, end=len(header), sha256=hashlib.sha256(header).hexdigest())}
    with create_file(path, SHARED) as file:
        file.write(header)
        for name in names:
            tensor = tensors[name]
            begin = file.tell()
            sha256 = hashlib.sha256()
            for chunk in _chunks(tensor):
                file.write(chunk)
                sha256.update(chunk)
            extents[name] = Extent(
                begin=begin,
                end=file.tell(),
                sha256=sha256.hexdigest(),
                dtype=SAVED_AS[tensor.dtype],
                shape=tuple(tensor.shape),
            )
        file.flush()
        os.fsync(file.fileno())
    return extents


def _header(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        entries[name] = {
            "dtype": SAVED_AS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format allows spaces after the JSON.
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(content), _CHUNK_BYTES):
        yield content[begin : begin + _CHUNK_BYTES]


def is_saved_as(tensor: torch.Tensor, extent: Extent) -> bool:
    """Return whether a tensor has the dtype, shape and digest in an extent.

    The tensor is read once.
    """
    if (extent.dtype, extent.shape) != (SAVED_AS[tensor.dtype], tuple(tensor.shape)):
        return False
    sha256 = hashlib.sha256()
    for chunk in _chunks(tensor):
        sha256.update(chunk)
    return sha256.hexdigest() == extent.sha256


# --- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedRows:
    """The rows of a tensor that one rank saved, and their position in that rank's file."""

    file: BufferedReader
    # Offset of the first byte in the file.
    begin: int
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size


def read_tensors(
    paths: Sequence[Path], into: Mapping[str, torch.Tensor], share_of: ShareOf
) -> dict[str, torch.Tensor]:
    """Return the tensors of one component by name, read into live tensors where possible.

    At most one tensor at a time is in memory twice.

    Args:
        paths: The component's files from all ranks, in the order of the rows that they contain.
        into: Live tensors by name, to be overwritten in place. A new tensor is created on the host
            if there is no live tensor with the saved dtype and shape, or if the live tensor is
            expanded.
        share_of: Given a tensor's name and full shape, returns the rows to read, or None for all
            rows.

    Raises:
        CheckpointError: H311 if a file is too short.
        OSError: A file cannot be read.
    """
    with contextlib.ExitStack() as files:
        rows_by_name: dict[str, list[_SavedRows]] = {}
        for path in paths:
            file = files.enter_context(open_to_read(path))
            _, places = tensor_places(path)
            for place in places:
                rows = _SavedRows(
                    file=file,
                    begin=place.begin,
                    size_bytes=place.end - place.begin,
                    dtype=_DTYPES[place.dtype],
                    shape=torch.Size(place.shape),
                )
                rows_by_name.setdefault(place.name, []).append(rows)
        return {
            name: _read_tensor(name, rows, into.get(name), share_of)
            for name, rows in rows_by_name.items()
        }


def _read_tensor(
    name: str, parts: Sequence[_SavedRows], target: torch.Tensor | None, share_of: ShareOf
) -> torch.Tensor:
    """Read a tensor, or some of its rows, from the files of all ranks, and return it.

    Args:
        name: The tensor's name.
        parts: The rows of the tensor in each file, in order.
        target: A live tensor, which is overwritten if it has the saved dtype and shape and is not
            expanded. May be None.
        share_of: Given the tensor's name and full shape, returns the rows to read, or None for all
            rows.
    """
    dtype = parts[0].dtype
    shape = _full_shape(parts)
    first_byte = 0
    last_byte = sum(part.size_bytes for part in parts)
    share = share_of(name, shape)
    if share is not None:
        # All rows have the same size, and they are stored one after another.
        size_bytes = last_byte
        first_byte = size_bytes * share.begin // shape[0]
        last_byte = size_bytes * share.end // shape[0]
        shape = torch.Size([share.end - share.begin, *shape[1:]])
    if target is None or not _can_hold(target, dtype, shape):
        target = torch.empty(shape, dtype=dtype)
    is_direct = target.device.type == "cpu" and target.is_contiguous()
    content = target if is_direct else torch.empty(shape, dtype=dtype)
    if content.numel():
        _read_bytes(name, parts, content, first_byte, last_byte)
    if not is_direct:
        target.copy_(content)
    return target if share is None else share.whole(target)


def _full_shape(parts: Sequence[_SavedRows]) -> torch.Size:
    """Return the full shape of a tensor whose rows may have been saved by several ranks."""
    if len(parts) == 1:
        return parts[0].shape
    rows = sum(part.shape[0] for part in parts)
    return torch.Size([rows, *parts[0].shape[1:]])


def _can_hold(target: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> bool:
    return target.dtype == dtype and target.shape == shape and not is_expanded(target)


def _read_bytes(
    name: str, parts: Sequence[_SavedRows], content: torch.Tensor, first_byte: int, last_byte: int
) -> None:
    """Read the bytes ``[first_byte, last_byte)`` of a tensor from its parts into `content`."""
    raw = content.detach().reshape(-1).view(torch.uint8).numpy()
    # Offset of the current part in the tensor.
    position = 0
    for part in parts:
        begin = max(first_byte - position, 0)
        end = min(last_byte - position, part.size_bytes)
        if begin < end:
            part.file.seek(part.begin + begin)
            # `raw` begins with the byte at `first_byte` of the tensor.
            destination = raw[position + begin - first_byte : position + end - first_byte]
            if part.file.readinto(destination.data) != end - begin:
                path = Path(part.file.name)
                raise damaged(path.parent, f"{path.name} ends in the middle of {name}")
        position += part.size_bytes
