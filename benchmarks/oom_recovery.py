"""Real out-of-memory errors under ``RLIMIT_DATA``.

How many steps are recovered, how exactly, and at what cost.

How: each case is one training step of a random model (perceptron, convolutions, transformer layers,
LSTM) in forked children of a process that has imported torch. One child makes the bare step without
a limit: its gradient is what is expected, and its peaks and its CPU time are measured. Others make
a bare step with an eighth of the batch under a limit that grows until it fits. Then the guarded
child makes the step with its memory limited to a random point beyond the weights: for half of the
cases between what an eighth of the batch needs, with a quarter to spare, and 95 % of what the whole
batch needs; for the other half where forward just fits and backward may not. All children make one
small step first, without a limit, and give back what it freed. The guard has its default policy.

A case counts if memory was really refused: the step took more than one attempt, or failed. Cases
are drawn until there are enough. A step is recovered if it is committed and its gradient differs
from the bare one by at most 1e-5 (relative L2, fp32). Some kernels are less exact than that
themselves: where it differs by more, both are compared with the gradient in fp64, and the recovered
one may be at most twice as far from it as the bare one. A child that dies of a signal counts as not
recovered and is counted by signal.

Cost: CPU time of the recovered step over (attempts x CPU time of the bare step). It is below 1 if
failed attempts end early.

Beside it, on the same cases under the same limit and with the guard's malloc setting: the plain
loop, and ``accelerate.utils.find_executable_batch_size`` around it (accelerate's own code, left out
if it cannot be had). It starts the loop again with a smaller batch, so whether the step comes
through and whether it is the same step are two figures.

To reach: 200 of 200 recovered, median cost <= 1.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forks import Child, Fate, in_a_fork, single_threaded
from benchmarks.oom_cases import KINDS, Case, Job, draw_case
from benchmarks.peers import find_peer
from benchmarks.process_memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.results_file import Result, read_options, without_paths
from holdfast import Guard
from holdfast.memory.host_memory import trim_heap
from holdfast.testing import limit_memory, memory_limited

_TOLERANCE = 1e-5
_TIMES_THE_BARE_ERROR = 2.0
_LEAST_SPARE = 1.25
_MOST_SHARE = 0.95
_SHARDS = 2
_LONGEST_SECONDS = 3600.0
_NEVER_MET = 2**45


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one case."""

    case: Case
    # "recovered", "inexact", "raised ...", the name of a signal, or "fits" if no memory was refused
    ended: str
    attempts: int = 0
    difference: float | None = None  # relative L2, of the gradient to the bare one
    from_fp64: tuple[float, float] | None = (
        None  # that of the guarded and of the bare one to fp64, where it is needed
    )
    cost: float | None = None
    # "forward" or "backward", for each failed attempt
    failed_in: list[str] = field(default_factory=list)
    plain: str = ""
    accelerate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a bare step needs.

    Bytes beyond the weights until the end of forward and in all, and CPU time.
    """

    forward_bytes: int
    bytes: int
    seconds: float


def warmed_up(case: Case, device: str = "cpu") -> Job:
    limit_memory(_NEVER_MET)
    job = Job(case, device)
    job.bare_step(job.small)
    job.optimizer.zero_grad()
    # Or what the small step has left free would be memory that the limit does not count
    trim_heap()
    return job


def bare_step(case: Case, file: Path) -> Needs:
    """Make the step without a limit, and measure it."""
    job = warmed_up(case)
    before = resident_bytes()
    reset_peak()
    started = time.process_time()
    loss = job.loss(job.batch)
    forward = peak_bytes() - before
    loss.backward()  # type: ignore[no-untyped-call]
    job.optimizer.step()
    seconds = time.process_time() - started
    torch.save(job.gradient(), file)
    return Needs(forward_bytes=forward, bytes=peak_bytes() - before, seconds=seconds)


def part_under_limit(case: Case, limit_bytes: int, parts: int = 1) -> str:
    """Make a bare step with a part of the batch under a limit; raises if it does not fit."""
    job = warmed_up(case)
    with memory_limited(limit_bytes):
        job.bare_step(tuple(tensor[: -(-case.batch_size // parts)] for tensor in job.batch))
    return "the same step"


def limit_of(case: Case, whole: Needs) -> int:
    """Return how much a case may allocate beyond its weights."""
    eighth = whole.bytes // 20  # at most 30 % more than an eighth of the batch needs
    while eighth < whole.bytes and not in_a_fork(partial(part_under_limit, case, eighth, 8)).value:
        eighth = int(1.3 * eighth)
    least, most = int(_LEAST_SPARE * eighth), int(_MOST_SHARE * whole.bytes)
    if case.number // len(KINDS) % 2:
        least, most = max(least, whole.forward_bytes), whole.bytes
    return least + int(case.share * max(0, most - least))


def gradient_in_fp64(case: Case, file: Path, device: str = "cpu") -> None:
    """Make the step in fp64, by eighths of the batch."""
    job = warmed_up(case, device)
    job.model.double()
    inputs, labels = job.batch
    for part, of_part in zip(inputs.double().chunk(8), labels.chunk(8), strict=True):
        loss = job.loss((part, of_part)) * (len(of_part) / len(labels))
        loss.backward()  # type: ignore[no-untyped-call]
    torch.save(job.gradient(), file)


def guarded_step(case: Case, limit_bytes: int, run_dir: Path, file: Path) -> dict[str, Any]:
    """Make the step under a guard and a limit; return what happened."""
    limit_memory(_NEVER_MET)  # as everybody has from the beginning who can run into one
    job, marks = Job(case), [(0.0, "")]

    def loss(batch: Any) -> torch.Tensor:
        marks.append((time.time(), "forward"))
        value = job.loss(batch)
        marks.append((time.time(), "backward"))
        return value

    guard = Guard(run_dir, model=job.model, optimizer=job.optimizer, save_interval_steps=None)
    guard.step(job.small, loss)
    job.optimizer.zero_grad()
    trim_heap()
    error, attempts = None, 0
    started = time.process_time()
    with memory_limited(limit_bytes):
        try:
            attempts = guard.step(job.batch, loss).attempts
        except Exception as failure:  # noqa: BLE001 - which one it is goes into the result
            error = f"{type(failure).__name__}: {failure}"
    seconds = time.process_time() - started
    if error is None:
        torch.save(job.gradient(), file)
    events = [
        event
        for event in guard.events()
        if event.global_step == 1 and event.kind == "out_of_memory"
    ]
    failed_in = [
        [place for moment, place in marks if moment <= event.unix_seconds][-1] for event in events
    ]
    return {"attempts": attempts, "seconds": seconds, "error": error, "failed_in": failed_in}


def accelerated_step(case: Case, limit_bytes: int, find: Callable[..., Any], file: Path) -> str:
    """Let accelerate find a batch size for the step, and say whether the step is the same."""
    job = warmed_up(case)

    def train(batch_size: int) -> int:
        job.bare_step(tuple(tensor[:batch_size] for tensor in job.batch))
        return batch_size

    with memory_limited(limit_bytes):
        find(train, starting_batch_size=case.batch_size)()
    same = relative_difference(job.gradient(), file) <= _TOLERANCE
    return "the same step" if same else "a step of a part of the batch"


def relative_difference(gradient: torch.Tensor, file: Path) -> float:
    truth = torch.load(file, weights_only=True).double()
    return float((gradient.double() - truth).norm() / truth.norm())


def run_case(case: Case, folder: Path, find: Callable[..., Any] | None) -> Row:
    """Run one case and what stands beside it."""
    bare, guarded = folder / "bare.pt", folder / "guarded.pt"
    whole = in_a_fork(partial(bare_step, case, bare)).value
    limit = limit_of(case, whole)
    fate = in_a_fork(partial(guarded_step, case, limit, folder / f"run{case.number}", guarded))
    row = Row(case=case, ended=fate.error or fate.how)
    if fate.value is not None:
        _judge(row, fate.value, whole.seconds, folder)
    if row.ended != "fits":
        row.plain = _ending(in_a_fork(partial(part_under_limit, case, limit)))
        if find is not None:
            row.accelerate = _ending(in_a_fork(partial(accelerated_step, case, limit, find, bare)))
    return row


def _judge(row: Row, found: dict[str, Any], bare_seconds: float, folder: Path) -> None:
    row.attempts, row.failed_in = found["attempts"], found["failed_in"]
    if found["error"] is not None:
        row.ended = f"raised {without_paths(found['error'].splitlines()[0])}"
        return
    if row.attempts == 1:
        row.ended = "fits"
        return
    row.cost = found["seconds"] / (row.attempts * bare_seconds)
    guarded = torch.load(folder / "guarded.pt", weights_only=True)
    row.difference = relative_difference(guarded, folder / "bare.pt")
    if row.difference > _TOLERANCE:
        exact = folder / "fp64.pt"
        in_a_fork(partial(gradient_in_fp64, row.case, exact))
        bare = torch.load(folder / "bare.pt", weights_only=True)
        row.from_fp64 = relative_difference(guarded, exact), relative_difference(bare, exact)
    exact_enough = (
        row.from_fp64 is None or row.from_fp64[0] <= _TIMES_THE_BARE_ERROR * row.from_fp64[1]
    )
    row.ended = "recovered" if exact_enough else "inexact"


def _ending(fate: Fate) -> str:
    return str(fate.value) if fate.value is not None else (fate.error or fate.how).split(":")[0]


def summarise(result: Result, rows: list[Row], version: str) -> None:
    """Add the figures over all cases, and by kind of model."""
    recovered = [row for row in rows if row.ended == "recovered"]
    result.add_count("recovered", len(recovered), len(rows), expected=len(rows))
    for kind in KINDS:
        of_kind = [row for row in rows if row.case.kind == kind]
        result.add_count(
            f"recovered: {kind}", sum(row.ended == "recovered" for row in of_kind), len(of_kind)
        )
    for ended, count in sorted(
        Tally(row.ended for row in rows if row.ended != "recovered").items()
    ):
        result.add_count(f"not recovered: {ended}", count, len(rows))
    for place in ("forward", "backward"):
        result.add_count(
            f"first failure in {place}",
            sum(row.failed_in[:1] == [place] for row in rows),
            len(rows),
        )
    differences = [row.difference for row in recovered if row.difference is not None]
    result.add_samples(
        "relative L2 difference to the bare gradient", "ratio", differences, digits=10
    )
    close = sum(difference <= _TOLERANCE for difference in differences)
    result.add_count("recovered within 1e-5 of the bare gradient", close, len(recovered))
    result.add_count(
        "recovered with the very same gradient, bit for bit", differences.count(0.0), len(recovered)
    )
    others = [row.from_fp64 for row in recovered if row.from_fp64 is not None]
    nearer = sum(guarded <= bare for guarded, bare in others)
    result.add_count(
        "of the others: nearer to the gradient in fp64 than the bare one", nearer, len(others)
    )
    result.add_samples(
        "attempts of a recovered step", "attempts", [row.attempts for row in recovered]
    )
    costs = [row.cost for row in recovered if row.cost is not None]
    result.add_samples("CPU time over attempts x bare CPU time", "ratio", costs, at_most=1.0)
    for name, found in (
        ("plain loop", [row.plain for row in rows]),
        (f"accelerate {version}", [row.accelerate for row in rows if row.accelerate]),
    ):
        if found:
            through = sum(ending.startswith(("the same", "a step")) for ending in found)
            result.add_count(f"{name}: came through", through, len(found))
            result.add_count(
                f"{name}: with the same gradient", found.count("the same step"), len(found)
            )
            result.samples[f"{name}: endings"] = dict(Tally(found).most_common())


def run_cases(
    shard: int, wanted: int, folder: Path, find: Callable[..., Any] | None
) -> tuple[list[Row], int]:
    """Run every second case until enough of them count; return them, and how many were drawn."""
    rows: list[Row] = []
    drawn = 0
    while len(rows) < wanted and drawn < 3 * wanted:
        row = run_case(draw_case(shard + _SHARDS * drawn), folder, find)
        drawn += 1
        if row.ended != "fits":
            rows.append(row)
    return rows, drawn


def main() -> None:
    single_threaded()
    options = read_options("oom_recovery", __doc__ or "")
    wanted = 12 if options.quick else 200
    parameters = {"cases": wanted, "kinds": KINDS, "at_a_time": _SHARDS, "most_share": _MOST_SHARE}
    result = Result(options=options, parameters=parameters)
    with tempfile.TemporaryDirectory() as name:
        peer = Path(name) / "accelerate"
        find, version = find_peer(
            "accelerate.utils.memory", "find_executable_batch_size", "accelerate==1.15.0", peer
        )
        single_threaded()
        folders = [Path(name) / str(shard) for shard in range(_SHARDS)]
        for folder in folders:
            folder.mkdir()
        children = [
            Child(partial(run_cases, shard, wanted // _SHARDS, folder, find))
            for shard, folder in enumerate(folders)
        ]
        fates = [child.finish(_LONGEST_SECONDS) for child in children]
    for fate in fates:
        if fate.value is None:
            raise RuntimeError(f"the cases could not be run: {fate.error or fate.how}")
    rows = [row for fate in fates for row in fate.value[0]]
    drawn = sum(fate.value[1] for fate in fates)
    result.parameters["accelerate"] = version
    result.notes.append(
        f"{drawn - len(rows)} of {drawn} cases are left out because no memory was refused"
    )
    summarise(result, rows, version)
    result.write()


if __name__ == "__main__":
    main()
