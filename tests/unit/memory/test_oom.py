"""Out of memory: recognised in every form and not in its look-alikes, what it holds is freed.

OneDNN, host memory.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.core.errors import OutOfMemoryError
from holdfast.memory.host_memory import allocation_can_fail, available_bytes
from holdfast.memory.onednn import switch_off_if_broken, switch_off_if_unsafe
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory, is_sticky
from holdfast.testing import memory_limited

_CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
_TEXTS = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.00 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "XPU out of memory. Tried to allocate 1 GiB",
    (
        "MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: 1 GB, max allowed:"
        " 9.07 GB)"
    ),
    "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1 GiB",
    "PrivateUseOne out of memory",
    "Device is out of memory, tried to allocate 5 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "miopenStatus_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    (
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version"
        " 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2"
        " 'out of memory'"
    ),
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    _CPU_TEXT,
    (
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"
        " to allocate 8 bytes."
    ),
    "Unable to allocate 8.00 PiB for an array with shape (3,) and data type float64",
    "std::bad_alloc",
    "posix_memalign failed:Cannot allocate memory (12)",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
    "could not create a primitive descriptor for the matmul primitive",
    "could not initialize a memory object",
]
_OTHER_ERRORS = [
    ValueError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    KeyError("CUDA error: out of memory"),
    AssertionError("std::bad_alloc"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError(
        "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"
    ),
    RuntimeError("the tokenizer ran out of memory slots"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("could not create the output folder"),
    RuntimeError(""),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError("No space left on device"),
    KeyboardInterrupt(),
]


def _caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("text", _TEXTS)
@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_every_known_text_is_recognised(kind: type[Exception], text: str) -> None:
    """Each text that libraries are known to use is found in a bare error, in any case, and is no
    dead device.
    """
    assert find_out_of_memory(kind(text)) == f"{kind.__name__}: {text.splitlines()[0]}"[:300]
    assert find_out_of_memory(kind(text.upper())) is not None
    assert not is_sticky(kind(text))


@pytest.mark.parametrize(
    "error", _OTHER_ERRORS, ids=lambda error: f"{type(error).__name__}-{error}"
)
def test_look_alikes_are_something_else(error: BaseException) -> None:
    """A user's ValueError about memory and a RuntimeError about shapes are never retried."""
    assert find_out_of_memory(error) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("anything" + "x" * 1000 + "\nsecond"),
        OSError(errno.ENOMEM, "no"),
    ],
)
def test_the_type_or_the_number_is_enough(error: BaseException) -> None:
    """Python's and torch's own types, and ENOMEM of the system, need no known text.

    An event gets one short line.
    """
    text = str(find_out_of_memory(error))
    assert text.startswith(f"{type(error).__name__}:")
    assert len(text) <= 300
    assert "second" not in text


@pytest.mark.parametrize(
    "fail", [lambda: torch.empty(2**50), lambda: np.empty(2**50), lambda: bytearray(2**62)]
)
def test_a_real_failure_is_recognised(fail: Callable[[], object]) -> None:
    """The errors of allocations that the kernel really refused to torch, numpy and Python are
    found.
    """
    assert find_out_of_memory(_caught(fail)) is not None


def test_causes_are_followed() -> None:
    """An out-of-memory error that a library wrapped twice, with ``raise ... from``, is found."""
    error = ValueError("collate failed")
    error.__cause__ = KeyError("worker 3")
    error.__cause__.__cause__ = RuntimeError(_CPU_TEXT)
    assert "DefaultCPUAllocator" in str(find_out_of_memory(error))


def test_what_happened_to_be_handled_is_no_cause() -> None:
    """An error raised while an out-of-memory error was handled is an error of its own."""
    error = ValueError("a bug in a fallback")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert find_out_of_memory(error) is None


def test_the_verdict_of_holdfast_is_no_failure_to_allocate() -> None:
    """Holdfast's own OutOfMemoryError means that all was tried, so it is not tried again."""
    verdict = OutOfMemoryError(
        "CUDA out of memory", limit="std::bad_alloc", fix="less", rule="H401"
    )
    assert isinstance(verdict, MemoryError)
    assert find_out_of_memory(verdict) is None


@pytest.mark.parametrize(
    "text",
    [
        "device-side assert triggered",
        "an illegal memory access was encountered",
        "unspecified launch failure",
        "uncorrectable ECC error encountered",
        "misaligned address",
        "an illegal instruction was encountered",
        "hardware stack error",
        "context is destroyed",
    ],
)
def test_errors_that_kill_the_context_are_sticky(text: str) -> None:
    """After these nothing in the process can use the device, also when the error was wrapped."""
    text = f"CUDA error: {text}"
    assert is_sticky(RuntimeError(text))
    wrapped = ValueError("step failed")
    wrapped.__cause__ = RuntimeError(text)
    assert is_sticky(wrapped)
    assert not is_sticky(ValueError(text))


def _allocate_and_fail(kept: list[weakref.ref[torch.Tensor]]) -> None:
    activation = torch.zeros(10)
    kept.append(weakref.ref(activation))
    raise torch.OutOfMemoryError("CUDA out of memory")


def _fail_twice(kept: list[weakref.ref[torch.Tensor]], *, by_cause: bool) -> None:
    workspace = torch.zeros(10)
    kept.append(weakref.ref(workspace))
    try:
        _allocate_and_fail(kept)
    except RuntimeError as error:
        if by_cause:
            raise ValueError("wrapped") from error
        raise ValueError("while handling it")  # noqa: B904


@pytest.mark.parametrize("by_cause", [True, False])
def test_tensors_in_the_frames_of_the_whole_chain_are_freed(by_cause: bool) -> None:
    """The activations of a failed attempt die although the exception object is still held."""
    kept: list[weakref.ref[torch.Tensor]] = []
    error = _caught(lambda: _fail_twice(kept, by_cause=by_cause))
    gc.collect()
    assert [ref() is not None for ref in kept] == [True, True]  # the frames own them
    clear_exception_frames(error)
    assert [ref() for ref in kept] == [None, None]
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_a_healthy_onednn_stays_on() -> None:
    """The trial neither switches oneDNN off nor draws random numbers, however often it is made."""
    before = torch.get_rng_state()
    assert [switch_off_if_broken() for _ in range(3)] == [False, False, False]
    assert torch._C._get_mkldnn_enabled() == torch.backends.mkldnn.is_available()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "is_unsafe"),
    [
        (torch.nn.Conv2d(1, 1, 4, stride=(1, 2)), True),
        (torch.nn.ConvTranspose1d(1, 1, 4, stride=2), True),
        (torch.nn.Conv2d(1, 1, 3, padding=1), False),
        (torch.nn.MaxPool2d(2, stride=2), False),
    ],
)
def test_it_is_switched_off_for_strided_convolutions_only(
    model: torch.nn.Module, is_unsafe: bool
) -> None:
    """Wherever in the models it lies, once; all else keeps oneDNN's kernels, and so its bits."""
    models = [torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Sequential(model))]
    try:
        assert [switch_off_if_unsafe(models) for _ in range(2)] == [is_unsafe, False]
        assert torch._C._get_mkldnn_enabled() is not is_unsafe
    finally:
        torch.backends.mkldnn.set_flags(True)


def test_a_real_limit_of_this_process_counts() -> None:
    """With the data segment limited to 64 MiB more than it has, no more than that is left."""
    before = available_bytes()
    assert before is not None
    with memory_limited(64 * 2**20):
        left = available_bytes()
    assert left is not None
    assert left <= min(64 * 2**20, before)


def test_what_cannot_be_read_does_not_limit(tmp_path: Path) -> None:
    """Where there are no such files, nothing is known."""
    assert available_bytes(tmp_path) is None


_PROGRAM = """
import ctypes, sys
from holdfast.memory.host_memory import set_malloc_threshold, trim_heap
from holdfast.testing import data_segment_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
assert set_malloc_threshold(eval(sys.argv[1])) is True
libc.free(libc.malloc(24 * 2**20))  # by default this raises the size from which blocks are mapped
before = data_segment_bytes()
blocks = [libc.malloc(8 * 2**20) for _ in range(8)]
pin = libc.malloc(100_000)          # lies above them, so the top of the heap cannot shrink
for block in blocks:
    libc.free(block)
print(data_segment_bytes() - before)
trim_heap()
"""


@pytest.mark.parametrize(
    ("threshold", "limit", "goes_back"),
    [(2**20, "", True), ("'auto'", "ulimit -Sd 9999999; ", True), ("'auto'", "", False)],
)
def test_freed_blocks_go_back_to_the_system(threshold: object, limit: str, goes_back: bool) -> None:
    """64 MiB that were freed under a live block are gone from the process.

    Without a limit it keeps them.
    """
    command = f'{limit}exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, _PROGRAM, str(threshold)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(done.stdout) < 8 * 2**20) is goes_back


def test_a_kernel_that_commits_strictly_may_refuse(tmp_path: Path) -> None:
    """As a limit of the process does; where it cannot be read, nothing is refused."""
    assert not allocation_can_fail(tmp_path)
    strict = tmp_path / "proc/sys/vm/overcommit_memory"
    strict.parent.mkdir(parents=True)
    for value in "012":
        strict.write_text(f"{value}\n")
        assert allocation_can_fail(tmp_path) is (value == "2")


def test_an_import_error_that_is_also_a_runtime_error_is_read_as_both() -> None:
    """A library's own class of errors does not hide a lack of memory."""

    class BackendError(ImportError, RuntimeError):
        pass

    assert find_out_of_memory(BackendError("CUDA out of memory")) is not None
    assert find_out_of_memory(BackendError("no such backend")) is None
