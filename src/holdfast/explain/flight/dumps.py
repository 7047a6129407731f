"""Find the dumps of torch's flight recorder, and read them.

Each rank writes one file, whose name ends with the rank: ``comm_lib_trace_rank_3``, or what
``TORCH_FR_DUMP_TEMP_FILE`` says. It is a pickle; ``torch._C._distributed_c10d`` can also write the
same values as JSON. The values are described in torch's ``FlightRecorder``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.files import open_to_read, read_file
from holdfast.explain.evidence import Frame
from holdfast.explain.flight.plain_pickle import NotPlainError, read_plain_pickle

# The largest file that is read, the number of files, and the entries and frames that are kept.
_MAX_BYTES = 64 << 20
_MAX_FILES = 4096
_MAX_CALLS = 100_000
_MAX_FRAMES = 64
_MAX_RANKS = 1_000_000
# The rank at the end of a file name.
_NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.json)?", re.DOTALL)
# The first bytes of a pickle and of a JSON object.
_BEGINNINGS = (b"\x80", b"{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective that a rank called."""

    # The name and the description of the process group.
    group: str
    group_label: str
    # The number of the collective in its group, counted from 1.
    sequence: int
    # The number of the record in the dump.
    record: int
    # The name of the collective, such as "all_reduce".
    name: str
    sizes: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = ()
    # "scheduled", "started" or "completed". Gloo never changes it from "scheduled".
    state: str = ""
    # Whether the recorder no longer waits for the collective to complete.
    retired: bool = False
    # When the collective was called, in nanoseconds since 1970.
    created_ns: int = 0
    # Where it was called, as in the dump. JSON dumps have no frames.
    stack: Any = None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return where it was called, with the innermost frame last; empty if unknown."""
        return _parse_frames(self.stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The newest collectives of one rank."""

    rank: int
    # The name of the file.
    file: str
    # The collectives, oldest first, without sends and receives.
    calls: tuple[Call, ...] = ()
    # The ranks of each process group, by the name of the group, as far as they are known.
    members: Mapping[str, tuple[int, ...]]


def find_dumps(path: Path) -> tuple[Path, ...]:
    """Return the dumps in a directory, or the dump at a path and the others beside it.

    The result is empty if the path is something else. A file counts as a dump if its name ends with
    a rank and its first byte is that of a dump; `read_dumps` ignores a file with other contents.

    Raises:
        OSError: If the directory cannot be read.
    """
    if path.is_dir():
        candidates = sorted(path.iterdir())
    else:
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_file():
            return ()
        prefix = match["prefix"]
        candidates = sorted(path.parent.glob(f"{_escaped(prefix)}*"))
    return tuple(file for file in candidates[:_MAX_FILES] if _may_be_dump(file))


def _escaped(prefix: str) -> str:
    """Return a file name as a pattern of `Path.glob` that matches only this name."""
    return re.sub(r"([*?\[])", r"[\1]", prefix)


def _may_be_dump(file: Path) -> bool:
    if _NAME.fullmatch(file.name) is None or not file.is_file():
        return False
    with suppress(OSError), open_to_read(file) as stream:
        return bool(stream.read(1).startswith(_BEGINNINGS))
    return False


def read_dumps(files: Iterable[Path]) -> tuple[list[Dump], list[str]]:
    """Read dumps, and return them by rank, and a clause for each file that cannot be read.

    If there are a pickle and a JSON file of one rank, the pickle is used, because only a pickle
    says where a collective was called.
    """
    dumps: dict[int, Dump] = {}
    problems = []
    for file in sorted(files, key=lambda file: file.name.endswith(".json")):
        match = _NAME.fullmatch(file.name)
        if match is None or int(match["rank"]) in dumps:
            continue
        rank = int(match["rank"])
        try:
            dump = _parse_dump(_read_values(file), rank=rank, file=file.name)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{file.name} could not be read: {error}")
            continue
        if dump is not None:
            dumps[rank] = dump
    return [dumps[rank] for rank in sorted(dumps)], problems


def _read_values(file: Path) -> Any:
    data = read_file(file, _MAX_BYTES)
    if data.startswith(b"{"):
        return json.loads(data)
    if not data:
        raise NotPlainError("it is empty")
    return read_plain_pickle(data)


def _parse_dump(values: Any, *, rank: int, file: str) -> Dump | None:
    """Return a dump, or None if the values are not those of a flight recorder."""
    if not isinstance(values, dict) or "pg_config" not in values:
        return None
    entries = values.get("entries")
    calls = [_parse_call(entry) for entry in _as_list(entries)[-_MAX_CALLS:]]
    return Dump(
        rank=rank,
        file=file,
        calls=tuple(sorted(filter(None, calls), key=lambda call: call.record)),
        members=_parse_members(values["pg_config"]),
    )


def _parse_members(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group from a text such as ``"[0, 1]"``."""
    members = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        text = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(text, str):
            ranks = tuple(int(number) for number in re.findall(r"\d{1,7}", text[:_MAX_RANKS]))
            if ranks:
                members[str(name)] = ranks
    return members


def _parse_call(entry: Any) -> Call | None:
    """Return a collective, or None for a send, a receive and a damaged entry."""
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    group = _as_list(entry.get("process_group"))
    name = entry.get("profiling_name")
    if len(group) != 2 or not isinstance(name, str) or not _read_count(entry, "collective_seq_id"):
        return None
    return Call(
        group=str(group[0]),
        group_label=_label_of_group(str(group[0]), str(group[1])),
        sequence=_read_count(entry, "collective_seq_id"),
        record=_read_count(entry, "record_id"),
        # The name begins with the backend, as in "nccl:all_reduce".
        name=name.rpartition(":")[2],
        sizes=tuple(str(size) for size in _as_list(entry.get("input_sizes"))),
        dtypes=tuple(str(dtype) for dtype in _as_list(entry.get("input_dtypes"))),
        state=str(entry.get("state")),
        retired=entry.get("retired") is True,
        created_ns=_read_count(entry, "time_created_ns"),
        # Most of the thousands of stacks are never shown.
        stack=entry.get("frames"),
    )


def _label_of_group(name: str, description: str) -> str:
    if description in ("", "undefined"):
        return f"group {name}"
    return description


def _parse_frames(frames: Any) -> tuple[Frame, ...]:
    """Return the frames of a dump, which lists the innermost frame first."""
    innermost_first = [
        Frame(
            file=str(frame.get("filename")),
            line=_read_count(frame, "line"),
            function=str(frame.get("name")),
        )
        for frame in _as_list(frames)[:_MAX_FRAMES]
        if isinstance(frame, dict)
    ]
    return tuple(reversed(innermost_first))


def _as_list(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else []


def _read_count(values: Mapping[str, Any], key: str) -> int:
    """Return a field if it is a non-negative integer, otherwise 0."""
    number = values.get(key)
    return number if type(number) is int and number >= 0 else 0
