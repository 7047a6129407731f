"""Which blocks to recompute so that a step fits, at the least cost in time.

Blocks are taken by what they save per second of recomputation until the step fits, then the choice is improved by
leaving out and by exchanging. Whether it fits is asked of the replay each time and never added up: what one block
saves depends on the others, and the peak moves. Blocks that do the same count as one kind, the earliest first: it
would hold its activations longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.forecast.trace.events import Trace
from holdfast.forecast.trace.recomputation import dropped_bytes, with_recompute

# Questions put to `fits` when exchanging blocks; bisection before it needs a handful. A replay of a large model takes
# a few tenths of a second, and a table has dozens of cells.
_MOST_EXCHANGES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Blocks that do the same, in the order of their forward passes; what each saves and costs."""

    blocks: tuple[str, ...]
    dropped_bytes: int
    seconds: float


def choose(trace: Trace, fits: Callable[[Trace], bool], seconds: Callable[[Trace], float]) -> frozenset[str] | None:
    """Return the names of the blocks to recompute, none if the step fits as it is; None if no choice makes it fit.

    `seconds` returns how long a step takes, or any measure of it.
    """
    search = _Search(trace, fits)
    if search.fits(frozenset()):
        return frozenset()
    kinds = _find_kinds(trace, seconds)
    ranked = [block for kind in kinds for block in kind.blocks]
    if not search.fits(frozenset(ranked)):
        # The block whose backward pass comes first is made again right away: it may be the one that is too much.
        ranked = [block for block in ranked if block != _last_block(trace, ranked)]
        if not ranked or not search.fits(frozenset(ranked)):
            return None
    fails, works = 0, len(ranked)
    while works - fails > 1:
        middle = (fails + works) // 2
        if search.fits(frozenset(ranked[:middle])):
            works = middle
        else:
            fails = middle
    return _improved(frozenset(ranked[:works]), kinds, search)


class _Search:
    """What fits; each choice is played once."""

    def __init__(self, trace: Trace, fits: Callable[[Trace], bool]) -> None:
        self._trace = trace
        self._fits = fits
        self._known: dict[frozenset[str], bool] = {}

    def fits(self, blocks: frozenset[str]) -> bool:
        if blocks not in self._known:
            self._known[blocks] = self._fits(with_recompute(self._trace, blocks))
        return self._known[blocks]

    @property
    def asked(self) -> int:
        return len(self._known)


def _find_kinds(trace: Trace, seconds: Callable[[Trace], float]) -> list[_Kind]:
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
            kinds.append(_Kind(blocks=tuple(blocks), dropped_bytes=saved, seconds=cost))
    return sorted(kinds, key=lambda kind: kind.seconds / kind.dropped_bytes)


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


def _improved(chosen: frozenset[str], kinds: Sequence[_Kind], search: _Search) -> frozenset[str]:
    """Return a cheaper choice that fits too, if leaving a block out or exchanging it for a cheaper one finds one."""
    last_question = search.asked + _MOST_EXCHANGES
    dearest = sorted(kinds, key=lambda kind: -kind.seconds)
    improves = True
    while improves and search.asked < last_question:
        improves = False
        for kind in dearest:
            taken = [block for block in kind.blocks if block in chosen]
            if not taken:
                continue
            less = chosen - {taken[-1]}
            cheaper = [other for other in kinds if other.seconds < kind.seconds]
            spare = [next((block for block in other.blocks if block not in chosen), None) for other in cheaper]
            options = [less, *(less | {block} for block in spare if block is not None)]
            found = next((one for one in options if search.asked < last_question and search.fits(one)), None)
            if found is not None:
                chosen, improves = found, True
                break
    return chosen
