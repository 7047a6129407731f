"""The signatures of scripts and settings are the last resort: whatever says more of an exception wins."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import python_code, settings

SIGNATURES = python_code.SIGNATURES + settings.SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError", *places: str) -> str | None:
    """Return the id of the best signature of all for one statement."""
    frames = tuple(
        Frame(file=place.rpartition(":")[0], line=1, function=place.rpartition(":")[2]) for place in places
    )
    statement = Statement(text=text, exception=exception, kind="exception" if exception else "line", frames=frames)
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
        ("No module named 'apex'", "ModuleNotFoundError", "H1361"),
        ("cannot import name 'Mapping' from 'collections' (/usr/lib/python3.11/collections/__init__.py)",
         "ImportError", "H1362"),
        ("module 'torch' has no attribute 'symeig'", "AttributeError", "H1363"),
        ("`np.Inf` was removed in the NumPy 2.0 release. Use `np.inf` instead.", "AttributeError", "H1363"),
        ("module 'data' has no attribute 'build'", "AttributeError", "H1366"),
        ("'Net' object has no attribute 'fc9'", "AttributeError", "H1366"),
        ("'NoneType' object has no attribute 'step'", "AttributeError", "H1367"),
        ("'NoneType' object is not subscriptable", "TypeError", "H1367"),
        ("unsupported operand type(s) for /: 'str' and 'int'", "TypeError", "H1369"),
        ("linear(): argument 'input' (position 1) must be Tensor, not list", "TypeError", "H1386"),
        ("Net.forward() missing 1 required positional argument: 'mask'", "TypeError", "H1365"),
        ("invalid syntax", "SyntaxError", "H1364"),
        ("", "AssertionError", "H1373"),
        ("", "NotImplementedError", "H1376"),
        ("maximum recursion depth exceeded while calling a Python object", "RecursionError", "H992"),
        ("unsupported format string passed to Tensor.__format__", "TypeError", "H1395"),
        ("pack expects a group of 4 values but got 3", "RuntimeError", "H1392"),
        ("something else entirely", "RuntimeError", None),
        ("something else entirely", "TypeError", None),
    ],
)  # fmt: skip
def test_neighbours_are_told_apart(text: str, exception: str, expected: str | None) -> None:
    """Texts that share words belong to one signature each, and an unknown text to none."""
    assert cause(text, exception) == expected


def test_a_missing_key_is_judged_by_where_it_was_missed() -> None:
    """The same KeyError is of a sample, of the environment or of plain code, as its frames say."""
    fetch = "site-packages/torch/utils/data/_utils/fetch.py:fetch"
    assert cause("'Dog'", "KeyError", "train.py:main", fetch, "data.py:__getitem__") == "H1360"
    assert cause("'Dog'", "KeyError", "train.py:main", "/home/me/data.py:__getitem__") == "H1360"
    assert cause("'DATA_ROOT'", "KeyError", "train.py:main", "<frozen os>:__getitem__") == "H1381"
    assert cause("'DATA_ROOT'", "KeyError", "train.py:main", "/usr/lib/python3.11/os.py:__getitem__") == "H1381"
    container = "site-packages/torch/nn/modules/container.py:__getitem__"
    assert cause("'dog'", "KeyError", "train.py:main", container) == "H1371"
    assert cause("'dog'", "KeyError", "train.py:main") == "H1371"
    assert cause("'dog'", "KeyError") == "H1371"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py: error: the following arguments are required: --data", "H1380"),
        ("main.py: error: argument --model: invalid choice: 'huge' (choose from 'small', 'large')", "H1380"),
        ("train.py: error: unrecognized arguments: --epoch-count 3", "H1380"),
        ("Error: No such option: --learning-rate", "H1380"),
        ("Error: Missing option '--data'.", "H1380"),
        ("test error: 3.2, best error: 2.9", None),
        ("Invalid value for lr in sweep 3, using the default", None),
        ("KeyError handled, using the default", None),
        ("assertion passed: 3 of 3", None),
        ("key 'lr' not in config, using 0.1", None),
    ],
)
def test_lines_of_argument_parsers_are_told_from_talk(line: str, expected: str | None) -> None:
    """What argparse and click print is known as a line; other words about errors are not."""
    assert cause(line, None) == expected


def test_the_last_resort_leaves_devices_alone() -> None:
    """A text about CUDA or NCCL is never taken for an argument that a function refused."""
    assert cause("CUDA error: invalid argument value, expected 3 but got 4") != "H1392"
    assert cause("ncclInvalidArgument: Invalid value for an argument") != "H1392"
