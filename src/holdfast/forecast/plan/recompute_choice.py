"""Which blocks to recompute so that a step fits, at the least cost in time.

Blocks are taken by what they save per second of recomputation until the step fits. Whether it fits is asked of the
replay each time and never added up: what one block saves depends on the others, and the peak moves. Blocks that do
the same count as one kind, the earliest first: it would hold its activations longest.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from holdfast.forecast.trace.events import Trace
from holdfast.forecast.trace.recomputation import dropped_bytes, with_recompute


def choose(trace: Trace, fits: Callable[[Trace], bool], seconds: Callable[[Trace], float]) -> frozenset[str] | None:
    """Return the names of the blocks to recompute, none if the step fits as it is; None if no choice makes it fit.

    `seconds` returns how long a step takes, or any measure of it.
    """

    def works(blocks: Sequence[str]) -> bool:
        return fits(with_recompute(trace, blocks))

    if works(()):
        return frozenset()
    ranked = _ranked(trace, seconds)
    if not works(ranked):
        # The block whose backward pass comes first is made again right away: it may be the one that is too much.
        ranked = [block for block in ranked if block != _last_block(trace, ranked)]
        if not ranked or not works(ranked):
            return None
    fewest = bisect.bisect_left(range(len(ranked)), 1, lo=1, key=lambda count: works(ranked[:count]))
    return frozenset(ranked[:fewest])


def _ranked(trace: Trace, seconds: Callable[[Trace], float]) -> list[str]:
    """Return the blocks that are worth recomputing, those first that save most for their time.

    Of blocks within each other only the outer ones count: recomputing both computes the inner one three times.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    outermost = [block for block in trace.blocks if not any(block.startswith(f"{one}.") for one in trace.blocks)]
    order = {trace.blocks[run.block]: place for place, run in reversed(list(enumerate(trace.block_runs)))}
    for block in sorted((block for block in outermost if block in order), key=order.__getitem__):
        alike.setdefault(_work(trace, block), []).append(block)
    without = seconds(trace)
    kinds = []
    for blocks in alike.values():
        saved = dropped_bytes(trace, blocks[0])
        cost = seconds(with_recompute(trace, blocks[:1])) - without
        if saved > 0:
            kinds.append((cost / saved, blocks))
    return [block for _, blocks in sorted(kinds, key=lambda kind: kind[0]) for block in blocks]


def _work(trace: Trace, block: str) -> tuple[object, ...]:
    """Return what a block does, such that blocks that do the same have the same."""
    number = trace.blocks.index(block)
    done: list[object] = []
    for run in trace.block_runs:
        if run.block == number:
            window = trace.events[slice(*run.forward)]
            operations = slice(*run.operations)
            done += [trace.size_bytes[window[window > 0] - 1].tobytes(), trace.flops[operations].tobytes()]
            done += [trace.operation_name[operations].tobytes(), run.backward >= 0]
    return tuple(done)


def _last_block(trace: Trace, blocks: Sequence[str]) -> str:
    """Return the block whose backward pass comes first."""
    begun = [(run.backward, trace.blocks[run.block]) for run in trace.block_runs if run.backward >= 0]
    return min((first, block) for first, block in begun if block in blocks)[1]
