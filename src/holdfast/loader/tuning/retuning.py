"""Whether a loader that runs should get more workers: decided from the waits of its last batches.

Pure, with its memory passed in and out, and slow to change: see `decide_again`. Restarting workers is for the loader.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.loader.tuning.choice import START_SECONDS, WARM_UP, Pace, decide_workers, margin
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Load

# Twice the wait that is aimed at, before a restart is thought of; and gains beyond the noise of loops.
_MUCH_WAIT, _WORTH_TRYING, _WORTH_KEEPING = 0.1, 0.05, 0.03
_FEWEST_SEEN = 32  # batches of a look, beyond those that were under way
_LONGEST_PATIENCE = 10_000  # batches between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is remembered between two looks at a loader that runs.

    Args:
        num_workers: In use.
        prefetch_factor: In use; None without workers.
        look_after_batches: Batches to record, from the last change or look on, before the next look.
        tried_from: Setting and seconds from batch to batch before the last raise, while that is on trial.
    """

    num_workers: int
    prefetch_factor: int | None
    look_after_batches: int = 100
    tried_from: tuple[int, int | None, float] | None = None


def decide_again(
    watch: Watch,
    waits: Sequence[float],
    steps: Sequence[float],
    *,
    pace: Pace,
    machine: Machine,
    load: Load,
    prefetch_factor: int | None = None,
    most_workers: int | None = None,
    batches_per_start: int | None = None,
) -> Watch:
    """Decide whether to go on with another number of workers, now that training has run for a while.

    Raised only while more than a tenth of the time is waiting and at least a twentieth of the time is to be gained;
    taken back if the loop did not get faster. Each raise, taken back or not, and each look that finds waits and no
    remedy doubles the time to the next look, so that a loader that no number of workers helps is left alone.

    Args:
        watch: What the last look returned, or `Watch` of the first decision.
        waits: Seconds that training waited for each of the batches since the last change or look.
        steps: Seconds of the step that followed each of them.
        pace: Of the first decision: what a batch costs, which is scaled to what is seen.
        machine: What there is.
        load: As in `decide_workers`.
        prefetch_factor: As in `decide_workers`.
        most_workers: As in `decide_workers`.
        batches_per_start: As in `decide_workers`: within so many a start of the workers must pay.

    Returns:
        What to use from now on, and when to look again. If the numbers differ from those in use, restart the
        workers with them; either way, record anew.
    """
    settled = watch.num_workers * (watch.prefetch_factor or 0)  # batches that were under way
    if len(steps) < settled + _FEWEST_SEEN:
        return replace(watch, look_after_batches=settled + 2 * _FEWEST_SEEN)
    usual = WARM_UP * statistics.median(steps[settled:])
    seen = [(w, s) for w, s in zip(waits[settled:], steps[settled:], strict=True) if s <= usual]
    wait, step = (statistics.fmean(times) for times in zip(*seen, strict=True))
    later = min(2 * watch.look_after_batches, _LONGEST_PATIENCE)
    if watch.tried_from is not None:
        workers, prefetch, before = watch.tried_from
        if wait + step > (1 - _WORTH_KEEPING) * before:
            return Watch(num_workers=workers, prefetch_factor=prefetch, look_after_batches=later)
        watch = replace(watch, tried_from=None)
    if wait <= _MUCH_WAIT * (wait + step):
        return replace(watch, look_after_batches=max(watch.look_after_batches, settled + 2 * _FEWEST_SEEN))
    now = _pace_seen(watch, pace, [w for w, _ in seen], step)
    plan = decide_workers(now, machine, load, prefetch_factor=prefetch_factor, most_workers=most_workers)
    gain = wait + step - 1 / plan.chosen.batches_per_second
    start = START_SECONDS.get(load.start_method, START_SECONDS["fork"]) * plan.num_workers
    pays = batches_per_start is None or gain * batches_per_start > start
    if plan.num_workers <= watch.num_workers or gain < _WORTH_TRYING * (wait + step) or not pays:
        return replace(watch, look_after_batches=later)
    return Watch(
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch_factor,
        look_after_batches=max(later, plan.num_workers * (plan.prefetch_factor or 0) + 2 * _FEWEST_SEEN),
        tried_from=(watch.num_workers, watch.prefetch_factor, wait + step),
    )


def _pace_seen(watch: Watch, pace: Pace, waits: Sequence[float], step: float) -> Pace:
    """Return the pace that explains the waits: workers that training waits for are never idle."""
    if watch.num_workers == 0:
        loads = tuple(waits)
    else:
        busy = watch.num_workers * (statistics.fmean(waits) + step) - pace.transfer.worker_seconds
        loads = (max(busy, 1e-6) / margin(pace),)  # it is how a worker does, which the margin makes of a load
    share = pace.load_cpu_seconds / max(statistics.fmean(pace.load_seconds), 1e-9)
    return replace(
        pace, load_seconds=loads, step_seconds=(step,), load_cpu_seconds=min(1.0, share) * statistics.fmean(loads)
    )
