"""Discard what the script prints and writes while its finished loops are skipped.

The script's code between two finished loops runs again. It would print its lines a second time, and
overwrite its files with weights from another point of the run.
"""

from __future__ import annotations

import builtins
import fnmatch
import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_STDOUT = 1
_STDERR = 2
# Functions that change files or send metrics, by the name of their module. They are replaced only
# if the module has been imported.
_REPLACED_FUNCTIONS = {
    "os": ("remove", "unlink", "rename", "replace", "rmdir"),
    "shutil": ("rmtree", "move"),
    "torch": ("save",),
    "torch.serialization": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "wandb": ("log",),
    "trackio": ("log",),
    "mlflow": ("log_metric", "log_metrics", "log_artifact", "log_artifacts"),
}
# Functions of `os` that fail if their result exists already, as it does from the earlier attempt.
_CREATE_ONCE = ("mkdir", "symlink", "link")
# Methods that write to a log, as a pattern of their names, by the names of their module and class.
_REPLACED_METHODS = {
    ("wandb.sdk.wandb_run", "Run"): "log",
    ("trackio.run", "Run"): "log",
    ("torch.utils.tensorboard.writer", "SummaryWriter"): "add_*",
    ("tensorboardX", "SummaryWriter"): "add_*",
}


class Silence:
    """Discards output between `begin` and `end`. Repeated calls of either have no effect."""

    def __init__(self) -> None:
        # Functions that undo what `begin` has done. None while output is not discarded.
        self._undo: list[Callable[[], None]] | None = None

    def begin(self) -> None:
        """Begin to discard printed lines, written files and logged metrics."""
        if self._undo is not None:
            return
        self._undo = []
        self._redirect_streams()
        self._replace_functions()
        self._replace_methods()
        self._replace_open()

    def end(self) -> None:
        """Stop discarding output."""
        if self._undo is None:
            return
        _flush()
        undo = self._undo
        self._undo = None
        for action in reversed(undo):
            action()

    def _redirect_streams(self) -> None:
        """Discard what is printed, and what is written to files that are open already."""
        _flush()
        for descriptor in (_STDOUT, _STDERR):
            self._redirect(descriptor)
        for stream in _streams_that_append():
            self._redirect(stream.fileno(), stream)

    def _replace_functions(self) -> None:
        """Replace the functions of `_CREATE_ONCE` and `_REPLACED_FUNCTIONS`."""
        for name in _CREATE_ONCE:
            self._replace(os, name, _accepting_existing(getattr(os, name)))
        for module_name, names in _REPLACED_FUNCTIONS.items():
            module = sys.modules.get(module_name)
            for name in names:
                if module is not None and hasattr(module, name):
                    self._replace(module, name, _do_nothing)

    def _replace_methods(self) -> None:
        """Replace the methods of `_REPLACED_METHODS`."""
        for (module_name, class_name), pattern in _REPLACED_METHODS.items():
            cls = getattr(sys.modules.get(module_name), class_name, None)
            if cls is not None:
                for name in fnmatch.filter(dir(cls), pattern):
                    self._replace(cls, name, _do_nothing)

    def _replace_open(self) -> None:
        """Discard what is written to files that are opened from now on."""
        discarding_open = _discarding(open)
        self._replace(builtins, "open", discarding_open)
        # `pathlib` uses this name.
        self._replace(io, "open", discarding_open)

    def _redirect(self, descriptor: int, stream: io.FileIO | None = None) -> None:
        """Send what is written to a file descriptor to ``/dev/null``.

        Args:
            descriptor: The file descriptor.
            stream: The stream to which it belongs. The script may close it.
        """
        assert self._undo is not None
        try:
            original = os.dup(descriptor)
        except OSError:
            # The script was started without this stream, so there is nothing to discard.
            return
        discard = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discard, descriptor)
        os.close(discard)

        def restore() -> None:
            if stream is None or not stream.closed:
                os.dup2(original, descriptor)
            os.close(original)

        self._undo.append(restore)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        assert self._undo is not None
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, *_buffered_streams()):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _buffered_streams() -> list[io.TextIOWrapper | io.BufferedWriter]:
    """Return the open streams that may hold unwritten output, those of text first."""
    kinds = (io.TextIOWrapper, io.BufferedWriter)
    streams = [value for value in gc.get_objects() if type(value) in kinds]
    return sorted(streams, key=lambda stream: kinds.index(type(stream)))


def _streams_that_append() -> list[io.FileIO]:
    """Return the open files of the script to which it appends, such as a log.

    The earlier attempt has written the same lines to them. A file that was opened with ``"w"`` has
    lost them, so they are written again.
    """
    streams = [value for value in gc.get_objects() if type(value) is io.FileIO]
    return [stream for stream in streams if not stream.closed and stream.mode.startswith("ab")]


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replace a function that writes."""


def _accepting_existing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of a function that does nothing if its result exists already."""

    def create_unless_existing(*args: Any, **kwargs: Any) -> None:
        with suppress(FileExistsError):
            original(*args, **kwargs)

    return create_unless_existing


def _discarding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `open` that opens ``/dev/null`` instead of a file to be written."""

    def open_or_discard(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_path = not isinstance(file, int)
        if is_path and isinstance(mode, str) and set(mode) & set("wax+"):
            return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    return open_or_discard
