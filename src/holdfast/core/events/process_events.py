"""Events about processes, recorded by the supervisor, its watchdog and each process's observer.

In all of these events, `attempt` counts from 0, `step` is the current step of the process that the
event is about, and `why` is an explanation for people to read. Events in a training loop are in
``run_events``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast.core.events.data import EventData, Failed, WithReason
from holdfast.core.raised import exception_text
from holdfast.core.text import counted, duration, listed, percent, size

# --- the supervisor -------------------------------------------------------------------------------


class AttemptStarted(EventData):
    """The supervisor started the command."""

    attempt: int
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"attempt {self.attempt} started: {' '.join(self.argv)}"


class AttemptEnded(EventData):
    """The command ended.

    `status` is the exit code of the command, or the negative number of the signal that killed it.
    `signal_sent_by_us` is the last signal that the supervisor sent to the command, and `asked_by`
    is the signal with which the supervisor was asked to stop.
    """

    attempt: int
    status: int
    oom_kills: int | None
    seconds: float
    steps: int | None
    signal_sent_by_us: int | None
    asked_by: int | None

    def __str__(self) -> str:
        text = f"attempt {self.attempt} ended after {duration(self.seconds)}"
        if self.steps is not None:
            text += f" and {counted(self.steps, 'step')}"
        text += f": {_end(self.status, self.oom_kills)}"
        if self.signal_sent_by_us is not None:
            text += f"; holdfast had sent {signal_name(self.signal_sent_by_us)}"
        if self.asked_by is not None:
            text += f"; stop requested by {signal_name(self.asked_by)}"
        return text


class ProcessEnded(EventData):
    """A process ended.

    `status` is the exit code, or the negative number of the signal that killed the process.
    `oom_kills` is the number of processes that the kernel killed during the attempt because memory
    ran out.
    """

    pid: int
    status: int
    oom_kills: int | None

    def __str__(self) -> str:
        return f"process {self.pid} ended: {_end(self.status, self.oom_kills)}"


class Restart(EventData):
    """The supervisor will restart the command, with the environment variables in `changes` set."""

    attempt: int
    cause: str
    why: str
    delay_seconds: float
    changes: Mapping[str, str]

    def __str__(self) -> str:
        text = f"restarting as attempt {self.attempt} in {duration(self.delay_seconds)}: {self.why}"
        text += f" ({self.cause})"
        if self.changes:
            variables = [f"{name}={value!r}" for name, value in self.changes.items()]
            text += f", with {listed(variables)} in its environment"
        return text


class Stopped(WithReason):
    """The supervisor exits. `why` says why it does not restart the command."""

    summary = "supervisor ended"


class Requeued(EventData):
    """The supervisor asked Slurm to requeue the job after a stop. `refusal` is None if it did."""

    job: str
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal is None:
            return f"Slurm requeues job {self.job}"
        return f"Slurm did not requeue job {self.job}: {self.refusal}"


class Signal(EventData):
    """The supervisor received a signal and passed it on to the command."""

    number: int

    def __str__(self) -> str:
        return f"received {signal_name(self.number)} and passed it on to the command"


class VerdictReached(EventData):
    """The supervisor determined why an attempt ended.

    `verdict` is the content of ``verdict.json``. It is also recorded here, because that file cannot
    be written if the disk is full.
    """

    kind: ClassVar[str] = "verdict"
    attempt: int
    verdict: Mapping[str, Any]

    def __str__(self) -> str:
        title, cause = self.verdict["title"], self.verdict["cause"]
        return f"verdict on attempt {self.attempt}: {title} ({cause})"


class NotWritten(EventData):
    """A file in the run directory could not be written."""

    file: str
    error: str

    def __str__(self) -> str:
        return f"{self.file} could not be written: {self.error}"


class OutputLost(Failed):
    """The supervisor can no longer record the command's output."""

    summary = "the output of the command is no longer recorded"


class Leftovers(EventData):
    """The command left processes behind when it ended, and the supervisor kills these processes."""

    pids: tuple[int, ...]

    def __str__(self) -> str:
        return f"killing {_processes(self.pids)} that the command left behind"


class NotKillable(EventData):
    """Some processes could not be killed because they are stuck in the kernel."""

    pids: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_processes(self.pids)} could not be killed: stuck in the kernel"


class EndedElsewhere(WithReason):
    """Another host that takes part in the training run has ended the attempt."""

    summary = "another host ended the attempt"


class MessageNotSent(EventData):
    """A message for the user could not be sent.

    `message` is the kind of message, such as ``"failure"``, and `receiver` is where it was sent to,
    without secrets.
    """

    message: str
    receiver: str
    error: str

    def __str__(self) -> str:
        return f"a message ({self.message}) could not be sent to {self.receiver}: {self.error}"


# --- the watchdog ---------------------------------------------------------------------------------


class HangSuspected(EventData):
    """A process has been in the same phase for `seconds`, which exceeds the phase's `limit`."""

    pid: int
    rank: int | None
    phase: str
    step: int
    seconds: float
    limit: float

    def __str__(self) -> str:
        return (
            f"{_process(self.pid, self.rank)} may be hanging: no progress for"
            f" {duration(self.seconds)} in phase {self.phase!r} (limit {duration(self.limit)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HungRank:
    """Where one rank was when a hang was examined; `frame` is empty if its stack is unknown."""

    pid: int
    rank: int | None
    step: int
    phase: str
    frame: str


class Hang(HangSuspected):
    """A process hangs.

    `pid`, `rank`, `phase` and `step` are those of the process that exceeded its limit. `hang_kind`
    and `signature` classify the hang. `blamed_pid` is the process that causes the hang, such as a
    worker or another rank, `blamed_rank` is the rank of that process, and `frame` is the innermost
    frame of user code in it, or an empty string. `ranks` lists the processes that train together,
    or the most important of them, if there are several. `odd_one_out` is the rank that the other
    ranks are waiting for. `remedy` is one of the remedies in ``explain.hangs.blame``. `files` are
    the files that contain the stack traces.
    """

    hang_kind: str
    signature: str
    certainty: str
    blamed_pid: int
    blamed_role: str
    frame: str
    odd_one_out: int | None
    sentence: str
    remedy: str
    files: tuple[str, ...] = ()
    blamed_rank: int | None = None
    ranks: tuple[HungRank, ...] = ()

    def __str__(self) -> str:
        return f"hang: {self.sentence} ({self.signature})"


class HangOver(EventData):
    """A hang is over: the process is making progress again, or it has ended."""

    pid: int
    phase: str
    step: int
    why: str

    def __str__(self) -> str:
        return f"process {self.pid} no longer hangs in phase {self.phase!r}: {self.why}"


class Stacks(EventData):
    """The stack traces of a process were written to files in the run directory."""

    pid: int
    files: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        took = duration(self.seconds)
        if not self.files:
            return f"no stack traces of process {self.pid} could be taken ({took})"
        return f"stack traces of process {self.pid} written to {listed(self.files)} ({took})"


class ProcessStopped(EventData):
    """A process was stopped by a signal, such as SIGSTOP."""

    pid: int
    rank: int | None
    step: int
    phase: str

    def __str__(self) -> str:
        return f"{_process(self.pid, self.rank)} was stopped by a signal in phase {self.phase!r}"


class ProcessContinued(EventData):
    """A process that was stopped by a signal has continued."""

    pid: int
    step: int
    seconds: float

    def __str__(self) -> str:
        return f"process {self.pid} continues after being stopped for {duration(self.seconds)}"


class WatchdogSuspended(EventData):
    """The machine was suspended. The suspended time does not count toward the limits for hangs."""

    seconds: float

    def __str__(self) -> str:
        return (
            f"the machine was suspended for {duration(self.seconds)}; that time counts toward no"
            " limit"
        )


class WatchingFailed(EventData):
    """A component of the supervisor failed: the watchdog, the verdict or a process watcher.

    `what` names the component. A process watcher that fails is switched off.
    """

    what: str
    error: str

    def __str__(self) -> str:
        return f"{self.what} failed: {self.error}"


class MemoryTrend(EventData):
    """A process's memory use grows from step to step, or has stopped growing (0 bytes per step).

    `what` is ``"host"`` or the name of a device, `between` is a confidence interval for
    `bytes_per_step`, and `minutes_left` is the time until memory runs out at this rate.
    """

    pid: int
    what: str
    bytes_per_step: int
    minutes_left: float | None = None
    between: tuple[int, int] | None = None
    grown_bytes: int = 0
    steps: int = 0
    signature: str | None = None

    def __str__(self) -> str:
        memory = f"{self.what} memory of process {self.pid}"
        if self.bytes_per_step == 0:
            return f"{memory} no longer grows"
        text = f"{memory} grows by {size(self.bytes_per_step)} per step"
        if self.grown_bytes:
            text += f", {size(self.grown_bytes)} in {counted(self.steps, 'step')}"
        if self.minutes_left is not None:
            text += f"; it runs out in {duration(60 * self.minutes_left)}"
        if self.signature is not None:
            text += f" ({self.signature})"
        return text


class ResourcesUsed(EventData):
    """What the trainers and loader workers of an attempt on this host have used so far.

    `cpus` is the number of CPUs that they may use, and `cpus_wanted` the mean number that they
    would have used if no other process had kept them waiting for one. `workers` is the largest
    number of loader workers per trainer, and `worker_busy` the share of time in which a worker
    computed or waited for a CPU. Of `waits_seen` observations of a trainer that waited for data,
    its main thread computed in `waits_running`.
    """

    attempt: int
    seconds: float
    cpus: float
    cpus_wanted: float
    workers: float
    worker_busy: float | None = None
    bytes_read: int = 0
    waits_seen: int = 0
    waits_running: int = 0

    def __str__(self) -> str:
        text = f"in {duration(self.seconds)}, training kept {self.cpus_wanted:g} of {self.cpus:g}"
        text += f" CPUs busy and read {size(self.bytes_read)}"
        if self.worker_busy is not None:
            text += f"; {self.workers:g} loader workers were busy {percent(self.worker_busy)} of it"
        return text


class StacksSampled(EventData):
    """How many stack samples of a training loop were in Python code of the loop itself.

    `place` is the line in the user's code that most of these samples were in.
    """

    attempt: int
    pid: int
    samples: int
    in_python: int
    place: str = ""
    at_place: int = 0

    def __str__(self) -> str:
        text = f"{self.in_python} of {self.samples} stack samples of process {self.pid} were in"
        text += " Python code of the loop itself"
        if self.place:
            text += f", {self.at_place} of them at {self.place}"
        return text


# --- the observer in each process -----------------------------------------------------------------


class GuardOpened(EventData):
    """A guard was created in this process, and records into the run directory `path`."""

    kind: ClassVar[str] = "guard"
    path: str

    def __str__(self) -> str:
        return f"a guard in this process records into {self.path}"


class TorchImported(EventData):
    """The script imported torch."""

    version: str

    def __str__(self) -> str:
        return f"torch {self.version} imported"


class EnvironmentsImported(EventData):
    """The script imported a package of reinforcement-learning environments.

    In reinforcement learning, the loss may not indicate how training progresses.
    """

    package: str

    def __str__(self) -> str:
        return f"{self.package} imported, so this is reinforcement learning"


class ExceptionRaised(EventData):
    """An exception ended a thread or, if `fatal` is true, the whole process.

    `type`, `message`, `frames` and `chain` are from `raised.describe_exception`.
    """

    kind: ClassVar[str] = "exception"
    type: str
    message: str
    frames: Sequence[Any]
    chain: Sequence[Any]
    thread: str
    fatal: bool

    def __str__(self) -> str:
        ended = "the process" if self.fatal else f"thread {self.thread!r}"
        return f"{ended} ended by {exception_text(self.type, self.message)}"


class Exiting(EventData):
    """The process exits.

    `how` is ``"returned"``, ``"sys.exit"`` or ``"exception"``. `said` is the message that the
    script passed to `sys.exit`.
    """

    how: str
    status: int | None
    said: str | None = None

    def __str__(self) -> str:
        sentences = {
            "returned": "process exits at the end of its script",
            "sys.exit": "process exits through sys.exit",
            "exception": "process exits after an exception",
        }
        text = sentences[self.how]
        if self.status is not None:
            text += f" with exit code {self.status}"
        if self.said is not None:
            text += f": {self.said}"
        return text


class StepsNotRecorded(Failed):
    """This process's steps are not recorded, so there are no training curves for it."""

    summary = "steps are not recorded"


class ScalarsNotRecorded(Failed):
    """The values that the script logs are not recorded."""

    summary = "logged values are not recorded"


class RepeatedRowsDropped(EventData):
    """The script logged steps again whose values its W&B run has already.

    These values are not logged to W&B a second time. The event is recorded once after each resume
    or rollback.
    """

    run_id: str

    def __str__(self) -> str:
        return f"values that W&B run {self.run_id} already has are not logged again"


class Leak(EventData):
    """Objects or memory accumulate from step to step.

    `what` describes the objects that accumulate, `held_by` is the variable that keeps them alive,
    and `retained_at` is the source line that stores them there.
    """

    form: str
    what: str
    count_per_step: float
    bytes_per_step: int
    device: str
    held_by: str
    retained_at: str
    signature: str

    def __str__(self) -> str:
        text = (
            f"leak of {size(self.bytes_per_step)} per step on {self.device}:"
            f" {self.count_per_step:g} x {self.what} per step, held by {self.held_by}"
        )
        if self.retained_at:
            text += f" at {self.retained_at}"
        return f"{text} ({self.signature})"


class LeakTrace(EventData):
    """A search for leaks ended after `steps` steps.

    `request` is the number of the request that started the search. If the search was abandoned,
    `why` is the reason. Otherwise, `why` is empty.
    """

    found: int
    steps: int
    request: int
    seconds: float | None = None
    why: str = ""

    def __str__(self) -> str:
        text = (
            f"leak search over {counted(self.steps, 'step')}: {counted(self.found, 'leak')} found"
        )
        if self.seconds is not None:
            text += f" in {duration(self.seconds)}"
        if self.why:
            text += f": {self.why}"
        return text


# --- parts of sentences ---------------------------------------------------------------------------


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGTERM", or "signal N" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _process(pid: int, rank: int | None) -> str:
    if rank is None:
        return f"process {pid}"
    return f"process {pid} (rank {rank})"


def _processes(pids: Sequence[int]) -> str:
    if len(pids) == 1:
        return f"process {pids[0]}"
    return f"processes {listed(pids)}"


def _end(status: int, oom_kills: int | None) -> str:
    """Describe how a process ended, given its exit code or the negative number of a signal."""
    text = f"exit code {status}"
    if status < 0:
        text = f"killed by {signal_name(-status)}"
    if oom_kills:
        text += f", {counted(oom_kills, 'process')} killed by the kernel for lack of memory"
    return text
