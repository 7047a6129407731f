"""Begin to watch the script of this process. The observer of `holdfast run` calls `start`."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from holdfast.core.events.data import EventData
from holdfast.recorder.run_files import GUARD_FOLDER

if TYPE_CHECKING:
    from holdfast.guard.unchanged.script import Script


def start(
    run_path: Path,
    emit: Callable[[EventData], None],
    note_error: Callable[[BaseException], None],
) -> None:
    """Begin to watch the loops over loaders and the optimizer steps of this process.

    Args:
        run_path: The directory of the supervised run.
        emit: Records an event.
        note_error: Records an error of holdfast that must not end the script.
    """
    start_iterator = DataLoader.__iter__

    @cache
    def script() -> Script:
        # The guard's modules take half a second to import. A process that never iterates a loader
        # or steps an optimizer does not need them.
        from holdfast.guard.unchanged.script import Script

        watched = Script(run_path / GUARD_FOLDER, start_iterator, emit, note_error)
        _watch_errors(watched)
        # The guard has an exit handler of its own, which reports unsaved steps. Python runs exit
        # handlers in reverse order, and that one was registered by the import above. So the run is
        # already closed when it runs.
        atexit.register(_end, watched)
        return watched

    @wraps(start_iterator)
    def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:  # noqa: N807
        return script().begin_loop(loader, sys._getframe(1))

    DataLoader.__iter__ = __iter__  # type: ignore[assignment, method-assign]

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        script().before_step(optimizer, sys._getframe(1))

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        script().after_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _watch_errors(script: Script) -> None:
    """Ensure that a traceback is printed, even if the error occurs while output is discarded."""
    previous = sys.excepthook

    @wraps(previous)
    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        script.end_silence()
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _end(script: Script) -> None:
    # Python sets these variables when it prints the traceback of an error that ends the process.
    # `last_exc` exists since Python 3.12.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    script.end(error if isinstance(error, BaseException) else None)
