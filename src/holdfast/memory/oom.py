"""Recognise an out-of-memory error in every form it takes, drop what it holds, and give memory
back.

The frames of the exception own the activations of the failed attempt, so nothing can be freed
inside the ``except`` block: leave it first, then call `clear_exception_frames` and
`release_memory`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import re
import traceback
from collections.abc import Iterator, Sequence

import torch

from holdfast.core.errors import HoldfastError, OutOfMemoryError
from holdfast.memory.host_memory import trim_heap
from holdfast.memory.onednn import is_onednn_failure

# Texts as found in torch 2.11 to 2.13, CUDA, cuBLAS, cuDNN, NCCL, HIP and glibc. An error's type is
# looked at first; these are for errors that are a bare RuntimeError, AcceleratorError or OSError.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(cuda|hip|xpu|mps|backend|npu|privateuseone).{0,20}out of memory",
        r"out of memory.{0,20}tried to allocate",
        r"cuda error: out of memory",
        r"(cublas|cudnn|cusolver|cusparse|cufft|hipblas|miopen)\w*_alloc_failed",
        r"cudnn_status_internal_error_host_allocation_failed",
        r"nccl.{0,200}out of memory",
        r"unable to find a valid cudnn algorithm",
        r"get was unable to find an engine to execute this computation",
        r"defaultcpuallocator: (can't allocate memory|not enough memory)",
        r"unable to allocate .* for an array",
        r"std::bad_alloc",
        r"posix_memalign failed",
    )
)
# Of the dynamic linker, for a library that does not fit into the address space: an ImportError.
_NOT_LOADED = re.compile(r"failed to map segment|cannot allocate memory", re.IGNORECASE)
_STICKY = re.compile(
    r"device-side assert|illegal memory access|unspecified launch failure|uncorrectable|misaligned"
    r" address"
    r"|illegal instruction|hardware stack error|cuda error: .*context is destroyed",
    re.IGNORECASE,
)


def find_out_of_memory(error: BaseException) -> str | None:
    """Return one line about the out-of-memory error in this error or its causes.

    None if it is something else.

    An `OutOfMemoryError` of holdfast itself is something else: a verdict, and no failure to
    allocate.

    Example:
        >>> find_out_of_memory(MemoryError("no room"))
        'MemoryError: no room'
        >>> find_out_of_memory(ValueError("CUDA out of memory")) is None
        True
    """
    for link in _causes(error):
        if isinstance(link, HoldfastError):
            return None
        typed = isinstance(link, (torch.OutOfMemoryError, MemoryError))
        typed = typed or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        text = str(link)
        typed = typed or (isinstance(link, ImportError) and bool(_NOT_LOADED.search(text)))
        texted = isinstance(link, (RuntimeError, OSError)) and (
            is_onednn_failure(text) or any(pattern.search(text) for pattern in _PATTERNS)
        )
        if typed or texted:
            lines = text.strip().splitlines() or [""]
            return f"{type(link).__name__}: {lines[0]}"[:300]
    return None


@contextlib.contextmanager
def naming_lack_of_memory(activity: str) -> Iterator[None]:
    """Raise H401 with what was being done, in place of a bare error for lack of memory such as
    ``MemoryError``.

    Args:
        activity: What is done inside, as it follows "while", such as ``"reading a checkpoint"``. Of
            several contexts the innermost names it.
    """
    try:
        yield
    except Exception as error:
        found = find_out_of_memory(error)
        if found is None:
            raise
        raise OutOfMemoryError(
            f"memory ran out while {activity} ({found})",
            limit="what is on the disk is whole: the newest checkpoint is where the run continues",
            fix=(
                "leave the process more memory (a limit such as `ulimit -v`, other processes,"
                " loader workers), or make model and batch smaller, and start again."
            ),
            rule="H401",
        ) from error


def is_sticky(error: BaseException) -> bool:
    """Say whether the device's context is dead, so that nothing on it can be retried or saved."""
    return any(
        isinstance(link, RuntimeError) and _STICKY.search(str(link)) for link in _causes(error)
    )


def clear_exception_frames(error: BaseException) -> None:
    """Drop every frame that an exception and its chain hold, and with them the tensors in those
    frames.

    Call it after the ``except`` block was left; the running frames keep their variables.
    """
    for link in list(_causes(error, contexts=True)):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__context__ = link.__cause__ = None


def release_memory(devices: Sequence[torch.device]) -> None:
    """Collect garbage and give cached blocks back, on the host and on these devices.

    Cost: a full garbage collection, 0.1 to 0.3 s in a large process. Only after an out-of-memory
    error.
    """
    gc.collect()
    for device in devices:
        torch.get_device_module(device).empty_cache()
    trim_heap()


def _causes(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes.

    With `contexts` also what was being handled when they were raised.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__] if contexts else [link.__cause__]
