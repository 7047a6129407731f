"""The signatures of several ranks tell the cause from what follows of it, and sorts of lost connections apart."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.distributed import SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    kind = "exception" if exception else "line"
    found = best_match(Statement(text=text, exception=exception, kind=kind))  # type: ignore[arg-type]
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        assert any(
            re.search(pattern, each, re.IGNORECASE)
            for pattern in signature.patterns
            for each in (text, text.rpartition("\n")[2].partition(": ")[2])
        ), text


def test_what_only_follows_from_another_rank_is_a_cascade() -> None:
    """Time-outs, lost connections, aborted communicators and the launcher's table never count as the root."""
    cascades = {signature.id for signature in SIGNATURES if signature.role == "cascade"}
    assert cascades == {"H921", "H922", "H924", "H1120", "H1137"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[/pytorch/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:10331", "H922"),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete", "H921"),
        ("[enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 40 vs 20", "H1125"),
        ("Timed out after 301 seconds waiting for clients. 1/2 clients joined.", "H1122"),
        ("ProcessGroupGloo::broadcast: invalid root rank: 3", "H1129"),
        ("ProcessGroupGloo::allgather: invalid input tensor list", "H1132"),
        ("Distributed package doesn't have NCCL built in", "H1131"),
        ("trying to initialize the default process group twice!", "H1130"),
        ("Process 4711 got signal: 15", "H1147"),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "H1105",
        ),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown'", "H923"),
    ],
)
def test_neighbours_are_told_apart(text: str, expected: str) -> None:
    """Texts of the same library have their own causes."""
    assert cause(text) == expected


def test_a_reset_connection_elsewhere_is_no_lost_rank() -> None:
    """A download that breaks off, or a loader's queue, is not told as a lost rank."""
    assert cause("[Errno 104] Connection reset by peer", "ConnectionResetError") != "H922"
    assert cause("requests.exceptions.ConnectionError: Connection aborted., Connection reset by peer", None) != "H922"


def test_only_the_names_that_a_launcher_sets_mean_that_it_is_missing() -> None:
    """A KeyError of LOCAL_RANK means a missing launcher; one of another key, or a line with that word, does not."""
    assert cause("'LOCAL_RANK'", "KeyError") == "H1146"
    assert cause("'RANKING'", "KeyError") != "H1146"
    assert cause("LOCAL_RANK", None) is None


@pytest.mark.parametrize(
    "line",
    [
        "rank 3: waiting for the other ranks",
        "NCCL version 2.21.5+cuda12.4",
        "NCCL INFO Bootstrap : Using eth0:10.244.0.233<0>",
        "init_process_group(backend='nccl', world_size=8, rank=3, timeout=1800s)",
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
        "port 29500 is free, using it",
        "collective timeout set to 600 s",
    ],
)
def test_talk_of_ranks_is_no_failure(line: str) -> None:
    """Lines that people and libraries print about ranks match none of these signatures."""
    found = [
        signature.id
        for signature in SIGNATURES
        if not signature.only_exceptions
        for pattern in signature.patterns
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found
