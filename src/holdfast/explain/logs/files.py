"""Open a log of a path that somebody named: a file, one compressed by gzip, or a pipe; nothing that never ends.

Does not: read it (see ``log_keeping``).
"""

from __future__ import annotations

import io
import os
import select
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.explain.logs.keeping import Readable

_PIPE_SECONDS = 10.0  # a pipe of a shell has its writer at once; without one the command would wait for ever
_CHUNK = 1 << 16
_GZIP_BITS = 31  # of zlib: with the header of gzip
_GZIP = b"\x1f\x8b\x08"
_PACKED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
}


@contextmanager
def opened(path: Path) -> Iterator[Readable]:
    """Open a log for reading bytes.

    Args:
        path: A file or a pipe.

    Raises:
        OSError: It cannot be opened.
        RunDirectoryError: H733 if it is a device, a pipe into which nobody writes, or packed in an unknown way.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise _no_log(path, "is a device or a socket", "name a file, or - for standard input.")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        if stat.S_ISFIFO(mode):
            poll = select.poll()
            poll.register(stream, select.POLLIN | select.POLLHUP)
            if not poll.poll(_PIPE_SECONDS * 1000):
                raise _no_log(path, "is a pipe into which nobody writes", "start what writes the log first.")
        os.set_blocking(stream.fileno(), True)
        start = stream.peek(4)[:4]
        packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
        if packed is not None:
            raise _no_log(path, f"is packed by {packed}", "unpack it: zcat LOG | holdfast explain -, or as zstdcat.")
        yield _Unpacked(stream) if start.startswith(_GZIP) else stream


class _Unpacked:
    """The text of a log compressed by gzip, as far as it can be unpacked: one that is still written has no end."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._packed = b""
        self._unpacker = zlib.decompressobj(_GZIP_BITS)

    def read(self, size: int = -1, /) -> bytes:
        most = size if size > 0 else _CHUNK
        try:
            while True:
                if self._unpacker.eof:  # several may stand one after the other
                    self._packed = self._unpacker.unused_data
                    self._unpacker = zlib.decompressobj(_GZIP_BITS)
                self._packed = self._packed or self._stream.read(_CHUNK)
                if not self._packed:
                    return self._unpacker.flush()
                text = self._unpacker.decompress(self._packed, most)
                self._packed = self._unpacker.unconsumed_tail
                if text:
                    return text
        except zlib.error:
            return b""


def _no_log(path: Path, what: str, fix: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path} {what}", limit="an explanation needs the text of a log", fix=fix, rule="H733")
