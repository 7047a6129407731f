"""The campaign over anyone's training: two undisturbed runs, then one trial for each fault.

Each fault, and the step that it comes at, is drawn from the seed; it is one that the undisturbed run has shown to be
possible: no worker is killed where there is none.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.chaos.comparing import Comparison, Difference, Reference, facts, trial_comparison, unsteady_fields
from holdfast.chaos.trials import Attempt, Bench, Line, Trial, carry_out
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError
from holdfast.supervise.launch.commands import find_program
from holdfast.testing import flip_bit

KINDS = ("kill", "term", "first", "save", "eval", "worker", "rank", "memory", "nan", "disk", "damage")
_LEAST_STILL_SECONDS = 20.0
_STILL_TIMES = 5.0  # the longest pause of the undisturbed run
_MOST_TIMES = 8.0  # the undisturbed run, for one attempt
_RANDOM_KILLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: what is done, in words, and when."""

    kind: str  # of `KINDS`
    words: str
    plan: dict[str, Any]
    between: Callable[[Workplace], str | None] | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """What one trial has shown.

    `result` is ``exact``, ``differs``, ``changed`` (as a fault in the data must), ``broken`` (NaN at the end),
    ``lost`` (it does not survive), ``hangs``, ``older`` (saved work is done again), ``survives`` (two undisturbed
    runs differ, too), ``not met`` (the fault did not happen) or ``not run``.
    """

    kind: str
    fault: str
    result: str
    detail: str = ""
    attempts: int = 0
    seconds: float = 0.0
    seconds_lost: float = 0.0
    left_processes: int = 0
    left_files: list[str] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the training came out as it should, or nothing was tried."""
        return self.result in ("exact", "changed", "survives", "not met", "not run")


@dataclass(slots=True, kw_only=True)
class Report:
    """What a campaign has found."""

    command: list[str]
    seed: int
    steps: int
    undisturbed_seconds: list[float]
    unsteady: Difference | None  # in which two undisturbed runs differ
    remarks: list[str]
    rows: list[Row]
    seconds: float = 0.0
    seconds_of_runs: float = 0.0  # of which the command itself ran

    @property
    def passed(self) -> bool:
        """Whether the training survives everything that was tried, and is the same training."""
        return all(row.passed for row in self.rows)


class Campaign:
    """Puts a command to the test.

    Args:
        command: The command.
        origin: Where it is started.
        writes: What it writes; none: everything in `origin` is copied.
        only: Kinds of faults, of `KINDS`; none: all.
        seed: Decides steps and bits.
        budget_seconds: After which no trial is begun.
        restarts: Of one trial at most.
        say: Called with each row as soon as it is there.

    Raises:
        PolicyError: H729 for a command that cannot be put to the test, H730 as `Workplace`.
    """

    def __init__(
        self, command: Sequence[str], *, origin: Path, writes: Sequence[Path] = (), only: Sequence[str] = (),
        seed: int = 0, budget_seconds: float = 600.0, restarts: int = 3, say: Callable[[Row], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._command, self._only, self._seed, self._restarts, self._say = list(command), only, seed, restarts, say
        self._chance = random.Random(seed)  # noqa: S311 - chance, not secrets
        program = find_program(self._command)
        self._began = time.monotonic()
        self._place = Workplace(origin, writes)
        self._bench = Bench(program, self._command, self._place, self._began + budget_seconds)
        self._deadline = self._began + budget_seconds
        self._ran = 0.0

    def run(self) -> Report:
        """Carry out everything."""
        try:
            first, second = (self._undisturbed() for _ in range(2))
            return self._try(first, second)
        finally:
            self._place.close()

    def _undisturbed(self) -> Trial:
        trial = carry_out(self._bench, self._place, None, restarts=0, steps=0)
        self._ran += trial.last.seconds
        _check(trial.last, self._place, out_of_time=time.monotonic() > self._deadline)
        return trial

    def _try(self, first: Trial, second: Trial) -> Report:
        ranks, others = first.ranks(), second.ranks()
        references, unsteady, again = {}, None, first.last
        for rank, (segment, *_) in ranks.items():
            differs, fields, unsaved = unsteady_fields(segment, others[rank][0])
            unsteady = unsteady or differs
            references[rank] = Reference(segment, fields, unsaved)
        self._bench.still_seconds = max(_LEAST_STILL_SECONDS, _STILL_TIMES * _longest_pause(first.last))
        self._bench.most_seconds = max(60.0, _MOST_TIMES * again.seconds)
        steps = references[min(references)].steps
        report = Report(
            command=self._command, seed=self._seed, steps=len(steps), unsteady=unsteady, rows=[],
            undisturbed_seconds=[trial.last.seconds for trial in (first, second)], remarks=_remarks(first),
        )  # fmt: skip
        for fault in self._faults(first):
            if self._only and fault.kind not in self._only:
                continue
            row = self._row(fault, first, references, unsteady)
            report.rows.append(row)
            self._say(row)
        report.seconds, report.seconds_of_runs = time.monotonic() - self._began, self._ran
        return report

    # --- faults ---------------------------------------------------------------------------------------------------

    def _faults(self, first: Trial) -> list[Fault]:
        segment = first.ranks()[min(first.ranks())][0]
        count = len(segment.steps)
        saves = [line for line in segment.lines if line["kind"] == "save"]
        evaluations = sum(line["kind"] == "eval" for line in segment.lines)
        after = min((line["step"] for line in saves if line["step"] < count), default=0)  # a save to go on from
        found = self._signals(count, after)
        if saves:
            found += self._in_saves(saves)
        if evaluations:
            number = self._chance.randint((evaluations + 1) // 2, evaluations)
            found.append(_fault("eval", f"SIGKILL in evaluation {number}", "eval", number, "SIGKILL"))
        found += self._others(segment.lines, segment.ranks, count, after)
        if saves:
            size = max(line["bytes"] for line in saves)
            step = self._step(after, count)
            if size:
                words = "no file can grow past half of a checkpoint (a full disk)"
                found.append(_fault("disk", f"{words} after step {after}", "after", after, "disk", bytes=size // 2))
            for words, act in (
                ("a bit of the newest checkpoint flipped", _flip),
                ("the newest checkpoint cut off", _cut),
            ):
                plan = {"at": "backward", "count": step, "act": "SIGKILL"}
                between = partial(_damage, act=act, chance=self._chance)
                found.append(
                    Fault(kind="damage", words=f"SIGKILL in step {step + 1}, {words}", plan=plan, between=between)
                )
        order = {kind: number for number, kind in enumerate(KINDS)}
        return sorted(found, key=lambda fault: order[fault.kind])

    def _step(self, after: int, count: int, part: int = 0, of: int = 1) -> int:
        """Draw a number of steps after a save; one of some equal parts of what is left."""
        low, high = min(after + 1, count - 1), count - 1
        width = high - low + 1
        return low + min(width - 1, int(width * (part + self._chance.random()) / of))

    def _signals(self, count: int, after: int) -> list[Fault]:
        found = [_fault("first", "SIGKILL in the first step", "backward", 0, "SIGKILL")]
        for part in range(_RANDOM_KILLS):
            step, at = self._step(after, count, part, _RANDOM_KILLS), self._chance.choice(["backward", "before"])
            found.append(_fault("kill", f"SIGKILL in step {step + 1}", at, step, "SIGKILL"))
        step = self._step(after, count)
        return [*found, _fault("term", f"SIGTERM in step {step + 1}", "backward", step, "SIGTERM")]

    def _in_saves(self, saves: list[Line]) -> list[Fault]:
        number = self._chance.randint(min(2, len(saves)), len(saves))
        at = saves[number - 1]["step"]
        found = [
            _fault("save", f"SIGKILL after writing in save {number} (step {at})", "save ends", number, "SIGKILL")
        ]
        size = max(line["bytes"] for line in saves)
        if size:
            words = f"killed half-way through the file of save {number} (step {at})"
            cut = {"bytes": size // 2}
            found.insert(0, _fault("save", words, "save begins", number, "cut write", **cut))
        return found

    def _others(self, lines: list[Line], ranks: int, count: int, after: int) -> list[Fault]:
        found = []
        loads = any(pair[0] for line in lines if line["kind"] == "step" for pair in line["inputs"])
        if any(line["kind"] == "workers" for line in lines):
            for act in ("killed", "stopped"):
                step = self._step(after, count)
                found.append(
                    _fault("worker", f"a loader worker {act} in step {step + 1}", "loader", step, f"worker {act}")
                )
        if ranks > 1:
            for words, act in (("killed", "SIGKILL"), ("stopped", "SIGSTOP")):
                step, rank = self._step(after, count), self._chance.randrange(1, ranks)
                fault = _fault("rank", f"rank {rank} {words} in step {step + 1}", "backward", step, act, rank=rank)
                found.append(fault)
        step = self._step(after, count)
        found.append(_fault("memory", f"out of memory in step {step + 1}", "backward", step, "memory"))
        at = "loader" if loads else "forward"
        return [*found, _fault("nan", f"a NaN in the batch of step {step + 1}", at, step, "nan")]

    # --- results --------------------------------------------------------------------------------------------------

    def _row(
        self, fault: Fault, first: Trial, references: dict[int, Reference], unsteady: Difference | None
    ) -> Row:  # fmt: skip
        row = Row(kind=fault.kind, fault=fault.words, result="not run")
        if time.monotonic() > self._deadline:
            return row
        steps = len(references[min(references)].steps)
        trial = carry_out(
            self._bench, self._place, fault.plan, restarts=self._restarts, steps=steps, between=fault.between
        )
        row.seconds = sum(attempt.seconds for attempt in trial.attempts)
        self._ran += row.seconds
        if time.monotonic() > self._deadline and trial.last.hung:
            return row
        row.attempts = len(trial.attempts)
        row.seconds_lost = max(0.0, row.seconds - first.last.seconds)
        row.left_processes = sum(attempt.left for attempt in trial.attempts)
        row.left_files = sorted(trial.files - first.files)
        comparison = trial_comparison(references, trial)
        row.comparison = facts(comparison)
        row.result, row.detail = _judge(fault, trial, comparison, unsteady)
        if trial.damaged:
            row.detail += f" ({trial.damaged} was damaged)"
        return row


def _fault(kind: str, words: str, at: str, count: int, act: str, **plan: Any) -> Fault:
    return Fault(kind=kind, words=words, plan={"at": at, "count": count, "act": act, **plan})


def _judge(fault: Fault, trial: Trial, comparison: Comparison, unsteady: Difference | None) -> tuple[str, str]:
    last, again = trial.last, f"{comparison.steps_again} steps made again"
    if not trial.attempts[0].met:
        return "not met", "the training ended before"
    if fault.between is not None and trial.damaged is None:
        return "not met", "no checkpoint was found to damage"
    if last.hung or last.status:
        how = "it stood still and was killed" if last.hung else f"it ended with {_status(last.status)}"
        said = last.output.strip().splitlines()[-1:]
        return ("hangs" if last.hung else "lost"), f"start {len(trial.attempts)}: {how}; {' '.join(said)[:200]}"
    if any(attempt.hung for attempt in trial.attempts):
        return "hangs", f"it stood still and had to be killed; then {again}"
    if not comparison.finite:
        return "broken", "the weights or the loss at the end are NaN or infinite"
    if fault.kind == "nan" and comparison.differences:
        return "changed", "this batch has changed the training; the weights at the end are finite"
    if unsteady is not None:
        return "survives", again
    if comparison.differences:
        difference = comparison.differences[0]
        return ("older" if difference.what == "older" else "differs"), difference.sentence()
    return "exact", again


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _longest_pause(attempt: Attempt) -> float:
    times: list[float] = sorted(line["seconds"] for segment in attempt.segments for line in segment.lines)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Before the first line a program starts, after the last it ends: neither is longer than what no line covers.
    return max([*pauses, attempt.seconds - (times[-1] - times[0] if times else 0.0)])


def _check(attempt: Attempt, place: Workplace, *, out_of_time: bool) -> None:
    """Refuse a command that cannot be put to the test."""
    why = None
    if out_of_time and attempt.hung:
        why = (
            "has not ended by itself within the budget",
            "give a larger --budget, or let the command make fewer steps.",
        )
    elif attempt.hung:
        why = "stands still", "let it run under `holdfast run`, which says where it stands."
    elif attempt.status:
        end = attempt.output.strip()[-400:]
        why = f"fails when nobody disturbs it, with {_status(attempt.status)}: {end}", "mend that first."
    elif not attempt.trained:
        fix = "name the command that trains; `python -I`, `-E` and `-S`, and steps from a CUDA graph are not seen."
        why = "made no step of an optimizer of torch", fix
    elif max(len(segment.steps) for segment in attempt.trained) < 4:
        why = "made fewer than 4 steps", "let it make more, with some saves among them."
    elif attempt.elsewhere and (paths := _elsewhere(attempt, place)):
        why = (
            f"writes outside of the working directory: {', '.join(paths[:3])}",
            "name that by --writes, so that each trial begins without it; or let it write elsewhere.",
        )
    if why is not None:
        raise PolicyError(
            f"the command {why[0]}", limit="it must train by itself, and be the same at each start", fix=why[1],
            rule="H729",
        )  # fmt: skip


def _elsewhere(attempt: Attempt, place: Workplace) -> list[str]:
    """Return what was written elsewhere, without what belongs to the system or is a cache."""
    system = ("/dev/", "/proc/", "/sys/", str(place.scratch), str(Path.home() / "."))
    return [each for each in attempt.elsewhere if not each.startswith(system) and "__pycache__" not in each]


def _remarks(first: Trial) -> list[str]:
    lines = [line for segment in first.last.segments for line in segment.lines]
    found = []
    if not any(line["kind"] == "save" for line in lines):
        found.append(
            "no checkpoint was seen to be written (torch.save, safetensors, torch.distributed.checkpoint): after "
            "each fault it begins anew, and faults of saves and checkpoints were not tried"
        )
    return found


def _damage(place: Workplace, *, act: Callable[[Path, random.Random], None], chance: random.Random) -> str | None:
    """Damage the newest file that is at least half as large as the largest of those that the training has written."""
    new = {}
    for path, (size, changed) in place.files().items():
        origin = place.origin / path.relative_to(place.work) if path.is_relative_to(place.work) else path
        if origin is path or not origin.exists() or origin.stat().st_mtime_ns != changed:
            new[path] = size, changed
    largest = max((size for size, _ in new.values()), default=0)
    if not largest:
        return None
    path = max((path for path, (size, _) in new.items() if 2 * size >= largest), key=lambda path: new[path][1])
    act(path, chance)
    return path.name


def _flip(path: Path, chance: random.Random) -> None:
    flip_bit(path, chance.randrange(8 * path.stat().st_size))


def _cut(path: Path, _: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def check_survives(
    command: Sequence[str], *, cwd: Path | None = None, writes: Sequence[Path] = (), only: Sequence[str] = (),
    seed: int = 0, budget_seconds: float = 600.0,
) -> Report:  # fmt: skip
    """Check that a training survives faults and is the same training afterwards: for tests of your own.

    Args:
        command: What trains, such as ``[sys.executable, "train.py"]``.
        cwd: Where it is started; None: here. It is copied, and nothing in it is changed.
        writes: As `Campaign` takes it.
        only: Kinds of faults, of `KINDS`; none: all.
        seed: Decides the steps of the faults.
        budget_seconds: After which no trial is begun.

    Raises:
        AssertionError: naming each fault after which it does not, and the first step that differs.
        PolicyError: H729, H730 if it cannot be put to the test.
    """
    origin = Path.cwd() if cwd is None else cwd
    report = Campaign(
        command, origin=origin, writes=writes, only=only, seed=seed, budget_seconds=budget_seconds
    ).run()  # fmt: skip
    if not report.passed:
        failed = [f"{row.fault}: {row.result}: {row.detail}" for row in report.rows if not row.passed]
        raise AssertionError("\n".join(failed))
    return report
