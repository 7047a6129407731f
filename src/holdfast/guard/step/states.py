"""Keep what the caller has registered, so that an attempt can be taken back although the loss function changes it.

An object says what it holds through ``state_dict()``, and takes it back through ``load_state_dict()``: hidden state
of truncated backpropagation, queues, running statistics, an average of the weights. Frozen parameters are kept too,
since a forward pass may move them (a momentum encoder).

A small object is copied at each step. A large one is copied until the first step has shown that the loss function
leaves it alone, and then only looked at now and then; one that turns out to change after all is copied from then on,
and what could not be put back is said.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.guard.parts import Parts, Stateful
from holdfast.guard.saving.snapshots import copied, parts_of
from holdfast.memory.oom import find_out_of_memory

_SMALL_BYTES = 64 * 2**20
_SMALL_ENTRIES = 512
FROZEN = "frozen parameters"


class FrozenParameters:
    """The parameters that do not require gradients at the beginning of a step, as an object with state."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._all = [(f"{name}.{key}", p) for name, model in models.items() for key, p in model.named_parameters()]
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def choose(self) -> None:
        """Take those that are frozen now; a loss function may freeze others."""
        self._frozen = [(name, p) for name, p in self._all if not p.requires_grad]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return them by name, as they are in memory."""
        return {name: p.detach() for name, p in self._frozen}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into them, unseen by autograd."""
        for name, parameter in self._frozen:
            parameter.data.copy_(state[name])


def kept_states(parts: Parts) -> dict[str, Stateful]:
    """Return what a loss function may change and a transaction keeps, by the name that messages use."""
    return {**{f"state.{name}": each for name, each in parts.states.items()}, FROZEN: FrozenParameters(parts.models)}


class StateKeeper:
    """Copies of registered state at the beginning of a step."""

    def __init__(self, states: Mapping[str, Stateful], *, every: bool = False) -> None:
        self._kept = [_Kept(name, stateful, every=every) for name, stateful in states.items()]

    def names(self) -> list[str]:
        """Return the names of all objects."""
        return [kept.name for kept in self._kept]

    def untouched(self) -> set[str]:
        """Return the names of the large objects that have not been seen to change."""
        return {kept.name for kept in self._kept if kept.untouched}

    def keep(self, *, look: bool = False) -> None:
        """Copy what may change.

        Args:
            look: Whether to look closely at large objects that have not changed so far.
        """
        for kept in self._kept:
            kept.keep(look=look)

    def put_back(self) -> list[str]:
        """Put everything back that is not as it was at `keep`; return the names of what could not be."""
        with torch.no_grad():
            return [kept.name for kept in self._kept if not kept.put_back()]

    def learn(self) -> list[str]:
        """After an attempt that will be committed, see which large objects change; return those that are new."""
        return [kept.name for kept in self._kept if kept.learn()]

    def now(self) -> dict[str, Any]:
        """Return copies of everything as it is now."""
        return {kept.name: copied(kept.stateful.state_dict(), torch.clone) for kept in self._kept}


class _Kept:
    """One object."""

    def __init__(self, name: str, stateful: Stateful, *, every: bool) -> None:
        self.name = name
        self.stateful = stateful
        self._every = every
        # None: not known yet. Frozen weights may be many times what is trained: no copy before they have changed.
        self._changes: bool | None = False if isinstance(stateful, FrozenParameters) and not every else None
        self._large = False
        self._steps = 0
        self._copy: tuple[Any] | None = None
        self._print: list[Any] | None = None

    @property
    def untouched(self) -> bool:
        return self._large and self._changes is False

    def keep(self, *, look: bool) -> None:
        self._steps += not look
        due = look or self._steps & (self._steps - 1) == 0
        self._copy = self._print = None
        if self.untouched and not due:
            return
        with contextlib.suppress(Exception):  # an object that cannot say or copy its state: nothing is promised
            if isinstance(self.stateful, FrozenParameters):
                self.stateful.choose()
            tree = self.stateful.state_dict()
            self._large = not self._every and not _is_small(tree)
            if self.untouched:
                self._print = fingerprint(tree)
                return
            try:
                self._copy = (copied(tree, torch.clone),)
            except Exception as error:
                if find_out_of_memory(error) is None:
                    raise
                self._large, self._changes = True, bool(self._changes)
                self._print = fingerprint(tree)

    def put_back(self) -> bool:
        """Return whether the object is as it was at `keep`, as far as that is known."""
        try:
            if self._copy is None:
                if self._print is not None and fingerprint(self.stateful.state_dict()) != self._print:
                    self._changes = True  # from the next step on there is a copy
                    return False
                return self._large and not self._changes
            if same(self.stateful.state_dict(), self._copy[0]):
                return True
            self._changes = True
            self.stateful.load_state_dict(copied(self._copy[0], torch.clone))
            return same(self.stateful.state_dict(), self._copy[0])
        except Exception:  # noqa: BLE001 - the step has failed already, and this is said beside it
            return False

    def learn(self) -> bool:
        """Return whether it has just been seen to change although there was no copy."""
        if not self._large or self._changes or (self._copy is None and self._print is None):
            return False
        try:
            now = self.stateful.state_dict()
            self._changes = fingerprint(now) != self._print if self._copy is None else not same(now, self._copy[0])
        except Exception:  # noqa: BLE001 - as in `keep`
            return False
        self._copy = None
        return self._changes and self._print is not None


def _is_small(tree: Any) -> bool:
    entries = size = 0
    left = [tree]
    while left:
        node = left.pop()
        size += node.nbytes if isinstance(node, (torch.Tensor, np.ndarray)) else 0
        entries += 1
        inner = parts_of(node)
        if entries > _SMALL_ENTRIES or size > _SMALL_BYTES or len(inner) > _SMALL_ENTRIES:
            return False
        left += inner
    return True


def fingerprint(tree: Any) -> list[Any]:
    """Return numbers that are others once the tree has changed, with hardly an exception. Cost: a host sync."""
    found: list[Any] = []
    left = [tree]
    while left:
        node = left.pop()
        inner = parts_of(node)
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            bits = torch.view_as_real(node) if node.is_complex() else node
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
            found.append((tuple(node.shape), bits.detach().view(kind).sum()))
        elif not inner:
            found.append(zlib.crc32(repr(node).encode()))
        left += inner
    sums = [entry[1].cpu() for entry in found if isinstance(entry, tuple)]
    numbers = iter(torch.stack(sums).tolist() if sums else [])
    return [(entry[0], next(numbers)) if isinstance(entry, tuple) else entry for entry in found]


def same(first: Any, second: Any, *, tolerance: float = 0.0) -> bool:
    """Say whether two trees of state hold the same values; NaN is like NaN.

    Args:
        first: Any tree.
        second: Another.
        tolerance: By how much floating-point values may differ, in relative L2 norm.
    """
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return _same_tensors(first, second, tolerance)
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))
    if isinstance(first, (float, np.floating)):
        near = abs(float(first) - float(second)) <= tolerance * abs(float(first))
        return near or first == second or (first != first and second != second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k], tolerance=tolerance) for k in first)
    if isinstance(first, (list, tuple)) or hasattr(first, "popleft"):
        return len(first) == len(second) and all(
            same(one, other, tolerance=tolerance) for one, other in zip(first, second, strict=True)
        )
    if hasattr(first, "__dict__") and "__eq__" not in {
        name for each in type(first).__mro__[:-1] for name in vars(each)
    }:
        return same(vars(first), vars(second), tolerance=tolerance)
    return bool(first == second)


def _same_tensors(first: Any, second: Any, tolerance: float) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    if first.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    first, second = first.detach(), second.detach()
    if bool(((first == second) | ((first != first) & (second != second))).all()):
        return True
    if not tolerance or not first.is_floating_point():
        return False
    allowed = tolerance * torch.linalg.vector_norm(first.float())
    return bool(torch.linalg.vector_norm((first - second).float()) <= allowed)
