"""Measure what modules save for the backward pass, and choose which of them to recompute.

Only the retry after an out-of-memory error is measured. Each call of a module is recorded, with
every storage that autograd saves during it (`torch.autograd.graph.saved_tensors_hooks`).

If a call is recomputed, everything it saved beyond its inputs is dropped, and exists again in the
backward pass, one call at a time. So a choice is judged by the peak that would have resulted:
recomputing a module that is called once and saves everything gains nothing, while recomputing one
that is called a hundred times gains 99 %. An attempt that fails is measured up to its failure,
since what was saved until then had filled the memory.

Two kinds of modules are never chosen: those that change something that is not restored for the
second computation (their inputs, tensors in plain attributes, containers that grow), and those with
user hooks on any submodule.

``recompute`` carries out the recomputation, and ``ladder`` decides when to use it.
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

from holdfast.memory.recompute import OWN_ATTRIBUTES, ReplacedForward
from holdfast.memory.tensors import has_storage, tensors_of, versions_of

# The smallest relative reduction of the peak that is worth the time of recomputing.
_LEAST_GAIN = 0.05
# Bytes that a recomputed call itself keeps: random state (5 KB) and autograd's own objects.
_CALL_BYTES = 2**14
# Stands for "no call" where calls are referred to by number.
_NO_CALL = -1
NOTHING_SAVES = (
    "up to the failure, no module that may be recomputed had saved much for the backward pass"
    " beyond its inputs"
)


@dataclass(slots=True, kw_only=True)
class _ModuleCall:
    """One call of a module. It made the saves ``[begin, end)`` of the pass."""

    name: str
    # Number of the enclosing call, or `_NO_CALL`.
    parent: int
    begin: int
    # Storages of the inputs. They stay even if the call is recomputed.
    inputs: tuple[int, ...]
    # Bytes that recomputing this call keeps in addition to its inputs.
    own_bytes: int
    # None while the call runs, or if it failed.
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedTensor:
    """One tensor that autograd saved: its storage, and the innermost call at that time."""

    storage: int
    call: int


@dataclass(slots=True)
class Measurement:
    """What one forward pass saved.

    Calls are numbered in order. A storage is identified by torch's `StorageImpl` pointer.
    """

    calls: list[_ModuleCall] = field(default_factory=list)
    saves: list[_SavedTensor] = field(default_factory=list)
    # Bytes of each storage.
    sizes: dict[int, int] = field(default_factory=dict)

    def saved_bytes(self) -> int:
        """Return the bytes of all recorded storages."""
        return sum(self.sizes.values())

    def peak(self, chosen: Collection[str], bytes_of_active: Mapping[str, int]) -> int:
        """Return the most bytes that the pass would keep if the chosen modules were recomputed.

        Time is counted in saves. At the end of the forward pass, all kept storages exist. While a
        call is recomputed in the backward pass, two kinds of storages exist: those kept until the
        end of that call, and everything that the call itself saves.

        Args:
            chosen: Names of the modules.
            bytes_of_active: Modules that this pass already recomputed, each with the bytes that one
                of its calls needs while it is recomputed.
        """
        owners = self._recomputed_owners(chosen)
        recomputed = [self.calls[number] for number, owner in enumerate(owners) if owner == number]
        kept_from = self._kept_from(owners, recomputed)

        added = [0] * (len(self.saves) + 1)
        for call in recomputed:
            added[call.begin] += call.own_bytes
        for storage, first_save in kept_from.items():
            added[first_save] += self.sizes[storage]
        # The bytes kept at each save of the forward pass, and at its end.
        kept_until = list(accumulate(added))

        # At the end of the forward pass, and while each recomputed call exists a second time.
        peaks = [kept_until[-1]]
        for call in self.calls:
            if call.name in bytes_of_active:
                peaks.append(kept_until[self._end(call)] + bytes_of_active[call.name])
        for call in recomputed:
            peaks.append(kept_until[self._end(call)] + self.bytes_inside(call, kept_from))
        return max(peaks)

    def bytes_inside(self, call: _ModuleCall, kept: Collection[int] = ()) -> int:
        """Return the bytes that a call saved beyond its inputs and the storages in `kept`."""
        storages = {save.storage for save in self.saves[call.begin : self._end(call)]}
        storages.difference_update(call.inputs)
        # No difference of sets, because `kept` is large and this runs for each of many calls.
        return sum(self.sizes[storage] for storage in storages if storage not in kept)

    def _recomputed_owners(self, chosen: Collection[str]) -> list[int]:
        """Return, for each call, the outermost chosen call around it (or itself), or `_NO_CALL`."""
        owners: list[int] = []
        for number, call in enumerate(self.calls):
            owner = _NO_CALL
            if call.parent != _NO_CALL:
                owner = owners[call.parent]
            if owner == _NO_CALL and call.name in chosen:
                owner = number
            owners.append(owner)
        return owners

    def _kept_from(
        self, owners: Sequence[int], recomputed: Iterable[_ModuleCall]
    ) -> dict[int, int]:
        """Return the storages that the forward pass keeps, each with the save that it is kept from.

        A storage that is saved outside of all recomputed calls is kept from its first such save. An
        input of a recomputed call is kept from the beginning of that call. Saves are given by their
        index in `saves`.

        Args:
            owners: The recomputed call that each call belongs to, or `_NO_CALL`.
            recomputed: The recomputed calls.
        """
        kept_from: dict[int, int] = {}
        for index, save in enumerate(self.saves):
            if save.call == _NO_CALL or owners[save.call] == _NO_CALL:
                kept_from.setdefault(save.storage, index)
        for call in recomputed:
            for storage in call.inputs:
                kept_from[storage] = min(call.begin, kept_from.get(storage, call.begin))
        return kept_from

    def _end(self, call: _ModuleCall) -> int:
        return len(self.saves) if call.end is None else call.end


class SavedBytes:
    """Measures attempts, and chooses the modules that the next one recomputes.

    Args:
        modules: The modules that may be recomputed, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._refused: set[str] = set()
        # The bytes that one call of a recomputed module needs while it is recomputed. They were
        # measured before the module was chosen: since then, its forward pass no longer saves them.
        self._bytes_of_call: dict[str, int] = {}
        self._measurement = Measurement()

    def refuse(self, names: Iterable[str]) -> None:
        """Never again choose these modules or those that contain them."""
        for name in names:
            self._refused.update(_with_parents(name))

    @contextlib.contextmanager
    def measuring(self, recomputed: Sequence[str], held: Iterable[torch.Tensor]) -> Iterator[None]:
        """Measure the forward passes within the context. The one that saves most counts.

        Args:
            recomputed: Modules that are recomputed in these passes.
            held: Tensors that exist in any case, such as those of the batch.
        """
        recorder = _Recorder(excluded=self._storages_held(held))
        self._measurement = Measurement()
        own_forwards: list[tuple[nn.Module, Any]] = []
        try:
            for name, module in self._modules.items():
                if not _can_be_measured(name, module, recomputed):
                    continue
                own_forwards.append((module, vars(module).get("forward")))
                run = recorder.recorded(name, module, module.forward)
                module.forward = ReplacedForward(module, run)
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                yield
        finally:
            for module, own_forward in own_forwards:
                vars(module).pop("forward")
                if own_forward is not None:
                    module.forward = own_forward
            self._measurement = recorder.largest_pass()
            self.refuse(recorder.changes_state)
            self._refused |= recorder.changes_input

    def choose(self, active: Sequence[str]) -> tuple[str, ...]:
        """Return the modules to recompute from now on: the active ones and further ones.

        Groups of modules are added greedily, starting with the one that lowers the peak most, until
        the next one would lower it by less than 5 %. Only as many of them are chosen as reach half
        of their total reduction.

        Args:
            active: Modules that were recomputed in the measured pass.
        """
        active_bytes = {name: self._bytes_of_call.get(name, 0) for name in active}
        groups = self._groups(active)
        stages = [_Stage(peak=self._measurement.peak((), active_bytes), names=())]
        while groups:
            last = stages[-1]
            candidates = []
            for group in groups:
                names = (*last.names, *group)
                peak = self._measurement.peak(set(names), active_bytes)
                candidates.append(_Stage(peak=peak, names=names))
            best = min(candidates, key=lambda stage: stage.peak)
            if best.peak > (1 - _LEAST_GAIN) * last.peak:
                break
            stages.append(best)
            groups = [group for group in groups if not _overlap(group, best.names)]
        gain = stages[0].peak - stages[-1].peak
        chosen = next(stage.names for stage in stages if 2 * (stages[0].peak - stage.peak) >= gain)
        self._remember_bytes(chosen)
        return (*active, *chosen)

    def _remember_bytes(self, names: Collection[str]) -> None:
        """Remember the bytes that one call of each newly chosen module needs when recomputed."""
        for call in self._measurement.calls:
            if call.name in names:
                size = self._measurement.bytes_inside(call)
                self._bytes_of_call[call.name] = max(self._bytes_of_call.get(call.name, 0), size)

    def _storages_held(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the storages of all parameters and buffers, and of these tensors."""
        storages = {_storage_of(tensor) for tensor in tensors}
        for module in self._modules.values():
            storages.update(_storage_of(parameter) for parameter in module.parameters())
            storages.update(_storage_of(buffer) for buffer in module.buffers())
        return {storage for storage in storages if storage is not None}

    def _groups(self, active: Sequence[str]) -> list[list[str]]:
        """Return the modules that can be chosen, in groups that are chosen together.

        A group holds modules of one class whose names differ in numbers only, such as all layers
        of a transformer.
        """
        groups: dict[tuple[str, type], list[str]] = {}
        for name in dict.fromkeys(call.name for call in self._measurement.calls):
            if name in self._refused or _overlap([name], active) or self._has_hooks_inside(name):
                continue
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
            groups.setdefault((pattern, type(self._modules[name])), []).append(name)
        return list(groups.values())

    def _has_hooks_inside(self, name: str) -> bool:
        """Return whether recomputing a module would run the user's hooks a second time."""
        module = self._modules[name]
        parts = [part for part in module.modules() if part is not module]
        return any(_has_hooks_of_the_caller(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A choice of further modules, and the most bytes that a pass keeps with it."""

    peak: int
    names: tuple[str, ...]


def _with_parents(name: str) -> list[str]:
    """Return a module's name and those of the modules that contain it.

    Example:
        >>> _with_parents("encoder.layers.0")
        ['encoder', 'encoder.layers', 'encoder.layers.0']
    """
    components = name.split(".")
    return [".".join(components[: depth + 1]) for depth in range(len(components))]


def _can_be_measured(name: str, module: nn.Module, recomputed: Sequence[str]) -> bool:
    is_inside = any(name.startswith(f"{outer}.") for outer in recomputed)
    return not is_inside and not isinstance(module, torch.jit.ScriptModule)


def _has_hooks_of_the_caller(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    sources = [str(getattr(hook, "__module__", "")) for hook in hooks]
    return any(not source.startswith(("torch.", "holdfast.")) for source in sources)


def _overlap(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether one of these modules is one of the others, inside it, or around it."""
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for name in names
        for other in others
    )


class _Recorder:
    """Records calls and saves as they happen.

    Args:
        excluded: Storages that exist in any case.
    """

    def __init__(self, excluded: set[int]) -> None:
        self._excluded = excluded
        self._current = Measurement()
        self._largest = Measurement()
        # Numbers of the calls that are running, the innermost last.
        self._stack: list[int] = []
        # As long as these exist, no other storage gets the number of a recorded one.
        self._references: list[StorageWeakRef] = []
        self._backward_has_run = False
        self.changes_state: set[str] = set()
        self.changes_input: set[str] = set()

    def largest_pass(self) -> Measurement:
        """Return the forward pass that saved most."""
        return max(self._largest, self._current, key=Measurement.saved_bytes)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves."""
        storage = None if _is_backward_running() else _storage_of(tensor)
        if storage is not None and storage not in self._excluded:
            self._begin_pass_after_backward()
            self._record_size(storage, tensor)
            self._current.saves.append(_SavedTensor(storage=storage, call=self._innermost_call()))
        # Detached, because an output that its own graph node saves would keep itself alive.
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a saved tensor to autograd."""
        self._backward_has_run = True
        return tensor

    def recorded(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a forward that records its calls."""
        buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())

        def run(*args: Any, **kwargs: Any) -> Any:
            if not _would_save():
                return forward(*args, **kwargs)
            self._begin_pass_after_backward()
            tensors = list(tensors_of((args, kwargs)))
            versions = versions_of(tensors)
            state = _state_of(module)
            # Another pass may have begun by the time this call ends.
            measurement = self._current
            number = self._begin_call(name, tensors, own_bytes=_CALL_BYTES + buffer_bytes)
            try:
                return forward(*args, **kwargs)
            finally:
                measurement.calls[number].end = len(measurement.saves)
                if self._innermost_call() == number:
                    self._stack.pop()
                if versions_of(tensors) != versions:
                    self.changes_input.add(name)
                if _has_changed(state, _state_of(module)):
                    self.changes_state.add(name)

        return run

    def _begin_call(self, name: str, tensors: Sequence[torch.Tensor], own_bytes: int) -> int:
        """Record the beginning of a call and return its number."""
        inputs = []
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is not None and storage not in self._excluded:
                self._record_size(storage, tensor)
                inputs.append(storage)
        number = len(self._current.calls)
        call = _ModuleCall(
            name=name,
            parent=self._innermost_call(),
            begin=len(self._current.saves),
            inputs=tuple(inputs),
            own_bytes=own_bytes,
        )
        self._current.calls.append(call)
        self._stack.append(number)
        return number

    def _begin_pass_after_backward(self) -> None:
        """Measure the next part of a batch separately: a backward pass frees what was saved."""
        if not self._backward_has_run:
            return
        self._largest = self.largest_pass()
        self._current = Measurement()
        self._backward_has_run = False
        self._stack.clear()
        # Hooks on saved tensors tie what the last part saved into reference cycles.
        gc.collect()

    def _innermost_call(self) -> int:
        return self._stack[-1] if self._stack else _NO_CALL

    def _record_size(self, storage_number: int, tensor: torch.Tensor) -> None:
        if storage_number in self._current.sizes:
            return
        storage = tensor.untyped_storage()
        self._current.sizes[storage_number] = storage.nbytes()
        self._references.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's storage, or None if it has no single storage."""
    if not has_storage(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


def _is_backward_running() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _would_save() -> bool:
    """Return whether autograd would save tensors for a forward pass that starts now."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return not _is_backward_running()


def _state_of(module: nn.Module) -> dict[tuple[str, int], int]:
    """Return the state by which in-place changes of a module's attributes are recognised.

    Versions of tensors and lengths of containers, by the name and identity of the attribute.
    """
    state: dict[tuple[str, int], int] = {}
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            state[name, id(value)] = versions_of([value])[0]
        elif isinstance(value, (list, dict, set, deque)) and name not in OWN_ATTRIBUTES:
            state[name, id(value)] = len(value)
    return state


def _has_changed(
    before: Mapping[tuple[str, int], int], after: Mapping[tuple[str, int], int]
) -> bool:
    """Return whether an attribute that exists in both states was changed in place."""
    return any(before[key] != after[key] for key in before.keys() & after.keys())
