"""The signatures of memory tell a full GPU from a fragmented one, host from GPU, and errors from talk of them."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.memory import SIGNATURES

MODERN = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 79.25 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 78.18 GiB memory in use. Of the allocated memory 60.90 GiB "
    "is allocated by PyTorch, and {held} is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    kind = "exception" if exception else "line"
    found = best_match(Statement(text=text, exception=exception, kind=kind))  # type: ignore[arg-type]
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        assert any(re.search(pattern, text, re.IGNORECASE) for pattern in signature.patterns), text


@pytest.mark.parametrize(
    ("wanted", "held", "expected"),
    [
        ("512.00 MiB", "194.87 MiB", "H901"),
        ("512.00 MiB", "3.20 GiB", "H902"),
        ("2.00 GiB", "1.90 GiB", "H901"),
        ("1.95 GiB", "2.10 GiB", "H902"),
        ("9.10 GiB", "8.95 GiB", "H901"),
        ("9.10 GiB", "11.95 GiB", "H902"),
        ("22.78 GiB", "9.35 GiB", "H901"),
        ("22.00 MiB", "0 bytes", "H901"),
    ],
)
def test_memory_in_fragments_is_told_from_a_full_gpu(wanted: str, held: str, expected: str) -> None:
    """Only if more is held unused than was asked for is the cause fragmentation."""
    assert cause(MODERN.format(wanted=wanted, held=held), "OutOfMemoryError") == expected


def test_an_empty_memory_error_counts_only_as_an_exception() -> None:
    """A MemoryError without a message is known by its class, and an empty or chatty line is not."""
    assert cause("", "MemoryError") == "H907"
    assert cause("Unable to allocate 149. GiB for an array", "_ArrayMemoryError") == "H907"
    assert cause("", None) is None
    assert cause("std::bad_alloc", "MemoryError") == "H908"


@pytest.mark.parametrize(
    "line",
    [
        "estimated memory: 11.2 GB, should not run out of memory on this GPU",
        "oom_kill=0 in memory.events",
        "killed 3 stale processes before the start",
        "config: skip_batch_on_cuda_oom=True",
        "Cannot allocate more than 4 workers on this node, using 4",
        "step 12 loss 1.23 mem 11.2/23.7 GiB allocated",
        "ulimit -v unlimited",
    ],
)
def test_talk_of_memory_is_no_failure(line: str) -> None:
    """Lines that people print about memory match none of these signatures."""
    found = [
        signature.id
        for signature in SIGNATURES
        if not signature.only_exceptions
        for pattern in signature.patterns
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found


def test_a_full_host_is_told_from_a_limit_of_maps_and_of_threads() -> None:
    """ENOMEM of the allocator, of a map, of a mapped checkpoint and of a thread are different causes."""
    allocator = (
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 80000000000 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert cause(allocator) == "H906"
    assert cause("[Errno 12] Cannot allocate memory", "OSError") == "H1101"
    assert cause("unable to mmap 400 bytes from file <model.pt>: Cannot allocate memory (12)") == "H1103"
    assert cause("can't start new thread") == "H1102"
    assert cause("CUDA error: out of memory") == "H1105"
