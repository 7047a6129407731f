"""An observed process of an attempt: its recordings, how it exited, and whether it died."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.explain.evidence import Statement
from holdfast.explain.runs.statements import text_of_field
from holdfast.recorder.progress import ProcessPhase, Standing
from holdfast.recorder.run_files import ProcessInfo

_MAX_EXIT_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How an observed process exited.

    Attributes:
        call: The call that ended the process, such as ``"sys.exit"`` or ``"os._exit"``, or another
            word that the observer recorded. None if unknown.
        message: The message that was passed to `sys.exit`; empty if there was none.
    """

    call: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedProcess:
    """An observed process of an attempt, with its events and the progress it published last."""

    folder: Path
    info: ProcessInfo
    events: Sequence[Event]
    standing: Standing | None

    @property
    def is_trainer(self) -> bool:
        """Return whether the process trains a model."""
        return self.info.role == "trainer"

    def exit(self) -> ProcessExit:
        """Return how the process exited.

        A process that loaded torch but did not record its exit is assumed to have called
        ``os._exit``.
        """
        exits = [event for event in self.events if event.kind == "exiting"]
        if exits:
            newest = exits[-1].data
            return ProcessExit(
                call=text_of_field(newest.get("how")) or None,
                message=text_of_field(newest.get("said"))[:_MAX_EXIT_MESSAGE_CHARACTERS],
            )
        if any(event.kind == "torch_imported" for event in self.events):
            return ProcessExit(call="os._exit")
        return ProcessExit()


def pids_that_died(
    processes: Sequence[ObservedProcess], raised: Sequence[Statement]
) -> set[int | None]:
    """Return the PIDs of training processes that an exception ended and that were not replaced.

    If the command ended with status 0, these processes are hidden failures: a shell pipeline, or a
    parent that ignores its child's status, did not pass on the failure. A failed process is
    considered replaced if another training process finished normally after it failed. A script that
    failed before its first step is a training process, but a helper that the script started, such
    as a compiler, is not.

    Args:
        processes: All observed processes of the attempt.
        raised: The exceptions that these processes recorded.
    """
    ended_by_exception = _pids_ended_by_exception(processes, raised)
    training = _training_processes(processes)
    survivors = [process for process in training if process.info.pid not in ended_by_exception]
    return {
        process.info.pid
        for process in training
        if process.info.pid in ended_by_exception and not _was_replaced(process, survivors)
    }


def _pids_ended_by_exception(
    processes: Sequence[ObservedProcess], raised: Sequence[Statement]
) -> set[int | None]:
    """Return the PIDs of processes that an exception ended.

    Processes that a `KeyboardInterrupt` or a call to `sys.exit` ended are not included.
    """
    called_sys_exit = {
        process.info.pid for process in processes if process.exit().call == "sys.exit"
    }
    return {
        statement.pid
        for statement in raised
        if statement.fatal
        and statement.exception != "KeyboardInterrupt"
        and statement.pid not in called_sys_exit
    }


def _training_processes(processes: Sequence[ObservedProcess]) -> list[ObservedProcess]:
    """Return the trainers, and other processes that loaded torch although their parent did not.

    The second group contains scripts that failed before their first step. If the parent of a
    process loaded torch, the process is a helper of its parent.
    """
    with_torch = [
        process
        for process in processes
        if process.info.torch and process.info.role != "loader worker"
    ]
    parents = {process.info.pid for process in with_torch if process.info.role != "launcher"}
    return [
        process for process in with_torch if process.is_trainer or process.info.ppid not in parents
    ]


def _was_replaced(failed: ObservedProcess, survivors: Sequence[ObservedProcess]) -> bool:
    """Return whether a survivor may have replaced a failed process.

    A survivor may have done so if it finished normally after the failure. Only a trainer can
    replace a trainer.
    """
    failed_since = failed.standing.since_seconds if failed.standing is not None else 0.0
    for survivor in survivors:
        standing = survivor.standing
        if standing is None or standing.phase is not ProcessPhase.ENDING:
            continue
        may_replace = survivor.is_trainer or not failed.is_trainer
        if may_replace and standing.since_seconds > failed_since:
            return True
    return False
