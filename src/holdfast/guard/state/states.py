"""Copy the ``state=`` objects, which a loss function may change, so that an attempt can be undone.

Frozen parameters are copied too, since a forward pass may change them, for example in a momentum
encoder.

Small objects are copied in every step. A large object is copied only until the first step has shown
that the loss function does not change it. After that, its fingerprint is compared in some steps. If
the object changes later, the guard reports that it was not restored, and copies it in every
following step.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping
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
_version_of = operator.attrgetter("_version")


class FrozenParameters:
    """Presents the parameters that are frozen at the start of a step as a `Stateful` object."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._all = [
            (f"{name}.{key}", p)
            for name, model in models.items()
            for key, p in model.named_parameters()
        ]
        self._frozen: list[tuple[str, nn.Parameter]] = []
        # Those that have a version counter.
        self._counted: list[nn.Parameter] = []
        # The sum of the version counters at the last call to `note_versions`.
        self._versions = 0

    def choose(self) -> bool:
        """Determine which parameters are currently frozen, and return whether there are any."""
        self._frozen = [(name, p) for name, p in self._all if not p.requires_grad]
        self._counted = [p for _, p in self._frozen if not p.is_inference()]
        return bool(self._frozen)

    def note_versions(self) -> None:
        """Note how often the frozen parameters were changed in place so far."""
        self._versions = self._sum_of_versions()

    def have_changed(self) -> bool:
        """Return whether they were changed in place since the last call to `note_versions`.

        Changes through ``parameter.data`` are not counted. Only `StateKeeper.learn` finds those, in
        steps 1, 2, 4, 8, and so on.
        """
        return self._sum_of_versions() != self._versions

    def _sum_of_versions(self) -> int:
        # A counter only increases, so the sum shows every change. There may be hundreds of
        # parameters, and this runs twice per step, so it must be fast.
        return sum(map(_version_of, self._counted))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the frozen parameters by name, without copying them."""
        return {name: local(p.detach()) for name, p in self._frozen}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the frozen parameters, without changing version counters."""
        for name, parameter in self._frozen:
            if is_plain(parameter):
                local(parameter.data).copy_(state[name])
            elif not has_no_values(parameter):
                copy_bits(parameter, state[name])


def changeable_states(parts: Parts) -> dict[str, Stateful]:
    """Return the objects that a loss function may change, keyed by their names in messages."""
    states: dict[str, Stateful] = {f"state.{name}": state for name, state in parts.states.items()}
    states[FROZEN] = FrozenParameters(parts.models)
    return states


class StateKeeper:
    """Keeps copies of stateful objects from the start of a step, to restore them.

    Args:
        states: The objects by name.
        copy_large_objects: Whether to copy large objects in every step as well.
    """

    def __init__(self, states: Mapping[str, Stateful], *, copy_large_objects: bool = False) -> None:
        self._tracked = [
            _TrackedState(name, stateful, copy_large_objects=copy_large_objects)
            for name, stateful in states.items()
        ]
        self._frozen_parameters = [
            stateful for stateful in states.values() if isinstance(stateful, FrozenParameters)
        ]

    def names(self) -> list[str]:
        """Return the names of all objects."""
        return [tracked.name for tracked in self._tracked]

    def objects(self) -> list[Any]:
        """Return all objects, in the same order as `names`."""
        return [tracked.stateful for tracked in self._tracked]

    def untouched(self) -> set[str]:
        """Return the names of the large objects that no step has changed so far."""
        return {tracked.name for tracked in self._tracked if tracked.untouched}

    def capture(self, *, look: bool = False) -> None:
        """Copy the objects that may change.

        Args:
            look: Whether to compute the fingerprint of every large object, to detect whether it
                changes. Otherwise, fingerprints are computed only in some steps.
        """
        for tracked in self._tracked:
            tracked.capture(look=look)

    def capture_again(self, objects: Iterable[Any]) -> None:
        """Copy objects again that were changed since the last `capture`, but not by an attempt.

        Args:
            objects: The objects, some of those that were passed to the constructor.
        """
        ids = set(map(id, objects))
        for tracked in self._tracked:
            if id(tracked.stateful) in ids:
                tracked.capture_again()

    def restore(self) -> list[str]:
        """Restore all objects to their state at the last `capture`.

        Returns:
            The names of objects that could not be restored.
        """
        with torch.no_grad():
            return [tracked.name for tracked in self._tracked if not tracked.restore()]

    def learn(self) -> list[str]:
        """Determine which large objects have changed in an attempt that will be committed.

        Returns:
            The names of objects that have changed for the first time.
        """
        return [
            tracked.name
            for tracked in self._tracked
            if (tracked.large or tracked.is_frozen_and_due) and tracked.learn()
        ]

    def frozen_parameters_change(self) -> bool:
        """Return whether a step was seen to change frozen parameters, as a momentum encoder does.

        Their values are compared in steps 1, 2, 4, 8, and so on.
        """
        return any(
            isinstance(tracked.stateful, FrozenParameters) and tracked.changes
            for tracked in self._tracked
        )

    def note_frozen_parameters(self) -> None:
        """Note the frozen parameters at the beginning of an attempt."""
        for frozen in self._frozen_parameters:
            frozen.note_versions()

    def frozen_parameters_have_changed(self) -> bool:
        """Return whether an attempt was seen to change frozen parameters in place."""
        return any(frozen.have_changed() for frozen in self._frozen_parameters)

    def now(self) -> dict[str, Any]:
        """Return copies of the current state of all objects."""
        return {tracked.name: copied(tracked.stateful.state_dict()) for tracked in self._tracked}


class _TrackedState:
    """A stateful object with a copy of its state."""

    def __init__(self, name: str, stateful: Stateful, *, copy_large_objects: bool) -> None:
        self.name = name
        self.stateful = stateful
        self._copies_large = copy_large_objects
        # Whether the loss function changes the object. None if this is unknown.
        self._changes: bool | None = None
        if isinstance(stateful, FrozenParameters) and not copy_large_objects:
            # Frozen weights may be much larger than the trained ones, so if they are large, they
            # are not copied until they have changed for the first time.
            self._changes = False
        self.large = False
        # How many steps have started so far.
        self._steps = 0
        # The state at the last `capture`, or None if there is no copy. The state is wrapped in a
        # tuple because it may be None itself.
        self._copy: tuple[Any] | None = None
        # The fingerprint of the state at the last `capture`, or None if it was not computed.
        self._print: list[Any] | None = None

    @property
    def untouched(self) -> bool:
        return self.large and self._changes is False

    @property
    def changes(self) -> bool:
        return self._changes is True

    @property
    def is_frozen_and_due(self) -> bool:
        return isinstance(self.stateful, FrozenParameters) and self._is_power_of_two

    @property
    def _is_power_of_two(self) -> bool:
        # A power of two has a single 1 bit, which the subtraction clears.
        return self._steps & (self._steps - 1) == 0

    def capture(self, *, look: bool) -> None:
        if not look:
            self._steps += 1
        self._copy = None
        self._print = None
        if self.untouched and not look and not self._is_power_of_two:
            # Large objects are checked only in steps 1, 2, 4, 8, and so on.
            return
        if isinstance(self.stateful, FrozenParameters) and not self.stateful.choose():
            self._copy = ({},)
            return
        # If the state of an object cannot be read or copied, the object is not restored.
        with contextlib.suppress(Exception):
            tree = self.stateful.state_dict()
            self.large = not self._copies_large and not is_small(
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
                # There is no memory for a copy, so a change can be detected but not undone.
                self.large = True
                self._changes = bool(self._changes)
                self._print = fingerprint(tree)

    def capture_again(self) -> None:
        if self._copy is not None or self._print is not None:
            self.capture(look=True)

    def restore(self) -> bool:
        """Restore the object.

        Returns:
            Whether the object is known to have the state of the last `capture`.
        """
        try:
            if self._copy is None:
                if self._print is not None:
                    has_changed = self._print != fingerprint(self.stateful.state_dict())
                    if has_changed:
                        # The object is copied from the next step on.
                        self._changes = True
                        return False
                return self.large and not self._changes
            if same(self.stateful.state_dict(), self._copy[0]):
                return True
            self._changes = True
            self.stateful.load_state_dict(copied(self._copy[0]))
            return same(self.stateful.state_dict(), self._copy[0])
        except Exception:  # noqa: BLE001 - the step has already failed, and this failure is reported with it
            return False

    def learn(self) -> bool:
        """Determine whether the object has changed.

        Returns:
            Whether this is a large object that has changed for the first time.
        """
        if self._changes or (self._copy is None and self._print is None):
            return False
        try:
            now = self.stateful.state_dict()
            if self._copy is None:
                self._changes = fingerprint(now) != self._print
            else:
                self._changes = not same(now, self._copy[0])
        except Exception:  # noqa: BLE001 - as in `capture`
            return False
        self._copy = None
        return self._changes and self._print is not None
