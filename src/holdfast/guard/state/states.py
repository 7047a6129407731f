"""Keep what the caller has registered, so that an attempt can be taken back although the loss
function changes it.

Frozen parameters are kept too, since a forward pass may move them (a momentum encoder). A small
object is copied at each step. A large one is copied until the first step has shown that the loss
function leaves it alone, and then only looked at now and then; one that turns out to change after
all is copied from then on, and what could not be put back is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.kinds import copy_bits, has_no_values, is_plain
from holdfast.guard.parts import Parts, Stateful
from holdfast.guard.state.trees import copied, fingerprint, is_small, same
from holdfast.memory.oom import find_out_of_memory
from holdfast.numerics.gradients import local

_SMALL_BYTES = 64 * 2**20
_SMALL_ENTRIES = 512
FROZEN = "frozen parameters"


class FrozenParameters:
    """The parameters that do not require gradients at the beginning of a step, as an object with
    state.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._all = [
            (f"{name}.{key}", p)
            for name, model in models.items()
            for key, p in model.named_parameters()
        ]
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def choose(self) -> bool:
        """Take those that are frozen now, if any; a loss function may freeze others."""
        self._frozen = [(name, p) for name, p in self._all if not p.requires_grad]
        return bool(self._frozen)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return them by name, as they are in memory."""
        return {name: local(p.detach()) for name, p in self._frozen}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into them, unseen by autograd."""
        for name, parameter in self._frozen:
            if is_plain(parameter):
                local(parameter.data).copy_(state[name])
            elif not has_no_values(parameter):
                copy_bits(parameter, state[name])


def kept_states(parts: Parts) -> dict[str, Stateful]:
    """Return what a loss function may change and a transaction keeps, by the name that messages
    use.
    """
    return {
        **{f"state.{name}": each for name, each in parts.states.items()},
        FROZEN: FrozenParameters(parts.models),
    }


class StateKeeper:
    """Copies of registered state at the beginning of a step.

    With `every`, of large objects each time, too.
    """

    def __init__(self, states: Mapping[str, Stateful], *, every: bool = False) -> None:
        self._kept = [_Kept(name, stateful, every=every) for name, stateful in states.items()]

    def names(self) -> list[str]:
        """Return the names of all objects."""
        return [kept.name for kept in self._kept]

    def objects(self) -> list[Any]:
        """Return all objects."""
        return [kept.stateful for kept in self._kept]

    def untouched(self) -> set[str]:
        """Return the names of the large objects that have not been seen to change."""
        return {kept.name for kept in self._kept if kept.untouched}

    def keep(self, *, look: bool = False) -> None:
        """Copy what may change; `look` closely at large objects that have not changed so far."""
        for kept in self._kept:
            kept.keep(look=look)

    def put_back(self) -> list[str]:
        """Put everything back that is not as it was at `keep`.

        Return the names of what could not be.
        """
        with torch.no_grad():
            return [kept.name for kept in self._kept if not kept.put_back()]

    def learn(self) -> list[str]:
        """After an attempt that will be committed, see which large objects change.

        Return those that are new.
        """
        return [kept.name for kept in self._kept if kept.large and kept.learn()]

    def now(self) -> dict[str, Any]:
        """Return copies of everything as it is now."""
        return {kept.name: copied(kept.stateful.state_dict()) for kept in self._kept}


class _Kept:
    """One object."""

    def __init__(self, name: str, stateful: Stateful, *, every: bool) -> None:
        self.name = name
        self.stateful = stateful
        self._every = every
        # None: not known yet. Frozen weights may be many times what is trained: no copy before they
        # have changed.
        self._changes: bool | None = (
            False if isinstance(stateful, FrozenParameters) and not every else None
        )
        self.large = False
        self._steps = 0
        self._copy: tuple[Any] | None = None
        self._print: list[Any] | None = None

    @property
    def untouched(self) -> bool:
        return self.large and self._changes is False

    def keep(self, *, look: bool) -> None:
        self._steps += not look
        self._copy = self._print = None
        if self.large and self._changes is False and not look and self._steps & (self._steps - 1):
            return
        if isinstance(self.stateful, FrozenParameters) and not self.stateful.choose():
            self._copy = ({},)
            return
        # An object that cannot say or copy its state: nothing is promised
        with contextlib.suppress(Exception):
            tree = self.stateful.state_dict()
            self.large = not self._every and not is_small(
                tree, most_entries=_SMALL_ENTRIES, most_bytes=_SMALL_BYTES
            )
            if self.untouched:
                self._print = fingerprint(tree)
                return
            try:
                self._copy = (copied(tree),)
            except Exception as error:
                if find_out_of_memory(error) is None:
                    raise
                self.large, self._changes = True, bool(self._changes)
                self._print = fingerprint(tree)

    def put_back(self) -> bool:
        """Return whether the object is as it was at `keep`, as far as that is known."""
        try:
            if self._copy is None:
                if (
                    self._print is not None
                    and fingerprint(self.stateful.state_dict()) != self._print
                ):
                    self._changes = True  # from the next step on there is a copy
                    return False
                return self.large and not self._changes
            if same(self.stateful.state_dict(), self._copy[0]):
                return True
            self._changes = True
            self.stateful.load_state_dict(copied(self._copy[0]))
            return same(self.stateful.state_dict(), self._copy[0])
        except Exception:  # noqa: BLE001 - the step has failed already, and this is said beside it
            return False

    def learn(self) -> bool:
        """Return whether a large object has just been seen to change although there was no copy."""
        if self._changes or (self._copy is None and self._print is None):
            return False
        try:
            now = self.stateful.state_dict()
            self._changes = (
                fingerprint(now) != self._print
                if self._copy is None
                else not same(now, self._copy[0])
            )
        except Exception:  # noqa: BLE001 - as in `keep`
            return False
        self._copy = None
        return self._changes and self._print is not None
