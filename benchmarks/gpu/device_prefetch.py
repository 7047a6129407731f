"""How much of the time that copies to a CUDA device take is hidden by copying one batch ahead.

How: one loop over the same pinned batches in four ways, in turns and in random order: batches that lie on the
device already, `prefetched`, ``batch.to(device, non_blocking=True)`` and ``batch.to(device)``. A step multiplies
matrices and reads one value, as a guarded step does, so the host never runs ahead of the device. The batch is made so
large that its copy takes about a third of a step. Wall time between two synchronisations around each block of steps.

To reach: `prefetched` takes <= 1.03 times as long as batches that lie there already. Also written down: the most
memory that each way takes beyond those. Every step's value is compared with the right one: a wrong hand-over shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.results_file import Result, read_options
from holdfast.loader.device_prefetch import prefetched

_WIDTH = 4096
_STEPS = 20
_COPY_SHARE = 1 / 3


def timed(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class Step:
    """So many products of matrices, and one sum over the batch that depends on all of it."""

    def __init__(self) -> None:
        self.matrix = torch.randn(_WIDTH, _WIDTH, device="cuda") / _WIDTH**0.5
        self.products = 8

    def __call__(self, batch: torch.Tensor) -> float:
        """Return the sum of the batch, once the products are made."""
        x = self.matrix
        for _ in range(self.products):
            x = x @ self.matrix
        return float(batch.sum() + 0 * x[0, 0])


def make_batches(step: Step, count: int) -> list[torch.Tensor]:
    """Return pinned batches, whole numbers in float64 so that sums are exact, whose copy is a third of a step."""
    tiny = torch.zeros(1, device="cuda", dtype=torch.float64)
    seconds = min(timed(lambda: step(tiny)) for _ in range(10))
    probe = torch.zeros(2**25, dtype=torch.float64).pin_memory()
    bandwidth = probe.nbytes / min(timed(lambda: probe.to("cuda", non_blocking=True)) for _ in range(10))
    numbers = max(1024, int(_COPY_SHARE * seconds * bandwidth / 8))
    return [torch.randint(1000, (numbers,)).to(torch.float64).pin_memory() for _ in range(count)]


def copied(batches: Iterable[torch.Tensor], *, non_blocking: bool) -> Iterator[torch.Tensor]:
    for batch in batches:
        yield batch.to("cuda", non_blocking=non_blocking)


def main() -> None:
    options = read_options("gpu_device_prefetch", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    rounds = 8 if options.quick else 60
    step = Step()
    batches = make_batches(step, _STEPS)
    there = [batch.cuda() for batch in batches]
    ways: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
        "resident": lambda: there,
        "prefetched": lambda: prefetched(batches, "cuda"),
        "non_blocking": lambda: copied(batches, non_blocking=True),
        "blocking": lambda: copied(batches, non_blocking=False),
    }
    parameters = {"rounds": rounds, "steps": _STEPS, "batch_bytes": batches[0].nbytes, "products": step.products}
    result = Result(options=options, parameters=parameters)
    expected = [float(batch.sum()) for batch in batches]
    chance, right, peaks = random.Random(1), 0, dict.fromkeys(ways, 0)
    ratios: dict[str, list[float]] = {name: [] for name in ways if name != "resident"}
    for number in range(rounds + 1):  # the first round is warm-up
        seconds = {}
        for name in chance.sample(list(ways), len(ways)):
            seen: list[float] = []
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            seconds[name] = timed(lambda way=ways[name], seen=seen: seen.extend(map(step, way())))  # type: ignore[misc]
            peaks[name] = torch.cuda.max_memory_allocated() - before
            right += seen == expected and number > 0
        if number:
            for name, found in ratios.items():
                found.append(seconds[name] / seconds["resident"])
    for name, found in ratios.items():
        at_most = 1.03 if name == "prefetched" else None
        result.add_samples(f"{name}: time over that of resident batches", "ratio", found, at_most=at_most)
        beyond = (peaks[name] - peaks["resident"]) / batches[0].nbytes
        result.add_samples(f"{name}: most extra memory", "batches", [beyond])
    result.add_count("loops whose every value is right", right, rounds * len(ways), expected=rounds * len(ways))
    result.write()


if __name__ == "__main__":
    main()
