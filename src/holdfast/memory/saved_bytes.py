"""Measure how much memory modules save for the backward pass, and choose which to recompute.

Only retries after an out-of-memory error are measured. Hooks record each call of a module, and
every storage that autograd saves during the call (`torch.autograd.graph.saved_tensors_hooks`). If
the retry fails too, the measurement covers everything up to its failure, because that is the memory
that caused the failure.

If a call is recomputed, everything that it saved is dropped, except its inputs. The dropped memory
is allocated again in the backward pass, but only for one call at a time. A choice of modules is
therefore judged by the peak that it would have caused. Recomputing a module that saves everything
in a single call gains nothing, whereas recomputing one that is called a hundred times gains 99 %.

Two kinds of modules are never chosen: modules that change state that is not restored for the second
computation (their inputs, tensors in plain attributes, or the length of containers), and modules
with submodules on which user code has registered hooks.

``recompute`` recomputes the modules, and ``ladder`` decides when to do so.
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

from holdfast.memory.recompute import COMMON_ATTRIBUTES, ReplacedForward
from holdfast.memory.tensors import has_storage, tensors_of, versions_of

# Recomputing more modules must lower the peak by at least this fraction to be worth the time.
_LEAST_GAIN = 0.05
# An estimate of the bytes that each recomputed call keeps in addition to its inputs: 5 KB of random
# state, and autograd's own objects.
_CALL_BYTES = 2**14
# Used in place of a call's number to mean "no call".
_NO_CALL = -1
NOTHING_SAVES = (
    "before the failure, no module that may be recomputed had saved much memory for the backward"
    " pass in addition to its inputs"
)


@dataclass(slots=True, kw_only=True)
class _ModuleCall:
    """One call of a module in a forward pass."""

    # The name of the module.
    name: str
    # The number of the enclosing call, or `_NO_CALL`.
    parent: int
    # How many tensors the pass had saved before this call.
    begin: int
    # The numbers of the inputs' storages. These are kept even if the call is recomputed.
    inputs: tuple[int, ...]
    # The bytes that are kept in addition to the inputs if this call is recomputed.
    own_bytes: int
    # How many tensors the pass had saved by the end of this call. None while the call runs, or if
    # it failed.
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedTensor:
    """A tensor that autograd saved: its storage, and the innermost call that was running then.

    Both are given as numbers; see `Measurement`.
    """

    storage: int
    call: int


@dataclass(slots=True)
class Measurement:
    """The calls of modules in one forward pass, and the tensors that autograd saved.

    The number of a call is its position in `calls`. The number of a storage is the address of
    torch's `StorageImpl`.
    """

    calls: list[_ModuleCall] = field(default_factory=list)
    saves: list[_SavedTensor] = field(default_factory=list)
    # The size of each storage in bytes, keyed by the storage's number.
    sizes: dict[int, int] = field(default_factory=dict)

    def saved_bytes(self) -> int:
        """Return the total bytes of all recorded storages."""
        return sum(self.sizes.values())

    def peak(self, chosen: Collection[str], bytes_of_active: Mapping[str, int]) -> int:
        """Return the peak of saved bytes if the chosen modules had been recomputed.

        The peak is reached at one of these moments:

        - At the end of the forward pass: all kept storages exist.
        - While the backward pass recomputes a call: the storages that the forward pass had kept by
          the end of this call exist, along with everything that the call itself saves.

        Args:
            chosen: Names of the modules.
            bytes_of_active: The modules that were already recomputed in this pass, mapped to the
                bytes that one of their calls needs while it is recomputed.
        """
        owners = self._recomputed_owners(chosen)
        recomputed = [self.calls[number] for number, owner in enumerate(owners) if owner == number]
        kept_from = self._kept_from(owners, recomputed)

        added = [0] * (len(self.saves) + 1)
        for call in recomputed:
            added[call.begin] += call.own_bytes
        for storage, first_save in kept_from.items():
            added[first_save] += self.sizes[storage]
        # kept_until[i] is the number of bytes that the forward pass keeps once it has saved i
        # tensors.
        kept_until = list(accumulate(added))

        # The first candidate is the end of the forward pass; the others are the recomputed calls.
        peaks = [kept_until[-1]]
        for call in self.calls:
            if call.name in bytes_of_active:
                peaks.append(kept_until[self._end(call)] + bytes_of_active[call.name])
        for call in recomputed:
            peaks.append(kept_until[self._end(call)] + self.bytes_inside(call, kept_from))
        return max(peaks)

    def bytes_inside(self, call: _ModuleCall, kept: Collection[int] = ()) -> int:
        """Return the bytes that a call saved, except for its inputs and the storages in `kept`."""
        storages = {save.storage for save in self.saves[call.begin : self._end(call)]}
        storages.difference_update(call.inputs)
        # Do not compute a set difference with `kept`: it is large, and this method runs for each of
        # many calls.
        return sum(self.sizes[storage] for storage in storages if storage not in kept)

    def _recomputed_owners(self, chosen: Collection[str]) -> list[int]:
        """Return, for each call, the number of the recomputed call that it is part of.

        The recomputed call is the outermost one of a chosen module, and may be the call itself. The
        number is `_NO_CALL` if the call would not be recomputed.
        """
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
        """Return the storages that the forward pass keeps, and since when it keeps them.

        A storage that is saved outside all recomputed calls is kept from the first such save. An
        input of a recomputed call is kept from the beginning of the call.

        Args:
            owners: The result of `_recomputed_owners`.
            recomputed: The recomputed calls.

        Returns:
            For each storage number, how many tensors had been saved before it was kept.
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
    """Measures what attempts save for backward, and chooses modules to recompute in the next one.

    Args:
        modules: The modules that may be recomputed, keyed by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._refused: set[str] = set()
        # For each chosen module, the bytes that one call needs while it is recomputed. They come
        # from the measurement before the module was chosen: once it is recomputed, its forward pass
        # no longer saves them.
        self._bytes_of_call: dict[str, int] = {}
        self._measurement = Measurement()

    def refuse(self, names: Iterable[str]) -> None:
        """Exclude these modules, and all modules that contain them, from later choices."""
        for name in names:
            self._refused.update(_with_parents(name))

    @contextlib.contextmanager
    def measuring(self, recomputed: Sequence[str], held: Iterable[torch.Tensor]) -> Iterator[None]:
        """Measure the forward passes in the ``with`` block, and keep the one that saves the most.

        Args:
            recomputed: Names of the modules that are recomputed in these passes.
            held: Tensors that stay alive in any case, such as those in the batch. They are not
                counted.
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
        """Return the modules to recompute from now on: the active ones, and more if that helps.

        A greedy search adds groups of modules: in each round, it adds the group that lowers the
        peak most, until no group lowers it by at least 5 %. Of these groups, only the first few are
        chosen: as many as it takes to reach half of the total reduction.

        Args:
            active: Names of the modules that were recomputed in the measured pass.
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
        """Store how many bytes a call of each newly chosen module needs while it is recomputed."""
        for call in self._measurement.calls:
            if call.name in names:
                size = self._measurement.bytes_inside(call)
                self._bytes_of_call[call.name] = max(self._bytes_of_call.get(call.name, 0), size)

    def _storages_held(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the storage numbers of all parameters, all buffers and the given tensors."""
        storages = {_storage_of(tensor) for tensor in tensors}
        for module in self._modules.values():
            storages.update(_storage_of(parameter) for parameter in module.parameters())
            storages.update(_storage_of(buffer) for buffer in module.buffers())
        return {storage for storage in storages if storage is not None}

    def _groups(self, active: Sequence[str]) -> list[list[str]]:
        """Return the names of the modules that can be chosen, in groups that are chosen as a whole.

        A group consists of modules of one class whose names differ only in their indices, such as
        the layers of a transformer.
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
    """A set of modules to recompute, and the peak of saved bytes that it leads to."""

    peak: int
    names: tuple[str, ...]


def _with_parents(name: str) -> list[str]:
    """Return the name of a module and the names of all modules that contain it.

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
    """Return whether any module in one list equals, contains or is inside one in the other list."""
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for name in names
        for other in others
    )


class _Recorder:
    """Records the module calls in a forward pass and the tensors that autograd saves.

    Args:
        excluded: Numbers of the storages to ignore, because they stay alive in any case.
    """

    def __init__(self, excluded: set[int]) -> None:
        self._excluded = excluded
        self._current = Measurement()
        self._largest = Measurement()
        # The numbers of running calls, innermost last.
        self._stack: list[int] = []
        # Weak references to recorded storages, so that no new storage gets the same number.
        self._references: list[StorageWeakRef] = []
        self._backward_has_run = False
        # Names of modules whose calls changed the module's attributes in place.
        self.changes_state: set[str] = set()
        # Names of modules whose calls changed their inputs in place.
        self.changes_input: set[str] = set()

    def largest_pass(self) -> Measurement:
        """Return the measurement of the forward pass that saved the most bytes."""
        return max(self._largest, self._current, key=Measurement.saved_bytes)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves, and return the tensor to save in its place."""
        storage = None if _is_backward_running() else _storage_of(tensor)
        if storage is not None and storage not in self._excluded:
            self._begin_pass_after_backward()
            self._record_size(storage, tensor)
            self._current.saves.append(_SavedTensor(storage=storage, call=self._innermost_call()))
        # Return a detached tensor. Otherwise, an output that is saved by its own graph node would
        # keep itself alive.
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a backward pass has begun to use saved tensors, and return the tensor."""
        self._backward_has_run = True
        return tensor

    def recorded(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that records a call of the module and runs its forward."""
        buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())

        def run(*args: Any, **kwargs: Any) -> Any:
            if not _would_save():
                return forward(*args, **kwargs)
            self._begin_pass_after_backward()
            tensors = list(tensors_of((args, kwargs)))
            versions = versions_of(tensors)
            state = _state_of(module)
            # Keep a reference, because another pass may have begun by the time this call ends.
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
        """Begin a new measurement if a backward pass has run and freed all saved tensors."""
        if not self._backward_has_run:
            return
        self._largest = self.largest_pass()
        self._current = Measurement()
        self._backward_has_run = False
        self._stack.clear()
        # Because of the hooks, the saved tensors of the last pass are in reference cycles, which
        # only the garbage collector frees.
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
    """Return the number of a tensor's storage, or None if the tensor has no single storage."""
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
    """Return values that differ before and after an in-place change of a module's attributes.

    Returns:
        The version of each tensor and the length of each container, keyed by the attribute's name
        and the object's id.
    """
    state: dict[tuple[str, int], int] = {}
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            state[name, id(value)] = versions_of([value])[0]
        elif isinstance(value, (list, dict, set, deque)) and name not in COMMON_ATTRIBUTES:
            state[name, id(value)] = len(value)
    return state


def _has_changed(
    before: Mapping[tuple[str, int], int], after: Mapping[tuple[str, int], int]
) -> bool:
    """Return whether any object recorded in both `before` and `after` was changed in place."""
    return any(before[key] != after[key] for key in before.keys() & after.keys())
