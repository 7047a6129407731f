"""Texts for stderr are written at once or not at all."""

from __future__ import annotations

import os
import select

import pytest

from holdfast.core import standard_streams


def test_a_text_longer_than_a_pipe_takes_at_once_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the write waits for a reader, which may never come."""
    reader, writer = os.pipe()
    monkeypatch.setattr(standard_streams, "_STDERR", writer)

    standard_streams.write_to_stderr("x" * 1_000_000)

    assert os.read(reader, 2_000_000) == b"x" * select.PIPE_BUF
    os.close(reader)
    os.close(writer)
