"""Write trees of state as one checkpoint, and read them back.

Two stages: `snapshot` gathers JSON and tensors, `write` puts them on the disk: data → read back and
verify → manifest → rename. A snapshot into host buffers shares nothing with the live state, so that
another thread may write it while training goes on; one without holds the live tensors themselves
and must be written before they change.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from holdfast.checkpoint.buffers import Groups, HostBuffers
from holdfast.checkpoint.codec import SAVED_AS, Encoder, decode
from holdfast.checkpoint.expanded import is_expanded
from holdfast.checkpoint.seal import (
    HEADER,
    Extent,
    Manifest,
    damaged,
    not_ours,
    read_manifest,
    reading,
    tensors_in,
    unreadable,
    verify_file,
)
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.durable import fsync_path, write_file
from holdfast.core.errors import CheckpointError
from holdfast.core.files import SHARED, created, opened, read_file, remove

STATE_FILE = "state.json"
_SUFFIX = ".safetensors"
_MOST_STATE_BYTES = 1 << 30
# Headers, the manifest and file system blocks; the manifest takes about 250 bytes for each tensor.
_SPARE_BYTES = 2**20
# Written and digested at once: long enough that the interpreter's lock is seldom asked for, short
# enough for caches.
_PIECE_BYTES = 4 * 2**20
_T = TypeVar("_T")
_TYPES = {name: dtype for dtype, name in SAVED_AS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of a tensor, from `begin` to before `end`, that this process holds of it.

    Others hold the rest.
    """

    begin: int
    end: int
    # Returns the tensor that has these rows, as the process sees it
    whole: Callable[[torch.Tensor], torch.Tensor]


class Writers:
    """Who writes a checkpoint: this process alone.

    Of several, each writes its share, and one commits.
    """

    rank = 0
    are_several = False

    def all(self, work: Callable[[], _T]) -> list[_T]:
        """Return what the work of each has given, of plain values.

        An error of one is raised by all.
        """
        return [work()]

    def first(self, work: Callable[[], _T]) -> _T:
        """Return, to all, what the work of the first one has given; its error is raised by all."""
        return work()


def on_all(work: Callable[[], _T], exchange: Callable[[list[Any]], list[Any]]) -> list[_T]:
    """Return what the work of each rank has given.

    Raise an error of one on all, when `exchange` has told them.
    """
    failure, own = None, None
    try:
        own = work()
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
    found = exchange([own, None if failure is None else f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise OSError(f"rank {rank} has failed: {text}")
    return [value for value, _ in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The trees of a state, taken apart.

    The live tensors, and the JSON part by component, which shares nothing.
    """

    tensors: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State that waits to be written.

    Copies in host buffers, with the places of the live ones, or these.
    """

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

    H310 if that needs pickle.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for component, tree in components.items():
        encoder = Encoder(component)
        try:
            state[component] = encoder.encode(tree)
        except RecursionError as error:
            limit, fix = (
                "a checkpoint holds trees",
                "let state_dict() return one where nothing contains itself.",
            )
            raise CheckpointError(
                f"{component} holds itself", limit=limit, fix=fix, rule="H310"
            ) from error
        tensors[component] = encoder.tensors
        for name, tensor in encoder.tensors.items():
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
    return Encoded(tensors=tensors, state=state)


def snapshot(
    components: Mapping[str, Any] | Encoded, global_step: int, buffers: HostBuffers | None = None
) -> Snapshot:
    """Gather the state of a step, of trees by component name (H310 as `encode`) or what `encode`
    made of them.

    Tensors are copied to `buffers`, if there are some; else the snapshot holds the live ones.
    """
    parts = components if isinstance(components, Encoded) else encode(components)
    if buffers is None:
        return Snapshot(global_step=global_step, tensors=parts.tensors, state=parts.state)
    places = {
        _place(tensor): (component, name)
        for component, group in parts.tensors.items()
        for name, tensor in group.items()
    }
    return Snapshot(
        global_step=global_step,
        tensors=buffers.fill(parts.tensors),
        state=parts.state,
        places=places,
    )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def write(
    store: Store, shot: Snapshot, *, unix_seconds: float, writers: Writers | None = None
) -> Entry:
    """Write a snapshot as a checkpoint that has been read back and verified.

    Of several `writers` each its share.

    Raises:
        OSError: if the disk is full or fails; what was written is removed and older checkpoints are
            untouched.
        CheckpointError: H311, if what was read back is not what was written.
    """
    writers = writers or Writers()
    needed = shot.size_bytes() + _SPARE_BYTES
    draft, save_id = writers.first(lambda: store.begin(shot.global_step, needed_bytes=needed))
    try:
        shares = writers.all(lambda: _write_share(draft, shot, writers.rank))
        files = {name: extents for share in shares for name, extents in share.items()}

        def commit() -> Path:
            found = {
                name: {key: Extent(**each) for key, each in extents.items()}
                for name, extents in files.items()
            }
            about = Manifest(
                save_id=save_id,
                global_step=shot.global_step,
                unix_seconds=unix_seconds,
                files=found,
            )
            return store.commit(draft, about).path

        return Entry(path=writers.first(commit), save_id=save_id, global_step=shot.global_step)
    except BaseException:
        if writers.rank == 0:
            remove(draft)
        raise


def _write_share(draft: Path, shot: Snapshot, rank: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Write and verify the files of one writer, and return their extents.

    The first one's lie on top.
    """
    folder, files = f"rank{rank}/" if rank else "", {}
    for component, tensors in shot.tensors.items():
        if tensors:
            (draft / folder).mkdir(exist_ok=True)
            files[f"{folder}{component}{_SUFFIX}"] = _write_tensors(
                draft / folder / (component + _SUFFIX), tensors
            )
    if rank == 0:
        body = json.dumps(shot.state, separators=(",", ":"), allow_nan=False).encode()
        write_file(draft / STATE_FILE, body)
        files[STATE_FILE] = {
            "json": Extent(begin=0, end=len(body), sha256=hashlib.sha256(body).hexdigest())
        }
    for name, extents in files.items():
        verify_file(draft, name, extents)
    if files:
        fsync_path(draft / folder)
    return {
        name: {key: asdict(each) for key, each in extents.items()}
        for name, extents in files.items()
    }


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Extent]:
    """Write one safetensors file, flush it, and return its extents.

    The digests are those of the tensors in memory.

    By hand, since the library makes no digests, and wants all tensors in one piece on the host at
    the same time.
    """
    # Large types first: all aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, begin = {}, 0
    for name in names:
        tensor, end = tensors[name], begin + tensors[name].nbytes
        header[name] = {
            "dtype": SAVED_AS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    extents = {HEADER: Extent(begin=0, end=len(prefix), sha256=hashlib.sha256(prefix).hexdigest())}
    with created(path, SHARED) as file:
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
                dtype=SAVED_AS[tensors[name].dtype],
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


def read_components(
    entry: Entry,
    names: Iterable[str],
    into: Groups | None = None,
    share_of: Callable[[str, str, torch.Size], Share | None] = lambda *_: None,
) -> dict[str, Any]:
    """Return the trees of these components of a checkpoint that was verified before.

    What is not there is left out.

    H311 if a file has lost its end meanwhile, H307 if the system does not let it be read. A live
    tensor in `into`, by component and name, of the saved type and shape is overwritten and
    returned, unless it is expanded; all others are made, on the host. `share_of` says of component,
    name and shape which rows of a tensor are read; None: all.
    """
    found = {}
    try:
        state = read_state(entry)
        for name in names:
            if name in state:
                # In the order of the writers, so that rows are in theirs.
                folders = sorted(
                    entry.path.glob("rank*/"),
                    key=lambda folder: int(folder.name.removeprefix("rank")),
                )
                paths = [folder / (name + _SUFFIX) for folder in (entry.path, *folders)]
                existing, share = [path for path in paths if path.exists()], partial(share_of, name)
                with reading(entry.path, name):
                    found[name] = decode(
                        state[name], _read_tensors(existing, (into or {}).get(name, {}), share)
                    )
    except OSError as error:
        raise unreadable(entry.path, error) from error
    except RuntimeError as error:
        # There is no memory for it here
        if str(error).startswith(("[enforce fail", "CUDA out of memory")):
            raise
        raise not_ours(entry.path, error) from error
    return found


def export(entry: Entry, path: Path, *, averaged: bool = False) -> None:
    """Write the weights of a checkpoint to one plain safetensors file, whoever has written its
    shares.

    Names are the model's own; of several models each has the name of its model in front. `averaged`
    weights are those of ``Guard(averaged=...)``. H310 if there are none, or for weights that the
    format does not know, OSError if the file cannot be written.
    """
    kind, inside = ("state.averaged", "module.") if averaged else ("model", "")
    models = [name for name in read_state(entry) if f"{name}.".startswith(f"{kind}.")]
    tensors: dict[str, torch.Tensor] = {}
    for component, tree in read_components(entry, models).items():
        prefix = f"{component.removeprefix(f'{kind}.')}." if len(models) > 1 else ""
        with reading(entry.path):
            own = {name: each for name, each in tree.items() if isinstance(each, torch.Tensor)}
        tensors |= {
            prefix + name.removeprefix(inside): own[name] for name in own if name.startswith(inside)
        }
    if not tensors:
        what, limit = (
            f"{entry.path.name} holds no averaged weights",
            "they are there where a run keeps an average",
        )
        raise CheckpointError(
            what, limit=limit, fix="pass averaged= to Guard, or use --export.", rule="H310"
        )
    for name, each in tensors.items():
        if each.dtype not in SAVED_AS or each.layout != torch.strided:
            limit, fix = (
                "a safetensors file holds dense tensors of real numbers",
                "read it with a Guard instead.",
            )
            raise CheckpointError(
                f"{name} is a tensor of {each.dtype}", limit=limit, fix=fix, rule="H310"
            )
    temporary = path.with_name(f".tmp-{path.name}")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise OSError(
            errno.EEXIST, "a link, a device or a folder is there, which is not replaced", str(path)
        )
    try:
        _write_tensors(temporary, tensors)
        temporary.replace(path)
    except OSError as error:
        # Not the temporary one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_state(entry: Entry) -> dict[str, Any]:
    """Return the JSON part of a checkpoint by component, as `encode` made it.

    H311 if it is none.
    """
    data = read_file(entry.path / STATE_FILE, _MOST_STATE_BYTES)
    with reading(entry.path):
        return dict(json.loads(data))


def same_tensors(entry: Entry, component: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a component of a checkpoint holds these very tensors, by their digests.

    It may hold more.

    Cost: one pass over the tensors; of the checkpoint only the manifest is read, and its errors are
    raised.
    """
    if not tensors:
        return True
    saved = read_manifest(entry.path).files.get(component + _SUFFIX, {})
    return all(name in saved and _is_what(saved[name], tensor) for name, tensor in tensors.items())


def saved_names(entry: Entry, component: str) -> set[str]:
    """Return the names of the tensors that a checkpoint holds of a component."""
    return set(read_manifest(entry.path).files.get(component + _SUFFIX, {})) - {HEADER}


def _is_what(extent: Extent, tensor: torch.Tensor) -> bool:
    if (extent.dtype, extent.shape) != (SAVED_AS[tensor.dtype], tuple(tensor.shape)):
        return False
    digest = hashlib.sha256()
    for piece in _pieces(tensor):
        digest.update(piece)
    return digest.hexdigest() == extent.sha256


class _Rows(NamedTuple):
    """Where rows of a tensor lie."""

    file: BufferedReader
    begin: int  # of their bytes
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size


def _read_tensors(
    paths: Sequence[Path],
    into: Mapping[str, torch.Tensor],
    share_of: Callable[[str, torch.Size], Share | None] = lambda *_: None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of files, each read to where it belongs.

    At most one of them is in memory twice.

    By hand, since the library maps the whole file, and a limit on memory may refuse that.
    """
    with contextlib.ExitStack() as files:
        pieces: dict[str, list[_Rows]] = {}
        for path in paths:
            file = files.enter_context(opened(path))
            # After the header
            for name, begin, end, dtype, shape in itertools.islice(tensors_in(path), 1, None):
                pieces.setdefault(name, []).append(
                    _Rows(file, begin, end - begin, _TYPES[dtype], torch.Size(shape))
                )
        return {
            name: _read_tensor(name, found, into.get(name), share_of)
            for name, found in pieces.items()
        }


def _read_tensor(
    name: str,
    pieces: Sequence[_Rows],
    target: torch.Tensor | None,
    share_of: Callable[[str, torch.Size], Share | None],
) -> torch.Tensor:
    dtype, shape = pieces[0].dtype, pieces[0].shape
    if len(pieces) > 1:
        shape = torch.Size([sum(piece.shape[0] for piece in pieces), *shape[1:]])
    share, first, last = share_of(name, shape), 0, sum(piece.size_bytes for piece in pieces)
    if share is not None:
        first, last = (last * row // shape[0] for row in (share.begin, share.end))
        shape = torch.Size([share.end - share.begin, *shape[1:]])
    if target is None or (target.dtype, target.shape) != (dtype, shape) or is_expanded(target):
        target = torch.empty(shape, dtype=dtype)
    direct = target.device.type == "cpu" and target.is_contiguous()
    content, at = target if direct else torch.empty(shape, dtype=dtype), 0
    if content.numel():
        raw = content.detach().reshape(-1).view(torch.uint8).numpy()
        for piece in pieces:
            begin, end = max(first - at, 0), min(last - at, piece.size_bytes)
            if begin < end:
                piece.file.seek(piece.begin + begin)
                if (
                    piece.file.readinto(raw[at + begin - first : at + end - first].data)
                    != end - begin
                ):
                    path = Path(piece.file.name)
                    raise damaged(path.parent, f"{path.name} ends within {name}")
            at += piece.size_bytes
    found = target if direct else target.copy_(content)
    return found if share is None else share.whole(found)
