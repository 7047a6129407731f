"""What a guarded step costs over a plain loop with clipping.

Everything at its default, the first steps too; both ways to decide a step; and other frameworks.

How: in a forked child a bare and a guarded model of one kind, each with a torch loader of its own,
train in blocks of 20 steps that take turns, in random order; in every second child the guarded
model is made first. Compared is the CPU time of all threads (user and system) of the two blocks of
a pair, so saves beside the loop count. *First*: the first 400 steps of both, the very first
included, as the ratio or difference of the sums, one sample for each child. *Warm*: after 500
steps, one sample for each pair of blocks.

*Now* and *late*: as above, with fused AdamW in all loops. The bare loop and two guarded ones take
turns: one decides each step before its optimizer is launched (``decide="now"``), the other one step
later (``decide="late"``).

*Alone*: one loop in a child of its own, all with the guard's malloc setting; the CPU time of steps
401 to 800 of a guarded child over that of the bare one started in the same round, in random order.

*Peers*: bare loop, Guard, Accelerate, Lightning and transformers' Trainer in one child, the same
model and AdamW for each, blocks in turn as above; those that own their loop wait in a callback, in
a thread. They save nothing and log nothing; the Guard has its defaults.

Memory: the peak of resident bytes in the third to fifth step over what was there before the model,
guarded less bare.
"""

from __future__ import annotations

import itertools
import random
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.forks import single_threaded, value_in_a_fork
from benchmarks.process_memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.results_file import Result, read_options
from benchmarks.step_loops import BLOCK_STEPS, FRAMEWORKS, LOOPS, in_turns, silence_frameworks
from benchmarks.step_models import Implementation, Job, find_batch_size
from holdfast.memory.host_memory import set_malloc_threshold

_FIRST_STEPS = 400
_WARM_AFTER_STEPS = 500
_WARM_ROUNDS = 20
_ALONE_AT_MOST = 1.015
_MEMORY_CASES = (("mlp", 16384), ("wide_conv", 64), ("wide_conv", 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A model whose steps are timed, and the targets.

    Args:
        kind: Of model; see `Job`.
        batch_size: Samples. None: as many as a bare step of `milliseconds` needs.
        milliseconds: The length of a bare step, if that decides the batch size.
        children: Processes in which it is measured.
        first: Largest cost of one of the first steps that reaches the target: a ratio, or
            microseconds of a tiny model, whose own steps are too short for a ratio.
        warm: The same after these.
        decisions: Whether steps that are decided now and late are compared as well.
    """

    kind: str
    batch_size: int | None = None
    milliseconds: float | None = None
    children: int
    first: float
    warm: float
    decisions: bool = False

    @property
    def is_tiny(self) -> bool:
        """Whether costs are in microseconds, and not ratios."""
        return self.kind == "tiny"

    @property
    def name(self) -> str:
        """What figures call it."""
        return self.kind if self.milliseconds is None else f"{self.kind}, {self.milliseconds:g} ms"

    def find_batch_size(self) -> int:
        """Return the batch size, found by trial in a child if that is necessary."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.milliseconds is not None
        find = partial(find_batch_size, self.kind, self.milliseconds)
        return int(value_in_a_fork(find, self.kind).batch_size)


_TIMED = (
    Timed(kind="tiny", batch_size=4, children=6, first=200.0, warm=100.0, decisions=True),
    Timed(kind="mlp512", batch_size=64, children=3, first=1.03, warm=1.015),
    Timed(kind="mlp", milliseconds=10.0, children=3, first=1.04, warm=1.02, decisions=True),
    Timed(kind="conv", milliseconds=10.0, children=3, first=1.04, warm=1.02, decisions=True),
    Timed(kind="mlp", milliseconds=50.0, children=1, first=1.03, warm=1.005),
)


@dataclass(slots=True)
class Rounds:
    """The seconds of a step by loop, in each round of blocks."""

    first: list[dict[str, float]] = field(default_factory=list)
    warm: list[dict[str, float]] = field(default_factory=list)

    def mean_of_first(self) -> dict[str, float]:
        """Return the mean seconds of one of the first steps, by loop."""
        return {
            name: statistics.fmean(seconds[name] for seconds in self.first)
            for name in self.first[0]
        }


def compared(
    names: Sequence[str],
    kind: str,
    batch_size: int,
    warm_rounds: int,
    seed: int,
    implementation: Implementation = "default",
) -> Rounds:
    """Time loops in this process, from their first step on."""
    set_malloc_threshold("auto")  # as the guard does, for all
    order = list(names) if seed % 2 else list(names)[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silence_frameworks()
        loops = [
            (name, LOOPS[name](Job(kind, batch_size, implementation=implementation)))
            for name in order
        ]
        first = in_turns(loops, _FIRST_STEPS // BLOCK_STEPS, seed)
        in_turns(loops, (_WARM_AFTER_STEPS - _FIRST_STEPS) // BLOCK_STEPS, seed)
        return Rounds(first, in_turns(loops, warm_rounds, seed))


def alone(name: str, kind: str, batch_size: int) -> float:
    """Return the CPU seconds of a step of one loop in this process, after 400."""
    set_malloc_threshold("auto")
    run = LOOPS[name](Job(kind, batch_size))
    run(_FIRST_STEPS)
    return run(_FIRST_STEPS) / _FIRST_STEPS


def measure_time(result: Result, timed: Timed, *, quick: bool) -> None:
    """Add what a guarded step of one model costs, at its defaults and by decision."""
    batch_size = timed.find_batch_size()
    result.parameters[timed.name] = {"batch_size": batch_size}
    measure_loops(result, timed, batch_size, {"guarded": "guarded"}, "default", quick=quick)
    if timed.decisions:
        described = {decision: f"guarded, fused, decide={decision}" for decision in ("now", "late")}
        measure_loops(result, timed, batch_size, described, "fused", quick=quick)


def measure_loops(
    result: Result,
    timed: Timed,
    batch_size: int,
    described: dict[str, str],
    implementation: Implementation,
    *,
    quick: bool,
) -> None:
    """Add what the steps of some guarded loops cost over those of a bare loop.

    Args:
        result: What the figures are added to.
        timed: The model.
        batch_size: Samples.
        described: What figures call each loop, by its name in `LOOPS`.
        implementation: Of AdamW, in all loops.
        quick: One child with few rounds.
    """
    loops = ("bare", *described)
    first: list[dict[str, float]] = []
    warm: list[dict[str, float]] = []
    for seed in range(1 if quick else timed.children):
        run = partial(
            compared,
            loops,
            timed.kind,
            batch_size,
            4 if quick else _WARM_ROUNDS,
            seed,
            implementation,
        )
        rounds = value_in_a_fork(run, timed.name)
        first.append(rounds.mean_of_first())
        warm += rounds.warm
    for name, text in described.items():
        add_cost(result, timed, f"first {_FIRST_STEPS} steps", name, text, first, timed.first)
        add_cost(result, timed, "warm", name, text, warm, timed.warm)
    bare_step = "bare step" if implementation == "default" else f"bare step, {implementation}"
    milliseconds = [1000 * seconds["bare"] for seconds in warm]
    result.add_samples(f"{timed.name}: {bare_step}", "ms", milliseconds)


def add_cost(
    result: Result,
    timed: Timed,
    when: str,
    name: str,
    text: str,
    samples: Sequence[dict[str, float]],
    at_most: float,
) -> None:
    """Add what the steps of a loop cost over those of the bare loop.

    Args:
        result: What the figure is added to.
        timed: The model.
        when: Which steps.
        name: Of the loop, in `samples`.
        text: What the figure calls the loop.
        samples: Seconds of a step, by loop.
        at_most: The target.
    """
    if timed.is_tiny:
        added = [1e6 * (seconds[name] - seconds["bare"]) for seconds in samples]
        what = f"{timed.name}, {when}: added to a step"
        if text != "guarded":
            what += f", {text}"
        result.add_samples(what, "us", added, at_most=at_most, digits=1)
        return
    ratios = [seconds[name] / seconds["bare"] for seconds in samples]
    what = f"{timed.name}, {when}: CPU time of {text} over bare"
    result.add_samples(what, "ratio", ratios, at_most=at_most)


def measure_alone(result: Result, rounds: int) -> None:
    """Add what a guarded step costs in a process that has no other loop."""
    order = random.Random(0)
    ratios = []
    for _ in range(rounds):
        seconds = {
            name: value_in_a_fork(partial(alone, name, "mlp512", 64), name)
            for name in order.sample(["bare", "guarded"], 2)
        }
        ratios.append(seconds["guarded"] / seconds["bare"])
    result.add_samples(
        "mlp512, alone: CPU time of guarded over bare", "ratio", ratios, at_most=_ALONE_AT_MOST
    )


def measure_peers(result: Result, children: int, rounds_of_a_child: int) -> None:
    """Add what a step costs under the guard and in each framework."""
    names = ("bare", "guarded", *FRAMEWORKS)
    first: list[dict[str, float]] = []
    warm: list[dict[str, float]] = []
    for seed in range(children):
        run = partial(compared, names, "mlp512", 64, rounds_of_a_child, seed)
        rounds = value_in_a_fork(run, "peers")
        first.append(rounds.mean_of_first())
        warm += rounds.warm
    for when, samples in ((f"first {_FIRST_STEPS} steps", first), ("warm", warm)):
        for name in names[1:]:
            ratios = [seconds[name] / seconds["bare"] for seconds in samples]
            what = f"peers, mlp512, {when}: CPU time of {name} over bare"
            result.add_samples(what, "ratio", ratios)


def peak_of_loop(kind: str, batch_size: int, name: str) -> tuple[int, int]:
    """Return the peak of resident bytes of a loop beyond what was there before, and the bytes of
    mutable buffers.
    """
    set_malloc_threshold("auto")
    before = resident_bytes()
    job = Job(kind, batch_size)
    run = LOOPS[name](job)
    run(2)
    reset_peak()
    run(3)
    return peak_bytes() - before, job.mutable_buffer_bytes()


def measure_memory(result: Result, kind: str, batch_size: int, repetitions: int) -> None:
    """Add what a guarded loop needs beyond the memory of a bare one."""
    name = f"{kind}, batch of {batch_size}"
    buffer_bytes = 0
    peaks: dict[str, list[int]] = {"bare": [], "guarded": []}
    for _, loop in itertools.product(range(repetitions), peaks):
        peak, buffer_bytes = value_in_a_fork(partial(peak_of_loop, kind, batch_size, loop), name)
        peaks[loop].append(peak)
    extra = [after - before for before, after in zip(peaks["bare"], peaks["guarded"], strict=True)]
    beyond = [(more - buffer_bytes) / peak for more, peak in zip(extra, peaks["bare"], strict=True)]
    result.parameters[f"{name}: mutable_buffer_bytes"] = buffer_bytes
    result.add_samples(
        f"{name}: peak of the bare loop", "MiB", [peak / 2**20 for peak in peaks["bare"]], digits=2
    )
    result.add_samples(
        f"{name}: extra peak of the guarded loop", "MiB", [more / 2**20 for more in extra], digits=2
    )
    result.add_samples(
        f"{name}: extra peak less mutable buffers, over bare peak", "ratio", beyond, at_most=0.01
    )


def main() -> None:
    single_threaded()
    options = read_options("step_overhead", __doc__ or "")
    quick = options.quick
    parameters = {"block": BLOCK_STEPS, "first": _FIRST_STEPS, "warm_after": _WARM_AFTER_STEPS}
    result = Result(options=options, parameters=parameters)
    for timed in _TIMED[: 2 if quick else None]:
        measure_time(result, timed, quick=quick)
    measure_alone(result, 1 if quick else 5)
    measure_peers(result, 1 if quick else 2, 2 if quick else 20)
    for kind, batch_size in _MEMORY_CASES[: 1 if quick else None]:
        measure_memory(result, kind, batch_size, 2 if quick else 5)
    result.write()


if __name__ == "__main__":
    main()
