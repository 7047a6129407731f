"""Record the events of a run, and log those that users should see.

Events may come from any thread. A process forked from the recording process must not write, because
both would number their records independently. Also, a lock that another thread held at the time of
the fork could never be acquired in the child.

The last event of a recording shows how the run ended, as far as its own process can know:
``left_by_exception`` or ``closed``. If the recording ends with neither, the process was killed.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, RunDirectoryError
from holdfast.core.events import process_events, run_events
from holdfast.core.events.data import EventData
from holdfast.core.events.decisions import Recompute, RollBack, SkipStep, Split, Stop
from holdfast.core.events.event import Event
from holdfast.core.raised import describe_exception, printable
from holdfast.guard.repeated_steps import RepeatedSteps, lost_steps
from holdfast.guard.stop import Interrupted
from holdfast.loader.epoch import note_step
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import write_json, write_settings
from holdfast.recorder.scalars import Scalars
from holdfast.recorder.start import START_FILE, facts_of_start

_log = logging.getLogger("holdfast")
# The event for an error includes at most this many of the innermost frames that called the guard.
# They show where in the user's loop the error was raised.
_MOST_CALLERS = 8
# Events describe an error in one line of at most this many characters.
_MOST_CHARACTERS_OF_ERROR = 500

# Events that users should see and that are identical on all ranks, so only rank 0 logs them.
_LOGGED_ONCE: frozenset[type[EventData]] = frozenset(
    {
        SkipStep,
        RollBack,
        Stop,
        run_events.SaveFailed,
        run_events.DiskSpaceLow,
        run_events.SaveRefused,
        run_events.LossScaleCollapsed,
        run_events.StopRequested,
        run_events.RequestReceived,
        run_events.Resumed,
        run_events.NotRestored,
        run_events.OptimizerNotFused,
        run_events.LossFunctionReads,
        run_events.DiagnosisLimited,
        run_events.SplitStopped,
        run_events.Spike,
        run_events.FindingReported,
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
        run_events.ScheduleLengthChanged,
        run_events.ImplementationChanged,
        run_events.PositionNotKept,
        run_events.GroupsChanged,
        run_events.OwnStateNotKept,
        run_events.ResumeMayDiffer,
        run_events.StepsLeftBehind,
        run_events.StepsRepeated,
        run_events.RepeatedStepDiffers,
        run_events.ResumeNotProven,
        run_events.NonfiniteStepTaken,
        run_events.StepsNotSeen,
    }
)
# Events that users should see and that concern a single rank, so each rank logs its own.
_LOGGED_BY_EACH_RANK: frozenset[type[EventData]] = frozenset(
    {
        Split,
        Recompute,
        run_events.OutOfMemory,
        run_events.EvaluationSplit,
        run_events.CheckpointDamaged,
        run_events.RecomputeImpossible,
        run_events.OnednnSwitchedOff,
        run_events.SamplesDropped,
        run_events.MicroBatchDropped,
        run_events.SavesSynchronous,
        run_events.RepetitionDiffered,
        run_events.StepNotRepeated,
        run_events.LoaderHealed,
        run_events.SampleQuarantined,
        run_events.DescriptorLimitRaised,
        run_events.SignalLeftAlone,
        run_events.EndOfJobUnknown,
        run_events.StreamReadOver,
        run_events.Preflight,
        run_events.QuarantineFull,
        run_events.RecordingMovedAside,
        run_events.RollbackFailed,
        run_events.MirrorPulled,
        run_events.MirrorFailed,
        run_events.MirrorRecovered,
        run_events.MirrorStopped,
        run_events.MirrorBehind,
        process_events.ScalarsNotRecorded,
        process_events.MessageNotSent,
    }
)

# How a run ended:
# "finished": its loop reached its limit, or the guard was closed.
# "stopped": a stop was requested.
# "left": its loop was left early, by ``break`` or by an error that the guard did not catch.
# "failed": an error ended it. An event records the error.
End = Literal["finished", "stopped", "left", "failed"]


class RunRecord:
    """The recording of one process of a run. It also holds the global step of the run.

    Args:
        directory: The folder of the recording.
        clock: The clock that provides the time of events.
        rank: The rank of this process, or None in a single process.
    """

    def __init__(self, directory: Path, clock: Clock, rank: int | None = None) -> None:
        self._directory = directory
        self._rank = rank
        self.clock = clock
        self._box: BlackBox | None = None
        # Reentrant, because a signal handler may record an event while another is being recorded.
        self._lock = threading.RLock()
        # The PID of the recording process. Forked children have another PID.
        self._process = 0
        # The type and message of the last recorded error. None if a step has been recorded since.
        self._left_by: tuple[str, str] | None = None
        # How the run ended, as stated by the last event. "failed" until the recording is closed.
        self.ended: End = "failed"
        self.scalars = Scalars(lambda: directory, self.emit)
        self._global_step = 0
        # Compares the steps that a resumed run repeats. None if there is nothing to compare.
        self._repeated: RepeatedSteps | None = None
        # Functions that are called with each event, after it was recorded.
        self._listeners: list[Callable[[EventData, Event], None]] = []
        # The event about a repeated step that differs. None if there is none.
        self.failed_repetition: run_events.RepeatedStepDiffers | None = None

    # --- the global step

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps that the current weights include."""
        return self._global_step

    def count_step(self) -> None:
        """Count a committed step, and the loaders that have returned batches for it."""
        self._global_step += 1
        note_step()

    def move_to_step(self, global_step: int) -> None:
        """Set the global step to that of a restored state."""
        self._global_step = global_step

    # --- opening and closing

    @property
    def is_open(self) -> bool:
        """Return whether the recording is open. While it is closed, events are only logged."""
        return self._box is not None

    def open(self) -> None:
        """Open the recording, or continue an existing one.

        Raises:
            RunDirectoryError: H302 if the recording cannot be created.
            OSError: If there is not enough memory to map the recording.
        """
        try:
            self._box = BlackBox(self._directory)
            self._process = os.getpid()
        except OSError as error:
            if error.errno == errno.ENOMEM:
                # The recording is mapped into memory, so freeing disk space would not help.
                raise
            raise RunDirectoryError(
                f"the recording in {self._directory} cannot be created ({error.strerror or error})",
                limit=(
                    "holdfast allocates 3 MiB when a run starts, so that it can record even after"
                    " the disk is full"
                ),
                fix="free some disk space, or choose another run directory.",
                rule="H302",
            ) from error
        for moved in self._box.moved_aside:
            self.emit(run_events.RecordingMovedAside(what=moved))

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the run (see `write_settings`) and the command that started it."""
        write_settings(self._directory, settings)
        write_json(
            self._directory / START_FILE, facts_of_start(sys.orig_argv, self.clock.unix_seconds())
        )

    def close(self, how: End | None = None) -> None:
        """End the recording with an event that states how the run ended.

        Args:
            how: How the run ended. None means "failed" if an exception is being handled, otherwise
                "finished".
        """
        if self._box is not None:
            self._report_repeated_steps()
            self.ended = "failed"
            self.ended = self._record_end(how)
            self._box.close()
            self._box = None
        self.scalars.close()

    def _report_repeated_steps(self) -> None:
        """Record how many steps were repeated so far, if the run ends before the last of them."""
        event = None if self._repeated is None else self._repeated.finish()
        self._repeated = None
        if event is not None:
            self.emit(event)

    def _record_end(self, how: End | None) -> End:
        """Record how the run ended, unless a recorded error already states it.

        Args:
            how: See `close`.

        Returns:
            How the run ended.
        """
        error = sys.exception()
        if how is None and error is not None:
            self.left_by(error)
            return "failed"
        if how == "failed":
            return "failed"
        if how not in ("finished", "stopped") and self._left_by is not None:
            return "failed"
        ended: End = how or "finished"
        self.emit(run_events.Closed(how=ended))
        return ended

    # --- errors

    def left_by(self, error: BaseException | type[BaseException]) -> None:
        """Record an error that ends the run.

        An error that is passed to this method several times in a row is recorded only once.

        Args:
            error: The error, or only its type if the error itself is not available.
        """
        if isinstance(error, (GeneratorExit, Interrupted)):
            # These exceptions end a loop, but they are not errors.
            return
        if not isinstance(error, type):
            self._record_error(error)
            return
        raised = sys.exception()
        if isinstance(raised, error):
            self._record_error(raised)
        elif self._left_by is None:
            self.emit(run_events.LeftByException(exception=error.__name__))

    def _record_error(self, error: BaseException) -> None:
        """Record an error with its frames, unless it equals the error that was recorded last."""
        facts = describe_exception(error, error.__traceback__)
        type_and_message = (facts["type"], facts["message"])
        if type_and_message == self._left_by:
            return
        self._left_by = type_and_message
        facts["frames"] = [*_callers(), *facts["frames"]]
        rule = error.rule if isinstance(error, HoldfastError) else None
        self.emit(run_events.LeftByException(exception=type(error).__name__, rule=rule, **facts))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Record an error that is raised out of the context."""
        try:
            yield
        except BaseException as error:
            self.left_by(error)
            raise

    # --- events and steps

    def listen(self, listener: Callable[[EventData, Event], None]) -> None:
        """Call a function with each event that this process records from now on.

        It may be called in any thread, and must neither fail nor take long.
        """
        self._listeners.append(listener)

    def emit(
        self, data: EventData, *, global_step: int | None = None, is_logged: bool = True
    ) -> None:
        """Record an event, and log it if users should see it.

        Args:
            data: The event.
            global_step: The step that the event refers to. Defaults to the current step. An event
                about a checkpoint written in the background refers to an earlier step.
            is_logged: Whether to log the event if users should see events of its kind. False for an
                event that repeats an earlier one.
        """
        event = Event(
            kind=data.kind,
            global_step=self.global_step if global_step is None else global_step,
            unix_seconds=self.clock.unix_seconds(),
            data=data.facts(),
        )
        if os.getpid() == self._process:
            with self._lock:
                if self._box is not None:
                    self._box.event(event)
            for listener in self._listeners:
                listener(data, event)
        if is_logged:
            self._log_event(data, event)

    def note_stop_signal(self, name: str) -> None:
        """Record that a signal has asked the run to stop. The signal's handler calls this.

        If a second signal then kills the process, nothing else shows why the run has ended.
        """
        self.emit(run_events.StopSignal(signal=name))

    def _log_event(self, data: EventData, event: Event) -> None:
        if type(data) in _LOGGED_BY_EACH_RANK:
            prefix = "" if self._rank is None else f"rank {self._rank}: "
            _log.warning("%s%s", prefix, event)
        elif type(data) in _LOGGED_ONCE and not self._rank:
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
        """Record a mark of a step. This costs about 0.5 microseconds.

        Args:
            mark: Whether the step has started, was committed, or was skipped.
            micro_batch_size: The number of samples in one forward and backward pass, or None if
                unknown.
            loss: The loss, or None if it was not read.
            norm: The gradient norm, or None if it was not read.
            seconds: The duration to record with the mark.
            optimizer: The name of the optimizer that was stepped, if there was only one.
        """
        assert self._box is not None
        # The run has continued, so a later error is recorded even if it equals the last one.
        self._left_by = None
        number = self._box.optimizers[optimizer] if optimizer else 0
        self._box.step(mark, self._global_step, micro_batch_size or 0, loss, norm, seconds, number)
        if self._repeated is not None and mark is StepMark.COMMITTED:
            self._compare(self._repeated, micro_batch_size or 0, loss, norm)

    # --- steps that a resumed run repeats

    def compare_repeated_steps(self, *, is_exact: bool, precision: str) -> None:
        """Compare the next steps with those that the recording holds after the current step.

        Call this when the run has resumed, before its first step.

        Args:
            is_exact: Whether a repeated step must have the same bits.
            precision: ``Policy.precision``.
        """
        earlier = lost_steps(self._directory, self._global_step)
        if earlier:
            self._repeated = RepeatedSteps(earlier, is_exact=is_exact, precision=precision)

    def stop_comparing(self) -> None:
        """Compare no more steps, because the run no longer repeats its earlier ones."""
        self._repeated = None

    def allow_any_precision(self) -> None:
        """Compare steps whose precision is unknown, because the loop takes them itself."""
        if self._repeated is not None:
            self._repeated.allow_any_precision()

    def _compare(
        self,
        repeated: RepeatedSteps,
        micro_batch_size: int,
        loss: float | None,
        norm: float | None,
    ) -> None:
        event = repeated.compare(self._global_step, micro_batch_size, loss, norm)
        if repeated.is_complete:
            self._repeated = None
        if event is not None:
            self.emit(event)
        if isinstance(event, run_events.RepeatedStepDiffers):
            self.failed_repetition = event

    # --- reading

    def events(self) -> list[Event]:
        """Return all events in this rank's recording, oldest first."""
        return read_events(self._directory)


def describe_error(error: BaseException) -> str:
    """Return a one-line description of an error for an event."""
    return f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS_OF_ERROR]


def _callers() -> list[list[Any]]:
    """Return the file, line and function of each frame that called this module, innermost last.

    At most `_MOST_CALLERS` frames are returned.
    """
    frame: FrameType | None = sys._getframe()
    callers: list[list[Any]] = []
    while frame is not None and len(callers) < _MOST_CALLERS:
        code = frame.f_code
        if code.co_filename != __file__:
            callers.append([printable(code.co_filename), frame.f_lineno, printable(code.co_name)])
        frame = frame.f_back
    # The frames were collected from the innermost to the outermost.
    return callers[::-1]
