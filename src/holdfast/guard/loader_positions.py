"""Return to a position in a loader. There is one class for each type of loader.

`StatefulLoader`   for a loader with ``state_dict`` and ``load_state_dict``, which restores its
                   position itself
`HoldfastLoader`   for a `holdfast.DataLoader`, which restores its position exactly and without
                   reading any data
`ReplayedLoader`   for any other iterable: the random state from the start of the epoch is restored,
                   and the batches before the position are read and discarded

`Cursor` counts the batches and uses these classes. ``loader.foreign.promises`` states how exactly a
run resumes with each type of loader.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from holdfast.guard.handed_out import HandedOut
from holdfast.guard.parts import Stateful
from holdfast.guard.state.trees import copied, same
from holdfast.loader.foreign.carried_state import digest_order, sources_of_state
from holdfast.loader.foreign.torch_workers import has_workers, match_workers
from holdfast.loader.loader import DataLoader
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.samplers import is_stateful, set_epoch, torch_loader_of

# The default passed to ``next``, which returns it when an iterator is exhausted.
_END = object()


@dataclass(slots=True)
class EpochProgress:
    """How far training has progressed in its loader.

    A batch counts as trained once the loop body has finished with it or requests the next one.
    """

    # The number of completed epochs.
    epoch: int = 0
    # The number of batches trained in this epoch.
    batches: int = 0
    # The number of batches trained over all epochs.
    trained: int = 0
    # The number of batches since the last one for which a step was run.
    batches_without_step: int = 0
    # True while an iterator over the current epoch is in use.
    under_way: bool = False
    # True from the start of a fetch until the fetched batch counts as trained.
    fetching: bool = False


class ResumePosition(Protocol):
    """The operations that `Cursor` needs for each type of loader."""

    def begin(self, random_state: RandomState | None) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch.

        Args:
            random_state: The random state to restore before training continues. If None, it is left
                unchanged.
        """

    def before_fetch(self) -> RandomState:
        """Store the position before a fetch, and return the random state to save with it."""

    def after_fetch(self, batch: Any) -> HandedOut | None:
        """Store the position after a batch, and return the batch with its samples.

        Returns:
            The batch and its dataset indices, or None if the indices are unknown.
        """

    def note_counted(self, before_fetch: RandomState | None) -> None:
        """Update the state for a replay, because the current batch now counts as trained.

        Args:
            before_fetch: The random state before the batch was fetched.
        """

    def leave(self) -> None:
        """Abandon the iterator. The next `begin` must return to the current position."""

    def end_epoch(self) -> None:
        """Discard the state of the epoch that has just ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of `empty_state` that this type of loader fills in."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `begin` return to a saved position."""


def empty_state() -> dict[str, Any]:
    """Return default values for those entries of a saved position that not all loaders fill in."""
    return {
        "loader": None,
        "epoch_start": None,
        "before_last": None,
        "generators": [],
        "generators_now": [],
        "had_workers": None,
        "settings": {},
        "order_was_changed": False,
    }


def position_in(
    loader: Iterable[Any], devices: Sequence[torch.device], progress: EpochProgress
) -> ResumePosition:
    """Return an object that tracks the position in a loader, starting at the beginning.

    Args:
        loader: The loader.
        devices: The accelerators whose random state is part of the position.
        progress: The cursor's counts, which the returned object reads but does not change.
    """
    if isinstance(loader, DataLoader):
        return HoldfastLoader(loader, devices, progress)
    if isinstance(loader, Stateful):
        return StatefulLoader(loader, devices, progress)
    return ReplayedLoader(loader, devices, progress)


class StatefulLoader:
    """Tracks a loader that saves and restores its position itself."""

    def __init__(
        self, loader: Any, devices: Sequence[torch.device], progress: EpochProgress
    ) -> None:
        self._loader = loader
        self._devices = devices
        self._progress = progress
        # The loader's position before the last fetch.
        self._state: Any = None
        # Whether the loader has to load `_state` before it is iterated.
        self._must_load = False

    def begin(self, random_state: RandomState | None) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch."""
        set_epoch(self._loader, self._progress.epoch)
        self._move_loader()
        iterator: Iterator[Any] = iter(self._loader)
        if random_state is not None:
            restore(random_state)
        return iterator

    def _move_loader(self) -> None:
        if self._must_load:
            self._loader.load_state_dict(self._state)
            self._must_load = False

    def before_fetch(self) -> RandomState:
        """Store the position before a fetch, and return the random state to save with it."""
        self._state = self._current_state()
        return capture(self._devices)

    def _current_state(self) -> Any:
        return self._loader.state_dict()

    def after_fetch(self, batch: Any) -> HandedOut | None:  # noqa: ARG002 - see the protocol
        """Return None, because the samples in a batch are unknown."""
        return None

    def note_counted(self, before_fetch: RandomState | None) -> None:
        """Do nothing, because the loader tracks its position."""

    def leave(self) -> None:
        """Store the current position, so that the next `begin` returns to it."""
        self._state = self.state_dict()["loader"]
        self._must_load = True

    def end_epoch(self) -> None:
        """Do nothing, because the loader tracks its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position."""
        self._refresh_state()
        return {"loader": self._state}

    def _refresh_state(self) -> None:
        """Update the stored position from the loader.

        The stored position is left unchanged if the loader is ahead of it, because a batch was
        fetched but not counted, or if the loader has yet to be moved to it.
        """
        if not self._progress.fetching and not self._must_load:
            self._state = self._current_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make `begin` return to a saved position."""
        self._state = state["loader"]
        self._must_load = self._state is not None


class HoldfastLoader(StatefulLoader):
    """Tracks a `holdfast.DataLoader`, which moves to any position without reading earlier batches.

    The saved position is that of the guard's iterator, even if the loop body also iterates the
    loader.
    """

    _loader: DataLoader

    def __init__(
        self, loader: DataLoader, devices: Sequence[torch.device], progress: EpochProgress
    ) -> None:
        super().__init__(loader, devices, progress)
        # The position after the last fetch. None at the start of an iterator.
        self._state_after_batch: Any = None

    def _move_loader(self) -> None:
        self._state_after_batch = None
        if self._must_load:
            super()._move_loader()
        else:
            # The script may have iterated the loader, for example to inspect a batch.
            self._loader.go_to(self._progress.epoch)

    def _current_state(self) -> Any:
        if self._state_after_batch is not None:
            return self._state_after_batch
        return self._loader.position()

    def after_fetch(self, batch: Any) -> HandedOut | None:
        """Store the position after a batch, and return the batch with its samples."""
        self._state_after_batch = self._loader.position()
        return HandedOut(batch, self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, including the state of its sampler.

        The sampler's state may be large, so it is added here rather than after each batch.
        """
        self._refresh_state()
        if self._state is None or "sampler" in self._state:
            return {"loader": self._state}
        return {"loader": self._loader.with_sampler(self._state)}

    def _refresh_state(self) -> None:
        if not self._progress.under_way and not self._must_load:
            # Between two iterators, the position is the start of an epoch.
            self._state = self._loader.state_at(self._progress.epoch)
        else:
            super()._refresh_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make `begin` return to a saved position.

        The loader raises an error if the position was saved with a different order of samples.
        """
        super().load_state_dict(state)
        if self._must_load:
            self._loader.load_state_dict(self._state)


class ReplayedLoader:
    """Tracks a loader without ``state_dict``, by reading and discarding batches after a resume.

    The last discarded batch is read with the same random state as in the original run, since the
    next batch may depend on that batch. For torch's own DataLoader, the states of its samplers are
    restored too, and persistent workers are started or shut down as in the original run.
    """

    def __init__(
        self, loader: Iterable[Any], devices: Sequence[torch.device], progress: EpochProgress
    ) -> None:
        self._loader = loader
        self._devices = devices
        self._progress = progress
        # The torch DataLoader that `loader` is or wraps, or None.
        self._torch_loader = torch_loader_of(loader)
        # The random state at the start of this epoch.
        self._epoch_start: RandomState | None = None
        # The random state before the last trained batch was fetched.
        self._before_last: RandomState | None = None
        # The states of the loader's generators and samplers at the start of this epoch.
        self._generators: list[Any] = []
        # Whether persistent workers existed when this epoch began. None means that this is unknown,
        # in which case the workers are left unchanged.
        self._had_workers: bool | None = None
        # A digest of the input that determines the loader's order, such as a sampler's weights.
        self._order: bytes | None = None
        # Whether the script has changed that input between two epochs.
        self.order_was_changed = False
        # The checkpoint's settings that differ from the loader's, such as "batch_size=8".
        self.changed_settings: tuple[str, ...] = ()

    def begin(self, random_state: RandomState | None) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch."""
        set_epoch(self._loader, self._progress.epoch)
        self._notice_changed_order()
        if self._progress.batches == 0:
            return self._begin_epoch(random_state)
        return self._replay(random_state)

    def _notice_changed_order(self) -> None:
        """Check whether the script has changed what determines the order since the last epoch."""
        order = digest_order(self._loader)
        if self._order is not None and order != self._order:
            self.order_was_changed = True
        self._order = order

    def _begin_epoch(self, random_state: RandomState | None) -> Iterator[Any]:
        self._match_workers()
        if random_state is not None:
            restore(random_state)
        self._epoch_start = capture(self._devices)
        self._generators = self._generator_states()
        return iter(self._loader)

    def _replay(self, random_state: RandomState | None) -> Iterator[Any]:
        """Start the epoch as in the original run, and discard the batches already trained.

        The replay draws random numbers. All random state is restored afterwards, so training
        continues as if there had been no replay.

        Args:
            random_state: The random state to restore afterwards, or None for the current one.
        """
        random_state_afterwards = random_state or capture(self._devices)
        self._match_workers()
        generators_afterwards = self._generator_states()
        if self._epoch_start is not None:
            restore(self._epoch_start)
        self._set_generators(self._generators)
        iterator = iter(self._loader)
        self._drop_counted_batches(iterator)
        self._set_generators(generators_afterwards)
        restore(random_state_afterwards)
        return iterator

    def _drop_counted_batches(self, iterator: Iterator[Any]) -> None:
        count = self._progress.batches
        for number in range(1, count + 1):
            # The first batch is always read with the random state at the start of the epoch.
            is_last = number == count and count > 1
            if is_last and self._before_last is not None:
                restore(self._before_last)
            if next(iterator, _END) is _END:
                return

    def _match_workers(self) -> None:
        """Start or shut down torch's persistent workers, to match those when this epoch began."""
        if self._torch_loader is None:
            return
        if self._had_workers is not None:
            states = self._generator_states()
            match_workers(self._torch_loader, started=self._had_workers)
            self._set_generators(states)
        self._had_workers = has_workers(self._torch_loader)

    def before_fetch(self) -> RandomState:
        """Return the random state that a checkpoint must save with the position.

        Before the first batch, this is the state at the start of the epoch, since a resume draws
        the order of the epoch again.
        """
        if self._progress.batches == 0 and self._epoch_start is not None:
            return self._epoch_start
        return capture(self._devices)

    def after_fetch(self, batch: Any) -> HandedOut | None:  # noqa: ARG002 - see the protocol
        """Return None, because the samples in a batch are unknown."""
        return None

    def note_counted(self, before_fetch: RandomState | None) -> None:
        """Keep the random state before the fetch, for the last batch of a replay."""
        self._before_last = before_fetch

    def leave(self) -> None:
        """Do nothing, because `begin` replays the epoch up to the position."""

    def end_epoch(self) -> None:
        """Discard the state of the epoch that has just ended."""
        self._epoch_start = None
        self._generators = []
        self._had_workers = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed for a replay."""
        generators_now = self._generators
        # Fetching the first batch may draw the order of the epoch. A resume draws the order again,
        # so the generators' states from before the fetch are saved.
        order_is_drawn = self._progress.fetching and self._progress.batches == 0
        if not order_is_drawn:
            generators_now = self._generator_states()
        return {
            "epoch_start": _to_tree(self._epoch_start),
            "before_last": _to_tree(self._before_last),
            "generators": self._generators,
            "generators_now": generators_now,
            "had_workers": self._workers_at_begin(),
            "settings": self._settings(),
            "order_was_changed": self.order_was_changed,
        }

    def _workers_at_begin(self) -> bool | None:
        """Return whether persistent workers existed when the current or next epoch began."""
        if self._torch_loader is None or self._had_workers is not None:
            return self._had_workers
        return has_workers(self._torch_loader)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that affect the position and the workers' random numbers."""
        loader = self._torch_loader
        if loader is None:
            return {}
        return {"batch_size": loader.batch_size, "num_workers": loader.num_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `begin` return to a saved position."""
        self._epoch_start = _from_tree(state["epoch_start"])
        self._before_last = _from_tree(state.get("before_last"))
        self._generators = state["generators"]
        self._set_generators(state["generators_now"])
        self._had_workers = state.get("had_workers")
        self.order_was_changed = bool(state.get("order_was_changed"))
        self._compare_settings(state.get("settings", {}))

    def _compare_settings(self, saved: dict[str, Any]) -> None:
        """Store the checkpoint's settings that differ from the loader's in `changed_settings`."""
        settings = self._settings()
        self.changed_settings = tuple(
            f"{name}={saved[name]!r}"
            for name, value in settings.items()
            if name in saved and saved[name] != value
        )

    def _generator_states(self) -> list[Any]:
        """Return the states of the loader's random generators and stateful samplers."""
        return [_state_of(source) for source in sources_of_state(self._loader)]

    def _set_generators(self, states: Sequence[Any]) -> None:
        for source, state in zip(sources_of_state(self._loader), states, strict=False):
            _restore_source(source, state)


def _to_tree(random_state: RandomState | None) -> Any:
    if random_state is None:
        return None
    return random_state.to_tree()


def _from_tree(tree: Any) -> RandomState | None:
    if not tree:
        return None
    return RandomState.from_tree(tree)


def _state_of(source: Any) -> Any:
    """Return the state of a random generator or of a sampler."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if is_stateful(source):
        return copied(source.state_dict())
    return source.get_state()


def _restore_source(source: Any, state: Any) -> None:
    """Restore a random generator or a sampler from a state that `_state_of` returned."""
    if isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif not is_stateful(source):
        source.set_state(state)
    elif not same(source.state_dict(), state):
        # A state that equals the current one is not loaded, because some samplers start in the
        # middle of an epoch after they have loaded a state.
        source.load_state_dict(copied(state))
