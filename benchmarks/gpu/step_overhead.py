"""What a guarded step costs beyond a bare one on a CUDA device when nothing goes wrong: time, and memory.

How: as ``benchmarks.step_overhead``, with wall time between two synchronisations around each block of steps, since
the device works on its own. The bare loop does not wait for the device in between; the guard reads one value a step.
Memory is the most that torch has allocated on the device during 3 steps after 2, of one loop at a time.

To reach: median ratio <= 1.03 at 10 ms, peak memory <= 1 % more plus a copy of the mutable buffers.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results_file import Result, read_options
from benchmarks.step_models import Job, find_batch_size
from benchmarks.step_overhead import Loop, compare

_KINDS = ("mlp", "conv")
_MILLISECONDS = 10.0
_STEPS = 20
_TINY_BATCH, _TINY_STEPS = 4, 200


def synchronised_seconds() -> float:
    """Return the wall time at which the device has finished everything."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_kind(result: Result, kind: str, batch_size: int, pairs: int, folder: Path) -> None:
    steps = _TINY_STEPS if kind == "tiny" else _STEPS
    guarded = Loop(Job(kind, batch_size, "cuda"), folder / kind, synchronised_seconds)
    bare = Loop(Job(kind, batch_size, "cuda"), clock=synchronised_seconds)
    found = compare(guarded, bare, steps, pairs)
    if kind == "tiny":
        added = [1e6 * (of_guarded - of_bare) for of_bare, of_guarded in found]
        result.add_samples("tiny: added to a step", "us", added, digits=1)
    else:
        ratios = [of_guarded / of_bare for of_bare, of_guarded in found]
        result.add_samples(f"{kind}: time of guarded over bare", "ratio", ratios, at_most=1.03)
    result.add_samples(f"{kind}: bare step", "ms", [1000 * of_bare for of_bare, _ in found])


def measure_memory(result: Result, kind: str, batch_size: int, folder: Path) -> None:
    peaks, buffers = [], 0
    for guarded in (False, True):
        torch.cuda.empty_cache()
        job = Job(kind, batch_size, "cuda")
        buffers = job.mutable_buffer_bytes()
        loop = Loop(job, folder / f"memory-{kind}" if guarded else None)
        loop.run(2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loop.run(3)
        peaks.append(torch.cuda.max_memory_allocated())
        del loop, job
        print(f"  {kind}: {before / 2**20:.0f} MiB between steps, peak {peaks[-1] / 2**20:.0f} MiB")
    beyond = (peaks[1] - peaks[0] - buffers) / peaks[0]
    result.add_samples(f"{kind}: extra peak less mutable buffers, over bare peak", "ratio", [beyond], at_most=0.01)


def main() -> None:
    options = read_options("gpu_step_overhead", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    pairs = 8 if options.quick else 50
    result = Result(options=options, parameters={"pairs": pairs})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_kind(result, "tiny", _TINY_BATCH, pairs, folder)
        for kind in _KINDS:
            size = find_batch_size(kind, _MILLISECONDS, synchronised_seconds, "cuda")
            result.parameters[kind] = {"batch_size": size.batch_size, "bare_milliseconds": size.milliseconds}
            measure_kind(result, kind, size.batch_size, pairs, folder)
            measure_memory(result, kind, size.batch_size, folder)
    result.write()


if __name__ == "__main__":
    main()
