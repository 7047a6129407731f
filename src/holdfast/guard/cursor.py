"""Count the epochs and batches that the run has trained on, and return to a saved position.

A batch counts as trained once the loop body has finished with it. A batch that was fetched but not
trained is fetched again after a resume or a rollback. How a loader is moved to a position depends
on its type; see ``loader_positions``. The position of a plain iterator is not restored, since an
iterator cannot be restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.core.containers import check_count
from holdfast.core.errors import LoaderError
from holdfast.core.events.data import EventData
from holdfast.guard.handed_out import HandedOut
from holdfast.guard.loader_positions import (
    EpochProgress,
    ReplayedLoader,
    empty_state,
    position_in,
)
from holdfast.guard.parts import Stateful
from holdfast.loader.foreign.promises import EXACT, keeps_by_state_dict, resume_promise
from holdfast.loader.loader import DataLoader
from holdfast.loader.random_state import RandomState, capture, with_generators

# The resume promise of a holdfast.DataLoader.
_EXACT_OF_HOLDFAST = (
    "bit-exact, if the dataset and collate_fn draw random numbers only from the global generators"
    " of torch, numpy and random: order and augmentation then depend on (seed, epoch, index)"
)

_ORDER_WAS_CHANGED = (
    "none, because the script has changed the list of batches or the sampler's input, such as its"
    " weights, since the previous epoch, and no checkpoint contains that change. Give the sampler"
    " state_dict and load_state_dict methods that include it"
)


def check_position(state: dict[str, Any]) -> None:
    """Check that a saved position has the format that `Cursor.state_dict` returns.

    Raises:
        TypeError, LookupError or ValueError: If the format is wrong.
    """
    for name in ("epoch", "batches", "trained"):
        check_count(state[name])
    for name in ("generators", "generators_now"):
        if not isinstance(state[name], (list, tuple)):
            raise TypeError(f"{name} is a {type(state[name]).__name__} and not a list")
    for random_state in (state["epoch_start"], state.get("before_last")):
        if random_state:
            RandomState.from_tree(random_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """Facts about an epoch that has ended."""

    # The number of batches in the whole epoch.
    batches: int
    # The number of samples per batch, or None if the loader has no ``batch_size``.
    batch_size: int | None


class Cursor:
    """Tracks the position in a loader.

    Args:
        loader: An iterable of batches that `check_loader` has accepted.
        devices: The accelerators whose random state is part of the position.
    """

    def __init__(self, loader: Iterable[Any], devices: Sequence[torch.device]) -> None:
        self._loader = loader
        self._holdfast_loader = loader if isinstance(loader, DataLoader) else None
        self._devices = devices
        self._progress = EpochProgress()
        self._position = position_in(loader, devices, self._progress)
        # The promise after a resume on a different number of ranks, with its reason. Empty if the
        # promise is not affected. Cleared at the end of the epoch in which the run was resumed.
        self._changed_ranks = ""
        # Whether a resume or rollback made the current iterator start in the middle of the epoch.
        self._begun_in_the_middle = False
        # Whether the loop was left before its current batch was counted as trained.
        self.left_in_batch = False
        # The batch that the loop body is using. The loop also refers to the batch until it fetches
        # the next one, so this reference does not extend the batch's lifetime.
        self._handed_out: HandedOut | None = None
        # The random state before the current batch was fetched.
        self._before_fetch: RandomState | None = None
        # The number of batches in this epoch. None if not yet queried, -1 if it is unknown.
        self._length: int | None = None

    @property
    def epoch(self) -> int:
        """Return the number of epochs completed."""
        return self._progress.epoch

    @property
    def batches(self) -> int:
        """Return the number of batches in this epoch that have been trained."""
        return self._progress.batches

    @property
    def trained(self) -> int:
        """Return the number of batches over all epochs that have been trained."""
        return self._progress.trained

    @property
    def passed(self) -> int:
        """Return the number of batches since the last one for which a step was run."""
        return self._progress.batches_without_step

    @property
    def batch_size(self) -> int | None:
        """Return the loader's ``batch_size``, or None if the loader has none."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    # --- the resume promise

    @property
    def promise(self) -> str:
        """Return a text that states how exactly a resumed run reads the same batches."""
        if self._holdfast_loader is not None:
            return _EXACT_OF_HOLDFAST
        if self._changed_ranks:
            return self._changed_ranks
        if isinstance(self._position, ReplayedLoader):
            if self._position.changed_settings:
                return _settings_were_changed(self._position.changed_settings)
            if self._position.order_was_changed:
                return _ORDER_WAS_CHANGED
        return resume_promise(self._loader)

    @property
    def unkept(self) -> str | None:
        """Return why a resumed run may read different batches, or None if no warning is needed."""
        promise = self.promise
        if self._holdfast_loader is not None or promise == EXACT:
            return None
        if keeps_by_state_dict(self._loader) and not self._resumes_differently():
            return None
        return promise

    def _resumes_differently(self) -> bool:
        """Return whether the checkpoint had other loader settings or another number of ranks."""
        if self._changed_ranks:
            return True
        return isinstance(self._position, ReplayedLoader) and bool(self._position.changed_settings)

    @property
    def goes_back(self) -> bool:
        """Return whether the loader can return to an earlier batch, unlike a plain iterator."""
        return isinstance(self._loader, Stateful) or not isinstance(self._loader, Iterator)

    def compare_ranks(self, before: int, now: int) -> None:
        """Lower the promise if a position within an epoch comes from a different number of ranks.

        Args:
            before: The number of ranks that saved the position.
            now: The number of ranks that resume from it.
        """
        if before == now or self._progress.batches == 0:
            return
        exception = "the number of ranks times the batch size is the same as before"
        if isinstance(self._loader, Stateful):
            exception = "the loader's own load_state_dict converts the position"
        self._changed_ranks = (
            f"none, because the checkpoint was saved in the middle of an epoch on {_ranks(before)},"
            f" and the run resumes on {_ranks(now)}: the position counts the batches of each rank,"
            " so the rest of this epoch reads some samples twice or never, unless"
            f" {exception}. Resume on {_ranks(before)}, or use holdfast.DataLoader, which reads"
            " each sample once on any number of ranks"
        )

    # --- iterating

    def begin(self, random_state: RandomState | None) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch.

        Args:
            random_state: The random state of a resumed run, which is restored once the loader has
                reached the position. If None, the random state is left unchanged.
        """
        self._begun_in_the_middle = self._progress.batches > 0
        self.left_in_batch = False
        self._handed_out = None
        self._length = None
        self._progress.under_way = True
        return self._position.begin(random_state)

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch. The batch counts as trained only after `advance`."""
        self._before_fetch = self._position.before_fetch()
        # Set this before the fetch, because a signal may interrupt the fetch.
        self._progress.fetching = True
        try:
            batch = next(iterator)
        except StopIteration:
            self._progress.fetching = False
            self._handed_out = None
            raise
        self._handed_out = self._position.after_fetch(batch)
        return batch

    def advance(self, *, used: bool) -> None:
        """Count the current batch as trained, unless it has been counted already.

        Args:
            used: Whether a step was run on the batch.
        """
        progress = self._progress
        if not progress.fetching:
            return
        progress.batches += 1
        progress.trained += 1
        if used:
            progress.batches_without_step = 0
        else:
            progress.batches_without_step += 1
        progress.fetching = False
        self._position.note_counted(self._before_fetch)

    def leave(self) -> None:
        """Abandon the iterator. The next `begin` returns to the current position."""
        self._position.leave()
        self._handed_out = None
        if self._progress.fetching:
            self.left_in_batch = True
        self._progress.fetching = False
        self._progress.under_way = False

    def end_epoch(self, *, needs_steps: bool, stepped: bool) -> EpochFacts:
        """Move to the start of the next epoch, and return facts about the one that has ended.

        Args:
            needs_steps: Whether the loop ends after a given number of optimizer steps.
            stepped: Whether any step was run in this epoch.

        Raises:
            LoaderError: H601 if the epoch had no batches. H602 if the loop counts steps but no step
                was run in this epoch, so the loop would never end.
        """
        if self._progress.batches == 0:
            raise LoaderError(
                "the loader yielded no batches in a whole epoch",
                limit="an epoch needs at least one batch",
                fix=(
                    "check the path of the data and its filters, and whether drop_last drops the"
                    " only batch. If the loader is an iterator, it may be exhausted: pass the"
                    " iterable itself."
                ),
                rule="H601",
            )
        if needs_steps and not stepped and not self._begun_in_the_middle:
            raise LoaderError(
                "a whole epoch passed without an optimizer step",
                limit="max_steps counts optimizer steps and would never be reached",
                fix=(
                    "call guard.step(batch, loss_fn), or step an optimizer of the guard outside of"
                    " torch.compile, or pass max_epochs."
                ),
                rule="H602",
            )
        facts = EpochFacts(batches=self._progress.batches, batch_size=self.batch_size)
        self._progress.epoch += 1
        self._progress.batches = 0
        self._progress.under_way = False
        self._changed_ranks = ""
        self._position.end_epoch()
        return facts

    # --- the current batch

    @property
    def seems_to_end(self) -> bool:
        """Return whether the current batch is the last of its epoch according to ``len(loader)``.

        If so, a save that is due can wait until the epoch has ended.
        """
        return self.seems_to_end_after(batches=0)

    def seems_to_end_after(self, *, batches: int) -> bool:
        """Return whether the epoch ends after this many more batches, not counting the current one.

        This relies on ``len(loader)``.
        """
        if self._length is None:
            self._length = self._measured_length()
        # The current batch is not included in `batches` of the progress while `fetching` is True.
        position = self._progress.batches + self._progress.fetching
        return self._progress.under_way and position + batches == self._length

    def _measured_length(self) -> int:
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - a loader may raise anything, and the length is only a hint
            return -1

    def sample_indices(self, batch: Any, size: int | None) -> list[int] | None:
        """Return the dataset indices of a step's samples.

        The indices are known only if the step used the batch that this loader yielded, and not, for
        example, a batch from a second loader.

        Args:
            batch: The batch used for the step.
            size: The number of samples in the batch, or None if unknown.

        Returns:
            The indices in the order of the samples, or None if they are unknown.
        """
        if self._handed_out is None:
            return None
        return self._handed_out.indices_of(batch, size)

    @property
    def handed_out(self) -> HandedOut | None:
        """Return the current batch as the loader yielded it, or None if this was not recorded."""
        return self._handed_out

    def rewind_random_state(self, earlier: RandomState, generators: Collection[str]) -> None:
        """Rewind generators in the random state before the fetch of the current batch.

        Call this if a step is undone after the next batch was fetched.

        Args:
            earlier: The random state before the step.
            generators: The names of the generators that the step has moved.
        """
        if self._progress.fetching and self._before_fetch is not None:
            self._before_fetch = with_generators(self._before_fetch, earlier, generators)

    def repeats(self) -> bool:
        """Return whether the current batch repeats one that another rank trains on and counts."""
        if not self._progress.fetching or self._holdfast_loader is None:
            return False
        return self._holdfast_loader.batch_is_repeated

    def random_state(self) -> RandomState:
        """Return the random state that a checkpoint must save with the position.

        While a batch has been fetched but not counted, this is the state before the fetch.
        """
        if self._progress.fetching and self._before_fetch is not None:
            return self._before_fetch
        return capture(self._devices)

    # --- features that only a holdfast loader has

    def attach(self, record: Callable[[EventData], None], run_dir: Path) -> None:
        """Let a holdfast loader record its events and store its quarantine in the run directory."""
        if self._holdfast_loader is not None:
            self._holdfast_loader.attach(record, run_dir)

    def quarantine(self, indices: Sequence[int], evidence: str) -> None:
        """Make a holdfast loader replace these samples from the next epoch on.

        Args:
            indices: The dataset indices of the samples.
            evidence: Why the samples are considered bad, as text for the quarantine file.
        """
        if self._holdfast_loader is None:
            return
        for index in indices:
            self._holdfast_loader.quarantine(index, "provenance", evidence)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position, without a batch that was fetched but not trained."""
        return {
            "epoch": self._progress.epoch,
            "batches": self._progress.batches,
            "trained": self._progress.trained,
            **empty_state(),
            **self._position.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position from which the next `begin` continues."""
        self._progress.epoch = state["epoch"]
        self._progress.batches = state["batches"]
        self._progress.trained = state["trained"]
        self._progress.batches_without_step = 0
        self._progress.fetching = False
        self._progress.under_way = False
        self._changed_ranks = ""
        self._position.load_state_dict(state)


def _settings_were_changed(settings: Sequence[str]) -> str:
    """Return the promise for a checkpoint that was saved with other DataLoader settings.

    Args:
        settings: The settings at the time of saving, such as ``"batch_size=8"``.
    """
    return (
        f"none, because the checkpoint was saved with {', '.join(settings)} and the loader's"
        " settings have changed since: a resume would skip batches of a different size, or use"
        " other workers' random numbers. Use the settings of the checkpoint, or"
        " holdfast.DataLoader, which resumes exactly with any settings"
    )


def _ranks(number: int) -> str:
    """Return a number of ranks as text, such as "2 ranks"."""
    return "1 rank" if number == 1 else f"{number} ranks"
