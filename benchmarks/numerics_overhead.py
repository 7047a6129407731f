"""What all guards of the numbers cost together when nothing goes wrong, and what the usual tools
cost beside them.

How: as in ``step_overhead``: loops in one process, one thread, blocks of steps that take turns in
random order, CPU time compared within each round. The bare loop clips with ``clip_grad_norm_``.
Compared with it are the guarded loop with all that is on by default (spikes, provenance,
diagnosis), the guarded loop with all of these off, the bare loop under ``detect_anomaly``, and the
bare loop with a forward hook on every module that looks for NaN and Inf. All train one model, but
for the hooked loop, which has its own. The first 400 steps of each are not timed: in them the
diagnosis looks at every step, then at one in ten, and later at one in fifty.

To reach: everything on over plain clipping: median ratio <= 1.03 at 10 ms and <= 1.01 at 50 ms.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.forks import in_a_fork, single_threaded
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import MAX_GRAD_NORM, Job, find_batch_size
from holdfast import Guard, Policy
from holdfast.memory.host_memory import set_malloc_threshold

_TIMED = (("mlp", 10.0, 1.03), ("conv", 10.0, 1.03), ("mlp", 50.0, 1.01), ("conv", 50.0, 1.01))
_OFF: dict[str, Any] = {
    "spike_action": "off",
    "provenance": False,
    "diagnose": False,
    "snapshot_interval_steps": None,
}
_WARM_STEPS = 400
_BLOCK_MILLISECONDS = 200
_ENDLESS = 10**9

Run = Callable[[int], None]


def guarded(job: Job, run_dir: Path, **policy: Any) -> Run:
    """Return a function that makes steps of a guarded loop."""
    guard = Guard(
        run_dir,
        model=job.model,
        optimizer=job.optimizer,
        loader=[job.batch] * 1000,
        max_grad_norm=MAX_GRAD_NORM,
        save_interval_steps=None,
        **policy,
    )
    batches: Iterator[Any] = guard.batches(max_steps=_ENDLESS)

    def run(steps: int) -> None:
        for _ in range(steps):
            guard.step(next(batches), job.loss)

    return run


def bare(job: Job) -> Run:
    """Return a function that makes steps of a plain loop."""

    def run(steps: int) -> None:
        for _ in range(steps):
            job.bare_step(job.batch)

    return run


def under_detect_anomaly(job: Job) -> Run:
    """Return a function that makes plain steps under torch's own detector."""
    plain = bare(job)

    def run(steps: int) -> None:
        with torch.autograd.set_detect_anomaly(True):
            plain(steps)

    return run


def with_forward_hooks(job: Job) -> Run:
    """Return a function that makes plain steps with a check of every module's output."""

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if not bool(torch.isfinite(output).all()):
            raise FloatingPointError(type(module).__name__)

    for module in job.model.modules():
        module.register_forward_hook(look)
    return bare(job)


def seconds_per_step(loops: dict[str, Run], steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of a step for each loop and round.

    In each round all take turns in random order.
    """
    for run in loops.values():
        run(_WARM_STEPS)
    chance = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name in chance.sample(list(loops), len(loops)):
            started = time.process_time()
            loops[name](steps)
            found[name].append((time.process_time() - started) / steps)
    return found


def measure(kind: str, milliseconds: float, rounds: int, folder: Path) -> dict[str, list[float]]:
    threshold = Policy().cpu_malloc_threshold_bytes
    assert threshold is not None
    set_malloc_threshold(threshold)
    size = find_batch_size(kind, milliseconds).batch_size
    # One job for all loops but the hooked one: models at other addresses differ by more than what
    # is measured.
    job = Job(kind, size)
    loops = {
        "bare": bare(job),
        "everything on": guarded(job, folder / "on"),
        "transaction and clipping only": guarded(job, folder / "off", **_OFF),
        "detect_anomaly": under_detect_anomaly(job),
        "forward hooks": with_forward_hooks(Job(kind, size)),
    }
    return seconds_per_step(loops, max(4, round(_BLOCK_MILLISECONDS / milliseconds)), rounds)


def main() -> None:
    single_threaded()
    options = read_options("numerics_overhead", __doc__ or "")
    rounds = 6 if options.quick else 40
    result = Result(options=options, parameters={"rounds": rounds, "warm_steps": _WARM_STEPS})
    with tempfile.TemporaryDirectory() as name:
        for kind, milliseconds, at_most in _TIMED[: 1 if options.quick else None]:
            case = f"{kind}, {milliseconds:g} ms"
            fate = in_a_fork(partial(measure, kind, milliseconds, rounds, Path(name) / case), 1200)
            if fate.value is None:
                raise RuntimeError(f"{case}: {fate.error or fate.how}")
            found: dict[str, list[float]] = fate.value
            for loop, against, target in (
                ("everything on", "bare", at_most),
                ("everything on", "transaction and clipping only", None),
                ("transaction and clipping only", "bare", None),
                ("detect_anomaly", "bare", None),
                ("forward hooks", "bare", None),
            ):
                ratios = [
                    mine / other for mine, other in zip(found[loop], found[against], strict=True)
                ]
                result.add_samples(
                    f"{case}: {loop} over {against}", "ratio", ratios, at_most=target
                )
    result.write()


if __name__ == "__main__":
    main()
