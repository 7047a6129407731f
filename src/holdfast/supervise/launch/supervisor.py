"""Run a command to its end.

Attempt after attempt, each judged, until it ended well or nothing can be helped.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.core.control_groups import fields_of, group_folders
from holdfast.core.durable import replace_file
from holdfast.core.errors import HoldfastError, RunDirectoryError
from holdfast.core.events import process_events
from holdfast.core.events.event import Event, EventData
from holdfast.core.events.run_events import RecordingMovedAside
from holdfast.core.secrets import without_secrets
from holdfast.explain.verdict import Verdict
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.progress import Standing, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    OUTPUT_FILE,
    VERDICT_FILE,
    read_processes,
)
from holdfast.supervise.launch.attempt import Attempt, End
from holdfast.supervise.launch.commands import Sentinel, make_environment, start
from holdfast.supervise.launch.hosts import Hosts, find_host
from holdfast.supervise.launch.output import Copier, OutputLog, Streams, open_missing_streams
from holdfast.supervise.launch.restarts import Again, Budgets, Past, Stop, decide_restart
from holdfast.supervise.launch.run_folder import RunFolder
from holdfast.supervise.launch.signals import PASSED_ON, Signals
from holdfast.supervise.process_tree import Tree, read_process
from holdfast.supervise.watch.limits import HangLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run, and how."""

    command: tuple[str, ...]  # its words
    program: str  # the file that the first word means
    run: Path  # the run directory
    # Whether it is the same one on all hosts, where the command runs on several
    shared: bool = False
    budgets: Budgets = field(default_factory=Budgets)  # of restarts
    limits: HangLimits | None = field(default_factory=HangLimits)  # of hangs; None: nobody watches
    observe: bool = True  # whether Python processes record themselves
    grace_seconds: float = 25.0  # between asking the command to end and SIGKILL
    most_log_bytes: int = 256 << 20  # size of the log of what it prints


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it all ended."""

    status: int  # exit code of the command, as a shell says it: 128 + the number of a signal
    attempts: int  # how often it was started
    seconds: float  # from the first start to the end
    why: str  # it is not started again, as a sentence without a full stop
    verdict: Verdict
    run: Path


class Supervisor:
    """Run a command to its end, from the main thread of this process (H722 to H724 before
    anything is started).
    """

    def __init__(self, plan: Plan, *, quiet: bool = False) -> None:
        open_missing_streams()
        self._plan = plan
        self._environment = dict(os.environ)
        self._history: list[Past] = []
        # The signal upon which the newest attempt stopped, or None
        self._stopped_by: str | None = None
        self._lock = threading.Lock()
        number, count = find_host(plan.command, self._environment) if plan.shared else (0, 1)
        self._folder = RunFolder(plan.run if count == 1 else plan.run / f"host-{number}")
        self.run_path = self._folder.path
        with ExitStack() as opened:
            opened.callback(self._folder.close)
            self._number = self._folder.next_attempt()
            try:
                self._folder.describe(plan.command, time.time())
                self._box = BlackBox(self._folder.supervisor)
                self._log = OutputLog(self.run_path / OUTPUT_FILE, plan.most_log_bytes)
            except OSError as error:
                raise self._folder.unusable(error) from error
            # The lock is ours
            self._hosts = Hosts(plan.run.expanduser(), number, count) if count > 1 else None
            opened.pop_all()
        self._copier = Copier(self._log, quiet=quiet)
        self._log.on_loss = self._say_output_is_lost
        self._folder.point_to(plan.run.expanduser().absolute())

    def run(self) -> Outcome:
        """Return after the last attempt; nothing of the command is left then."""
        become_subreaper()
        started, first = time.monotonic(), self._number
        own = read_process(os.getpid())
        mark = f"{os.getpid()}-{own.ticks if own else 0}"
        tree = Tree(mark)  # before anything of ours is started
        with ExitStack() as stack:
            for each in (self._folder, self._log, self._box):
                stack.callback(each.close)
            sentinel = Sentinel(mark, self._folder.supervisor / LOST_FILE)
            stack.callback(sentinel.release)
            signals = stack.enter_context(Signals(tree))
            self._folder.look_at_git()
            for what in self._box.moved_aside:
                self.emit(RecordingMovedAside(what=what))
                self._copier.say(f"{self._folder.supervisor.name}/{what}")
            if (alone := self._together(signals)) is not None:
                assert self._hosts is not None
                self._hosts.stopped(alone.why, well=False)
                raise RunDirectoryError(
                    f"this host has not begun: {alone.why}",
                    limit=(
                        "the hosts of one training begin together, and exchange files in the run"
                        " directory"
                    ),
                    fix=(
                        "start the command on every host, with the same --run-dir on a disk that"
                        " all of them see."
                    ),
                    rule="H725",
                )
            while True:
                end = self._attempt(mark, tree, sentinel, signals)
                verdict = self._judge()
                decision = self._decide(end, verdict)
                self._tell(end, verdict)
                if isinstance(decision, Again) and not self._goes_on(decision, verdict, signals):
                    decision = Stop(why="a signal asked to end")
                if isinstance(decision, Again):
                    decision = self._together(signals) or decision
                if isinstance(decision, Stop):
                    break
                self._number += 1
            self.emit(process_events.Stopped(why=decision.why))
            if self._hosts is not None:
                self._hosts.stopped(decision.why, well=end.status == 0)
        return Outcome(
            status=end.status if end.status >= 0 else 128 - end.status,
            attempts=self._number - first + 1,
            seconds=time.monotonic() - started,
            why=decision.why,
            verdict=verdict,
            run=self.run_path,
        )

    def begin_line(self, descriptor: int) -> None:
        """End a line that the command has left unfinished on one of our own streams.

        After the run.
        """
        self._copier.begin_line(descriptor)

    def emit(self, data: EventData) -> None:
        """Record an event, with its own step or that of the command; from any thread."""
        now, step = time.time(), getattr(data, "step", None)
        step = self._most("step") or 0 if step is None else step
        with self._lock:
            self._box.event(
                Event(kind=data.kind, global_step=step, unix_seconds=now, data=data.facts())
            )

    def _say_output_is_lost(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self.emit(process_events.OutputLost(error=why))
        self._copier.say(
            f"{OUTPUT_FILE} cannot be written ({why}); the command goes on, and what it prints is"
            " lost there"
        )

    def _attempt(self, mark: str, tree: Tree, sentinel: Sentinel, signals: Signals) -> End:
        plan, number = self._plan, self._number
        self._log.begin(number)
        with suppress(OSError):  # that of the attempt before: nobody may take it for this one's
            (self.run_path / VERDICT_FILE).unlink(missing_ok=True)
        oom_kills = count_oom_kills()
        self.emit(
            process_events.AttemptStarted(attempt=number, argv=tuple(without_secrets(plan.command)))
        )
        environment = make_environment(
            self._environment, self.run_path, number, mark, observe=plan.observe
        )
        streams = Streams()
        self._copier.take(streams.sources)
        child = start(plan.program, plan.command, environment, streams)
        streams.close_theirs()
        sentinel.guard_session(child.pid)
        attempt = Attempt(
            number=number,
            run=self.run_path,
            child=child,
            tree=tree,
            streams=streams,
            copier=self._copier,
            signals=signals,
            grace_seconds=plan.grace_seconds,
            emit=self.emit,
            hosts=self._hosts,
        )
        with ExitStack() as watched:
            # Without boards there is nothing to look at
            if plan.limits is not None and plan.observe:
                from holdfast.supervise.watch.watching import watching

                look = watching(
                    self.run_path,
                    number,
                    plan.limits,
                    emit=self.emit,
                    on_hang=attempt.take_hang,
                    say=attempt.take_line,
                )
                watched.enter_context(look)
            end = attempt.serve()
        sentinel.guard_session(0)  # its number may be a stranger's from now on
        after = count_oom_kills()
        killed = None if oom_kills is None or after is None else after - oom_kills
        self.emit(process_events.ProcessEnded(pid=child.pid, status=end.status, oom_kills=killed))
        ended = process_events.AttemptEnded(
            attempt=number,
            status=end.status,
            oom_kills=killed,
            seconds=round(end.seconds, 3),
            steps=self._most("made"),
            signal_sent_by_us=end.sent,
            asked_by=end.asked,
        )
        self.emit(ended)
        return end

    def _most(self, what: Literal["step", "made"]) -> int | None:
        """Return the most that a process of this attempt shows of its steps, see `Standing`.

        None if it has none.
        """
        trainers = [
            folder
            for folder, info in read_processes(self.run_path)
            if info.attempt == self._number and info.role == "trainer"
        ]
        boards = (_board(folder / BOARD_FILE) for folder in trainers)
        return max((getattr(board, what) for board in boards if board is not None), default=None)

    def _judge(self) -> Verdict:
        """Return why the attempt ended, and write it down."""
        self._stopped_by = None
        try:
            from holdfast.explain.collecting import collect
            from holdfast.explain.judging import judge
            from holdfast.explain.runtime_causes import signal_of_stop, stop_requested

            facts = collect(self.run_path, self._number)
            request = stop_requested(facts.events)
            self._stopped_by = None if request is None else signal_of_stop(request)
            verdict = judge(facts)
        except Exception as error:  # noqa: BLE001 - whatever lies in the run directory: the supervisor goes on
            why = f"{type(error).__name__}: {error}"
            verdict = _no_verdict(why)
            self.emit(process_events.WatchingFailed(what="verdict", error=why))
        path = self.run_path / VERDICT_FILE
        try:
            replace_file(path, json.dumps(verdict.as_json(), indent=1).encode())
        except OSError as error:  # the disk is full or the directory gone: the event below has it
            with suppress(OSError):
                path.unlink(missing_ok=True)  # that of an attempt before
            self.emit(
                process_events.NotWritten(file=VERDICT_FILE, error=error.strerror or str(error))
            )
        self.emit(process_events.VerdictReached(attempt=self._number, verdict=verdict.as_json()))
        return verdict

    def _decide(self, end: End, verdict: Verdict) -> Again | Stop:
        """Return what follows an attempt."""
        steps = self._most("made")
        at_step = self._most("step") if verdict.step is None else verdict.step
        self._history.append(
            Past(
                cause=verdict.cause,
                kind=verdict.restart,
                at_step=at_step,
                steps=steps,
                seconds=end.seconds,
            )
        )
        if end.asked is not None:
            return Stop(why=f"{signal.Signals(end.asked).name} asked to end")
        asked_by_us = end.sent is not None or end.elsewhere is not None
        # Known from the run: its exit code may be any
        if self._stopped_by is not None and not asked_by_us:
            return Stop(why=f"{self._stopped_by} asked the training to stop")
        if end.status == 0 and end.hang is None:
            return Stop(why="the command has ended with exit code 0")
        if end.hang is not None and end.hang.remedy == "end":
            return Stop(why="the training was over, and only its end hung")
        # Whether it goes on is for the other host to say
        if self._hosts is not None and self._follows(end, verdict):
            budgets = self._plan.budgets
            if len(self._history) > budgets.max_restarts + budgets.max_preemptions:
                return Stop(why="all restarts are used")
            why = end.elsewhere or "another host has failed"
            return Again(cause=verdict.cause, why=why, delay_seconds=budgets.first_delay_seconds)
        return decide_restart(verdict, self._history, self._plan.budgets, self._environment)

    def _goes_on(self, decision: Again, verdict: Verdict, signals: Signals) -> bool:
        """Wait until the command is started again.

        Return False if a signal asks to end meanwhile.
        """
        restart = process_events.Restart(
            attempt=self._number + 1,
            cause=decision.cause,
            why=decision.why,
            delay_seconds=decision.delay_seconds,
            changes=dict(decision.changes),
        )
        self.emit(restart)
        self._environment.update(decision.changes)
        # The others have a word in it
        start = "started" if self._hosts is None else "to be started"
        self._copier.say(
            f"attempt {self._number} ended: {verdict.title} [{verdict.cause}]; {start} "
            f"again in {decision.delay_seconds:g} s: {decision.why}"
        )
        return self._wait(decision.delay_seconds, signals)

    def _wait(self, seconds: float, signals: Signals) -> bool:
        """Return true after so many seconds, false as soon as a signal asks to end."""
        deadline = time.monotonic() + seconds
        while True:
            for number in signals.take():
                if number in PASSED_ON:  # between attempts there is nobody to handle it
                    self.emit(process_events.Signal(number=number))
                    return False
            if (left := deadline - time.monotonic()) <= 0:
                return True
            select.select([signals.wake], [], [], left)

    def _together(self, signals: Signals) -> Stop | None:
        """Wait until every host begins the next attempt; return why it is not begun."""
        if self._hosts is None:
            return None
        why = self._hosts.begin(lambda seconds: self._wait(seconds, signals), self._copier.say)
        return None if why is None else Stop(why=why)

    def _tell(self, end: End, verdict: Verdict) -> None:
        if self._hosts is not None:
            follows = verdict.family == "ended well" or self._follows(end, verdict)
            self._hosts.ended(cause=verdict.cause, title=verdict.title, follows=follows)

    def _follows(self, end: End, verdict: Verdict) -> bool:
        """Return whether an attempt only ended since it had failed on another host."""
        if end.elsewhere is not None or verdict.cause == "H114":
            return True
        from holdfast.explain.signatures import all_signatures

        known = all_signatures().get(verdict.cause)
        return known is not None and known.role == "cascade"


def _board(path: Path) -> Standing | None:
    try:
        return read_board(path)
    except HoldfastError:  # of a newer holdfast in the command's environment
        return None


def _no_verdict(why: str) -> Verdict:
    return Verdict(
        cause="H1600",
        family="unknown",
        title="unknown",
        summary="Why the command ended could not be found out, since the judgement itself failed.",
        fix="Read the end of output.log in the run directory.",
        confidence=0.0,
        missing=(f"the judgement failed with {why}",),
    )


# --- what a kernel, a container or a user without the right denies, without an error
# --------------------


def become_subreaper() -> None:
    """Let every orphaned descendant become a child of this process, so that none is lost."""
    with suppress(OSError, AttributeError):
        # PR_SET_CHILD_SUBREAPER, linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of our own control group the kernel has killed for memory.

    None if it does not say.

    Only the innermost group that counts is read: those above it count the kills of other jobs too.
    """
    names = ("memory.events", "memory.oom_control")  # versions 2 and 1
    counts = (
        fields_of(each / name).get("oom_kill")
        for each in group_folders(root, "memory")
        for name in names
    )
    return next((count for count in counts if count is not None), None)
