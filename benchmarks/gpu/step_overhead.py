"""What a guarded step costs beyond a bare one on a CUDA device when nothing goes wrong: time, waits, and memory.

How: as ``benchmarks.step_overhead``, with wall time between two synchronisations around each block of steps, since
the device works on its own. The bare loop does not wait for the device in between. How often a guarded step does is
counted by ``torch.cuda.set_sync_debug_mode``, over 20 warm steps. Memory is the most that torch has allocated on the
device during 3 steps after 2, of one loop at a time.

To reach: median ratio <= 1.03 in the first 400 steps and 1.015 when warm, at 10 ms; at most one synchronisation a
step; peak memory <= 1 % more plus a copy of the mutable buffers.
"""

from __future__ import annotations

import time
import warnings

import torch

from benchmarks.results_file import Result, read_options
from benchmarks.step_models import Job, find_batch_size
from benchmarks.step_overhead import bare, guarded, in_turns

_KINDS = ("mlp", "conv")
_MILLISECONDS = (5.0, 10.0, 20.0)
_BLOCK, _FIRST_PAIRS, _BETWEEN_PAIRS = 20, 20, 5
_TINY_BATCH = 4


def synchronised_seconds() -> float:
    """Return the wall time at which the device has finished everything."""
    torch.cuda.synchronize()
    return time.perf_counter()


def synchronisations(run: object) -> float:
    """Return how often a step of a loop waits for the device."""
    assert callable(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(_BLOCK)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught) / _BLOCK


def measure_time(result: Result, kind: str, name: str, batch_size: int, pairs: int) -> None:
    made = [
        ("bare", bare(Job(kind, batch_size, "cuda"), synchronised_seconds)),
        ("guarded", guarded(Job(kind, batch_size, "cuda"), synchronised_seconds)),
    ]
    first = in_turns(made, _FIRST_PAIRS, 0)
    in_turns(made, _BETWEEN_PAIRS, 1)
    for when, found, most in (("first 400 steps", first, 1.03), ("warm", in_turns(made, pairs, 2), 1.015)):
        if kind == "tiny":
            added = [1e6 * (each["guarded"] - each["bare"]) for each in found]
            result.add_samples(f"{name}, {when}: added to a step", "us", added, digits=1)
        else:
            ratios = [each["guarded"] / each["bare"] for each in found]
            result.add_samples(f"{name}, {when}: time of guarded over bare", "ratio", ratios, at_most=most)
        result.add_samples(f"{name}, {when}: bare step", "ms", [1000 * each["bare"] for each in found])
    for loop, run in made:
        most = 1.0 if loop == "guarded" else None
        result.add_samples(f"{name}, {loop}: synchronisations of a step", "", [synchronisations(run)], at_most=most)


def measure_memory(result: Result, kind: str, batch_size: int) -> None:
    peaks, buffers = [], 0
    for loop in (bare, guarded):
        torch.cuda.empty_cache()
        job = Job(kind, batch_size, "cuda")
        buffers = job.mutable_buffer_bytes()
        run = loop(job)
        run(2)
        torch.cuda.reset_peak_memory_stats()
        run(3)
        peaks.append(torch.cuda.max_memory_allocated())
        del run, job
    beyond = (peaks[1] - peaks[0] - buffers) / peaks[0]
    result.add_samples(f"{kind}: extra peak less mutable buffers, over bare peak", "ratio", [beyond], at_most=0.01)


def main() -> None:
    options = read_options("gpu_step_overhead", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    pairs = 8 if options.quick else 30
    result = Result(options=options, parameters={"pairs": pairs, "block": _BLOCK})
    measure_time(result, "tiny", "tiny", _TINY_BATCH, pairs)
    for kind in _KINDS:
        for milliseconds in _MILLISECONDS:
            size = find_batch_size(kind, milliseconds, synchronised_seconds, "cuda")
            name = f"{kind}, {milliseconds:g} ms"
            result.parameters[name] = {"batch_size": size.batch_size, "bare_milliseconds": size.milliseconds}
            measure_time(result, kind, name, size.batch_size, pairs)
        measure_memory(result, kind, size.batch_size)
    result.write()


if __name__ == "__main__":
    main()
