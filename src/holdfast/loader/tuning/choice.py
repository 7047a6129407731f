"""How many workers, and how deep they prefetch: decided from the times of a few batches.

Every option is played through with the measured times: workers take batches in turn, deliver in order, and share the
processors with training. The smallest option that is as good as the best one is taken. Pure: measures nothing and
applies nothing; what running shows later is judged in `holdfast.loader.tuning.retuning`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Load
from holdfast.loader.tuning.probing import Sample, Transfer

# On the time that a load waits: 1.15 reached 97.7-99.8 % of the best on an idle machine. Where others use the machine
# too, it took a worker more, which costs little where it is not needed (docs/adr/0027).
_MARGIN = 1.25
_AS_GOOD = 0.98  # of the best option, to be taken for its fewer workers: leaves 3 of the 5 % aimed at to the model
_PREFETCHES = (2, 4, 8)  # torch's default, and twice as deep while that helps
_PLAYED = 240  # batches of each option that are timed, after those that fill the queues
WARM_UP = 3.0  # a sample beyond three times the median of the rest is a first call, or a break in a loop
_MOST_WORKERS = 64  # for one training process, however large the machine
_FEWEST_TRIED = 8  # workers that wait need no processors
# Of one worker; two took 0.05, 2.9 and 4.2 s (docs/adr/0027).
START_SECONDS = {"fork": 0.025, "spawn": 1.45, "forkserver": 2.1}
_LITTLE_WAIT = 0.05  # of the time; on an idle machine all points beyond this knee were alike (docs/adr/0027)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The times to decide from: those of `samples` without warm-up.

    Args:
        load_seconds: Wall time of each batch's loading on one thread, as in a worker.
        load_cpu_seconds: Mean CPU time of that.
        step_seconds: Usual times of a training step.
        step_cpu_seconds: Median CPU time of a step.
        transfer: What getting a batch from a worker costs.
    """

    load_seconds: tuple[float, ...]
    load_cpu_seconds: float
    step_seconds: tuple[float, ...]
    step_cpu_seconds: float
    transfer: Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one number of workers is predicted to give.

    Args:
        num_workers: As torch.
        prefetch_factor: As torch; None without workers.
        batches_per_second: Of the whole loop, steps included.
        wait_share: Part of the loop's time that it waits for batches, from 0 to 1.
        shared_memory_bytes: In /dev/shm at most.
        memory_bytes: Of workers and batches, at most.
        fits: Whether the machine has what it needs.
    """

    num_workers: int
    prefetch_factor: int | None
    batches_per_second: float
    wait_share: float
    shared_memory_bytes: int
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The decision, with everything that it was weighed against.

    Args:
        num_workers: To pass on.
        prefetch_factor: To pass on; None without workers.
        reason: One sentence.
        options: One for each number of workers from 0 on.
        pace: What it was decided from.
    """

    num_workers: int
    prefetch_factor: int | None
    reason: str
    options: tuple[Option, ...]
    pace: Pace

    @property
    def chosen(self) -> Option:
        """The option that was taken."""
        return self.options[self.num_workers]


def pace_of(samples: Sequence[Sample], transfer: Transfer, *, step_seconds: float | None = None) -> Pace:
    """Return the times to decide from.

    The first batches and steps open files, fill caches and compile: samples at the beginning that stand out are left
    out, and always the first one if there are three. Loading keeps its slow batches, since they return; a step that
    takes three times as long as the others is an evaluation or a save, and is left out.

    Args:
        samples: At least one.
        transfer: What getting a batch from a worker costs.
        step_seconds: Time of a step, if it is known and not in the samples; taken to keep one processor busy.
    """
    assert samples
    loads = _without_warm_up(samples, [sample.load_seconds for sample in samples])
    steps = _without_warm_up(samples, [sample.step_seconds for sample in samples])
    usual = statistics.median(sample.step_seconds for sample in steps)
    steps = [sample for sample in steps if sample.step_seconds <= WARM_UP * usual]
    return Pace(
        # A worker has one thread: what several threads did here at once, it does in turn. Waiting for a processor is
        # no waiting for a disk: more workers would not hide it.
        load_seconds=tuple(max(each.load_seconds - each.queued_seconds, each.load_cpu_seconds) for each in loads),
        load_cpu_seconds=statistics.fmean(sample.load_cpu_seconds for sample in loads),
        step_seconds=tuple(sample.step_seconds for sample in steps) if step_seconds is None else (step_seconds,),
        step_cpu_seconds=statistics.median(sample.step_cpu_seconds for sample in steps)
        if step_seconds is None
        else step_seconds,
        transfer=transfer,
    )


def decide_workers(
    pace: Pace,
    machine: Machine,
    load: Load,
    *,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    most_workers: int | None = None,
    batches_per_start: int | None = None,
) -> LoaderPlan:
    """Decide how many workers to start and how deep they prefetch.

    Args:
        pace: From `pace_of`.
        machine: What there is.
        load: Size of a batch, start method and sharing strategy; its numbers of workers are not used.
        num_workers: Only decide the prefetch factor, for this many.
        prefetch_factor: Only decide the number of workers, with this factor.
        most_workers: Try no more; else twice the processors, at least 8.
        batches_per_start: Batches after which workers are started anew (those of an epoch, if they do not persist).
    """
    most = most_workers if most_workers is not None else max(_FEWEST_TRIED, math.ceil(2 * machine.cpu_quota))
    numbers = range(min(most, _MOST_WORKERS) + 1) if num_workers is None else range(num_workers + 1)
    prefetches = _PREFETCHES if prefetch_factor is None else (prefetch_factor,)
    options = tuple(_option(n, prefetches, pace, machine, load, batches_per_start) for n in numbers)
    allowed = [option for option in options if option.fits or option.num_workers == 0]
    if num_workers is not None:
        allowed = [options[num_workers]]
    best = max(option.batches_per_second for option in allowed)
    chosen = next(option for option in allowed if option.batches_per_second >= _AS_GOOD * best)
    return LoaderPlan(
        num_workers=chosen.num_workers,
        prefetch_factor=chosen.prefetch_factor,
        reason=_reason(chosen, options, pace, machine),
        options=options,
        pace=pace,
    )


def _without_warm_up(samples: Sequence[Sample], times: Sequence[float]) -> list[Sample]:
    """Return the samples from the first one on that does not stand out from those after it; at least half."""
    start = 1 if len(samples) >= 3 else 0
    while start < len(samples) // 2 and times[start] > WARM_UP * statistics.median(times[start + 1 :]):
        start += 1
    return list(samples[start:])


def _option(
    num_workers: int, prefetches: Sequence[int], pace: Pace, machine: Machine, load: Load, per_start: int | None
) -> Option:
    """Return the option of this many workers, with the shallowest prefetching that is as good as the best."""
    if num_workers == 0:
        period = statistics.fmean(pace.load_seconds) + statistics.fmean(pace.step_seconds)
        return _described(replace(load, num_workers=0), None, period, pace, fits=True)
    asked = [replace(load, num_workers=num_workers, prefetch_factor=depth) for depth in prefetches]
    fitting = [each for each in asked if each.fits(machine)]
    if not fitting:  # less deep than anybody would choose, but it may fit
        asked = [replace(load, num_workers=num_workers, prefetch_factor=1 if len(prefetches) > 1 else prefetches[0])]
        fitting = [each for each in asked if each.fits(machine)]
    tried = fitting or asked
    start = START_SECONDS.get(load.start_method, START_SECONDS["fork"]) * num_workers
    periods = [_period(each, pace, machine.cpu_quota, start, per_start) for each in tried]
    good = next(each for each in zip(tried, periods, strict=True) if _AS_GOOD * each[1] <= min(periods))
    return _described(good[0], good[0].prefetch_factor, good[1], pace, fits=bool(fitting))


def _described(load: Load, prefetch_factor: int | None, period: float, pace: Pace, *, fits: bool) -> Option:
    return Option(
        num_workers=load.num_workers,
        prefetch_factor=prefetch_factor,
        batches_per_second=1 / max(period, 1e-9),
        wait_share=max(0.0, 1 - statistics.fmean(pace.step_seconds) / max(period, 1e-9)),
        shared_memory_bytes=load.shared_memory_bytes,
        memory_bytes=load.memory_bytes,
        fits=fits,
    )


def _period(load: Load, pace: Pace, cpu_quota: float, start_seconds: float, per_start: int | None) -> float:
    """Return the seconds from batch to batch: as the workers' turns allow, and as the processors allow."""
    under_way = load.num_workers * load.prefetch_factor
    if per_start is None:
        first = max(_PLAYED // 3, 2 * under_way)
        handed_out = _play(load.num_workers, under_way, first + _PLAYED, pace)
        turns = (handed_out[-1] - handed_out[first]) / (len(handed_out) - 1 - first)
        return max(turns, _cpu_seconds(pace) / cpu_quota)
    # From the start on: the queues are empty, and an epoch may be over before all workers have had a turn.
    count = min(per_start, _PLAYED)
    turns = _play(load.num_workers, under_way, count, pace)[-1] / count
    return max(turns, _cpu_seconds(pace) / cpu_quota) + start_seconds / per_start


def _play(num_workers: int, under_way: int, count: int, pace: Pace) -> list[float]:
    """Return when training asks for the next batch, after each of `count` batches, as torch's loader orders them."""
    sent = pace.transfer.worker_seconds
    loads = [margin(pace) * seconds + sent for seconds in _mixed(pace.load_seconds, count)]
    steps = _mixed(pace.step_seconds, count)
    free = [0.0] * num_workers
    ready: list[float] = []
    asked, now = [0.0] * min(under_way, count), 0.0
    ends = []
    for number in range(count):
        while len(ready) < len(asked):  # batches are given to the workers in turn, as soon as there is room
            worker = len(ready) % num_workers
            free[worker] = max(free[worker], asked[len(ready)]) + loads[len(ready)]
            ready.append(free[worker])
        now = max(now, ready[number]) + pace.transfer.hand_over_seconds
        if len(asked) < count:
            asked.append(now)
        now += steps[number]
        ends.append(now)
    return ends


def margin(pace: Pace) -> float:
    """Return by how much longer than measured a load is taken to last in a worker; nothing on its CPU time.

    With a margin on that, one worker more than the processors can run would look better, and is up to 9 % worse.
    """
    on_a_processor = pace.load_cpu_seconds / max(statistics.fmean(pace.load_seconds), 1e-9)
    return 1 + (_MARGIN - 1) * (1 - min(1.0, on_a_processor))


def _mixed(times: Sequence[float], count: int) -> list[float]:
    """Return the times again and again, in another order each time, the same for every option.

    In the order that they came in, one worker could get all the slow ones; drawn freely, an option could be lucky.
    """
    drawn = random.Random(0)  # noqa: S311 - no secret
    return [each for _ in range(-(-count // len(times))) for each in drawn.sample(times, len(times))][:count]


def _cpu_seconds(pace: Pace) -> float:
    """Return the CPU time of all processes for one batch with workers."""
    transfer = pace.transfer.worker_seconds + pace.transfer.hand_over_cpu_seconds
    return pace.load_cpu_seconds + transfer + pace.step_cpu_seconds


def _reason(chosen: Option, options: Sequence[Option], pace: Pace, machine: Machine) -> str:
    faster = [o for o in options if not o.fits and _AS_GOOD * o.batches_per_second > chosen.batches_per_second]
    cpu_bound = _cpu_seconds(pace) / machine.cpu_quota * chosen.batches_per_second > _AS_GOOD
    if faster:
        return f"{faster[0].num_workers} workers would be faster, and memory or descriptors do not suffice for them"
    if chosen.num_workers == 0:
        return "no number of workers gains on loading in the training process: sending a batch costs time too"
    if chosen.wait_share <= _LITTLE_WAIT:
        return f"training waits for {chosen.wait_share:.1%} of its time, and more workers do not lower that"
    if cpu_bound:
        return (
            f"a batch takes {_cpu_seconds(pace) * 1e3:.3g} ms of processor time with its step, and "
            f"{machine.cpu_quota:g} processors are busy with that; more workers would only share them"
        )
    if chosen.num_workers == len(options) - 1:
        return f"loading is slower than training with any of 0 to {chosen.num_workers} workers"
    return f"training waits for {chosen.wait_share:.1%} of its time, and more workers do not lower that"
