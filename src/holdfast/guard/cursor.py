"""Where the data is: epochs and batches that were *trained*, and how to get there again.

a loader with state_dict  its own position (holdfast.DataLoader: exact, in no time)
any other iterable        the random state at the start of the epoch is put back, the batches before
                          the position are read and dropped, the last from the random state of then,
                          since the next may be made with it. The random state of the moment
                          follows. For torch's own DataLoader also its samplers' state_dict, and its
                          workers are there or not as they were then
an iterator               cannot be started again: its order is nobody's to restore

What each can promise is in ``loader.foreign``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.core.containers import count
from holdfast.core.errors import LoaderError, PolicyError
from holdfast.core.events.event import EventData
from holdfast.guard.handed_out import HandedOut
from holdfast.guard.parts import Stateful
from holdfast.guard.state.trees import copied, same
from holdfast.loader.foreign import EXACT, keeps_by_state_dict, resume_promise
from holdfast.loader.generators import sources_of_state
from holdfast.loader.given_order import digest_order
from holdfast.loader.loader import DataLoader
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.samplers import is_stateful, set_epoch, torch_loader_of
from holdfast.loader.torch_workers import has_workers, match_workers

_EXACT = (
    "bit-exact, if the dataset and collate_fn draw from the global generators of torch, numpy and"
    " random only: order and augmentation depend on (seed, epoch, index) then"
)

_CHANGED_ORDER = (
    "none, because the script has changed the list of batches, or what the sampler was given, such"
    " as weights, since the epoch before: no checkpoint holds that. Give the sampler state_dict and"
    " load_state_dict that hold it"
)


def check_position(state: dict[str, Any]) -> None:
    """Raise a TypeError, LookupError or ValueError for a position that no `Cursor.state_dict`
    has returned.
    """
    for name in ("epoch", "batches", "trained"):
        count(state[name])
    _ = len(state["generators"]), len(state["generators_now"])
    for each in (state["epoch_start"], state.get("before_last")):
        _ = each and RandomState.from_tree(each)


class Cursor:
    """The position in a loader."""

    def __init__(self, loader: Iterable[Any], devices: Sequence[torch.device]) -> None:
        if not isinstance(loader, Iterable):
            raise PolicyError(
                f"loader is a {type(loader).__name__}",
                limit="it is iterated for batches",
                fix="pass a DataLoader or another iterable of batches.",
                rule="H105",
            )
        self._loader = loader
        self._devices = devices
        self._stateful = isinstance(loader, Stateful)
        # torch's DataLoader, or the one inside our wrapper, if a resume has to read and drop its
        # batches.
        self._torch_loader = None if self._stateful else torch_loader_of(loader)
        # Whether persistent workers existed when this epoch began. None: not known, so the workers
        # stay as they are.
        self._had_workers: bool | None = None
        self._changed_settings = ""
        # What another number of ranks leaves of the promise, until the end of the epoch that was
        # under way.
        self._changed_ranks = ""
        # What the script has given the loader to take its order from, and whether it has changed
        # that since.
        self._order: bytes | None = None
        self._order_was_changed = False
        self.epoch = 0
        self.batches = 0
        self.trained = 0  # batches over all epochs
        # The number of batches without a step since the last batch with one.
        self.passed = 0
        self._epoch_start: RandomState | None = None
        self._generators: list[Any] = []
        self._loader_state: Any = None
        # Of a holdfast loader: where it stood when its last batch was handed out
        self._state_after: Any = None
        self._length: int | None = None  # of this epoch, once it was asked for; -1: it is not known
        self._reload = False
        self._under_way = False  # an iterator of this epoch is in use
        # A batch is out, or being fetched, that does not count as trained yet
        self._fetching = False
        self.left_in_batch = False  # the loop was left with a batch that no step was made with
        self._begun_in_the_middle = False
        # The batch that is out. The loop holds that batch too, until it has fetched the next one.
        self._handed_out: HandedOut | None = None
        self._before_fetch: RandomState | None = None
        self._before_last: RandomState | None = None  # as that, of the last batch that counts

    @property
    def promise(self) -> str:
        """Return what a resume can promise for this loader."""
        if isinstance(self._loader, DataLoader):
            return _EXACT
        if self._changed_ranks:
            return self._changed_ranks
        if self._changed_settings:
            return self._changed_settings
        return _CHANGED_ORDER if self._order_was_changed else resume_promise(self._loader)

    @property
    def unkept(self) -> str | None:
        """Return why a resumed run may read other batches, or None if there is nothing to warn
        of before training.
        """
        promise = self.promise
        if isinstance(self._loader, DataLoader) or promise == EXACT:
            return None
        if keeps_by_state_dict(self._loader) and not (
            self._changed_ranks or self._changed_settings
        ):
            return None
        return promise

    @property
    def goes_back(self) -> bool:
        """Whether batches can be asked for again."""
        return self._stateful or not isinstance(self._loader, Iterator)

    def begin(self, state: RandomState | None) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch.

        The state of a resumed run is put back in time.
        """
        self._begun_in_the_middle, self.left_in_batch = self.batches > 0, False
        self._handed_out = None
        self._under_way, self._state_after, self._length = True, None, None
        set_epoch(self._loader, self.epoch)
        self._notice_another_order()
        if self._stateful:
            if self._reload:
                self._loader.load_state_dict(self._loader_state)  # type: ignore[attr-defined]
                self._reload = False
            elif isinstance(self._loader, DataLoader):
                self._loader.go_to(self.epoch)  # whoever looked at a batch before has moved nothing
            iterator = iter(self._loader)
        elif self.batches == 0:
            self._match_workers()
            if state is not None:
                restore(state)
            self._epoch_start = capture(self._devices)
            self._generators = self._generator_states()
            return iter(self._loader)
        else:
            state = state or capture(self._devices)
            iterator = self._replay()
        if state is not None:
            restore(state)
        return iterator

    def _notice_another_order(self) -> None:
        """Notice that the script has changed since the last epoch what the order of the batches
        comes from.
        """
        if self._stateful:
            return
        order = digest_order(self._loader)
        if self._order is not None and order != self._order:
            self._order_was_changed = True
        self._order = order

    def _match_workers(self) -> None:
        """Start or end the persistent workers of torch's loader, as they were when this epoch
        began.
        """
        if self._torch_loader is None:
            return
        if self._had_workers is not None:
            states = self._generator_states()
            match_workers(self._torch_loader, started=self._had_workers)
            self._set_generators(states)
        self._had_workers = has_workers(self._torch_loader)

    def _replay(self) -> Iterator[Any]:
        self._match_workers()
        now = self._generator_states()
        if self._epoch_start is not None:
            restore(self._epoch_start)
        self._set_generators(self._generators)
        iterator = iter(self._loader)
        for left in range(self.batches, 0, -1):
            if left == 1 < self.batches and self._before_last is not None:
                restore(self._before_last)
            if next(iterator, self) is self:
                break
        self._set_generators(now)
        return iterator

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; until `advance` it does not count as trained."""
        if self._stateful:
            self._loader_state = self._state_of_loader()
        # Before the first batch, the place to return to is the beginning of the epoch, with its
        # order still to draw.
        self._before_fetch = (
            self._epoch_start if self.batches == 0 and self._epoch_start else capture(self._devices)
        )
        self._fetching = True  # from here on a signal may interrupt
        try:
            batch = next(iterator)
        except StopIteration:
            self._fetching = False
            self._handed_out = None
            raise
        if isinstance(self._loader, DataLoader):
            self._state_after = self._loader.position()
            self._handed_out = HandedOut(batch, self._loader)
        return batch

    def _state_of_loader(self) -> Any:
        """Return the loader's position.

        That of our iterator, also if the loop body has looked at another one.
        """
        if self._state_after is not None:
            return self._state_after
        if isinstance(self._loader, DataLoader):
            return self._loader.position()
        return self._loader.state_dict()  # type: ignore[attr-defined]

    def advance(self, *, used: bool) -> None:
        """Count the batch that was fetched last as trained, unless it was counted before.

        `used` says whether a step was made with it, and not only the rest of the loop body.
        """
        if self._fetching:
            self.batches += 1
            self.trained += 1
            self.passed = 0 if used else self.passed + 1
            self._fetching, self._before_last = False, self._before_fetch

    @property
    def seems_to_end(self) -> bool:
        """Return whether no batch comes after this one, as far as the loader's length says.

        A save can wait then.
        """
        if self._length is None:
            try:
                self._length = len(self._loader)  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - whatever a loader of the caller's says instead, it is only a guess
                self._length = -1
        return self._under_way and self.batches + self._fetching == self._length

    def sample_indices(self, batch: Any, size: int | None) -> list[int] | None:
        """Return the dataset indices of the samples that a step was made with, or None if they are
        not known.

        They are known if it was made with the batch that is out, and not, for instance, with that
        of a second loader.

        Args:
            batch: What the step was made with.
            size: The number of samples in it, None if unknown.
        """
        return None if self._handed_out is None else self._handed_out.indices_of(batch, size)

    def repeats(self) -> bool:
        """Return whether the batch that is out is trained on by another rank too, and counts
        there.
        """
        return self._fetching and isinstance(self._loader, DataLoader) and self._loader.repeats

    def attach(self, record: Callable[[EventData], None], run_dir: Path) -> None:
        """Let a holdfast loader record what happens in it, and keep what it quarantines with the
        run.
        """
        if isinstance(self._loader, DataLoader):
            self._loader.attach(record, run_dir)

    def quarantine(self, indices: Sequence[int], evidence: str) -> None:
        """Let a holdfast loader replace samples from the next epoch on."""
        if isinstance(self._loader, DataLoader):
            for index in indices:
                self._loader.quarantine(index, "provenance", evidence)

    def random_state(self) -> RandomState:
        """Return the random state that belongs to the position.

        From before a fetch that does not count yet.
        """
        if self._fetching and self._before_fetch is not None:
            return self._before_fetch
        return capture(self._devices)

    def leave(self) -> None:
        """Note that the iterator is given up, so that the next `begin` goes to this position
        again.
        """
        if self._stateful:
            self._loader_state = self.state_dict()["loader"]
            self._reload = True
        self._handed_out = None
        self.left_in_batch |= self._fetching
        self._fetching = self._under_way = False

    def end_epoch(self, *, needs_steps: bool, stepped: bool) -> tuple[int, int | None]:
        """Go to the beginning of the next epoch.

        Return how many batches that was, of how many samples if known.
        """
        if self.batches == 0:
            raise LoaderError(
                "the loader gave no batch in a whole epoch",
                limit="at least one is needed",
                fix=(
                    "check the path of the data, filters, and drop_last with a batch size above the"
                    " number of samples; an iterator that was used up cannot be iterated again,"
                    " pass the iterable itself."
                ),
                rule="H601",
            )
        if needs_steps and not stepped and not self._begun_in_the_middle:
            raise LoaderError(
                "a whole epoch passed without guard.step()",
                limit="max_steps counts optimizer steps and would never be reached",
                fix="call guard.step(batch, loss_fn) in the loop, or pass max_epochs.",
                rule="H602",
            )
        facts = self.batches, self.batch_size
        self.epoch, self.batches, self._epoch_start, self._generators = self.epoch + 1, 0, None, []
        self._had_workers = None
        self._changed_ranks = ""
        self._under_way = False
        return facts

    @property
    def batch_size(self) -> int | None:
        """Return how many samples the loader puts into a batch, None if it does not say."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: batches that are fetched but not trained do not count."""
        if isinstance(self._loader, DataLoader) and not self._under_way and not self._reload:
            self._loader_state = self._loader.state_at(self.epoch)
        elif self._stateful and not self._fetching and not self._reload:
            self._loader_state = self._state_of_loader()
        # Maybe the order of this epoch: return to before that
        drawn = self._fetching and self.batches == 0
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "trained": self.trained,
            "loader": self._with_sampler(self._loader_state),
            "epoch_start": None if self._epoch_start is None else self._epoch_start.to_tree(),
            "before_last": (
                None if self._before_last is None or self._stateful else self._before_last.to_tree()
            ),
            "generators": self._generators,
            "generators_now": self._generators if drawn else self._generator_states(),
            "had_workers": self._workers_at_begin(),
            "settings": self._settings(),
            "order_was_changed": self._order_was_changed,
        }

    def _with_sampler(self, loader_state: Any) -> Any:
        """Return the state of a holdfast loader with that of its sampler, which is not added at
        each batch.
        """
        if (
            not isinstance(self._loader, DataLoader)
            or loader_state is None
            or "sampler" in loader_state
        ):
            return loader_state
        return self._loader.with_sampler(loader_state)

    def _workers_at_begin(self) -> bool | None:
        """Return whether persistent workers existed at the beginning of the current epoch, or of
        the next one.
        """
        if self._torch_loader is None or self._had_workers is not None:
            return self._had_workers
        return has_workers(self._torch_loader)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of torch's loader on which the position and the random numbers of
        workers depend.
        """
        loader = self._torch_loader
        return (
            {}
            if loader is None
            else {"batch_size": loader.batch_size, "num_workers": loader.num_workers}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the next `begin` starts there."""
        self.epoch, self.batches, self.trained = state["epoch"], state["batches"], state["trained"]
        self.passed = 0
        self._fetching = self._under_way = False
        self._loader_state = state["loader"] if self._stateful else None
        self._reload = self._loader_state is not None
        if isinstance(self._loader, DataLoader) and self._loader_state is not None:
            # Says at once if the order is another one
            self._loader.load_state_dict(self._loader_state)
        self._epoch_start, self._before_last = (
            each and RandomState.from_tree(each)
            for each in (state["epoch_start"], state.get("before_last"))
        )
        self._generators = state["generators"]
        self._set_generators(state["generators_now"])
        self._had_workers = state.get("had_workers")
        self._order_was_changed = bool(state.get("order_was_changed"))
        self._changed_ranks = ""
        self._compare_settings(state.get("settings", {}))

    def compare_ranks(self, before: int, now: int) -> None:
        """Lower the promise if another number of ranks wrote the position that was loaded, inside
        an epoch.

        Args:
            before: The number of ranks that wrote it.
            now: The number of ranks that continue from it.
        """
        if before == now or self.batches == 0:
            return
        exception = "the number of ranks times the batch size is the same as before"
        if self._stateful:
            exception = "the loader's own load_state_dict converts the position"
        self._changed_ranks = (
            f"none, because the checkpoint was made in the middle of an epoch on {_ranks(before)},"
            f" and the run resumes on {_ranks(now)}: the position counts the batches of each rank,"
            " so this epoch's samples are not those of an unbroken run (some are read twice or"
            f" never), unless {exception}. Resume on {_ranks(before)}; holdfast.DataLoader reads"
            " each sample once on any number of ranks"
        )

    def _compare_settings(self, before: dict[str, Any]) -> None:
        """Lower the promise if torch's loader had other settings when the position was saved."""
        now = self._settings()
        changed = [
            f"{name}={before[name]!r}"
            for name in now
            if name in before and now[name] != before[name]
        ]
        self._changed_settings = ""
        if changed:
            self._changed_settings = (
                f"none, because the checkpoint was made with {', '.join(changed)}, and the loader"
                " has other settings now: a resume drops batches of another size, or other workers"
                " draw the random numbers. Use the settings of the checkpoint; holdfast.DataLoader"
                " resumes exactly with any"
            )

    def _sources(self) -> list[Any]:
        """Return the generators and stateful samplers of a loader without ``state_dict``."""
        return [] if self._stateful else sources_of_state(self._loader)

    def _generator_states(self) -> list[Any]:
        return [_state_of(source) for source in self._sources()]

    def _set_generators(self, states: Sequence[Any]) -> None:
        for source, state in zip(self._sources(), states, strict=False):
            _restore(source, state)


def _ranks(number: int) -> str:
    """Return a number of ranks in words, such as "2 ranks"."""
    return "1 rank" if number == 1 else f"{number} ranks"


def _state_of(source: Any) -> Any:
    """Return the state of a random generator or of a sampler."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if is_stateful(source):
        return copied(source.state_dict())
    return source.get_state()


def _restore(source: Any, state: Any) -> None:
    """Restore a random generator or a sampler from the value of `_state_of`."""
    if isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif not is_stateful(source):
        source.set_state(state)
    elif not same(source.state_dict(), state):
        # Loading moves some samplers to the middle of an epoch, so an equal state is not loaded
        # again.
        source.load_state_dict(copied(state))
