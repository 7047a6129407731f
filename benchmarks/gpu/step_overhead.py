"""What a guarded step costs beyond a bare one on a CUDA device when nothing goes wrong.

Time, waits, and memory.

How: as ``benchmarks.step_overhead``, with wall time between two synchronisations around each block
of steps, since the device works on its own. The bare loop does not wait for the device in between.
*First* is measured at 10 ms and of the tiny model; *warm* is after 500 steps, which elsewhere are
made with a small batch. How often a guarded step waits is counted by
``torch.cuda.set_sync_debug_mode``, over 20 warm steps. *Host* is the time in which a loop has
issued a step, not waiting for its end: where it is that of the bare step, the host sets the pace.
Memory is the most that torch has allocated on the device during 3 steps after 2, of one loop at a
time.

*Peers*: at 20 ms, as there.

To reach: median ratio <= 1.03 in the first 400 steps and 1.015 when warm, at 10 ms; at most one
synchronisation a step; peak memory <= 1 % more plus a copy of the mutable buffers.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings

import torch

from benchmarks.results_file import Result, read_options
from benchmarks.step_models import Job, find_batch_size
from benchmarks.step_overhead import PEERS, Loop, bare, guarded, in_turns

# Kind, milliseconds, pairs of blocks when warm.
_TIMED = (
    ("mlp", 5.0, 20),
    ("mlp", 10.0, 20),
    ("mlp", 20.0, 10),
    ("conv", 5.0, 20),
    ("conv", 10.0, 20),
    ("conv", 20.0, 10),
    ("mlp2048", 100.0, 6),
)
_BLOCK, _FIRST_PAIRS, _WARM_AFTER, _HOST_STEPS = 20, 20, 500, 5
_SAMPLED = 50  # steps, of which the diagnosis reads more in one
_TINY_BATCH, _SMALL_BATCH, _PEER_PAIRS = 4, 64, 6


class Clock:
    """Tells the wall time, when the device has finished everything or at once."""

    waits = True

    def __call__(self) -> float:
        """Return the time in seconds."""
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()


_clock = Clock()


def host_seconds(run: Loop) -> float:
    """Return the seconds in which a loop issues a step."""
    torch.cuda.synchronize()
    _clock.waits = False
    seconds = run(_HOST_STEPS) / _HOST_STEPS
    _clock.waits = True
    return seconds


def synchronisations(run: object) -> float:
    """Return how often a step of a loop waits for the device."""
    assert callable(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(_SAMPLED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught) / _SAMPLED


def warmed_up(
    names: list[str], kind: str, batch_size: int, device: str = "cuda"
) -> list[tuple[str, Loop]]:
    """Return loops that have made their first steps, with a small batch, and one block with
    their own.
    """
    made = []
    for name in names:
        job = Job(kind, batch_size, device)
        own, job.batch = job.batch, tuple(tensor[:_SMALL_BATCH] for tensor in job.batch)
        made.append((name, run := PEERS[name](job, _clock)))
        run(_WARM_AFTER)
        job.batch = own
        run(_BLOCK)
    return made


def measure_time(
    result: Result, kind: str, name: str, batch_size: int, pairs: int, *, first: bool
) -> None:
    found = []
    if first:
        made = [
            (loop, PEERS[loop](Job(kind, batch_size, "cuda"), _clock))
            for loop in ("bare", "guarded")
        ]
        found.append(("first 400 steps", in_turns(made, _FIRST_PAIRS, 0), 1.03))
        in_turns(made, _WARM_AFTER // _BLOCK - _FIRST_PAIRS, 1)
    else:
        made = warmed_up(["bare", "guarded"], kind, batch_size)
    found.append(("warm", in_turns(made, pairs, 2), 1.015))
    for when, rounds, most in found:
        if kind == "tiny":
            added = [1e6 * (each["guarded"] - each["bare"]) for each in rounds]
            result.add_samples(f"{name}, {when}: added to a step", "us", added, digits=1)
        else:
            ratios = [each["guarded"] / each["bare"] for each in rounds]
            result.add_samples(
                f"{name}, {when}: time of guarded over bare", "ratio", ratios, at_most=most
            )
        result.add_samples(
            f"{name}, {when}: bare step", "ms", [1000 * each["bare"] for each in rounds]
        )
    for loop, run in made:
        host = [1000 * host_seconds(run) for _ in range(5)]
        result.add_samples(f"{name}, {loop}: host's time of a step", "ms", host)
        most = 1.0 if loop == "guarded" else None
        result.add_samples(
            f"{name}, {loop}: synchronisations of a step", "", [synchronisations(run)], at_most=most
        )


def measure_peers(result: Result, kind: str, batch_size: int, pairs: int) -> None:
    made: list[tuple[str, Loop]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PEERS:
            try:
                made += warmed_up([name], kind, batch_size)
            except ImportError as error:
                result.notes.append(f"{name} left out: {error}")
        rounds = in_turns(made, pairs, 3)
    for name, _ in made[1:]:
        ratios = [each[name] / each["bare"] for each in rounds]
        result.add_samples(f"peers, {kind}, warm: time of {name} over bare", "ratio", ratios)


def measure_memory(result: Result, kind: str, batch_size: int) -> None:
    peaks, buffers = [], 0
    for loop in (bare, guarded):
        gc.collect()
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
    result.add_samples(
        f"{kind}: extra peak less mutable buffers, over bare peak", "ratio", [beyond], at_most=0.01
    )


def main() -> None:
    options = read_options("gpu_step_overhead", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    for name in ("lightning.pytorch", "transformers", "accelerate", "holdfast"):
        logging.getLogger(name).setLevel(logging.ERROR)
    result = Result(options=options, parameters={"block": _BLOCK, "warm_after": _WARM_AFTER})
    measure_time(result, "tiny", "tiny", _TINY_BATCH, 20, first=True)
    sizes = {}
    for kind, milliseconds, pairs in _TIMED[:1] if options.quick else _TIMED:
        size = find_batch_size(kind, milliseconds, _clock, "cuda")
        name, sizes[kind] = f"{kind}, {milliseconds:g} ms", size.batch_size
        result.parameters[name] = {
            "batch_size": size.batch_size,
            "bare_milliseconds": size.milliseconds,
        }
        measure_time(result, kind, name, size.batch_size, pairs, first=milliseconds == 10)
    for kind, batch_size in sizes.items():
        measure_memory(result, kind, batch_size)
    # Last: their threads never end
    measure_peers(result, "mlp", sizes["mlp"], 2 if options.quick else _PEER_PAIRS)
    result.write()


if __name__ == "__main__":
    main()
