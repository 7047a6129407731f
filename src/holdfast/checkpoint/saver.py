"""Save the training state as a checkpoint.

Saving has two stages. `snapshot` gathers the state as JSON and tensors. `write` writes both to
disk, reads the files back to verify them, writes the manifest and renames the folder. A snapshot in
host buffers shares no memory with the live state, so another thread can write it while training
continues. A snapshot without buffers refers to the live tensors and must be written before they
change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.checkpoint.buffers import Groups, HostBuffers
from holdfast.checkpoint.codec import SAVED_AS, Encoder, Memory, memory_of
from holdfast.checkpoint.manifest import Extent, Manifest
from holdfast.checkpoint.store import Entry, Store
from holdfast.checkpoint.tensor_files import SUFFIX, write_tensors
from holdfast.checkpoint.verify import verify_file
from holdfast.core.durable import fsync_path, write_file
from holdfast.core.errors import CheckpointError
from holdfast.core.files import remove

STATE_FILE = "state.json"
# Disk space that a checkpoint needs in addition to its tensors: for headers, the manifest (about
# 250 bytes per tensor) and partly filled blocks of the file system.
SPARE_BYTES = 2**20
_T = TypeVar("_T")
# Extents by file and tensor name, as plain values that ranks can exchange.
_PlainExtents = dict[str, dict[str, dict[str, Any]]]


class Writers:
    """The processes that write a checkpoint together. This base class represents a single process.

    If several processes write a checkpoint, each of them writes its share, and rank 0 commits the
    checkpoint.
    """

    rank = 0
    are_several = False

    def all(self, work: Callable[[], _T]) -> list[_T]:
        """Run a function in every process, and return the results, which must be plain values.

        If the function fails in any process, an error is raised in all of them.
        """
        return [work()]

    def first(self, work: Callable[[], _T]) -> _T:
        """Run a function in the first process only, and return its result in all processes.

        If the function fails, an error is raised in all processes.
        """
        return work()


def on_all(work: Callable[[], _T], exchange: Callable[[list[Any]], list[Any]]) -> list[_T]:
    """Run a function on every rank, and return the results of all ranks in rank order.

    Args:
        work: The function. Its result must be a plain value.
        exchange: Sends this rank's list to all ranks, and returns the lists of all ranks in rank
            order.

    Raises:
        OSError: The function failed on another rank. An error on this rank is raised unchanged,
            after the other ranks have been notified.
    """
    failure: Exception | None = None
    result = None
    try:
        result = work()
    # The exception is re-raised below, after the other ranks have been notified.
    except Exception as error:  # noqa: BLE001
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = exchange([result, text])
    if failure is not None:
        raise failure
    for rank, (_, error_text) in enumerate(outcomes):
        if error_text is not None:
            raise OSError(f"rank {rank} failed: {error_text}")
    return [value for value, _ in outcomes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The training state as JSON values and live tensors, both by component name.

    The JSON values share no memory with the live state.
    """

    tensors: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The training state after a step, in the form that `write` saves."""

    global_step: int
    # Tensors by component and name: either copies in host buffers or the live tensors.
    tensors: Groups
    state: Mapping[str, Any]
    # The component and name of each live tensor, by memory location. Empty if `tensors` are the
    # live tensors themselves.
    names_by_memory: Mapping[Memory, tuple[str, str]] = field(default_factory=dict)

    def size_bytes(self) -> int:
        """Return the total size of the tensors in bytes."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the snapshot's copy of a live tensor, or None if there is no copy."""
        if tensor.layout != torch.strided:
            return None
        location = self.names_by_memory.get(memory_of(tensor))
        if location is None:
            return None
        component, name = location
        return self.tensors[component][name]


def encode(components: Mapping[str, Any]) -> Encoded:
    """Convert each component's state to JSON and named tensors, without copying tensors.

    Raises:
        CheckpointError: H310 if a checkpoint cannot store a value.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for component, tree in components.items():
        encoder = Encoder(component)
        try:
            state[component] = encoder.encode(tree)
        except RecursionError as error:
            raise CheckpointError(
                f"{component} contains itself, or is nested too deeply",
                limit="a checkpoint can only store trees",
                fix="return a value from state_dict() in which no object contains itself.",
                rule="H310",
            ) from error
        tensors[component] = encoder.tensors
        for name, tensor in encoder.tensors.items():
            _check_dtype(component, name, tensor)
    return Encoded(tensors=tensors, state=state)


def _check_dtype(component: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in SAVED_AS:
        raise CheckpointError(
            f"{component}: {name} is a tensor of {tensor.dtype}",
            limit=f"a checkpoint can store tensors of {', '.join(SAVED_AS.values())}",
            fix=(
                "return one of these from state_dict(), for example the tensor's bytes:"
                " tensor.view(torch.uint8)."
            ),
            rule="H310",
        )


def snapshot(
    components: Mapping[str, Any] | Encoded, global_step: int, buffers: HostBuffers | None = None
) -> Snapshot:
    """Gather the training state after a step.

    Args:
        components: Trees of state by component name, or the result of `encode`.
        global_step: Number of optimizer steps taken so far.
        buffers: Memory to which the tensors are copied. With None, the snapshot refers to the live
            tensors.

    Raises:
        CheckpointError: H310, see `encode`.
    """
    encoded = components if isinstance(components, Encoded) else encode(components)
    if buffers is None:
        return Snapshot(global_step=global_step, tensors=encoded.tensors, state=encoded.state)
    names_by_memory = {
        memory_of(tensor): (component, name)
        for component, group in encoded.tensors.items()
        for name, tensor in group.items()
    }
    return Snapshot(
        global_step=global_step,
        tensors=buffers.fill(encoded.tensors),
        state=encoded.state,
        names_by_memory=names_by_memory,
    )


def write(
    store: Store, shot: Snapshot, *, unix_seconds: float, writers: Writers | None = None
) -> Entry:
    """Write a snapshot as a checkpoint, and commit it once its files have been verified.

    Args:
        store: Where to write the checkpoint.
        shot: The snapshot, or only this process's share of it if several processes write the
            checkpoint.
        unix_seconds: Time of the save, recorded in the manifest.
        writers: The processes that write the checkpoint, or None for this process alone.

    Raises:
        OSError: The disk is full or fails. The files written so far are removed, and older
            checkpoints are not touched.
        CheckpointError: H311 if the bytes read back differ from the bytes written.
    """
    writers = writers or Writers()
    needed_bytes = shot.size_bytes() + SPARE_BYTES
    draft, save_id = writers.first(lambda: store.begin(shot.global_step, needed_bytes=needed_bytes))
    try:
        shares = writers.all(lambda: _write_share(draft, shot, writers.rank))
        manifest = Manifest(
            save_id=save_id,
            global_step=shot.global_step,
            unix_seconds=unix_seconds,
            files=_files_of(shares),
        )
        path = writers.first(lambda: store.commit(draft, manifest).path)
        return Entry(path=path, save_id=save_id, global_step=shot.global_step)
    except BaseException:
        if writers.rank == 0:
            remove(draft)
        raise


def _files_of(shares: list[_PlainExtents]) -> dict[str, dict[str, Extent]]:
    files: dict[str, dict[str, Extent]] = {}
    for share in shares:
        for name, extents in share.items():
            files[name] = {key: Extent(**extent) for key, extent in extents.items()}
    return files


def _write_share(draft: Path, shot: Snapshot, rank: int) -> _PlainExtents:
    """Write and verify the files of one rank, and return their extents.

    Rank 0 writes its files at the top level of the checkpoint, and every other rank writes its
    files to its own folder.
    """
    folder = f"rank{rank}/" if rank else ""
    files: dict[str, dict[str, Extent]] = {}
    for component, tensors in shot.tensors.items():
        if not tensors:
            continue
        (draft / folder).mkdir(exist_ok=True)
        name = f"{folder}{component}{SUFFIX}"
        files[name] = write_tensors(draft / name, tensors)
    if rank == 0:
        files[STATE_FILE] = _write_state(draft, shot.state)
    for name, extents in files.items():
        verify_file(draft, name, extents)
    if files:
        fsync_path(draft / folder)
    return {
        name: {key: asdict(extent) for key, extent in extents.items()}
        for name, extents in files.items()
    }


def _write_state(draft: Path, state: Mapping[str, Any]) -> dict[str, Extent]:
    body = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
    write_file(draft / STATE_FILE, body)
    sha256 = hashlib.sha256(body).hexdigest()
    return {"json": Extent(begin=0, end=len(body), sha256=sha256)}
