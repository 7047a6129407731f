"""`ObservedProcess`: the observer's interface for the classes that track training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from holdfast.core.events.data import EventData
    from holdfast.core.importing import ImportWatch
    from holdfast.recorder.progress import ProgressBoard, SampleRing
    from holdfast.recorder.run_files import ProcessRole


class ObservedProcess(Protocol):
    """The part of `ProcessObserver` that the step tracker and its helpers use."""

    watch: ImportWatch

    @property
    def board(self) -> ProgressBoard:
        """The progress board of the process."""

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Record the settings of the training run."""

    def open_samples(self) -> SampleRing:
        """Open the ring buffer for recorded steps."""

    def emit(self, data: EventData) -> None:
        """Record an event."""

    def set_role(self, role: ProcessRole) -> None:
        """Change the recorded role of the process."""

    def note_error(self, error: BaseException) -> None:
        """Write an error of holdfast to the run directory instead of raising it into the script."""


class _HasObserver(Protocol):
    observer: ObservedProcess


P = TypeVarTuple("P")
_Owner = TypeVar("_Owner", bound=_HasObserver)


def noted(method: Callable[[_Owner, *P], None]) -> Callable[[_Owner, *P], None]:
    """Decorate a method so that its errors are passed to `note_error` and not to the script."""

    @wraps(method)
    def noting(owner: _Owner, *args: *P) -> None:
        try:
            method(owner, *args)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            owner.observer.note_error(error)

    return noting
