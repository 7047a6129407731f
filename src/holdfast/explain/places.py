"""Whose code a frame is: the user's own, where a reader looks first, or that of Python, a library or holdfast."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.explain.evidence import Frame

# Looked for in ``file:function``. A frozen module has no file; ``<string>:__init__`` is what `dataclass` writes.
_FOREIGN = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)\d|^<(?!string>|stdin>|ipython)|^<string>:__|/tqdm/"
    r"|/torch/(?:nn|utils|optim|distributed|autograd|_ops|_tensor)|(?:^|/)runpy\.py:"
    r"|/holdfast/(?:guard|loader|forecast|memory|numerics|learning|checkpoint|supervise|recorder|core|integrations)/"
)
_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib(?:64)?/(?:python|pypy)[\d.]+)/")


def is_own_code(frame: Frame) -> bool:
    """Return whether a frame is the user's own: neither Python's library, nor an installed package, nor holdfast."""
    return _FOREIGN.search(f"{frame.file}:{frame.function}") is None


def own_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user's own code, else the innermost.

    Args:
        frames: Innermost last; at least one.
    """
    return next((frame for frame in reversed(frames) if is_own_code(frame)), frames[-1])


def library_file(frame: Frame) -> str:
    """Return the file of a library's frame from its package on, such as ``"torch/nn/functional.py"``."""
    return _INSTALLED.sub("", frame.file)
