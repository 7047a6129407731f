"""What happens in a run, written into its black box and, where people should see it, into the log.

Facts may come from any thread. A process that was forked from the one that records must not write:
both would count the records by themselves, and a lock that another thread held at the fork is never
given back there.

The last words of a recording say how the run ended, as far as its own process can know it:
``left_by_exception`` or ``closed``. One without either was cut off.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, RunDirectoryError
from holdfast.core.events import process_events, run_events
from holdfast.core.events.event import Event, EventData, Recompute, RollBack, SkipStep, Split, Stop
from holdfast.core.raised import describe_exception, printable
from holdfast.guard.stop import Interrupted
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import write_json, write_settings
from holdfast.recorder.scalars import Scalars
from holdfast.recorder.start import START_FILE, facts_of_start

_log = logging.getLogger("holdfast")
_MOST_CALLERS = 8  # frames outside of the guard, the innermost: where the user's loop stands
# People should see these although they did not ask; the others are for the record. First those that
# all of several ranks record alike, and one shows; then those of one rank.
_OF_ALL = (
    SkipStep,
    RollBack,
    Stop,
    run_events.SaveFailed,
    run_events.SaveRefused,
    run_events.LossScaleCollapsed,
    run_events.StopRequested,
    run_events.NotRestored,
    run_events.DiagnosisLimited,
    run_events.SplitStopped,
    run_events.Spike,
    run_events.Finding,
    run_events.SplitNotTried,
    run_events.SideEffects,
    run_events.SchedulersWait,
    run_events.RolledBack,
    run_events.SavePostponed,
    run_events.RanksNotDivided,
    run_events.ChangesNotSaved,
    run_events.NotSaved,
    run_events.BeginsAnew,
    run_events.SettingsKept,
    run_events.PositionNotKept,
    run_events.GroupsChanged,
    run_events.OwnStateNotKept,
    run_events.ResumeMayDiffer,
    run_events.StepsLeftBehind,
)
_OF_ONE = (
    Split,
    Recompute,
    run_events.OutOfMemory,
    run_events.CheckpointDamaged,
    run_events.RecomputeImpossible,
    run_events.OnednnSwitchedOff,
    run_events.SamplesDropped,
    run_events.MicroBatchDropped,
    run_events.SavesSynchronous,
    run_events.LoaderHealed,
    run_events.SampleQuarantined,
    run_events.DescriptorLimitRaised,
    run_events.SignalLeftAlone,
    run_events.StreamReadOver,
    run_events.Preflight,
    run_events.QuarantineFull,
    run_events.RecordingMovedAside,
    run_events.RollbackFailed,
    process_events.ScalarsNotRecorded,
)


End = Literal["finished", "stopped", "left", "failed"]
"""How a run was closed: it came to its end; on request.

Its loop was left early, by ``break`` or by an error that the
guard did not see; by an error that is recorded.
"""


class RunRecord:
    """The recording of one process of a run, and the step that it stands at.

    `rank` is that of one of several.
    """

    def __init__(self, directory: Path, clock: Clock, rank: int | None = None) -> None:
        self._directory, self._rank = directory, rank
        self.clock = clock
        self._box: BlackBox | None = None
        self._lock = threading.RLock()  # reentrant, for a signal handler of the caller that records
        self._process = 0
        self._left_by: tuple[str, str] | None = None
        self.ended: End = "failed"  # as its last word says; without one it has failed
        self.scalars = Scalars(lambda: directory, self.emit)
        self.global_step = 0

    @property
    def is_open(self) -> bool:
        """Return whether records are written; without that they are only logged."""
        return self._box is not None

    def open(self) -> None:
        """Continue the recording."""
        try:
            self._box = BlackBox(self._directory)
            self._process = os.getpid()
        except OSError as error:
            if error.errno == errno.ENOMEM:
                # No room in memory, to which the recording is mapped: free space on the disk does
                # not help
                raise
            raise RunDirectoryError(
                f"the recording in {self._directory} cannot be made ({error.strerror or error})",
                limit=(
                    "3 MiB are allocated when a run starts, so that a full disk cannot silence it"
                    " later"
                ),
                fix="free some space, or choose another run directory.",
                rule="H302",
            ) from error
        for what in self._box.moved_aside:
            self.emit(run_events.RecordingMovedAside(what=what))

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Keep what the run is set to, see `write_settings`, and what it was started with."""
        write_settings(self._directory, settings)
        write_json(
            self._directory / START_FILE, facts_of_start(sys.orig_argv, self.clock.unix_seconds())
        )

    def close(self, how: End | None = None) -> None:
        """End the recording with how the run ended.

        None: "finished", unless an error is on its way out.
        """
        if self._box is not None:
            error = sys.exception() if how is None else None
            self.ended = "failed"
            if error is not None:
                self.left_by(error)
            elif how in ("finished", "stopped") or (how != "failed" and self._left_by is None):
                self.ended = how or "finished"
                self.emit(run_events.Closed(how=self.ended))
            self._box.close()
            self._box = None
        self.scalars.close()

    def left_by(self, error: BaseException | type[BaseException]) -> None:
        """Record an error that leaves the run; one that passes several places is recorded once."""
        if isinstance(error, (GeneratorExit, Interrupted)):
            return  # these end a loop in order
        raised = sys.exception()
        if isinstance(error, type) and isinstance(raised, error):
            error = raised
        if isinstance(error, type):
            if self._left_by is None:
                self.emit(run_events.LeftByException(exception=error.__name__))
            return
        facts = describe_exception(error, error.__traceback__)
        seen = facts["type"], facts["message"]
        if seen != self._left_by:
            self._left_by = seen
            facts["frames"] = [*_callers(), *facts["frames"]]
            rule = error.rule if isinstance(error, HoldfastError) else None
            self.emit(
                run_events.LeftByException(exception=type(error).__name__, rule=rule, **facts)
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Record an error that leaves the context."""
        try:
            yield
        except BaseException as error:
            self.left_by(error)
            raise

    def emit(self, data: EventData, *, global_step: int | None = None) -> None:
        """Record what happened at a step, such as that of a checkpoint finished now.

        None: the present one.
        """
        step = self.global_step if global_step is None else global_step
        event = Event(
            kind=data.kind,
            global_step=step,
            unix_seconds=self.clock.unix_seconds(),
            data=data.facts(),
        )
        if os.getpid() == self._process:
            with self._lock:
                if self._box is not None:
                    self._box.event(event)
        if type(data) in _OF_ONE:
            _log.warning("%s%s", "" if self._rank is None else f"rank {self._rank}: ", event)
        elif type(data) in _OF_ALL and not self._rank:
            _log.warning("%s", event)

    def step(
        self,
        mark: StepMark,
        micro_batch_size: int | None,
        loss: float | None,
        norm: float | None,
        seconds: float,
        optimizer: str = "",
    ) -> None:
        """Record a mark of a step; None: that was not read. Cost: about 0.5 microseconds."""
        assert self._box is not None
        self._left_by = None  # whatever was raised before, it goes on
        number = self._box.optimizers[optimizer] if optimizer else 0
        self._box.step(mark, self.global_step, micro_batch_size or 0, loss, norm, seconds, number)

    def events(self) -> list[Event]:
        """Return everything that was recorded in this run directory, oldest first."""
        return read_events(self._directory)


def described(error: BaseException) -> str:
    """Return an error as one line for an event."""
    return f"{type(error).__name__}: {error}"[:500]


def _callers() -> list[list[Any]]:
    """Return the frames that called the function which records, without those of this file.

    Innermost last.
    """
    frame: FrameType | None = sys._getframe()
    found: list[list[Any]] = []
    while frame is not None and len(found) < _MOST_CALLERS:
        if frame.f_code.co_filename != __file__:
            found.append(
                [
                    printable(frame.f_code.co_filename),
                    frame.f_lineno,
                    printable(frame.f_code.co_name),
                ]
            )
        frame = frame.f_back
    return found[::-1]
