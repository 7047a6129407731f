"""What the guard's malloc setting costs or saves, apart from the guard, against glibc's default.

Where memory can be refused (``ulimit -v``, ``-d``), `Guard` tells malloc to map blocks of 4 MiB and
more by themselves and to give them back at once, which makes out-of-memory on the CPU recoverable;
elsewhere to keep what a step frees. It changes the whole process, so it is measured with a plain
loop.

How: a small convolutional network with BatchNorm, once with activations below 4 MiB and once above,
trains in forked children that have one setting each and are started in turns, in random order
within each round. CPU time (user and system) of 8 steps after 3 is compared within each round.

To reach: where nothing limits the process, no more than glibc's default (1.02, for noise); under a
limit nothing, since the setting is a trade.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Literal, TypeAlias

from benchmarks.forks import single_threaded, value_in_a_fork
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import Job
from holdfast.memory.host_memory import UNDER_A_LIMIT_BYTES, set_malloc_threshold

# Samples; an activation of conv is 64 KiB a sample, one of wide_conv 256 KiB.
_CASES = {
    "1 MiB": ("conv", 16),
    "3 MiB": ("conv", 48),
    "6 MiB": ("wide_conv", 24),
    "16 MiB": ("wide_conv", 64),
}
_WARM_STEPS, _STEPS = 3, 8


_Setting: TypeAlias = int | Literal["auto"] | None


def cpu_seconds(kind: str, batch_size: int, threshold: _Setting) -> float:
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
    rounds = 2 if options.quick else 12
    settings: dict[_Setting, str] = {
        "auto": "without a limit",
        UNDER_A_LIMIT_BYTES: "under a limit",
    }
    parameters = {
        "rounds": rounds,
        "steps": _STEPS,
        "threshold_bytes": UNDER_A_LIMIT_BYTES,
        "cases": _CASES,
    }
    result = Result(options=options, parameters=parameters)
    chance = random.Random(0)
    for name, (kind, batch_size) in _CASES.items():
        found: dict[_Setting, list[float]] = {None: [], **{setting: [] for setting in settings}}
        for _ in range(rounds):
            for setting in chance.sample(list(found), len(found)):
                found[setting].append(
                    value_in_a_fork(partial(cpu_seconds, kind, batch_size, setting), name)
                )
        for setting, where in settings.items():
            ratios = [
                after / before for before, after in zip(found[None], found[setting], strict=True)
            ]
            what = f"activations of {name}, {where}: CPU time with threshold over default"
            result.add_samples(what, "ratio", ratios, at_most=1.02 if setting == "auto" else None)
        result.add_samples(
            f"activations of {name}: default", "ms", [1000 * seconds for seconds in found[None]]
        )
    result.write()


if __name__ == "__main__":
    main()
