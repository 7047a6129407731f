"""Write trees of state as one checkpoint.

There are two stages: `snapshot` gathers JSON and tensors, and `write` writes them to disk (data,
read back and verify, manifest, rename). A snapshot in host buffers shares nothing with the live
state, so another thread may write it while training continues. A snapshot without buffers holds the
live tensors themselves and must be written before they change.
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
# For headers, the manifest (about 250 bytes per tensor) and file system blocks.
_SPARE_BYTES = 2**20
_T = TypeVar("_T")
# Extents by file and name, as plain values that ranks can exchange.
_PlainExtents = dict[str, dict[str, dict[str, Any]]]


class Writers:
    """The processes that write a checkpoint; this class is for a single process.

    If there are several, each writes its share, and the first one commits.
    """

    rank = 0
    are_several = False

    def all(self, work: Callable[[], _T]) -> list[_T]:
        """Return the results of all processes, which must be plain values.

        An error of one process is raised in all.
        """
        return [work()]

    def first(self, work: Callable[[], _T]) -> _T:
        """Return the result of the first process in all processes; its error is raised in all."""
        return work()


def on_all(work: Callable[[], _T], exchange: Callable[[list[Any]], list[Any]]) -> list[_T]:
    """Run some work on every rank and return the results of all ranks.

    Args:
        work: Returns plain values.
        exchange: Sends a list to all ranks and returns the lists of all ranks, in rank order.

    Raises:
        OSError: The work of another rank has failed. An error of this rank is raised unchanged,
            once the other ranks know about it.
    """
    failure: Exception | None = None
    result = None
    try:
        result = work()
    # Raised below, once the other ranks know about it.
    except Exception as error:  # noqa: BLE001
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = exchange([result, text])
    if failure is not None:
        raise failure
    for rank, (_, error_text) in enumerate(outcomes):
        if error_text is not None:
            raise OSError(f"rank {rank} has failed: {error_text}")
    return [value for value, _ in outcomes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The trees of a state, by component: live tensors, and JSON that shares nothing with them."""

    tensors: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State to be written."""

    global_step: int
    # By component and name: copies in host buffers, or the live tensors.
    tensors: Groups
    state: Mapping[str, Any]
    # If the tensors are copies: the component and name of each live tensor, by its location in
    # memory.
    names_by_memory: Mapping[Memory, tuple[str, str]] = field(default_factory=dict)

    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a live tensor, or None if there is none."""
        if tensor.layout != torch.strided:
            return None
        location = self.names_by_memory.get(memory_of(tensor))
        if location is None:
            return None
        component, name = location
        return self.tensors[component][name]


def encode(components: Mapping[str, Any]) -> Encoded:
    """Encode the trees of a state, by component, without copying a tensor.

    Raises:
        CheckpointError: H310 for values that would need pickle, or that the format cannot hold.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for component, tree in components.items():
        encoder = Encoder(component)
        try:
            state[component] = encoder.encode(tree)
        except RecursionError as error:
            raise CheckpointError(
                f"{component} holds itself",
                limit="a checkpoint holds trees",
                fix="let state_dict() return a value in which nothing contains itself.",
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
            limit=f"a checkpoint holds tensors of {', '.join(SAVED_AS.values())}",
            fix=(
                "let state_dict() return one of these, for instance its bytes:"
                " tensor.view(torch.uint8)."
            ),
            rule="H310",
        )


def snapshot(
    components: Mapping[str, Any] | Encoded, global_step: int, buffers: HostBuffers | None = None
) -> Snapshot:
    """Gather the state of a step.

    Args:
        components: Trees by component name, or what `encode` returned for them.
        global_step: Optimizer steps committed.
        buffers: Receives copies of the tensors. With None, the snapshot holds the live tensors.

    Raises:
        CheckpointError: H310, as `encode`.
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
    """Write a snapshot as a checkpoint, after reading it back and verifying it.

    Args:
        store: Where to.
        shot: The snapshot. If there are several writers, this process writes its share.
        unix_seconds: The time recorded in the manifest.
        writers: The processes that write the checkpoint, or None for this process alone.

    Raises:
        OSError: The disk is full or fails. What was written is removed, and older checkpoints are
            untouched.
        CheckpointError: H311 if the bytes read back are not the bytes written.
    """
    writers = writers or Writers()
    needed_bytes = shot.size_bytes() + _SPARE_BYTES
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
    """Write and verify the files of one writer, and return their extents.

    The files of the first writer are at the top level; every other writer has a folder for its
    rank.
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
