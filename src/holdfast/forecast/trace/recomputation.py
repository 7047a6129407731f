"""What a step needs if some of its blocks are recomputed: the recorded events are edited, nothing is traced again.

What torch's checkpoint (and `memory.recompute`) does to a block, and so what is edited:

    forward     runs as it did; what only the block's own graph held is then freed, its outputs stay
    meanwhile   its inputs are kept until its backward pass is done, even if nothing else needs them
    backward    its forward pass runs again before it; now the second copies end as the first ones did

Where a trace cannot say who else holds a storage, it is taken to stay as long as it did without recomputation: the
answer may be too high, not too low. Too high it is while a block runs forward (a checkpoint keeps nothing, the events
keep all up to the end of the block), and after its last saved tensor (a checkpoint stops there, the events go on).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import OWNERS, PHASES, BlockRun, Trace

_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_BUFFERS, _GRADIENTS = OWNERS.index("buffers"), OWNERS.index("gradients")
_CAST = "aten._to_copy"
Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64] | npt.NDArray[np.int32] | int


def with_recompute(trace: Trace, blocks: Iterable[str]) -> Trace:
    """Return the step that recomputes the activations of some of `Trace.blocks`.

    It has more storages (the second copies), events and operations. Passes without a backward pass stay as they are.
    """
    wanted = {trace.blocks.index(name) for name in blocks}
    chosen = [
        number
        for number, run in enumerate(trace.block_runs)
        if run.block in wanted and 0 <= run.backward < len(trace.events)
    ]
    for level in _innermost_first(trace.block_runs, chosen):
        trace = _Edit(trace).made(level)
    return trace


def dropped_bytes(trace: Trace, block: str) -> int:
    """Return how much less is alive between the forward and the backward passes of a block that is recomputed."""
    number = trace.blocks.index(block)
    edit = _Edit(trace)
    runs = (run for run in trace.block_runs if run.block == number and run.backward >= 0)
    return sum(int(trace.size_bytes[edit.dropped(run)].sum()) for run in runs)


def _innermost_first(runs: Sequence[BlockRun], chosen: Sequence[int]) -> list[list[int]]:
    """Return the chosen passes in groups: none of a group contains another, and what does comes in a later one."""
    depths: dict[int, list[int]] = {}
    around: list[int] = []  # where the passes end that contain the next one
    for number in sorted(chosen, key=lambda one: (runs[one].forward[0], -runs[one].forward[1], one)):
        first, last = runs[number].forward
        while around and (around[-1] <= first or around[-1] < last):
            around.pop()
        depths.setdefault(len(around), []).append(number)
        around.append(last)
    return [depths[depth] for depth in sorted(depths, reverse=True)]


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Events of one phase, as in `Trace.events`, that are inserted before event `at` of the step's."""

    at: int
    events: Ids
    phase: int


@dataclass(frozen=True, slots=True)
class _Replay(_Insertion):
    """A forward pass that is made again; `offsets` says how many of `events` come before each of the pass's."""

    run: BlockRun
    offsets: Ids


class _Edit:
    """A trace and what is to be changed in it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events = trace.events.astype(np.int64)
        frees = trace.events < 0
        self._dies = np.full(len(trace.size_bytes), len(trace.events), dtype=np.int64)
        self._dies[-trace.events[frees] - 1] = np.flatnonzero(frees)
        self._released = self._dies.copy()  # the event before which a storage is freed in the edited step
        self._in_forward = np.flatnonzero(trace.event_phase == _FORWARD)
        self._in_backward = np.flatnonzero(trace.event_phase == _BACKWARD)
        self._trained_bytes = np.unique(trace.size_bytes[trace.owner == _GRADIENTS])
        self._sources: list[Ids] = [np.arange(len(trace.size_bytes))]  # what each storage of the edited step is like
        self._storages = len(trace.size_bytes)
        self._casts: dict[int, list[tuple[int, Ids]]] = {}  # of weights, by block, and when the cache drops them
        self._frees: list[_Insertion] = []
        self._clones: list[_Insertion] = []
        self._replays: list[_Replay] = []

    def dropped(self, run: BlockRun) -> Ids:
        """Return the storages that only the graph of a pass holds after it, its outputs not counted."""
        left = self._survivors(run)
        return left[self._only_own(run, left) & ~np.isin(left, run.kept)]

    def made(self, numbers: Sequence[int]) -> Trace:
        """Return the trace with these passes recomputed, none of which contains another."""
        runs = [self._trace.block_runs[number] for number in numbers]
        for run, until in [(run, self._recompute(run)) for run in runs]:
            for storage in run.inputs:  # the checkpoint holds them
                self._released[storage] = max(self._released[storage], until)
        self._move_frees()
        return self._assembled()

    def _made(self, run: BlockRun) -> Ids:
        window = self._trace.events[slice(*run.forward)]
        return window[window > 0].astype(np.int64) - 1

    def _survivors(self, run: BlockRun) -> Ids:
        made = self._made(run)
        return made[self._dies[made] >= run.forward[1]]

    def _only_own(self, run: BlockRun, left: Ids) -> npt.NDArray[np.bool_]:
        """Return which of them are freed by the pass's own backward pass: its graph was the last to hold them."""
        own = (self._dies[left] >= run.backward) & (self._dies[left] <= self._end_of_backward(run))
        return own if run.saved is None else own & (~np.isin(left, run.kept) | np.isin(left, run.saved))

    def _end_of_backward(self, run: BlockRun) -> int:
        """Return the last event of the model's backward pass in which that of a block lies."""
        following = np.searchsorted(self._in_forward, run.backward)
        limit = self._in_forward[following] if following < len(self._in_forward) else len(self._events)
        last = np.searchsorted(self._in_backward, limit) - 1
        return max(run.backward, int(self._in_backward[last])) if last >= 0 else run.backward

    def _end_of_forward(self, run: BlockRun) -> int:
        """Return the first event of a backward pass after a pass; by then autocast's scope has ended."""
        following = np.searchsorted(self._in_backward, run.forward[1])
        return int(self._in_backward[following]) if following < len(self._in_backward) else len(self._events)

    def _recompute(self, run: BlockRun) -> int:
        """Edit one pass; return the event before which its checkpoint is gone."""
        left = self._survivors(run)
        own = self._only_own(run, left)
        kept = np.isin(left, run.kept)
        again = left[own]  # their second copies take over
        until = 1 + (int(self._dies[again].max()) if len(again) else self._end_of_backward(run))
        casts = self._weight_casts(run)
        scope_ends = self._end_of_forward(run)
        earlier = [ids for end, ids in self._casts.get(run.block, []) if end > run.forward[0]]
        self._casts.setdefault(run.block, []).append((scope_ends, casts))
        self._released[left[own & ~kept]] = run.forward[1]
        self._released[np.intersect1d(left[own & ~kept], casts)] = scope_ends
        self._released[left[own & kept]] = run.backward
        beyond = self._dies[left] > self._end_of_backward(run)  # held from elsewhere: the copies by the graph, maybe
        if run.saved is not None:
            beyond &= ~kept | np.isin(left, run.saved)
        # Casts that an earlier pass of the block has made are made again if autocast's cache is gone.
        more = np.concatenate([self._made(run)[:0], *earlier])
        # A backward pass within autocast's scope finds its own in the cache.
        cached = np.intersect1d(left[beyond], casts)
        self._replay(run, until, again=again, beyond=np.setdiff1d(left[beyond], cached), more=more, not_made=cached)
        return until

    def _replay(self, run: BlockRun, until: int, *, again: Ids, beyond: Ids, more: Ids, not_made: Ids) -> None:
        """Insert what a pass does a second time; `until` is the event before which its checkpoint is gone.

        Of what the pass made, the copies of `again` are freed when those were, of `beyond` with the checkpoint, of
        all others when the forward pass is done. `more` is made again although the pass did not make it, `not_made`
        is not although it did.
        """
        window = self._trace.events[slice(*run.forward)].astype(np.int64)
        storage = np.abs(window) - 1
        named = np.full(len(self._trace.size_bytes), -1, dtype=np.int64)
        made = np.setdiff1d(self._made(run), not_made)
        named[made] = self._copy(made)
        inside = named[storage] >= 0  # it also freed what others had made; that happens once
        replay = (np.sign(window) * (named[storage] + 1))[inside]
        gone = np.concatenate([-replay[replay < 0] - 1, named[again], named[beyond]])
        left = np.setdiff1d(replay[replay > 0] - 1, gone)
        buffers = self._buffers(run)
        first, second, more = self._copy(buffers), self._copy(buffers), self._copy(more)
        before = np.concatenate([second, more]) + 1
        events = np.concatenate([before, replay, -left - 1, -second - 1])
        offsets = len(before) + np.concatenate([[0], np.cumsum(inside)])
        self._events[self._dies[again]] = -named[again] - 1
        self._clones.append(_Insertion(run.forward[0], first + 1, _FORWARD))
        self._replays.append(_Replay(run.backward, events, _BACKWARD, run, offsets))
        ends = -np.concatenate([named[beyond], more, first]) - 1
        self._frees.append(_Insertion(until, ends, _BACKWARD))

    def _copy(self, sources: Ids) -> Ids:
        """Return the ids of new storages like these."""
        self._sources.append(sources)
        self._storages += len(sources)
        return np.arange(self._storages - len(sources), self._storages)

    def _buffers(self, run: BlockRun) -> Ids:
        """Return the buffers of a block: `memory.recompute` copies them, to put them back for the second time."""
        path = self._trace.blocks[run.block]
        inside = np.array([name == path or name.startswith(f"{path}.") for name in self._trace.modules])
        resident = np.array(self._trace.resident, dtype=np.int64)
        found: Ids = resident[inside[self._trace.module[resident]] & (self._trace.owner[resident] == _BUFFERS)]
        return found

    def _weight_casts(self, run: BlockRun) -> Ids:
        """Return the copies of weights that autocast's cache holds to the end of the forward pass.

        They are known by what they are: casts of half the size of a parameter that is trained.
        """
        made = self._made(run)
        first, last = run.operations
        if self._trace.precision == "fp32" or _CAST not in self._trace.names or first == last:
            return made[:0]
        born = run.forward[0] + np.flatnonzero(self._trace.events[slice(*run.forward)] > 0)
        maker = np.searchsorted(self._trace.operation_event[first:last], born, side="right") - 1
        name = self._trace.operation_name[first + np.maximum(maker, 0)]
        is_cast = name == self._trace.names.index(_CAST)
        found: Ids = made[is_cast & np.isin(2 * self._trace.size_bytes[made], self._trained_bytes)]
        return found

    def _move_frees(self) -> None:
        """Free the first copies where they are released now; whose second copies took over is renamed already."""
        moved = np.flatnonzero(self._released != self._dies)
        known = moved[self._dies[moved] < len(self._events)]
        own = known[self._events[self._dies[known]] == -known - 1]
        self._events[self._dies[own]] = 0
        for storage in known:
            at = int(self._released[storage])
            phase = int(self._trace.event_phase[max(0, at - 1)])
            self._frees.append(_Insertion(at, np.array([-storage - 1]), phase))

    def _assembled(self) -> Trace:
        trace = self._trace
        replays = sorted(self._replays, key=lambda one: -one.run.forward[0])  # if at one place: the later block first
        parts = [*self._frees, *self._clones, *replays]
        lengths = [len(one.events) for one in parts]
        at = np.repeat([one.at for one in parts], lengths)
        events = np.insert(self._events, at, np.concatenate([one.events for one in parts]))
        phases = np.insert(trace.event_phase, at, np.repeat([one.phase for one in parts], lengths))
        moves = Moves(at, events != 0)
        starts = moves.inserted[np.cumsum([0, *lengths])[-len(replays) - 1 : -1]]
        sources = np.concatenate(self._sources)
        return replace(
            trace,
            events=events[events != 0].astype(np.int32),
            event_phase=phases[events != 0].astype(np.int8),
            **{name: getattr(trace, name)[sources] for name in ("size_bytes", "owner", "module", "line")},
            **_operations(trace, replays, starts, moves),
        )


class Moves:
    """Where the events of a step are after others were inserted and some taken out.

    Args:
        at: Shape ``(inserted,)``: the event before which each was inserted, those of one place in this order.
        kept: Shape ``(events + inserted,)``: which were not taken out afterwards.
    """

    def __init__(self, at: Ids, kept: npt.NDArray[np.bool_]) -> None:
        remaining = np.concatenate([[0], np.cumsum(kept)])
        order = np.argsort(at, kind="stable")
        places = np.empty(len(at) + 1, dtype=np.int64)
        places[order] = at[order] + np.arange(len(at))
        places[-1] = len(kept)
        self.inserted: Ids = remaining[places]
        self._remaining = remaining
        self._at = at[order]

    def before(self, events: Places) -> Ids:
        """Return where they are now, and what was inserted right before them."""
        return self._remaining[events + np.searchsorted(self._at, events, side="left")]

    def after(self, events: Places) -> Ids:
        """Return where they are now themselves."""
        return self._remaining[events + np.searchsorted(self._at, events, side="right")]

    def span(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return where a part of the step is now; what was inserted at its ends is no part of it."""
        return int(self.after(span[0])), int(self.before(span[1]))


def _operations(trace: Trace, replays: Sequence[_Replay], starts: Ids, moves: Moves) -> dict[str, Any]:
    """Return the fields of the edited trace that count operations or events."""
    repeated = [np.arange(*one.run.operations) for one in replays]
    at = np.repeat(
        np.searchsorted(trace.operation_event, [one.at for one in replays]), [len(numbers) for numbers in repeated]
    )
    numbers = np.concatenate(repeated)
    begun = [
        start + one.offsets[np.clip(trace.operation_event[those] - one.run.forward[0], 0, len(one.offsets) - 1)]
        for one, start, those in zip(replays, starts, repeated, strict=True)
    ]
    changed: dict[str, Any] = {
        name: np.insert(getattr(trace, name), at, getattr(trace, name)[numbers])
        for name in ("operation_name", "flops", "moved_bytes", "dtype")
    }
    changed["operation_phase"] = np.insert(trace.operation_phase, at, np.full(len(at), _BACKWARD))
    events = np.insert(moves.after(trace.operation_event), at, np.concatenate(begun))
    changed["operation_event"] = events.astype(np.int32)
    moved = Moves(at, np.ones(len(trace.operation_name) + len(at), dtype=np.bool_))
    changed["block_runs"] = tuple(_moved_run(run, moves, moved) for run in trace.block_runs)
    changed["variants"] = tuple(
        replace(one, events=moves.span(one.events), operations=moved.span(one.operations)) for one in trace.variants
    )
    return changed


def _moved_run(run: BlockRun, events: Moves, operations: Moves) -> BlockRun:
    """Return where a pass is now; what it drops at its end is a part of it, as of one that contains it."""
    return replace(
        run,
        forward=(int(events.after(run.forward[0])), int(events.after(run.forward[1]))),
        backward=run.backward if run.backward < 0 else int(events.before(run.backward)),
        operations=operations.span(run.operations),
    )
