"""An exception as facts: bounded, printable, and never an error."""

from __future__ import annotations

import json

from holdfast.core.raised import describe_exception


class OddError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError


def down(depth: int) -> None:
    if depth == 0:
        raise ValueError("bottom")
    down(depth - 1)


def test_a_recursion_is_described_by_its_ends() -> None:
    """Of hundreds of frames the outermost and the innermost are kept."""
    try:
        down(500)
    except ValueError as error:
        frames = describe_exception(error, error.__traceback__)["frames"]
    assert len(frames) == 40
    assert [frames[0][2], frames[-1][2]] == ["test_a_recursion_is_described_by_its_ends", "down"]
    assert frames[-1][1] < frames[-2][1]


def test_what_an_exception_says_never_fails() -> None:
    """A broken text, notes that are no list, a suppressed context and causes in a circle do no
    harm.
    """
    odd, noted = OddError(), ValueError("text")
    odd.__context__, odd.__suppress_context__ = ValueError("hidden"), True
    found = describe_exception(odd, None)
    assert "RuntimeError" in found["message"]
    assert found["chain"] == []
    json.dumps(found)
    noted.__notes__ = 7  # type: ignore[assignment]
    assert describe_exception(noted, None)["message"] == "text"
    noted.__cause__, other = KeyError("second"), noted
    noted.__cause__.__context__ = other
    assert [each["type"] for each in describe_exception(noted, None)["chain"]] == ["KeyError"]
