"""What the guard's malloc setting costs or saves, apart from the guard: glibc's default against a threshold of 4 MiB.

By default `Guard` tells malloc to map blocks of 4 MiB and more by themselves and to give them back at once, which
makes out-of-memory on the CPU recoverable. It changes the whole process, so it is measured with a plain loop.

How: a small convolutional network with BatchNorm, once with activations below 4 MiB and once above, trains in forked
children that have one setting each and are started in turns, in random order within each pair. CPU time (user and
system) of 8 steps after 3 is compared within each pair.

To reach: nothing; the figure is reported, since the setting is a trade.
"""

from __future__ import annotations

import random
import time
from functools import partial

from benchmarks.forks import single_threaded, value_in_a_fork
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import Job
from holdfast import Policy
from holdfast.memory.host_memory import set_malloc_threshold

# Samples; an activation of conv is 64 KiB a sample, one of wide_conv 256 KiB.
_CASES = {"1 MiB": ("conv", 16), "3 MiB": ("conv", 48), "6 MiB": ("wide_conv", 24), "16 MiB": ("wide_conv", 64)}
_WARM_STEPS, _STEPS = 3, 8


def cpu_seconds(kind: str, batch_size: int, threshold: int | None) -> float:
    """Return the CPU seconds of one bare step under a malloc setting; None is the default."""
    if threshold is not None and not set_malloc_threshold(threshold):
        raise RuntimeError("malloc is not glibc's")
    job = Job(kind, batch_size)
    for _ in range(_WARM_STEPS):
        job.bare_step(job.batch)
    started = time.process_time()
    for _ in range(_STEPS):
        job.bare_step(job.batch)
    return (time.process_time() - started) / _STEPS


def main() -> None:
    single_threaded()
    options = read_options("malloc_threshold", __doc__ or "")
    pairs = 2 if options.quick else 12
    threshold = Policy().cpu_malloc_threshold_bytes
    parameters = {"pairs": pairs, "steps": _STEPS, "threshold_bytes": threshold, "cases": _CASES}
    result = Result(options=options, parameters=parameters)
    chance = random.Random(0)
    for name, (kind, batch_size) in _CASES.items():
        found: dict[int | None, list[float]] = {None: [], threshold: []}
        for _ in range(pairs):
            for setting in chance.sample(list(found), 2):
                found[setting].append(value_in_a_fork(partial(cpu_seconds, kind, batch_size, setting), name))
        ratios = [after / before for before, after in zip(found[None], found[threshold], strict=True)]
        result.add_samples(f"activations of {name}: CPU time with threshold over default", "ratio", ratios)
        result.add_samples(f"activations of {name}: default", "ms", [1000 * seconds for seconds in found[None]])
    result.write()


if __name__ == "__main__":
    main()
