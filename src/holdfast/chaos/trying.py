"""The campaign over anyone's training: two undisturbed runs, then one trial for each fault.

Each fault, and the step that it comes at, is drawn from the seed; it is one that the undisturbed
run has shown to be
possible: no worker is killed where there is none.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.chaos.comparing import (
    Comparison,
    Difference,
    Reference,
    compare,
    losses,
    unsteady_fields,
)
from holdfast.chaos.faults import flip_bit
from holdfast.chaos.trials import Attempt, Bench, Line, Trial, carry_out
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError
from holdfast.core.version import __version__
from holdfast.supervise.launch.commands import find_program

KINDS = (
    "kill",
    "term",
    "first",
    "save",
    "eval",
    "worker",
    "rank",
    "memory",
    "nan",
    "disk",
    "io",
    "clock",
    "damage",
)
_LEAST_STILL_SECONDS = 20.0
_STILL_TIMES = 5.0  # the longest pause of the undisturbed run
_MOST_TIMES = 8.0  # the undisturbed run, for one attempt
_RANDOM_KILLS = 3
_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_GRACE, _SLOW, _CLOCK = (15.0, signal.SIGKILL), (10.0, signal.SIGCONT), {"clock": -3600}
_FAILS_ONCE = {"errno": errno.EIO, "once": True}
_NO_SAVE = (
    "no checkpoint was seen to be written (torch.save, safetensors, torch.distributed.checkpoint):"
    " after each "
)
_NO_SAVE += "fault it begins anew, and faults of saves and checkpoints were not tried"
# No checkpoint ends so; rings are what a guard records.
_TEXTS = (".log", ".txt", ".csv", ".json", ".jsonl", ".out", ".yaml", ".yml", ".ring")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, of `KINDS`, in words, the plan for `Injector`, what comes after it,
    plans of restarts.
    """

    kind: str
    words: str
    plan: dict[str, Any]
    between: Callable[..., Path | None] | None = None
    then: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True, kw_only=True)
class Row:
    """What one trial has shown.

    `result` is ``exact``, ``survives`` (it is another one after a fault in the data, or already
    when undisturbed), ``another training``, ``work is lost`` (saved work is done again), ``ends in
    NaN``, ``hangs``, ``does not survive``, ``did not occur`` (the fault's moment never came) or
    ``not tried`` (no time, interrupted).
    """

    kind: str
    fault: str
    result: str = "not tried"
    detail: str = "no time"
    attempts: int = 0
    seconds: float = 0.0
    seconds_lost: float = 0.0
    left_processes: int = 0
    left_files: list[str] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)
    failed: str = ""  # how our observer has failed

    @property
    def passed(self) -> bool:
        """Whether the training came out as it should."""
        return self.result in ("exact", "survives")

    @property
    def lost(self) -> bool:
        """Whether it does not survive."""
        return self.result in ("does not survive", "hangs", "ends in NaN")

    @property
    def tried(self) -> bool:
        """Whether the fault happened."""
        return self.result not in ("did not occur", "not tried")


@dataclass(slots=True, kw_only=True)
class Report:
    """What a campaign has found."""

    command: list[str]
    seed: int
    steps: int
    undisturbed_seconds: list[float]
    unsteady: Difference | None  # in which two undisturbed runs differ
    remarks: list[str]
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    seconds_of_runs: float = 0.0  # of which the command itself ran
    losses: list[float | None] = field(default_factory=list)  # of the undisturbed run, step by step
    interrupted: bool = False
    versions: dict[str, str] = field(default_factory=dict)  # that the training has imported

    @property
    def passed(self) -> bool:
        """Whether all that was asked for was tried, and the training survives it and is the same
        training.
        """
        tried = [row for row in self.rows if row.tried]
        whole = self.unsteady is None and all(row.result != "not tried" for row in self.rows)
        return whole and not self.interrupted and bool(tried) and all(row.passed for row in tried)


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
        say: Called with a line of progress for each fault.

    Raises:
        PolicyError: H729 for a command that cannot be put to the test, H730 as `Workplace`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        origin: Path,
        writes: Sequence[Path] = (),
        only: Sequence[str] = (),
        seed: int = 0,
        budget_seconds: float = 600.0,
        restarts: int = 3,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._command, self._only, self._seed, self._restarts, self._say = (
            list(command),
            only,
            seed,
            restarts,
            say,
        )
        self._chance = random.Random(seed)  # noqa: S311 - chance, not secrets
        self._began = time.monotonic()
        program = find_program(self._command)
        self._place = Workplace(origin, writes)
        self._bench = Bench(program, self._command, self._place, self._began + budget_seconds)
        self._ran = 0.0
        self._read: set[str] = set()  # by restarts
        self._tried_states: set[str] = set()

    def run(self) -> Report:
        """Carry out everything."""
        try:
            first, second = (self._undisturbed() for _ in range(2))
            return self._try(first, second)
        finally:  # whatever comes meanwhile: the copies are removed, and what was found is kept
            ends = {}
            with suppress(ValueError):  # in a thread signals are not ours
                ends = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDS}
            self._place.close()
            for number, handler in ends.items():
                signal.signal(number, handler)

    def _undisturbed(self) -> Trial:
        trial = carry_out(self._bench)
        self._ran += trial.last.seconds
        _check(trial.last, self._place, out_of_time=time.monotonic() > self._bench.deadline)
        return trial

    def _try(self, first: Trial, second: Trial) -> Report:
        references, unsteady, others = {}, None, second.ranks()
        for rank, segments in sorted(first.ranks().items()):
            differs, fields = unsteady_fields(segments, others.get(rank, []))
            unsteady, references[rank] = unsteady or differs, Reference(segments, fields)
        reference = references[min(references)]
        self._bench.still_seconds = max(
            _LEAST_STILL_SECONDS, _STILL_TIMES * _longest_pause(first.last)
        )
        self._bench.most_seconds = max(60.0, _MOST_TIMES * first.last.seconds)
        remarks = [] if first.last.lines("save") else [_NO_SAVE]
        remarks += (
            ["no step has changed a weight"]
            if len({step["weights"] for step in reference.steps}) == 1
            else []
        )
        report = Report(
            command=self._command,
            seed=self._seed,
            unsteady=unsteady,
            steps=len(reference.steps),
            undisturbed_seconds=[trial.last.seconds for trial in (first, second)],
            remarks=remarks,
            losses=losses(reference.steps),
            versions=reference.segments[0].lines[0].get("versions", {}) | {"holdfast": __version__},
        )
        faults = [
            each for each in self._faults(reference) if not self._only or each.kind in self._only
        ]
        starts = 2 + sum(1 + max(1, len(each.then)) for each in faults)  # mostly
        minutes = starts * first.last.seconds / 60 + 1
        need = f"{len(faults)} faults need about {minutes:.0f} min"
        self._say(f"one start takes {first.last.seconds:.0f} s; {need}")
        numbers = [
            sum(other.kind == each.kind for other in faults[:at]) for at, each in enumerate(faults)
        ]
        # First one of each kind
        faults = [faults[at] for at in sorted(range(len(faults)), key=numbers.__getitem__)]
        report.rows = [Row(kind=each.kind, fault=each.words) for each in faults]
        try:
            for at, fault in enumerate(faults):
                report.rows[at] = self._row(fault, first, references, unsteady)
                self._say(f"{fault.words}: {report.rows[at].result}")
        except KeyboardInterrupt:
            report.interrupted = True
            for row in (row for row in report.rows if row.result == "not tried"):
                row.detail = "interrupted"
        if failed := {first.last.failed, *(row.failed for row in report.rows)} - {""}:
            report.remarks.append(
                f"what observes the training has failed, please report it: {min(failed)}"
            )
        if any(row.detail == "no time" for row in report.rows):
            report.remarks.append(f"{need}: give a larger --budget")
        report.seconds, report.seconds_of_runs = time.monotonic() - self._began, self._ran
        return report

    def _faults(self, reference: Reference) -> list[Fault]:
        """Draw all faults; each is drawn whatever others are asked for, so that a seed means the
        same.
        """
        # Steps are counted in each process
        segment = max(reference.segments, key=lambda each: len(each.steps))
        count, lines = len(segment.steps), segment.lines
        saves = [line for line in lines if line["kind"] == "save"]
        # A save to go on from
        after = min((line["step"] for line in saves if line["step"] < count), default=0)
        step = partial(self._step, after, count)
        found = [_fault("first", "SIGKILL in the first step", "backward", 0, "SIGKILL")]
        moments = [self._chance.choice(["backward", "before"]) for _ in range(_RANDOM_KILLS)]
        found += [
            _at_step("kill", "SIGKILL in", at, step(part), "SIGKILL")
            for part, at in enumerate(moments)
        ]
        found.append(_at_step("term", "SIGTERM in", "backward", step(), "SIGTERM", later=_GRACE))
        if any(line["kind"] == "workers" for line in lines):
            for act in ("killed", "stopped"):
                found.append(
                    _at_step(
                        "worker", f"a loader worker {act} in", "loader", step(), f"worker {act}"
                    )
                )
        if segment.ranks > 1:
            for words, act in (("killed", "SIGKILL"), ("stopped", "SIGSTOP")):
                rank = self._chance.randrange(1, segment.ranks)
                found.append(
                    _at_step("rank", f"rank {rank} {words} in", "backward", step(), act, rank=rank)
                )
        found.append(_at_step("memory", "out of memory in", "backward", step(), "memory"))
        seen, at = (
            [
                what
                for what in ("batch", "inputs")
                if any(any(each[what]) for each in segment.steps)
            ],
            step(),
        )
        if seen:
            found.append(
                _at_step(
                    "nan",
                    "a NaN in the batch of",
                    "loader" if "batch" in seen else "forward",
                    at,
                    "nan",
                )
            )
        if evaluations := sum(line["kind"] == "eval" for line in lines):
            number = self._chance.randint((evaluations + 1) // 2, evaluations)
            found.append(
                _fault("eval", f"SIGKILL in evaluation {number}", "eval", number, "SIGKILL")
            )
        if saves:
            found += self._in_saves(saves, after, step())
            found += self._after_saves(saves, after, step(), count)
        if segment.ranks > 1:
            for words, act, plan in (
                ("stopped for 10 s", "SIGSTOP", {"later": _SLOW}),
                ("cut off", "cut off", {}),
            ):
                rank = self._chance.randrange(1, segment.ranks)
                found.append(
                    _at_step(
                        "rank",
                        f"rank {rank} {words} in",
                        "backward",
                        step(),
                        act,
                        rank=rank,
                        **plan,
                    )
                )
        return sorted(found, key=lambda fault: KINDS.index(fault.kind))

    def _step(self, after: int, count: int, part: int | None = None) -> int:
        """Draw a number of steps after a save.

        In one of equal parts of what is left, if a part is given.
        """
        low, drawn = min(after + 1, count - 1), self._chance.random()
        return low + int(
            (count - low) * (drawn if part is None else (part + drawn) / _RANDOM_KILLS)
        )

    def _in_saves(self, saves: list[Line], after: int, step: int) -> list[Fault]:
        number, size = (
            self._chance.randint(min(2, len(saves)), len(saves)),
            max(line["bytes"] for line in saves),
        )
        step_of = saves[number - 1]["step"]
        # Files of one checkpoint?
        same = [at for at, line in enumerate(saves, 1) if line["step"] == step_of]
        which = f"save {number} (step {step_of})"
        found = [
            _fault("save", f"SIGKILL after writing in {which}", "save ends", number, "SIGKILL")
        ]
        if size:
            full = "no room for more than half of a checkpoint"
            for each in sorted({same[0], same[-1]}):
                half = saves[each - 1]["bytes"] // 2
                cut = f"killed half-way through the file of save {each} (step {step_of})"
                found.append(_fault("save", cut, "save begins", each, "cut write", bytes=half))
            half = {"bytes": size // 2, "errno": errno.ENOSPC}
            found.append(
                _fault("disk", f"{full} after step {after}", "after", after, "disk", **half)
            )
            full = f"a write fails (EIO) half-way in {which}"
            found.append(_fault("io", full, "save begins", number, "EIO", **half | _FAILS_ONCE))
        for words, act in (
            ("a bit of the newest checkpoint flipped", _flip),
            ("the newest checkpoint cut off", _cut),
        ):
            fault = _fault(
                "damage", f"SIGKILL in step {step + 1}, {words}", "backward", step, "SIGKILL"
            )
            found.append(replace(fault, between=partial(_damage, act=act, chance=self._chance)))
        return found

    def _after_saves(self, saves: list[Line], after: int, step: int, count: int) -> list[Fault]:
        words = f"SIGKILL in step {step + 1}, a read of the newest checkpoint fails (EIO)"
        newest = partial(_damage, act=lambda *_: None, chance=self._chance)
        fault = _fault("io", words, "backward", step, "SIGKILL")
        found = [replace(fault, between=newest, then=(_FAILS_ONCE, {}))]
        then: tuple[dict[str, Any], ...] = (_CLOCK,)
        words = f"SIGKILL in step {after + 1}, the clock set back an hour"
        if more := [line["step"] - after + 1 for line in saves if after < line["step"] < count - 1]:
            words += ", SIGKILL after the next save"  # which save is the newest then?
            then = ({**_CLOCK, "at": "backward", "count": min(more), "act": "SIGKILL"}, _CLOCK)
        return [*found, replace(_fault("clock", words, "backward", after, "SIGKILL"), then=then)]

    def _carried_out(self, fault: Fault, steps: int) -> Trial:
        between = fault.between and partial(fault.between, read=self._read)
        options: dict[str, Any] = {"restarts": self._restarts, "steps": steps, "then": fault.then}
        trial = carry_out(self._bench, fault.plan, between=between, **options)
        self._ran += sum(attempt.seconds for attempt in trial.attempts)
        self._read |= {_alike(path) for path in trial.read}
        return trial

    def _try_random(self, states: set[str], references: dict[int, Reference]) -> None:
        """Run with each of these random states set to another.

        Where nothing else differs, it is not compared.
        """
        for name in sorted(states):
            trial = carry_out(self._bench, {"random": name})
            self._ran += trial.last.seconds
            others = {rank: each.without(name) for rank, each in references.items()}
            if (
                not trial.last.status
                and not trial.last.hung
                and not compare(others, trial).differences
            ):
                references.update(others)
        self._tried_states |= states

    def _is_unread(self, trial: Trial) -> bool:
        """Return whether no restart reads such files as the damaged one, by its name.

        Safetensors are read unseen.
        """
        if trial.damaged is None or trial.damaged.suffix == ".safetensors" or not self._read:
            return False
        return _alike(trial.damaged) not in self._read

    def _names(self, files: set[Path]) -> dict[str, str]:
        """Return names of files without what is chance or changes with step and time, and as
        they are.
        """
        names = [
            str(each).removeprefix(f"{self._place.scratch}/").removeprefix("work/")
            for each in files
        ]
        # Those of `tempfile`
        names = [re.sub(r"(tmp|pymp-|listener-)[a-z0-9_]{8}", r"\1*", name) for name in names]
        return {_alike(name): name for name in names}

    def _row(
        self,
        fault: Fault,
        first: Trial,
        references: dict[int, Reference],
        unsteady: Difference | None,
    ) -> Row:
        row = Row(kind=fault.kind, fault=fault.words)
        steps = max(len(segment.steps) for segment in first.last.segments)
        if time.monotonic() > self._bench.deadline:
            return row
        if len(fault.then) > self._restarts:
            row.result, row.detail = "did not occur", f"it needs --restarts {len(fault.then)}"
            return row
        trial = self._carried_out(fault, steps)
        if self._is_unread(trial):  # now it is known what is read
            trial = self._carried_out(fault, steps)
        row.seconds = sum(attempt.seconds for attempt in trial.attempts)
        row.failed = next((attempt.failed for attempt in trial.attempts if attempt.failed), "")
        if time.monotonic() > self._bench.deadline and trial.last.hung:
            return row
        row.attempts, row.seconds_lost = (
            len(trial.attempts),
            max(0.0, row.seconds - first.last.seconds),
        )
        row.left_processes = sum(attempt.left for attempt in trial.attempts)
        left, usual = self._names(trial.files), self._names(first.files)
        row.left_files = sorted(left[each] for each in left.keys() - usual.keys())
        comparison = compare(references, trial)
        # Is anything made of the random states that differ?
        while (
            states := {name for each in comparison.differences for name in each.states}
            - self._tried_states
        ):
            if unsteady is not None:
                break
            self._try_random(states, references)
            comparison = compare(references, trial)
        row.comparison = asdict(comparison)
        row.result, row.detail = _judge(fault, trial, comparison, unsteady)
        if row.passed and self._is_unread(trial):
            others = ", ".join(sorted({each.name for each in trial.read})[:3])
            row.result, row.detail = "did not occur", f"no restart reads such a file, but {others}"
        done = "a read of {} failed" if fault.kind == "io" else "{} was damaged"
        row.detail += f" ({done.format(trial.damaged.name)})" if trial.damaged else ""
        return row


def _alike(path: object) -> str:
    return re.sub(r"\d+", "#", str(path))


def _fault(kind: str, words: str, at: str, count: int, act: str, **plan: Any) -> Fault:
    return Fault(kind, words, {"at": at, "count": count, "act": act, **plan})


def _at_step(kind: str, words: str, at: str, step: int, act: str, **plan: Any) -> Fault:
    return _fault(kind, f"{words} step {step + 1}", at, step, act, **plan)


def _judge(
    fault: Fault, trial: Trial, comparison: Comparison, unsteady: Difference | None
) -> tuple[str, str]:
    last, again = (
        trial.last,
        f"{comparison.steps_again} steps made again" if unsteady is None else "",
    )
    if not trial.attempts[0].lines("fault"):
        status = trial.attempts[0].status
        return (
            "did not occur",
            f"its moment never came{f', it ended with {_status(status)}' * bool(status)}",
        )
    if fault.between is not None and trial.damaged is None:
        return "did not occur", "no checkpoint was found"
    if (fault.between is not None or fault.then) and len(trial.attempts) == 1:
        return "did not occur", "the command went on by itself before"
    refused = sum(attempt.refused for attempt in trial.attempts)
    missed = [line["why"] for attempt in trial.attempts for line in attempt.lines("missed")]
    if (fault.kind == "io" and not refused) or (missed and fault.plan["act"] in ("cut off", "nan")):
        return "did not occur", next(iter(missed), "no such read or write was seen")
    if last.hung or last.status:
        how = (
            "it stood still and was killed"
            if last.hung
            else f"it ended with {_status(last.status)}"
        )
        lines = [line for line in last.output.splitlines() if re.search(r"\w", line)]
        # Before a launcher's own
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b: \S", line)]
        said = " ".join((errors or lines)[-1:]).strip()[:200]
        return (
            "hangs" if last.hung else "does not survive"
        ), f"start {len(trial.attempts)}: {how}; {said}".strip("; ")
    if any(attempt.hung for attempt in trial.attempts):
        return "hangs", f"it stood still and had to be killed; then {again}"
    if not comparison.finite:
        return "ends in NaN", "the weights or the loss at the end are NaN or infinite"
    if fault.kind == "nan" and any(each.what != "text" for each in comparison.differences):
        return "survives", "this batch has changed the training; the weights at the end are finite"
    # The graver ones first
    found = sorted(comparison.differences, key=lambda each: each.what == "older")
    for difference in found if unsteady is None else ():
        if difference.what == "text":
            again += f"; {difference.detail}"
        elif difference.what != "older" or fault.between is None:  # else the newest one is damaged
            return ("work is lost" if difference.what == "older" else "another training"), str(
                difference
            )
    return ("exact" if unsteady is None else "survives"), again


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _longest_pause(attempt: Attempt) -> float:
    times: list[float] = sorted(
        line["seconds"] for segment in attempt.segments for line in segment.lines
    )
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Before the first line a program starts, after the last it ends: neither is longer than what no
    # line covers.
    return max([*pauses, attempt.seconds - (times[-1] - times[0])])


def _check(attempt: Attempt, place: Workplace, *, out_of_time: bool) -> None:
    """Refuse a command that cannot be put to the test."""
    most = max((len(segment.steps) for segment in attempt.segments), default=0)
    # What belongs to the system, or is a cache, is not the training's.
    home = os.path.expanduser("~/.")  # noqa: PTH111 - where there is none that of pathlib raises
    system = ("/dev/", "/proc/", "/sys/", str(place.scratch), home)
    # Multiprocessing's
    written = [line["path"] for line in attempt.lines("outside") if "/pymp-" not in line["path"]]
    written = [
        each for each in written if not each.startswith(system) and "/__pycache__" not in each
    ]
    if attempt.hung and out_of_time:
        why = (
            "has not ended by itself in time",
            "give a larger --budget, or let the command make fewer steps.",
        )
    elif attempt.hung:
        why = "stands still", "let it run under `holdfast run`, which says where it stands."
    elif attempt.status:
        end = attempt.output.strip()[-400:]
        why = (
            f"fails when nobody disturbs it, with {_status(attempt.status)}: {end}",
            "correct that first.",
        )
    elif not most:
        fix = (
            "name the command that trains; `python -I`, `-E`, `-S`, CUDA graphs, weights set by"
            " hand are not seen."
        )
        fix += " If it goes on from a finished run that lies in the directory, begin without that."
        why = "made no step of an optimizer of torch", fix
    elif most < 4:
        why = "made fewer than 4 steps", "let it make more, with some saves among them."
    elif written:
        fix = (
            "name that by --writes, so that each trial begins without it; or let it write into the"
            " directory."
        )
        why = f"writes outside of the working directory: {', '.join(written[:3])}", fix
    else:
        return
    limit = "it must train by itself, and be the same at each start"
    raise PolicyError(f"the command {why[0]}", limit=limit, fix=why[1], rule="H729")


def _damage(
    place: Workplace,
    saved: Sequence[Path],
    *,
    act: Callable[[Path, random.Random], None],
    chance: random.Random,
    read: set[str],
) -> Path | None:
    """Damage the newest file that is at least half as large as the largest of those that the
    training has written.

    Of them only what was saved counts, where that still has a name that was seen; of that what
    restarts have `read`.
    """
    new, files = {}, place.files()
    names = Counter(path.stat().st_ino for path in files)
    for path, (size, changed) in files.items():
        origin = (
            place.first / path.relative_to(place.work) if path.is_relative_to(place.work) else None
        )
        if path.stat().st_nlink > names[path.stat().st_ino]:
            continue  # under a name elsewhere it may be somebody's data
        if size and (origin is None or not origin.exists() or origin.stat().st_mtime_ns != changed):
            new[path] = size, changed
    if not new:
        return None
    new = {
        path: about for path, about in new.items() if not {path, *path.parents}.isdisjoint(saved)
    } or new
    new = {path: about for path, about in new.items() if path.suffix not in _TEXTS} or new
    new = {path: about for path, about in new.items() if _alike(path) in read} or new
    largest = max(size for size, _ in new.values())
    path = max((path for path in new if 2 * new[path][0] >= largest), key=lambda path: new[path][1])
    act(path, chance)
    return path


def _flip(path: Path, chance: random.Random) -> None:
    flip_bit(path, chance.randrange(8 * path.stat().st_size))


def _cut(path: Path, _: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def check_survives(command: Sequence[str], *, cwd: Path | None = None, **options: Any) -> Report:
    """Check that a training survives faults and is the same training afterwards.

    For tests of your own.

    Args:
        command: What trains, such as ``[sys.executable, "path/to/file.py"]``.
        cwd: Where it is started; None: here. It is copied, and nothing in it is changed.
        options: ``writes``, ``only``, ``seed``, ``budget_seconds`` and ``restarts`` of `Campaign`.

    Raises:
        AssertionError: naming each fault after which it does not, and the first step that differs.
        PolicyError: H729, H730 if it cannot be put to the test.
    """
    report = Campaign(command, origin=Path.cwd() if cwd is None else cwd, **options).run()
    failed = [
        f"{row.fault}: {row.result}: {row.detail}"
        for row in report.rows
        if row.tried and not row.passed
    ]
    if not report.passed:
        raise AssertionError("\n".join(failed) or "no fault could be tried")
    return report
