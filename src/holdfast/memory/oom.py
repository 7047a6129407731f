"""Recognize out-of-memory errors in all their forms, and release the memory that they hold.

The stack frames of an exception keep the activations of the failed attempt alive, so they cannot be
freed inside the ``except`` block. Leave the block first, and then call `clear_exception_frames` and
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

# Messages of out-of-memory errors whose class is too general, such as RuntimeError or OSError. They
# come from torch 2.11 to 2.13, CUDA, cuBLAS, cuDNN, NCCL, HIP and glibc.
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
# The dynamic linker's messages in an ImportError if a library does not fit into the address space.
_LIBRARY_DOES_NOT_FIT = re.compile(r"failed to map segment|cannot allocate memory", re.IGNORECASE)
# Messages of errors after which every call on the device fails.
_DEAD_CONTEXT = re.compile(
    r"device-side assert|illegal memory access|unspecified launch failure|uncorrectable"
    r"|misaligned address|illegal instruction|hardware stack error"
    r"|cuda error: .*context is destroyed",
    re.IGNORECASE,
)
_LONGEST_LINE = 300


def find_out_of_memory(error: BaseException) -> str | None:
    """Return the first line of an out-of-memory error in an exception chain, or None.

    holdfast's own `OutOfMemoryError` does not count, because it is a final verdict about an error
    that was handled before.

    Example:
        >>> find_out_of_memory(MemoryError("no room"))
        'MemoryError: no room'
        >>> find_out_of_memory(ValueError("CUDA out of memory")) is None
        True
    """
    for link in _chain(error):
        if isinstance(link, HoldfastError):
            return None
        if _is_out_of_memory(link):
            lines = str(link).strip().splitlines() or [""]
            return f"{type(link).__name__}: {lines[0]}"[:_LONGEST_LINE]
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error itself, regardless of its causes."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    if isinstance(error, ImportError) and _LIBRARY_DOES_NOT_FIT.search(text):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (RuntimeError, OSError)):
        return is_onednn_failure(text) or any(pattern.search(text) for pattern in _PATTERNS)
    return False


@contextlib.contextmanager
def naming_lack_of_memory(activity: str) -> Iterator[None]:
    """Convert an out-of-memory error within the context to H401, which names the activity.

    If contexts are nested, the innermost one converts the error.

    Args:
        activity: The activity within the context, as a phrase that can follow "while", such as
            ``"reading a checkpoint"``.

    Raises:
        OutOfMemoryError: H401.
    """
    try:
        yield
    except Exception as error:
        line = find_out_of_memory(error)
        if line is None:
            raise
        raise OutOfMemoryError(
            f"memory ran out while {activity} ({line})",
            limit="all checkpoints on disk are intact, so the run can resume from the newest one",
            fix=(
                "give the process more memory (check limits such as `ulimit -v`, other processes"
                " and loader workers), or use a smaller model or batch, and restart."
            ),
            rule="H401",
        ) from error


def is_sticky(error: BaseException) -> bool:
    """Return whether an error has left the device unusable, so that no retry or save can work."""
    return any(
        isinstance(link, RuntimeError) and _DEAD_CONTEXT.search(str(link)) for link in _chain(error)
    )


def clear_exception_frames(error: BaseException) -> None:
    """Clear the stack frames of an exception chain, so that their tensors are freed.

    Call this after leaving the ``except`` block. Frames that are still running are not cleared.
    """
    for link in list(_chain(error, with_contexts=True)):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__context__ = None
        link.__cause__ = None


def release_memory(devices: Sequence[torch.device]) -> None:
    """Collect garbage, and return cached memory of the devices and of the host to the system.

    Call this only after an out-of-memory error, because a full garbage collection takes 0.1 to
    0.3 s in a large process.
    """
    gc.collect()
    for device in devices:
        torch.get_device_module(device).empty_cache()
    trim_heap()


def _chain(error: BaseException, *, with_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes (``__cause__``), each of them once.

    Args:
        error: The error.
        with_contexts: Whether to also follow ``__context__``: the error that was being handled when
            another one was raised.
    """
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        pending.append(link.__cause__)
        if with_contexts:
            pending.append(link.__context__)
