"""Which modules to recompute.

Measured by the bytes that each call of them keeps for the backward pass.

Measured in an attempt that is made again because memory was short, never in others: each call of a
module is noted, and what autograd saves in it (`torch.autograd.graph.saved_tensors_hooks`), by
storage. What a call saves beyond its inputs is forgotten if it is recomputed, and is there again,
one call at a time, in the backward pass. So a choice is judged by the peak that it would have had:
a module called once that holds everything saves nothing, one that is called a hundred times saves
99 of 100 parts. An attempt that fails is measured as far as it came, which is what had filled the
memory by then.

Not considered: modules that change what is not put back for the second pass, that is their inputs,
tensors in plain attributes, and containers that grow; and modules with parts that have hooks of the
caller's.

Does not: recompute (see ``recompute``), or decide when (see ``ladder``).
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.memory.recompute import (
    OWN_ATTRIBUTES,
    ReplacedForward,
    has_storage,
    tensors_of,
    versions_of,
)

_LEAST_GAIN = 0.05  # of the peak: a smaller one costs more time than it is worth
# That a call which is recomputed takes itself: random state (5 KB), frames of autograd
_CALL_BYTES = 2**14
NOTHING_SAVES = (
    "no module that may be recomputed keeps much for the backward pass beyond its inputs, as far as"
    " the attempt came"
)


@dataclass(slots=True)
class _Call:
    """One call of a module: saves ``[begin, end)`` were made in it."""

    name: str
    parent: int
    begin: int
    inputs: tuple[int, ...]
    own_bytes: int
    end: int | None = None


@dataclass(slots=True)
class Measurement:
    """What one forward pass has saved.

    Storages by number, each save with the innermost call that it was made in.
    """

    calls: list[_Call] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def peak(self, chosen: Collection[str], known: Mapping[str, int]) -> int:
        """Return the bytes that would be kept at most if these modules were recomputed."""
        owners: list[int] = []  # the outermost recomputed call that each call is in, -1: none
        for number, call in enumerate(self.calls):
            outer = owners[call.parent] if call.parent >= 0 else -1
            owners.append(outer if outer >= 0 or call.name not in chosen else number)
        recomputed = [self.calls[number] for number, owner in enumerate(owners) if owner == number]
        kept: dict[int, int] = {}  # storages, with the save after which each is there
        for place, (storage, number) in enumerate(self.saves):
            if number < 0 or owners[number] < 0:
                kept.setdefault(storage, place)
        added = [0] * (len(self.saves) + 1)
        for call in recomputed:
            added[call.begin] += call.own_bytes
            for storage in call.inputs:
                kept[storage] = min(call.begin, kept.get(storage, call.begin))
        for storage, place in kept.items():
            added[place] += self.sizes[storage]
        until = list(accumulate(added))
        peaks = [until[-1]]
        peaks += [
            until[self._end(call)] + known[call.name] for call in self.calls if call.name in known
        ]
        peaks += [until[self._end(call)] + self.inside(call, kept) for call in recomputed]
        return max(peaks)

    def inside(self, call: _Call, kept: Collection[int] = ()) -> int:
        """Return the bytes that a call has saved, beyond its inputs and what is kept anyway."""
        found = {storage for storage, _ in self.saves[call.begin : self._end(call)]}
        return sum(
            self.sizes[storage]
            for storage in found
            if storage not in kept and storage not in call.inputs
        )

    def _end(self, call: _Call) -> int:
        return len(self.saves) if call.end is None else call.end


class SavedBytes:
    """Measures attempts, and chooses what to recompute in the next one, of the modules that may
    be recomputed.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._refused: set[str] = set()
        self._known: dict[str, int] = {}
        self._best = Measurement()

    def refuse(self, names: Iterable[str]) -> None:
        """Choose these modules no more, nor what contains them."""
        for name in names:
            self._refused.update(name[: match.start()] for match in re.finditer(r"\.|$", name))

    @contextlib.contextmanager
    def measuring(self, recomputed: Sequence[str], held: Iterable[torch.Tensor]) -> Iterator[None]:
        """Measure the forward passes that are made meanwhile; the one that saves most counts."""
        parts = [
            part
            for module in self._modules.values()
            for part in (module.parameters(), module.buffers())
        ]
        watch = _Watch(
            {key for part in (*parts, held) for tensor in part if (key := _key(tensor)) is not None}
        )
        self._best = Measurement()
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for name, module in self._modules.items():
                inside = any(name.startswith(f"{other}.") for other in recomputed)
                if inside or isinstance(module, torch.jit.ScriptModule):
                    continue
                replaced.append((module, vars(module).get("forward")))
                module.forward = ReplacedForward(
                    module, watch.watched(name, module, module.forward)
                )
            with torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
                yield
        finally:
            for module, own in replaced:
                vars(module).pop("forward")
                if own is not None:
                    module.forward = own
            self._best = watch.ended()
            self.refuse(watch.changes_state)
            self._refused |= watch.changes_input

    def choose(self, active: Sequence[str]) -> tuple[str, ...]:
        """Return the modules to recompute from now on.

        Those that are, and the ones that save most of all others.
        """
        known = {name: self._known.get(name, 0) for name in active}
        chosen, peak = list(active), self._best.peak((), known)
        start, stages = peak, [(peak, tuple(active))]
        units = self._units(active)
        while units:
            found = {
                key: self._best.peak({*chosen, *names} - set(active), known)
                for key, names in units.items()
            }
            best = min(found, key=found.__getitem__)
            if found[best] > (1 - _LEAST_GAIN) * peak:
                break
            peak = found[best]
            names = units.pop(best)
            chosen += names
            units = {key: mine for key, mine in units.items() if not _touch(mine, names)}
            stages.append((peak, tuple(chosen)))
        enough = next(names for reached, names in stages if 2 * (start - reached) >= start - peak)
        for call in self._best.calls:
            if call.name in enough and call.name not in active:
                self._known[call.name] = max(self._known.get(call.name, 0), self._best.inside(call))
        return enough

    def _units(self, active: Sequence[str]) -> dict[tuple[str, type], list[str]]:
        """Return what is chosen together.

        Modules of one class whose names differ by numbers only.
        """
        units: dict[tuple[str, type], list[str]] = {}
        for name in dict.fromkeys(call.name for call in self._best.calls):
            if (
                name not in self._refused
                and not _touch([name], active)
                and not self._has_hooks_inside(name)
            ):
                pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
                units.setdefault((pattern, type(self._modules[name])), []).append(name)
        return units

    def _has_hooks_inside(self, name: str) -> bool:
        """Say whether hooks of the caller's would run again with the parts of a module."""
        hooks = (
            hook
            for part in self._modules[name].modules()
            if part is not self._modules[name]
            for registered in (part._forward_hooks, part._forward_pre_hooks)
            for hook in registered.values()
        )
        return any(
            not str(getattr(hook, "__module__", "")).startswith(("torch.", "holdfast."))
            for hook in hooks
        )


class _Watch:
    """Notes calls and saves while they happen."""

    def __init__(self, excluded: set[int]) -> None:
        self._excluded = excluded
        self._now, self._best = Measurement(), Measurement()
        self._stack: list[int] = []
        # As long as these are there, no other storage has their number
        self._references: list[StorageWeakRef] = []
        self._went_backward = False
        self.changes_state: set[str] = set()
        self.changes_input: set[str] = set()

    def ended(self) -> Measurement:
        """Return the forward pass that saved most."""
        return max(self._best, self._now, key=lambda measured: sum(measured.sizes.values()))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = None if _is_backward_running() else _key(tensor)
        if key is not None and key not in self._excluded:
            self._begin_pass_after_backward()
            self._note(key, tensor)
            self._now.saves.append((key, self._stack[-1] if self._stack else -1))
        # An output that is saved by what it comes from would keep itself alive
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._went_backward = True
        return tensor

    def _begin_pass_after_backward(self) -> None:
        """What was saved for a backward pass is gone after it.

        The next part of the batch is measured by itself.
        """
        if self._went_backward:
            self._best, self._now, self._went_backward = self.ended(), Measurement(), False
            self._stack.clear()
            gc.collect()  # hooks on saved tensors have made cycles of what the last part had saved

    def _note(self, key: int, tensor: torch.Tensor) -> None:
        if key not in self._now.sizes:
            storage = tensor.untyped_storage()
            self._now.sizes[key] = storage.nbytes()
            self._references.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def watched(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a forward that notes its calls."""
        buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())

        def run(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.compiler.is_compiling()
                or not torch.is_grad_enabled()
                or _is_backward_running()
            ):
                return forward(*args, **kwargs)
            self._begin_pass_after_backward()
            tensors = list(tensors_of((args, kwargs)))
            versions, state, measured = versions_of(tensors), _state_of(module), self._now
            number = self._begin(name, tensors, _CALL_BYTES + buffer_bytes)
            try:
                return forward(*args, **kwargs)
            finally:
                measured.calls[number].end = len(measured.saves)
                if self._stack and self._stack[-1] == number:
                    self._stack.pop()
                if versions_of(tensors) != versions:
                    self.changes_input.add(name)
                if any(
                    key in state and state[key] != now for key, now in _state_of(module).items()
                ):
                    self.changes_state.add(name)

        return run

    def _begin(self, name: str, tensors: Sequence[torch.Tensor], own_bytes: int) -> int:
        calls, inputs = self._now.calls, []
        for tensor in tensors:
            key = _key(tensor)
            if key is not None and key not in self._excluded:
                self._note(key, tensor)
                inputs.append(key)
        parent = self._stack[-1] if self._stack else -1
        calls.append(_Call(name, parent, len(self._now.saves), tuple(inputs), own_bytes))
        self._stack.append(len(calls) - 1)
        return len(calls) - 1


def _key(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's storage; None for one that has no single storage."""
    return int(tensor.untyped_storage()._cdata) if has_storage(tensor) else None


def _is_backward_running() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _state_of(module: nn.Module) -> dict[tuple[str, int], int]:
    """Return what shows that a module changes its attributes in place.

    Counters of tensors, lengths of containers.
    """
    found: dict[tuple[str, int], int] = {}
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            found[name, id(value)] = versions_of([value])[0]
        elif isinstance(value, (list, dict, set, deque)) and name not in OWN_ATTRIBUTES:
            found[name, id(value)] = len(value)
    return found


def _touch(names: Sequence[str], others: Sequence[str]) -> bool:
    """Say whether one of these modules is one of the others, or in it, or around it."""
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for name in names
        for other in others
    )
