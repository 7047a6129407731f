"""Discard what the script prints and writes while its finished loops are skipped.

The script's code between two finished loops runs again. It would print its lines a second time, and
overwrite its files with weights from another point of the run.
"""

from __future__ import annotations

import builtins
import fnmatch
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_STDOUT = 1
_STDERR = 2
# Functions that change files, by the name of their module. They are replaced only if the module has
# been imported.
_REPLACED = {
    "os": ("remove", "unlink", "rename", "replace", "rmdir"),
    "shutil": ("rmtree", "move"),
    "torch": ("save",),
    "torch.serialization": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "wandb": ("log",),
    "mlflow": ("log_metric", "log_metrics", "log_artifact", "log_artifacts"),
}
# Methods that write to a log, as a pattern of their names, by the names of their module and class.
_REPLACED_METHODS = {
    ("wandb.sdk.wandb_run", "Run"): "log",
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
        _flush()
        for descriptor in (_STDOUT, _STDERR):
            self._redirect(descriptor)
        for module_name, names in _REPLACED.items():
            module = sys.modules.get(module_name)
            for name in names:
                if module is not None and hasattr(module, name):
                    self._replace(module, name, _do_nothing)
        for (module_name, class_name), pattern in _REPLACED_METHODS.items():
            cls = getattr(sys.modules.get(module_name), class_name, None)
            if cls is not None:
                for name in fnmatch.filter(dir(cls), pattern):
                    self._replace(cls, name, _do_nothing)
        opener = _discarding(open)
        self._replace(builtins, "open", opener)
        self._replace(io, "open", opener)

    def end(self) -> None:
        """Stop discarding output."""
        if self._undo is None:
            return
        _flush()
        undo = self._undo
        self._undo = None
        for action in reversed(undo):
            action()

    def _redirect(self, descriptor: int) -> None:
        """Send what is written to a file descriptor to ``/dev/null``."""
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
            os.dup2(original, descriptor)
            os.close(original)

        self._undo.append(restore)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        assert self._undo is not None
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replace a function that writes."""


def _discarding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `open` that opens ``/dev/null`` instead of a file to be written."""

    def open_or_discard(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_path = not isinstance(file, int)
        if is_path and isinstance(mode, str) and set(mode) & set("wax+"):
            return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    return open_or_discard
