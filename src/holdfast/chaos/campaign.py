"""The campaign: two undisturbed runs of a command, followed by one trial for each fault.

`Campaign` implements ``holdfast chaos``, and `check_survives` runs a campaign in your own tests.
"""

from __future__ import annotations

import itertools
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.chaos.checkpoint_damage import damage_newest_checkpoint, name_without_numbers
from holdfast.chaos.command_check import check_command
from holdfast.chaos.comparison.differences import RunDifference
from holdfast.chaos.comparison.reference import Reference
from holdfast.chaos.comparison.timeline import TrialComparison, compare, compare_undisturbed, losses
from holdfast.chaos.fault_plans import Fault, FaultDraw
from holdfast.chaos.injection.plan import Injection
from holdfast.chaos.judgement import TrialCase, judge
from holdfast.chaos.results import CampaignReport, FaultResult, TrialResult
from holdfast.chaos.trials import Bench, Trial, TrialAttempt, run_trial
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError
from holdfast.core.version import __version__
from holdfast.supervise.launch.commands import find_program

# An attempt counts as hanging if it makes no progress for this long, or for `STALL_FACTOR` times
# the longest pause in the undisturbed run, whichever is longer. The factor allows for restarts,
# which load a checkpoint and may have to compile the model again.
MIN_STALL_SECONDS = 20.0
STALL_FACTOR = 5.0
# The maximum duration of an attempt is this long, or `DURATION_FACTOR` times as long as the
# undisturbed run, whichever is longer.
MIN_DURATION_SECONDS = 60.0
DURATION_FACTOR = 8.0
# Signals that end a campaign early.
INTERRUPTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

NO_SAVE_REMARK = (
    "no checkpoint was written by torch.save, safetensors or torch.distributed.checkpoint, so the"
    " run starts over after each fault, and faults in saves and checkpoints were not tried"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    """The two undisturbed runs of the command.

    Args:
        first: The first run, with which all trials are compared.
        references: The steps and saves of the first run, by rank. If a random state turns out not
            to affect training, the references are replaced by copies that ignore this state.
        unsteady: The first difference between the two runs, or None if they are the same.
        seconds: The durations of the two runs.
    """

    first: Trial
    references: dict[int, Reference]
    unsteady: RunDifference | None
    seconds: list[float]

    @property
    def reference(self) -> Reference:
        """Return the reference of the lowest rank."""
        return self.references[min(self.references)]


class Campaign:
    """Tests a training command by injecting one fault after another.

    Args:
        command: The words of the training command.
        origin: The working directory of the command. It is copied and never changed.
        writes: The paths that the command writes to. If given, large files elsewhere are linked
            instead of copied.
        only: The kinds of faults to try, from `fault_plans.KINDS`. If empty, all kinds are tried.
        seed: The seed that determines at which steps and bits faults are injected.
        budget_seconds: The time after which the campaign ends.
        restarts: The maximum number of times that the command is restarted in one trial.
        exhaustive_saves: Whether to also kill the process before each system call by which one save
            changes a file.
        say: Called with one line of text at the beginning and one after each fault, to report
            progress.

    Raises:
        PolicyError: H729 for a command that cannot be tested; H730 in the same cases as
            `Workplace`.
    """

    def __init__(  # noqa: PLR0913 - a public interface with many options
        self,
        command: Sequence[str],
        *,
        origin: Path,
        writes: Sequence[Path] = (),
        only: Sequence[str] = (),
        seed: int = 0,
        budget_seconds: float = 600.0,
        restarts: int = 3,
        exhaustive_saves: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._began = time.monotonic()
        self._command = list(command)
        self._only = only
        self._seed = seed
        self._restarts = restarts
        self._exhaustive_saves = exhaustive_saves
        self._say = say
        self._chance = random.Random(seed)  # noqa: S311 - not used for cryptography
        program = find_program(self._command)
        self._workplace = Workplace(origin, writes)
        self._bench = Bench(program, self._command, self._workplace, self._began + budget_seconds)
        # The names of the files that restarts have read, with "#" for each number.
        self._read_names: set[str] = set()
        # The random states that `_find_harmless_random_states` has tested.
        self._tried_random_states: set[str] = set()

    def run(self) -> CampaignReport:
        """Run the whole campaign and return its report.

        An interrupt ends the campaign early. The report then contains the results up to that point.
        """
        try:
            return self._report(self._run_undisturbed())
        finally:
            with _interrupts_ignored():
                self._workplace.close()

    # --- undisturbed runs -----------------------------------------------------------------------

    def _run_undisturbed(self) -> _Baseline:
        first = self._run_checked()
        second = self._run_checked()
        second_segments = second.segments_by_rank()
        references = {}
        unsteady = None
        for rank, segments in sorted(first.segments_by_rank().items()):
            reference, difference = compare_undisturbed(segments, second_segments.get(rank, []))
            references[rank] = reference
            unsteady = unsteady or difference
        stall_seconds = STALL_FACTOR * _longest_pause_seconds(first.last)
        self._bench.stall_seconds = max(MIN_STALL_SECONDS, stall_seconds)
        duration_seconds = DURATION_FACTOR * first.last.seconds
        self._bench.max_seconds = max(MIN_DURATION_SECONDS, duration_seconds)
        return _Baseline(
            first=first,
            references=references,
            unsteady=unsteady,
            seconds=[first.last.seconds, second.last.seconds],
        )

    def _run_checked(self) -> Trial:
        trial = run_trial(self._bench)
        check_command(trial.last, self._workplace, out_of_time=self._is_out_of_time())
        return trial

    # --- faults ---------------------------------------------------------------------------------

    def _report(self, baseline: _Baseline) -> CampaignReport:
        """Try as many faults as the time budget allows, and return the report."""
        reference = baseline.reference
        draw = FaultDraw(reference, self._chance)
        faults = draw.draw()
        if self._only:
            faults = [fault for fault in faults if fault.kind in self._only]
        if self._exhaustive_saves:
            faults += draw.kill_before_each(self._changes_of_save(draw.watch))
        faults = _first_of_each_kind_first(faults)
        estimate = _estimate(faults, baseline.first.last.seconds)
        self._say(f"one start takes {baseline.first.last.seconds:.0f} s; {estimate}")
        rows = [FaultResult(kind=fault.kind, fault=fault.description) for fault in faults]
        interrupted = False
        try:
            for index, fault in enumerate(faults):
                rows[index] = self._try_fault(fault, baseline)
                self._say(f"{fault.description}: {rows[index].result}")
        except KeyboardInterrupt:
            interrupted = True
            for row in rows:
                if row.result == TrialResult.NOT_TRIED:
                    row.detail = "interrupted"
        return CampaignReport(
            command=self._command,
            seed=self._seed,
            steps=len(reference.steps),
            undisturbed_seconds=baseline.seconds,
            unsteady=baseline.unsteady,
            remarks=_remarks(baseline, rows, estimate),
            rows=rows,
            seconds=time.monotonic() - self._began,
            seconds_of_runs=self._bench.command_seconds,
            losses=losses(reference.steps),
            interrupted=interrupted,
            versions=_versions(reference),
        )

    def _changes_of_save(self, watch: Injection | None) -> tuple[str, ...]:
        """Run the command once more, and return descriptions of the changes that a save makes.

        Args:
            watch: The injection that lists the changes. None if there is no such save.

        Raises:
            PolicyError: H729 if there is no such save, or if its system calls cannot be watched.
        """
        why = "no save is followed by another step"
        if watch is not None:
            attempt = run_trial(self._bench, watch).last
            if attempt.changes:
                return attempt.changes
            why = "the save changed no file of the working directory"
            for obstacle in attempt.events("missed"):
                why = obstacle.facts["why"]
        raise PolicyError(
            "--exhaustive-saves",
            limit=f"the changes of a save must be visible, but {why}",
            fix="leave out the option; the other faults in saves are tried without it.",
            rule="H729",
        )

    def _try_fault(self, fault: Fault, baseline: _Baseline) -> FaultResult:
        """Run one trial of a fault and return its result.

        If the trial damages a file that restarts do not read, a second trial is run. The first
        trial has then shown which files restarts read, so the second trial damages one of these.
        """
        result = FaultResult(kind=fault.kind, fault=fault.description)
        if self._is_out_of_time():
            return result
        needed_restarts = len(fault.restart_injections)
        if needed_restarts > self._restarts:
            result.result = TrialResult.DID_NOT_OCCUR
            result.detail = f"this fault needs --restarts {needed_restarts}"
            return result
        trial = self._run_trial(fault, baseline)
        if self._damaged_unread_file(trial):
            trial = self._run_trial(fault, baseline)
        errors = [attempt.observer_error for attempt in trial.attempts if attempt.observer_error]
        result.failed = "".join(errors[:1])
        result.seconds = trial.seconds
        if trial.last.hung and self._is_out_of_time():
            # The attempt was killed because the campaign ran out of time, so there is no result.
            return result
        result.seconds_lost = max(0.0, trial.seconds - baseline.first.last.seconds)
        result.attempts = len(trial.attempts)
        result.left_processes = sum(attempt.leftover_processes for attempt in trial.attempts)
        result.left_files = self._files_left_behind(trial, baseline.first)
        comparison = self._compare(trial, baseline)
        result.comparison = asdict(comparison)
        judgement = judge(
            TrialCase(
                fault=fault,
                trial=trial,
                comparison=comparison,
                is_steady=baseline.unsteady is None,
                damaged_unread_file=self._damaged_unread_file(trial),
            )
        )
        result.result = judgement.result
        result.detail = judgement.detail
        return result

    def _run_trial(self, fault: Fault, baseline: _Baseline) -> Trial:
        """Run one trial of a fault, and add the files that its restarts read to `_read_names`."""
        damage = None
        if fault.damage is not None:
            damage = partial(
                damage_newest_checkpoint,
                action=fault.damage,
                chance=self._chance,
                read_names=self._read_names,
            )
        trial = run_trial(
            self._bench,
            fault.injection,
            restarts=self._restarts,
            expected_steps=baseline.first.last.most_steps,
            damage=damage,
            restart_injections=fault.restart_injections,
        )
        self._read_names |= {name_without_numbers(path) for path in trial.read}
        return trial

    def _damaged_unread_file(self, trial: Trial) -> bool:
        """Return whether the trial damaged a file of a kind that no restart reads.

        The kind is the file's name without its numbers. The result is False if it is unknown which
        files are read. This is the case for safetensors files, which native code reads, and until a
        restart has been observed reading a file.
        """
        if trial.damaged is None or trial.damaged.suffix == ".safetensors":
            return False
        if not self._read_names:
            return False
        return name_without_numbers(trial.damaged) not in self._read_names

    def _compare(self, trial: Trial, baseline: _Baseline) -> TrialComparison:
        """Return a comparison of a trial with the undisturbed run.

        If the comparison finds that a random state is the cause of a difference, test whether the
        run uses that state, and compare again.
        """
        comparison = compare(baseline.references, trial)
        if baseline.unsteady is not None:
            return comparison
        while True:
            blamed = {name for difference in comparison.differences for name in difference.states}
            untried = blamed - self._tried_random_states
            if not untried:
                return comparison
            self._find_harmless_random_states(untried, baseline)
            comparison = compare(baseline.references, trial)

    def _find_harmless_random_states(self, names: set[str], baseline: _Baseline) -> None:
        """Find which of these random states the run does not use, and stop comparing these states.

        For each state, the command runs once with that random generator reseeded. If nothing else
        differs from the undisturbed run, the run does not use the state.
        """
        for name in sorted(names):
            trial = run_trial(self._bench, Injection(reseeded=name))
            references = {
                rank: reference.without(name) for rank, reference in baseline.references.items()
            }
            has_ended_well = trial.last.status == 0 and not trial.last.hung
            if has_ended_well and not compare(references, trial).differences:
                baseline.references.update(references)
        self._tried_random_states |= names

    def _files_left_behind(self, trial: Trial, first: Trial) -> list[str]:
        """Return the names of the files that this trial left behind, unless the first run did too.

        Names that differ only in their numbers count as the same name.
        """
        names = {name_without_numbers(name): name for name in self._names(trial.files)}
        usual_names = {name_without_numbers(name) for name in self._names(first.files)}
        return sorted(name for key, name in names.items() if key not in usual_names)

    def _names(self, files: set[Path]) -> Iterator[str]:
        """Yield the names of files in the workplace, with "*" in place of random characters."""
        for file in files:
            name = str(file).removeprefix(f"{self._workplace.scratch}/").removeprefix("work/")
            yield re.sub(r"(tmp|pymp-|listener-)[a-z0-9_]{8}", r"\1*", name)

    def _is_out_of_time(self) -> bool:
        return time.monotonic() > self._bench.deadline


def check_survives(
    command: Sequence[str], *, cwd: Path | None = None, **options: Any
) -> CampaignReport:
    """Check that a training run survives faults and is still the same run after each fault.

    Use this function in your own tests.

    Args:
        command: The training command, such as ``[sys.executable, "path/to/file.py"]``.
        cwd: The command's working directory, which by default is the current directory. The
            directory is copied, and nothing in the original is changed.
        options: The arguments ``writes``, ``only``, ``seed``, ``budget_seconds``, ``restarts`` and
            ``exhaustive_saves`` of `Campaign`.

    Returns:
        The report of the campaign.

    Raises:
        AssertionError: If any fault changes or ends the run; the message names each such fault and
            the first step that differs. Also if no fault could be tried.
        PolicyError: H729 or H730 if the command cannot be tested.
    """
    origin = Path.cwd() if cwd is None else cwd
    report = Campaign(command, origin=origin, **options).run()
    if report.passed:
        return report
    failures = [
        f"{row.fault}: {row.result}: {row.detail}"
        for row in report.rows
        if row.tried and not row.passed
    ]
    raise AssertionError("\n".join(failures) or "no fault could be tried")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore the signals in `INTERRUPTS` while the ``with`` block runs."""
    handlers = {}
    # Only the main thread can set signal handlers.
    with suppress(ValueError):
        for number in INTERRUPTS:
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _longest_pause_seconds(attempt: TrialAttempt) -> float:
    """Return the longest time during which an attempt wrote no record to its traces.

    The time before the first record and the time after the last record count together as one pause.
    """
    times = sorted(record.seconds for segment in attempt.segments for record in segment.records)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    start_and_end = attempt.seconds - (times[-1] - times[0])
    return max([*pauses, start_and_end])


def _first_of_each_kind_first(faults: Sequence[Fault]) -> list[Fault]:
    """Reorder faults: the first fault of each kind, then the second of each kind, and so on."""
    faults_of_kind: Counter[str] = Counter()
    numbered = []
    for fault in faults:
        numbered.append((faults_of_kind[fault.kind], fault))
        faults_of_kind[fault.kind] += 1
    return [fault for _, fault in sorted(numbered, key=lambda pair: pair[0])]


def _remarks(baseline: _Baseline, rows: Sequence[FaultResult], estimate: str) -> list[str]:
    """Return notes for the user that apply to the campaign as a whole."""
    remarks = []
    if not baseline.first.last.saves:
        remarks.append(NO_SAVE_REMARK)
    if len({step.weights for step in baseline.reference.steps}) == 1:
        remarks.append("no step changed a weight")
    errors = {baseline.first.last.observer_error, *(row.failed for row in rows)} - {""}
    if errors:
        remarks.append(
            f"observing the training run failed; please report this error: {min(errors)}"
        )
    if any(row.detail == "no time" for row in rows):
        remarks.append(f"{estimate}: increase --budget")
    return remarks


def _versions(reference: Reference) -> dict[str, str]:
    start = next(reference.segments[0].events("start"), None)
    versions = {} if start is None else start.facts["versions"]
    return {**versions, "holdfast": __version__}


def _estimate(faults: Sequence[Fault], seconds_per_start: float) -> str:
    """Return a phrase that estimates the duration of the campaign."""
    # The command starts twice for the undisturbed runs. A fault usually takes one start and one
    # restart. A fault with injections into restarts takes one restart for each injection.
    starts = 2 + sum(1 + max(1, len(fault.restart_injections)) for fault in faults)
    # One minute is added for everything apart from the command itself.
    minutes = starts * seconds_per_start / 60 + 1
    return f"{len(faults)} faults need about {minutes:.0f} min"
