"""Recognize out-of-memory errors in all their forms, and release the memory they keep alive.

The stack frames of an exception keep the activations of the failed attempt alive, so they cannot be
freed inside the ``except`` block. Leave the block first, then call `clear_exception_frames` and
`release_memory`.
"""

from __future__ import annotations

import errno
import functools
import gc
import re
import traceback
from collections.abc import Iterator, Sequence

import torch

from holdfast.core.errors import HoldfastError, OutOfMemoryError
from holdfast.memory.host_memory import trim_heap
from holdfast.memory.onednn import is_onednn_failure

# Messages of out-of-memory errors whose class is too general to identify them, such as RuntimeError
# or OSError. The messages come from torch 2.11 to 2.13, CUDA, cuBLAS, cuDNN, NCCL, HIP and glibc.
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
# What the dynamic linker reports in an ImportError if a library does not fit in the address space.
_LIBRARY_DOES_NOT_FIT = re.compile(r"failed to map segment|cannot allocate memory", re.IGNORECASE)
# Messages of errors after which every further call to the device fails.
_DEAD_CONTEXT = re.compile(
    r"device-side assert|illegal memory access|unspecified launch failure|uncorrectable"
    r"|misaligned address|illegal instruction|hardware stack error"
    r"|cuda error: .*context is destroyed",
    re.IGNORECASE,
)
_LONGEST_LINE = 300


def find_out_of_memory(error: BaseException) -> str | None:
    """Search an error and its causes for an out-of-memory error.

    The search ends at the first error raised by holdfast. In particular, holdfast's own
    `OutOfMemoryError` does not count, because it reports an error that was already handled.

    Returns:
        The class and the first line of the out-of-memory error, or None if there is none.

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
    """Return whether an error is itself an out-of-memory error, regardless of its causes."""
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


class _NamingLackOfMemory:
    """The context that `naming_lack_of_memory` returns. It has no state, so it can be shared."""

    __slots__ = ("_activity",)

    def __init__(self, activity: str) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return
        line = find_out_of_memory(error)
        if line is None:
            return
        raise OutOfMemoryError(
            f"memory ran out while {self._activity} ({line})",
            limit="all checkpoints on disk are intact, so the run can resume from the newest one",
            fix=(
                "give the process more memory (check limits such as `ulimit -v`, other processes"
                " and loader workers), or use a smaller model or batch, and restart."
            ),
            rule="H401",
        ) from error


# Every step enters four of these contexts, so they are not created again each time.
@functools.lru_cache(maxsize=64)
def naming_lack_of_memory(activity: str) -> _NamingLackOfMemory:
    """Convert an out-of-memory error raised in the ``with`` block to H401, naming the activity.

    If such blocks are nested, the innermost one converts the error.

    Args:
        activity: What the block does, as a phrase that can follow "while", such as
            ``"reading a checkpoint"``.

    Raises:
        OutOfMemoryError: H401 if memory runs out in the block.
    """
    return _NamingLackOfMemory(activity)


def is_sticky(error: BaseException) -> bool:
    """Return whether an error has left the device unusable, so that retries and saves must fail."""
    return any(
        isinstance(link, RuntimeError) and _DEAD_CONTEXT.search(str(link)) for link in _chain(error)
    )


def clear_exception_frames(error: BaseException) -> None:
    """Clear the stack frames of an exception chain, so that their tensors are freed.

    Call this function after leaving the ``except`` block. It also unlinks the errors of the chain
    from each other. Frames that are still running are not cleared.
    """
    for link in list(_chain(error, with_contexts=True)):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__context__ = None
        link.__cause__ = None


def release_memory(devices: Sequence[torch.device]) -> None:
    """Collect garbage, and return cached device and host memory to the system.

    Call this function only after an out-of-memory error, because a full garbage collection takes
    0.1 to 0.3 s in a large process.
    """
    gc.collect()
    for device in devices:
        torch.get_device_module(device).empty_cache()
    trim_heap()


def _chain(error: BaseException, *, with_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and its direct and indirect causes (``__cause__``), each of them once.

    Args:
        error: The error at which the chain starts.
        with_contexts: Whether to follow ``__context__`` as well, which is the error that was being
            handled when another one was raised.
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
