"""The signatures of disks, files, networks and native code tell full from forbidden, and errors from talk."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import data_files, native_code, system

SIGNATURES = data_files.SIGNATURES + native_code.SIGNATURES + system.SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    statement = Statement(text=text, exception=exception, kind="exception" if exception else "line")
    found = best_match(statement)
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        last = text.rpartition("in <module>\n")[2]
        bodies = (text, last, last.partition(": ")[2])
        assert any(re.search(pattern, body, re.IGNORECASE) for pattern in signature.patterns for body in bodies), text


@pytest.mark.parametrize(
    ("text", "exception", "expected"),
    [
        ("[Errno 28] No space left on device", "OSError", "H981"),
        ("[Errno 28] No space left on device: '/dev/shm/torch_1'", "OSError", None),
        ("[Errno 30] Read-only file system: '/data'", "OSError", "H1347"),
        ("[Errno 27] File too large", "OSError", "H1344"),
        ("[Errno 5] Input/output error", "OSError", "H1346"),
        ("[Errno 2] No such file or directory: 'a.yaml'", "FileNotFoundError", "H988"),
        ("[Errno 21] Is a directory: 'run1'", "IsADirectoryError", "H1345"),
        ("libcudart.so.11.0: cannot open shared object file: No such file or directory", "OSError", "H989"),
        ("./ops.so: undefined symbol: _ZN3c105Error", "OSError", "H1357"),
        ("<urlopen error [Errno 111] Connection refused>", "URLError", "H1348"),
        ("HTTP Error 503: Service Unavailable", "HTTPError", "H1348"),
        ("Expecting value: line 1 column 1 (char 0)", "JSONDecodeError", "H1377"),
        ('mapping values are not allowed here\n  in "a.yaml", line 1, column 10', "ScannerError", "H1378"),
    ],
)
def test_neighbours_are_told_apart(text: str, exception: str, expected: str | None) -> None:
    """Each error number of the system, and each kind of file, has its own signature; shared memory is not a disk."""
    assert cause(text, exception) == expected if expected else cause(text, exception) != "H981"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Segmentation fault (core dumped)", "H991"),
        ("./train.sh: line 3:  4711 Segmentation fault      (core dumped) python train.py", "H991"),
        ("free(): invalid pointer", "H1342"),
        ("double free or corruption (out)", "H1342"),
        ("terminate called after throwing an instance of 'std::length_error'", "H1342"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "H908"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-01T04:12:09 DUE TO TIME LIMIT ***", "H990"),
        ("segmentation fault handler installed", None),
        ("time limit: 12:00:00", None),
        ("train/seg: segmentation loss 0.3", None),
        ("cache directory exists already, using it", None),
        ("dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory", None),
        ("No such file or directory: using defaults", None),
        ("retrying after HTTP Error 503: Service Unavailable", None),
    ],
)  # fmt: skip
def test_lines_of_crashes_are_told_from_talk(line: str, expected: str | None) -> None:
    """What shells, the C library and schedulers print is known as a line; what programs say about it is not."""
    assert cause(line, None) == expected
