"""`Supervisor`: run a command, determine why each attempt ended, and restart it if that helps.

`Supervisor.run` is the loop over attempts. ``attempt`` serves a running attempt, and ``restarts``
decides whether another one follows.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError, RunDirectoryError
from holdfast.core.events import process_events
from holdfast.core.events.data import EventData
from holdfast.core.events.event import Event
from holdfast.core.events.run_events import RecordingMovedAside
from holdfast.core.secrets import without_secrets
from holdfast.explain.verdict import Verdict
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.progress import Standing, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    NOTIFY_VARIABLE,
    OUTPUT_FILE,
    read_processes,
)
from holdfast.supervise.launch.attempt import Attempt, AttemptEnd
from holdfast.supervise.launch.commands import Sentinel, make_environment, start_command
from holdfast.supervise.launch.flight_dumps import flight_variables, keep_dumps
from holdfast.supervise.launch.hosts import HostPosition, Hosts, find_host
from holdfast.supervise.launch.kernel import become_subreaper, count_oom_kills
from holdfast.supervise.launch.output import CommandStreams, OutputCopier, open_missing_streams
from holdfast.supervise.launch.output_log import OutputLog
from holdfast.supervise.launch.requeue import (
    REFUSED_STATUS,
    job_to_requeue,
    requeue,
    should_requeue,
)
from holdfast.supervise.launch.restarts import (
    Budgets,
    EndedAttempt,
    EndRun,
    PastAttempt,
    RestartDecision,
    StartAgain,
    decide_restart,
)
from holdfast.supervise.launch.run_folder import RunFolder
from holdfast.supervise.launch.shutdown import Shutdown
from holdfast.supervise.launch.signals import FORWARDED, Signals
from holdfast.supervise.launch.verdicts import (
    AttemptJudgement,
    is_consequence,
    judge_attempt,
    remove_verdict,
    write_verdict,
)
from holdfast.supervise.launch.wandb_id import wandb_variables
from holdfast.supervise.process_tree import Tree, read_start_ticks
from holdfast.supervise.watch.limits import HangLimits

if TYPE_CHECKING:
    from holdfast.supervise.launch.notifications import RunNotifications
_MIRROR_VARIABLE = "HOLDFAST_MIRROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a supervised run.

    Args:
        command: The words of the command.
        program: Path of the command's executable.
        run_path: The run directory.
        is_run_path_shared: Whether all hosts of a multi-host run use this directory.
        budgets: Limits on restarts.
        hang_limits: How long each phase of training may go without progress. None turns off the
            detection of hangs and leaks.
        observe: Whether the command's Python processes record themselves.
        grace_seconds: Time between the request to end the command and SIGKILL.
        max_log_bytes: Maximum size of the output log.
        requeue: Whether to ask Slurm to requeue the job after the training script has stopped.
        resume: Whether to save and resume a training script that does not use holdfast.
        notify: Where to send messages about the run; see ``core.notify.receivers``. None: nowhere.
        mirror: Where the script's guard copies its checkpoints, or None.
    """

    command: tuple[str, ...]
    program: str
    run_path: Path
    is_run_path_shared: bool = False
    budgets: Budgets = field(default_factory=Budgets)
    hang_limits: HangLimits | None = field(default_factory=HangLimits)
    observe: bool = True
    # Must be less than the 30 s that schedulers usually allow between SIGTERM and SIGKILL.
    grace_seconds: float = 25.0
    max_log_bytes: int = 256 << 20
    requeue: bool = False
    resume: bool = False
    notify: str | None = None
    # It may contain credentials.
    mirror: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a supervised run ended.

    Args:
        exit_code: Exit code of the last attempt, as a shell reports it.
        attempts: How many times the command was started.
        seconds: Time from the start of the first attempt to the end of the last one.
        why: Why the command is not restarted, as a clause without a final period.
        verdict: Why the last attempt ended.
        run_path: The run directory.
    """

    exit_code: int
    attempts: int
    seconds: float
    why: str
    verdict: Verdict
    run_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessControl:
    """The objects that find, signal and kill the command's processes in all attempts."""

    mark: str
    tree: Tree
    sentinel: Sentinel
    signals: Signals


class Supervisor:
    """Runs a command and restarts it if that helps. Must be used from the main thread.

    Args:
        options: Options of the run.
        quiet: Whether to print only the command's output.

    Raises:
        RunDirectoryError: H722 to H724 if the run directory cannot be used; see `RunFolder`.
        PolicyError: H735 for the option `requeue` outside a Slurm job, H118 if the receiver in
            `notify` cannot be used.
    """

    def __init__(self, options: RunOptions, *, quiet: bool = False) -> None:
        open_missing_streams()
        self._options = options
        self._environment = dict(os.environ)
        if options.mirror is not None:
            # A guard reads its settings from such variables.
            self._environment[_MIRROR_VARIABLE] = options.mirror
        # The Slurm job to requeue after a stop, or None.
        self._job = job_to_requeue(self._environment) if options.requeue else None
        self._history: list[PastAttempt] = []
        self._event_lock = threading.Lock()
        shared_path = options.run_path.expanduser()
        position = HostPosition()
        if options.is_run_path_shared:
            position = find_host(options.command, self._environment)
        is_one_of_several = position.count > 1
        self._notifications: RunNotifications | None = None
        if options.notify is not None:
            self._environment[NOTIFY_VARIABLE] = options.notify
            # The other hosts would send the same messages.
            if position.number == 0:
                self._notifications = self._make_notifications(options.notify, shared_path.name)
        if is_one_of_several:
            self._folder = RunFolder(shared_path / f"host-{position.number}")
        else:
            self._folder = RunFolder(shared_path)
        self.run_path = self._folder.path
        self._hosts: Hosts | None = None
        try:
            # Number of the attempt, from 0. In an existing run directory, numbering continues.
            self._number = self._folder.next_attempt()
            self._open_recording()
            if options.observe:
                self._environment.update(wandb_variables(self._environment, self.run_path))
            # This must follow the lock of the run directory, so that a second supervisor on this
            # host publishes nothing.
            if is_one_of_several:
                self._hosts = Hosts(shared_path, position)
        except BaseException:
            self._folder.close()
            raise
        # The Unix time at which the current attempt was started.
        self._attempt_began = 0.0
        self._copier = OutputCopier(self._log, quiet=quiet)
        self._folder.update_last_link(shared_path.absolute())

    def _make_notifications(self, notify: str, run: str) -> RunNotifications:
        # Imported here because most runs send no messages, and the supervisor must start quickly.
        from holdfast.supervise.launch.notifications import RunNotifications

        return RunNotifications(notify, run, self.emit)

    def _open_recording(self) -> None:
        try:
            self._folder.write_description(self._options.command, time.time())
            self._box = BlackBox(self._folder.supervisor)
            self._log = OutputLog(
                self.run_path / OUTPUT_FILE,
                self._options.max_log_bytes,
                on_loss=self._report_lost_output,
            )
        except OSError as error:
            raise self._folder.unusable(error) from error

    # --- the run ---

    def run(self) -> RunOutcome:
        """Run attempts until no further attempt would help, and return how the run ended.

        No process of the command is left when this returns.

        Raises:
            RunDirectoryError: H725 if the hosts of the run could not start together.
        """
        become_subreaper()
        started_at = time.monotonic()
        first_number = self._number
        with self._take_control() as control:
            self._folder.add_git_state()
            self._report_damaged_recordings()
            self._wait_for_first_start(control)
            while True:
                end = self._run_attempt(control)
                judgement = self._judge(end)
                decision = self._decide(end, judgement)
                decision = self._wait_before_restart(decision, judgement.verdict, control)
                if isinstance(decision, EndRun):
                    break
                self._number += 1
            if self._options.resume and end.status == 0 and judgement.stopped_by is None:
                self._folder.note_complete()
            exit_code, why = self._requeue(judgement, end.exit_code, decision.why)
            self.emit(process_events.Stopped(why=why))
            if self._hosts is not None:
                self._hosts.publish_stopped(decision.why, succeeded=end.status == 0)
        return RunOutcome(
            exit_code=exit_code,
            attempts=self._number - first_number + 1,
            seconds=time.monotonic() - started_at,
            why=why,
            verdict=judgement.verdict,
            run_path=self.run_path,
        )

    @contextmanager
    def _take_control(self) -> Iterator[_ProcessControl]:
        mark = f"{os.getpid()}-{read_start_ticks()}"
        # Create the tree before starting anything: children that exist now are not part of the
        # command.
        tree = Tree(mark)
        with ExitStack() as stack:
            stack.callback(self._folder.close)
            stack.callback(self._log.close)
            stack.callback(self._box.close)
            sentinel = Sentinel(mark, self._folder.supervisor / LOST_FILE)
            stack.callback(sentinel.release)
            signals = stack.enter_context(Signals(tree))
            # While the last messages are sent, Ctrl-C must not end the supervisor.
            stack.callback(self._finish_notifications)
            yield _ProcessControl(mark=mark, tree=tree, sentinel=sentinel, signals=signals)

    def _run_attempt(self, control: _ProcessControl) -> AttemptEnd:
        """Start the command, serve it until it ends, and record its start and its end."""
        options = self._options
        self._log.begin_attempt(self._number)
        remove_verdict(self.run_path)
        oom_kills_before = count_oom_kills()
        argv = tuple(without_secrets(options.command))
        self.emit(process_events.AttemptStarted(attempt=self._number, argv=argv))
        attempt = self._start_command(control)
        control.sentinel.guard_session(attempt.child.pid)
        with self._watching(attempt):
            end = attempt.serve()
        # From now on, the kernel may reuse the session ID for other processes.
        control.sentinel.guard_session(0)
        oom_kills = _difference(oom_kills_before, count_oom_kills())
        pid = attempt.child.pid
        self.emit(process_events.ProcessEnded(pid=pid, status=end.status, oom_kills=oom_kills))
        self.emit(
            process_events.AttemptEnded(
                attempt=self._number,
                status=end.status,
                oom_kills=oom_kills,
                seconds=round(end.seconds, 3),
                steps=self._steps_of_attempt(),
                signal_sent_by_us=end.signal_sent,
                asked_by=end.requested_by,
            )
        )
        return end

    def _start_command(self, control: _ProcessControl) -> Attempt:
        """Start the command and its output streams for this attempt."""
        options = self._options
        self._attempt_began = time.time()
        flight = flight_variables(self._environment, self.run_path, self._number)
        environment = make_environment(
            {**self._environment, **flight},
            self.run_path,
            self._number,
            control.mark,
            observe=options.observe,
            resume=options.resume,
        )
        streams = CommandStreams()
        self._copier.add_sources(streams.sources)
        child = start_command(options.program, options.command, environment, streams)
        streams.close_command_ends()
        return Attempt(
            number=self._number,
            run_path=self.run_path,
            child=child,
            tree=control.tree,
            streams=streams,
            copier=self._copier,
            signals=control.signals,
            shutdown=Shutdown(options.grace_seconds),
            emit=self.emit,
            hosts=self._hosts,
        )

    @contextmanager
    def _watching(self, attempt: Attempt) -> Iterator[None]:
        """Context manager that detects hangs and leaks in background threads."""
        limits = self._options.hang_limits
        # Only processes that record themselves can be watched.
        if limits is None or not self._options.observe:
            yield
            return
        from holdfast.supervise.watch.attempt_watch import AttemptWatch
        from holdfast.supervise.watch.threads import watching

        watch = AttemptWatch(
            run_path=self.run_path,
            attempt=attempt.number,
            limits=limits,
            emit=self.emit,
            on_hang=attempt.report_hang,
            say=attempt.print_message,
        )
        with watching(watch):
            yield

    # --- after an attempt ---

    def _judge(self, end: AttemptEnd) -> AttemptJudgement:
        """Determine why the attempt ended and record the verdict."""
        keep_dumps(self._environment, self.run_path, self._number, since=self._attempt_began)
        judgement = judge_attempt(self.run_path, self._number)
        verdict = judgement.verdict
        if judgement.error is not None:
            self.emit(process_events.WatchingFailed(what="verdict", error=judgement.error))
        write_verdict(self.run_path, verdict, self.emit)
        if self._notifications is not None:
            self._notifications.note_verdict(verdict)
        self.emit(process_events.VerdictReached(attempt=self._number, verdict=verdict.as_json()))
        step = verdict.step
        if step is None:
            step = self._step_of_training()
        self._history.append(
            PastAttempt(
                cause=verdict.cause,
                kind=verdict.restart,
                at_step=step,
                steps=self._steps_of_attempt(),
                seconds=end.seconds,
            )
        )
        return judgement

    def _decide(self, end: AttemptEnd, judgement: AttemptJudgement) -> RestartDecision:
        """Decide whether to restart, and tell the other hosts how the attempt ended."""
        verdict = judgement.verdict
        follows = False
        if self._hosts is not None:
            follows = end.failed_elsewhere is not None or is_consequence(verdict)
        decision = decide_restart(
            EndedAttempt(
                verdict=verdict,
                end=end,
                history=self._history,
                budgets=self._options.budgets,
                environment=self._environment,
                stopped_by=judgement.stopped_by,
                follows_other_host=follows,
            )
        )
        if self._hosts is not None:
            is_no_cause = follows or verdict.family == "ended well"
            self._hosts.publish_ended(cause=verdict.cause, title=verdict.title, follows=is_no_cause)
        return decision

    def _wait_before_restart(
        self, decision: RestartDecision, verdict: Verdict, control: _ProcessControl
    ) -> RestartDecision:
        """Before a restart, wait for the restart delay and then for the other hosts.

        Returns:
            The decision, or `EndRun` if a signal requests the end of the run or the hosts cannot
            start together.
        """
        if isinstance(decision, EndRun):
            return decision
        self._announce_restart(decision, verdict)
        self._environment.update(decision.changes)
        if not self._sleep(decision.delay_seconds, control.signals):
            return EndRun(why="a signal requested the end of the run")
        obstacle = self._wait_for_hosts(control)
        if obstacle is not None:
            return EndRun(why=obstacle)
        return decision

    def _announce_restart(self, decision: StartAgain, verdict: Verdict) -> None:
        self.emit(
            process_events.Restart(
                attempt=self._number + 1,
                cause=decision.cause,
                why=decision.why,
                delay_seconds=decision.delay_seconds,
                changes=dict(decision.changes),
            )
        )
        what_follows = "restarting"
        if self._hosts is not None:
            what_follows = "restarting with the other hosts"
        self._copier.print_message(
            f"attempt {self._number} ended: {verdict.title} [{verdict.cause}]; {what_follows}"
            f" in {decision.delay_seconds:g} s: {decision.why}"
        )

    def _sleep(self, seconds: float, signals: Signals) -> bool:
        """Sleep and return True, or return False early if a signal requests the end of the run."""
        deadline = time.monotonic() + seconds
        while True:
            for received in signals.take():
                # Between attempts, no command is running that could handle the signal.
                if received.number in FORWARDED:
                    self.emit(process_events.Signal(number=received.number))
                    return False
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return True
            select.select([signals.wake], [], [], left_seconds)

    def _requeue(self, judgement: AttemptJudgement, exit_code: int, why: str) -> tuple[int, str]:
        """Ask Slurm to requeue the job, if that is wanted after this stop.

        Args:
            judgement: Why the last attempt ended.
            exit_code: The exit code of the last attempt.
            why: Why the command is not restarted.

        Returns:
            The exit code of this run, and the reason with what Slurm did.
        """
        if self._job is None or not should_requeue(judgement.stopped_by, self._environment):
            return exit_code, why
        refusal = requeue(self._job)
        event = process_events.Requeued(job=self._job, refusal=refusal)
        self.emit(event)
        if refusal is not None:
            exit_code = REFUSED_STATUS
        return exit_code, f"{why}; {event}"

    # --- several hosts ---

    def _wait_for_hosts(self, control: _ProcessControl) -> str | None:
        """Wait until all hosts start the attempt; return the reason if they cannot, else None."""
        if self._hosts is None:
            return None
        return self._hosts.begin(
            lambda seconds: self._sleep(seconds, control.signals), self._copier.print_message
        )

    def _wait_for_first_start(self, control: _ProcessControl) -> None:
        obstacle = self._wait_for_hosts(control)
        if obstacle is None:
            return
        assert self._hosts is not None
        self._hosts.publish_stopped(obstacle, succeeded=False)
        raise RunDirectoryError(
            f"this host could not start the run: {obstacle}",
            limit="the hosts of a run start together, and exchange files in the run directory",
            fix=(
                "start the command on every host, with the same --run-dir on a disk that all hosts"
                " share."
            ),
            rule="H725",
        )

    # --- recording and printing ---

    def begin_line(self, descriptor: int) -> None:
        """Start a new line if the command's last line of output is unfinished."""
        self._copier.begin_line(descriptor)

    def emit(self, data: EventData) -> None:
        """Record an event at the current training step. Thread-safe."""
        now = time.time()
        step = getattr(data, "step", None)
        if step is None:
            step = self._step_of_training() or 0
        with self._event_lock:
            self._box.event(
                Event(kind=data.kind, global_step=step, unix_seconds=now, data=data.facts())
            )
        if self._notifications is not None:
            self._notifications.note(data, step)

    def _finish_notifications(self) -> None:
        """Wait a few seconds for the last messages, and print the reason if one was not sent."""
        if self._notifications is None:
            return
        problem = self._notifications.close()
        if problem is not None:
            self._copier.print_message(problem)

    def _report_lost_output(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self.emit(process_events.OutputLost(error=why))
        self._copier.print_message(
            f"{OUTPUT_FILE} cannot be written ({why}); the command continues, but its output is"
            " missing there"
        )

    def _report_damaged_recordings(self) -> None:
        for what in self._box.moved_aside:
            self.emit(RecordingMovedAside(what=what))
            self._copier.print_message(f"{self._folder.supervisor.name}/{what}")

    def _step_of_training(self) -> int | None:
        """Return the training script's current step, or None without trainers."""
        return max((standing.step for standing in self._standings()), default=None)

    def _steps_of_attempt(self) -> int | None:
        """Return the number of steps completed in this attempt, or None without trainers."""
        return max((standing.steps_made for standing in self._standings()), default=None)

    def _standings(self) -> Iterator[Standing]:
        """Yield the current contents of the trainers' progress boards in this attempt."""
        for folder, process in read_processes(self.run_path):
            if process.attempt != self._number or process.role != "trainer":
                continue
            try:
                standing = read_board(folder / BOARD_FILE)
            except HoldfastError:
                # The board was written by a newer version of holdfast, installed in the command's
                # environment.
                continue
            if standing is not None:
                yield standing


def _difference(before: int | None, after: int | None) -> int | None:
    if before is None or after is None:
        return None
    return after - before
