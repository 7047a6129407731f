"""Tensors that workers share through named files, where file descriptors are short: one keeper for all workers.

Torch has a process keep such files. Each that shares one starts its own keeper unless it knows of one, and several of
them start at a time, each as slow as torch's libraries are to load. Here the first worker starts it and says where it
is, and the others join it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import set_sharing_strategy

_PATIENCE_SECONDS, _LOOK_SECONDS = 30.0, 0.005  # spawned workers may begin seconds apart
_ROOM_BYTES = 512
_NONE = b"\n\n\n"  # nobody need wait
_kept: list[Any] = []  # what the first worker shares, for as long as another may join


class SharedFiles:
    """What the workers of a generation know of their keeper; it travels to them as an argument of their process.

    Args:
        context: Multiprocessing context that the workers are started with.
    """

    def __init__(self, context: Any) -> None:
        self._note = context.RawArray("c", _ROOM_BYTES)

    def work(self, is_first: bool, target: Callable[..., Any], args: Sequence[Any]) -> None:  # noqa: FBT001
        """Have a worker share tensors through files, with the keeper of all workers if it can be had, and begin.

        Args:
            is_first: Whether it starts the keeper, or joins it.
            target: What the worker runs.
            args: With what.
        """
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        with suppress(OSError, RuntimeError, ValueError):  # then it has a keeper of its own, as with torch
            self._start() if is_first else self._join()
        target(*args)

    def _start(self) -> None:
        note = _NONE
        try:
            storage = torch.UntypedStorage(1)  # type: ignore[no-untyped-call]
            keeper, file, size = storage._share_filename_cpu_()
            _kept.append(storage)
            note = b"\n".join((keeper, file, str(size).encode(), b""))
        finally:
            self._note.value = note

    def _join(self) -> None:
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < give_up:
            match self._note.value.split(b"\n"):
                case keeper, file, size, _:  # else it is not written yet, or half of it
                    torch.UntypedStorage._new_shared_filename_cpu(keeper, file, int(size))
                    return
            time.sleep(_LOOK_SECONDS)


def keeps_files(pid: int) -> bool:
    """Say whether a process is a keeper."""
    try:
        return "torch_shm_manager".startswith(Path(f"/proc/{pid}/comm").read_text().strip() or "-")
    except OSError:
        return False
