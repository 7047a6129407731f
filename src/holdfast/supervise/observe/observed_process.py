"""`ObservedProcess`: what the parts that track training need from the observer."""

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
    """The part of `ProcessObserver` that they use."""

    watch: ImportWatch

    @property
    def board(self) -> ProgressBoard:
        """The board on which the process shows its progress."""

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Record the settings of the training run."""

    def open_samples(self) -> SampleRing:
        """Open the ring buffer in which steps are recorded."""

    def emit(self, data: EventData) -> None:
        """Record an event."""

    def set_role(self, role: ProcessRole) -> None:
        """Show the role that the process has turned out to have."""

    def note_error(self, error: BaseException) -> None:
        """Note one of our errors, which must not reach the script."""


class _HasObserver(Protocol):
    observer: ObservedProcess


P = TypeVarTuple("P")
_Owner = TypeVar("_Owner", bound=_HasObserver)


def noted(method: Callable[[_Owner, *P], None]) -> Callable[[_Owner, *P], None]:
    """Decorate a method so that it notes its errors instead of raising them into the script."""

    @wraps(method)
    def noting(owner: _Owner, *args: *P) -> None:
        try:
            method(owner, *args)
        except Exception as error:  # noqa: BLE001 - our errors must not stop the script
            owner.observer.note_error(error)

    return noting
