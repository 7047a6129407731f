"""Open a log of a path that somebody named: a file or a pipe, also one compressed by gzip.

Does not: read it (see ``keeping``).
"""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.explain.logs.keeping import Readable

_GZIP = b"\x1f\x8b\x08"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"\xfd7zX": "xz", b"BZh": "bzip2"}


@contextmanager
def opened(path: Path) -> Iterator[Readable]:
    """Open a log for reading bytes.

    Raises:
        OSError: It cannot be opened.
        RunDirectoryError: H733 if it is a device or a socket, or packed in another way than by gzip.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise _no_log(path, "is a device or a socket", "name a file, or - for standard input.")
    with path.open("rb") as stream:
        start = stream.peek(4)[:4]
        packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
        if packed is not None:
            raise _no_log(path, f"is packed by {packed}", "unpack it: zcat LOG | holdfast explain -, or as zstdcat.")
        yield _Unpacked(stream) if start.startswith(_GZIP) else stream


class _Unpacked:
    """The text of a log compressed by gzip, as far as it can be unpacked: one that is still written has no end."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = gzip.GzipFile(fileobj=stream)

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._stream.read1(size)  # `read` would lose what stands before the place where it is cut off
        except (EOFError, OSError, zlib.error):
            return b""


def _no_log(path: Path, what: str, fix: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path} {what}", limit="an explanation needs the text of a log", fix=fix, rule="H733")
