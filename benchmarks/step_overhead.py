"""What a guarded step costs beyond a bare one when nothing goes wrong: time, and memory.

How: the guarded loop is ``for batch in guard.batches(...): guard.step(batch, loss_fn)`` with ``max_grad_norm`` and no
saving; the bare one is zero_grad, forward, backward, ``clip_grad_norm_``, ``optimizer.step`` over the same batches,
model and AdamW. Both loops live in one process with one thread and the guard's malloc setting, and train the same
model. Blocks of steps alternate, in random order within each pair, and CPU time is compared within each pair:
noise from elsewhere hits both. The batch is sized so that a bare step takes about 10 ms or 50 ms (a perceptron, and
convolutions with BatchNorm, whose statistics the guard copies); a tiny model shows the fixed cost. A second bare loop
against the first, in the same way, shows how far equal loops seem to differ.

Memory: each loop runs in a forked child of its own, 5 times. After 2 steps the kernel's peak of resident memory is
reset, 3 steps are made, and the peak is read, less what was resident before there was a model. Part of what the guard
takes, such as its recording, does not depend on the model, so the share is shown for three sizes.

To reach: median ratio <= 1.03 at 10 ms and <= 1.01 at 50 ms, <= 150 us added to a tiny step, peak memory <= 1 % more
plus a copy of the mutable buffers.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.forks import single_threaded, value_in_a_fork
from benchmarks.process_memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import MAX_GRAD_NORM, Job, Size, find_batch_size
from holdfast import Guard, Policy
from holdfast.memory.host_memory import set_malloc_threshold

_ENDLESS = 10**9
_BATCHES_OF_AN_EPOCH = 1000
_TIMED = (("mlp", 10.0, 1.03), ("conv", 10.0, 1.03), ("mlp", 50.0, 1.01), ("conv", 50.0, 1.01))
_TINY_BATCH = 4
_TINY_STEPS = 200
_FIXED_COST_US = 150.0
_BLOCK_MILLISECONDS = 200
_MEMORY_CASES = (("mlp", 16384), ("wide_conv", 64), ("wide_conv", 256))

Clock: TypeAlias = Callable[[], float]
Pairs: TypeAlias = list[tuple[float, float]]


class Loop:
    """A plain loop, or with a run directory a guarded one, that can be run for some steps at a time."""

    def __init__(self, job: Job, run_dir: Path | None = None, clock: Clock = time.process_time) -> None:
        self._job, self._clock, self._guard = job, clock, None
        self._batches: Iterator[Any] = repeat(job.batch)
        if run_dir is not None:
            self._guard = Guard(
                run_dir,
                model=job.model,
                optimizer=job.optimizer,
                loader=[job.batch] * _BATCHES_OF_AN_EPOCH,
                max_grad_norm=MAX_GRAD_NORM,
                save_interval_steps=None,
            )
            self._batches = self._guard.batches(max_steps=_ENDLESS)

    def run(self, steps: int) -> float:
        """Make steps and return their seconds."""
        job, guard, batches = self._job, self._guard, self._batches
        started = self._clock()
        for _ in range(steps):
            if guard is None:
                job.bare_step(next(batches))
            else:
                guard.step(next(batches), job.loss)
        return self._clock() - started


def compare(guarded: Loop, bare: Loop, steps: int, pairs: int) -> Pairs:
    """Return the seconds of a bare and of a guarded step, for each pair of blocks."""
    for _ in range(2):
        bare.run(steps)
        guarded.run(steps)
    chance = random.Random(0)
    found: Pairs = []
    for _ in range(pairs):
        seconds = {loop: loop.run(steps) / steps for loop in chance.sample([bare, guarded], 2)}
        found.append((seconds[bare], seconds[guarded]))
    return found


def time_model(kind: str, milliseconds: float, pairs: int, run_dir: Path) -> tuple[Size, Pairs, Pairs]:
    """Return the size, the guarded loop against the bare one, and a second bare loop against it."""
    set_malloc_threshold(_malloc_threshold())  # before all loops, as the guard does anyway
    size = find_batch_size(kind, milliseconds)
    job = Job(kind, size.batch_size)  # one for all: copies at other addresses differ by more than what is measured
    guarded, bare, control = Loop(job, run_dir), Loop(job), Loop(job)
    steps = max(4, round(_BLOCK_MILLISECONDS / milliseconds))
    return size, compare(guarded, bare, steps, pairs), compare(control, bare, steps, -(-pairs // 2))


def time_tiny_model(pairs: int, run_dir: Path) -> Pairs:
    job = Job("tiny", _TINY_BATCH)
    return compare(Loop(job, run_dir), Loop(job), _TINY_STEPS, pairs)


def _malloc_threshold() -> int | Literal["auto"]:
    threshold = Policy().cpu_malloc_threshold_bytes
    assert threshold is not None
    return threshold


def peak_of_loop(kind: str, batch_size: int, *, guarded: bool, run_dir: Path) -> tuple[int, int]:
    """Return the peak of resident bytes of a loop beyond what was there before, and the bytes of mutable buffers."""
    set_malloc_threshold(_malloc_threshold())
    before = resident_bytes()
    job = Job(kind, batch_size)
    loop = Loop(job, run_dir if guarded else None)
    loop.run(2)
    reset_peak()
    loop.run(3)
    return peak_bytes() - before, job.mutable_buffer_bytes()


def measure_time(result: Result, folder: Path, pairs: int) -> None:
    for kind, milliseconds, at_most in _TIMED:
        name = f"{kind}, {milliseconds:g} ms"
        run_dir = folder / name
        size, found, control = value_in_a_fork(partial(time_model, kind, milliseconds, pairs, run_dir), name)
        result.parameters[name] = {"batch_size": size.batch_size, "bare_milliseconds": size.milliseconds}
        ratios = [guarded / bare for bare, guarded in found]
        result.add_samples(f"{name}: CPU time of guarded over bare", "ratio", ratios, at_most=at_most)
        ratios = [again / bare for bare, again in control]
        result.add_samples(f"{name}: CPU time of a second bare loop over the bare one", "ratio", ratios)
        result.add_samples(f"{name}: bare step", "ms", [1000 * bare for bare, _ in found])


def measure_fixed_cost(result: Result, folder: Path, pairs: int) -> None:
    found = value_in_a_fork(partial(time_tiny_model, pairs, folder / "tiny"), "tiny")
    added = [1e6 * (guarded - bare) for bare, guarded in found]
    result.add_samples("tiny: added to a step", "us", added, at_most=_FIXED_COST_US, digits=1)
    result.add_samples("tiny: bare step", "us", [1e6 * bare for bare, _ in found], digits=1)


def measure_memory(result: Result, folder: Path, kind: str, batch_size: int, repetitions: int) -> None:
    name = f"{kind}, batch of {batch_size}"
    peaks: dict[bool, list[int]] = {False: [], True: []}
    buffers = 0
    for number in range(repetitions):
        for guarded in (False, True):
            run_dir = folder / f"memory-{kind}-{batch_size}-{number}"
            run = partial(peak_of_loop, kind, batch_size, guarded=guarded, run_dir=run_dir)
            peak, buffers = value_in_a_fork(run, name)
            peaks[guarded].append(peak)
    extra = [after - before for before, after in zip(peaks[False], peaks[True], strict=True)]
    beyond = [(more - buffers) / peak for more, peak in zip(extra, peaks[False], strict=True)]
    result.parameters[f"{name}: mutable_buffer_bytes"] = buffers
    result.add_samples(f"{name}: peak of the bare loop", "MiB", [peak / 2**20 for peak in peaks[False]], digits=2)
    result.add_samples(f"{name}: extra peak of the guarded loop", "MiB", [more / 2**20 for more in extra], digits=2)
    result.add_samples(f"{name}: extra peak less mutable buffers, over bare peak", "ratio", beyond, at_most=0.01)


def main() -> None:
    single_threaded()
    options = read_options("step_overhead", __doc__ or "")
    pairs = 8 if options.quick else 40
    parameters = {"pairs": pairs, "cpu_malloc_threshold_bytes": _malloc_threshold()}
    result = Result(options=options, parameters=parameters)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_fixed_cost(result, folder, pairs)
        measure_time(result, folder, pairs)
        for kind, batch_size in _MEMORY_CASES[: 2 if options.quick else None]:
            measure_memory(result, folder, kind, batch_size, 2 if options.quick else 5)
    result.write()


if __name__ == "__main__":
    main()
