"""`DataLoader`: torch's loader with exact resume and automatic replacement of lost workers.

The order of samples is computed from (seed, epoch), and a sample's random numbers from (seed,
epoch, index). The position is the number of samples returned so far. There is no other state, so a
run can continue at any batch, even with a different batch size or number of workers or ranks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.loader.arguments import (
    check_arguments,
    check_position,
    check_ranks,
    options_for_torch,
    plan_batches,
    start_method,
    why_not_divided,
)
from holdfast.loader.device import find_copy_target, move_to_device
from holdfast.loader.epoch import Epoch, FailedBatch, is_iterated
from holdfast.loader.machine import Load, Machine, concerns
from holdfast.loader.order.host_epochs import HostEpochs
from holdfast.loader.order.ranks import ranks_now, steps_left
from holdfast.loader.order.sampler_order import Drawn, SamplerOrder
from holdfast.loader.position import LoaderPosition
from holdfast.loader.quarantine import FILE_NAME, QuarantineLedger
from holdfast.loader.random_state import SeededGenerator
from holdfast.loader.samplers import is_stateful
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import note_handlers
from holdfast.loader.streams.sharding import shards_itself
from holdfast.loader.streams.stream import InitialState, StreamSettings, StreamSource
from holdfast.loader.weak_calls import WeakCall
from holdfast.loader.workers.board import Board
from holdfast.loader.workers.fetch import Fetcher
from holdfast.loader.workers.map_source import MapSource
from holdfast.loader.workers.pool import WorkerSettings
from holdfast.loader.workers.recovery import WorkerRecovery
from holdfast.loader.workers.report import as_error

_log = logging.getLogger("holdfast")


class DataLoader(TorchDataLoader[Any]):
    """A `torch.utils.data.DataLoader` that resumes exactly and replaces lost workers.

    It is a drop-in replacement for torch's loader. Each ``iter()`` starts an epoch, as in torch,
    and `state_dict` returns the position. Workers that die, are stopped or hang are replaced, and
    the training loop gets the same batches as without the failure. A sample that cannot be read is
    retried once and then quarantined: the next readable sample in the epoch's order takes its
    place.

    Under ``torch.distributed``, the samples are divided among the ranks that exist when an epoch
    begins. If you pass a ``batch_sampler`` or ``sampler``, it decides which samples this rank gets,
    and its ``set_epoch`` is called for each epoch. You can also call ``set_epoch`` yourself to
    choose the next epoch, if the sampler stores the number in its attribute ``epoch``. In the
    middle of an epoch, only a later epoch is accepted. Calls before `load_state_dict` or `go_to`
    are ignored.

    Args:
        dataset: As in torch. The items of an ``IterableDataset`` are divided among workers unless
            the dataset divides them itself. A resume uses the dataset's own ``state_dict`` if it
            has one, and otherwise reads all items before the position again. A map-style dataset is
            read through ``__getitem__`` even if it has ``__getitems__``, because each sample has
            its own random numbers. To read many samples at once, pass ``batch_size=None`` and a
            sampler that yields lists, such as a ``BatchSampler``. If you have already divided the
            dataset among ranks, for example with a ``Subset``, pass ``rank=0`` and
            ``world_size=1``, so that it is not divided again.
        *args: As in torch.
        seed: Determines the order of every epoch and the random numbers of every sample, which
            ``torch.manual_seed`` does not affect. If you pass torch's ``generator``, its initial
            seed is used instead. If you zip two loaders, give them different seeds. Otherwise, two
            datasets of the same length are shuffled identically.
        quarantine: The maximum number of quarantined samples, given either as a count or as a
            fraction of the dataset (below 1). A fraction always allows at least one sample. With 0,
            a sample that raises an exception ends the epoch.
        repeats: Whether your sampler may yield an index more than once per epoch. With None,
            repeats are allowed if the sampler draws with replacement or is a
            ``DistributedSampler``.
        sharded: Whether an ``IterableDataset`` divides its items among workers itself. With None,
            this is inferred from the dataset's code. If the dataset does so, or if its code reads
            its rank, its items are divided among ranks only if you pass ``rank``.
        rank: The rank of this process. With None, it is taken from ``torch.distributed``.
        world_size: The number of ranks. With None, it is taken from ``torch.distributed``.
        device: The device to which each batch is copied when the loop requests it. Combine it with
            ``pin_memory=True``, so that the host does not wait for the copy. With None, batches
            stay on the host.
        **kwargs: As in torch. ``timeout`` is how long the loop waits for a batch before the workers
            are replaced. Without a timeout, a worker counts as stuck if it spends more than a
            minute on one sample, or more than eight times the longest time that any sample has
            taken so far, whichever is longer. Starting a worker, including ``worker_init_fn``, may
            take ten times as long.
            ``in_order=False`` is ignored: batches always arrive in order, because the position is a
            single number.

    Raises:
        LoaderError: H603 for a sampler without a length, H607 for an invalid argument, H610 for a
            dataset without samples.

    Example:
        >>> loader = DataLoader(list(range(4)), batch_size=2, shuffle=True, seed=1)
        >>> first = list(loader); loader.load_state_dict({**loader.state_dict(), "epoch": 0})
        >>> all(torch.equal(a, b) for a, b in zip(first, loader))
        True
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        seed: int = 0,
        quarantine: float = 0.001,
        repeats: bool | None = None,
        sharded: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = check_arguments(dataset, args, kwargs, seed=seed, quarantine=quarantine)
        self._iterable = isinstance(dataset, IterableDataset)
        # Whether the dataset is a stream that divides its items among workers itself.
        self.sharded = self._iterable and bool(sharded)
        if self._iterable and sharded is None:
            self.sharded = shards_itself(dataset, arguments.get("worker_init_fn"))
        self._hides_worker = sharded is None and not self.sharded
        super().__init__(**arguments)
        self.seed = int(seed) if self.generator is None else self.generator.initial_seed()
        self.device = device

        ranks_were_passed = rank is not None
        # Why a stream is not divided among the ranks, or "" if it is.
        self._why_not_divided = ""
        if self._iterable and not ranks_were_passed:
            self._why_not_divided = why_not_divided(dataset, sharded=self.sharded)
        # If False, the ranks are looked up at the beginning of each epoch.
        self._ranks_are_fixed = ranks_were_passed or bool(self._why_not_divided)
        self._ranks = (0, 1) if self._why_not_divided else check_ranks(rank, world_size)

        # How samples are grouped into batches. None for a stream.
        self._epoch_batches = None
        # Number of samples in a map-style dataset, or None if it has no length.
        self._length = None
        if not self._iterable:
            self._epoch_batches = plan_batches(
                self,
                arguments,
                self._ranks,
                repeats=repeats,
                ranks_were_passed=ranks_were_passed,
            )
            if isinstance(dataset, Sized):
                self._length = len(dataset)

        # The quarantined samples, each with the reason.
        self.ledger = QuarantineLedger(quarantine, self._length, time.time)
        self._replaces_bad_samples = quarantine > 0
        # Whether samples are known to draw from Python's or NumPy's global generator.
        self._draws = False

        self._epoch = 0
        self._position = LoaderPosition(consumed=0)
        # Whether batches of the current epoch have been requested.
        self._under_way = False
        self._host_epochs = HostEpochs(self)
        # Whether a lower rank also gets the batch that was last returned, because fewer samples
        # were left than there are ranks.
        self.batch_is_repeated = False
        self._initial_state = InitialState()

        # Whether the position is saved, because the loader is part of a run, or `state_dict` or
        # `load_state_dict` was called.
        self.is_kept = False
        self._record: Callable[[EventData], None] | None = None
        self._sampler_was_reported = False
        # The ids of the rules in `machine` that have been reported.
        self._reported_rules: set[str] = set()
        # Whether the machine must be checked again once the size of a batch is known.
        self._machine_is_unchecked = self.num_workers > 0

        # This generator is private, so that starting an epoch does not advance torch's global one.
        self._worker_seeds = SeededGenerator()
        keep_workers = arguments.get("persistent_workers", False) and not self._iterable
        settings = WorkerSettings(
            workers=self.num_workers,
            method=start_method(arguments.get("multiprocessing_context")),
            options=options_for_torch(
                self, generator=self._worker_seeds, keep_workers=keep_workers
            ),
            timeout_seconds=arguments.get("timeout", 0),
            keep=keep_workers,
        )
        # `WeakCall` holds a weak reference, because a bound method would create a reference cycle.
        # Persistent workers must end when the last reference to the loader is gone, not at a later
        # garbage collection.
        self._recovery = WorkerRecovery(settings, WeakCall(self, "_emit"))

    # --- events -----------------------------------------------------------------------------------

    def attach(self, record: Callable[[EventData], None], run_dir: Path) -> None:
        """Send all later events to `record`, and store the quarantine ledger in `run_dir`."""
        self._record = record
        self.is_kept = True
        self.ledger.keep_in(run_dir / FILE_NAME)

    def _emit(self, data: EventData) -> None:
        if self._record is not None:
            self._record(data)
        else:
            _log.warning("%s", data)

    def quarantine(self, index: int, kind: str, evidence: str) -> None:
        """Quarantine a sample, so that another sample takes its place from the next epoch on.

        Args:
            index: Dataset index of the sample.
            kind: See `Quarantined`.
            evidence: See `Quarantined`.

        Raises:
            LoaderError: H612 if the quarantine is full.
        """
        event = self.ledger.add(index, kind, self._epoch + 1, evidence)
        if event is not None:
            self._emit(event)

    def _check_machine(self, batch: Any = None) -> None:
        """Warn, once per rule, if the machine lacks resources for the workers."""
        load = Load.of(batch, self._recovery.settings.workers, self.prefetch_factor)
        for concern in concerns(load, Machine.here()):
            if concern.rule not in self._reported_rules:
                self._reported_rules.add(concern.rule)
                self._emit(concern)

    # --- epochs -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over the next epoch, or over its remaining batches after a resume.

        As in torch, iteration can continue after a batch has raised an error.
        """
        return Epoch(self._iterate_epoch(), self)

    def _iterate_epoch(self) -> Generator[Any]:
        note_handlers()
        self._go_to_next_epoch()
        epoch = self._epoch
        self._check_length()
        # The sampler is iterated here, so that its errors are not mistaken for a worker's errors.
        drawn = None
        if self._sampler is not None:
            drawn = self._sampler.check_drawn(epoch, self._position.drawn)
        self._report_changed_sampler()
        self._worker_seeds.manual_seed(derive_seed(self.seed, epoch, "workers"))
        source: MapSource | StreamSource
        if self._iterable:
            self._warn_about_stream()
            source = self._stream_source()
        else:
            source = self._map_source()
        target = find_copy_target(self.device)
        with contextlib.closing(self._receive_batches(source, drawn)) as batches:
            for batch, position in batches:
                if position is None:
                    yield batch
                    continue
                # The copy precedes the advance, so that the position does not count a batch that
                # could not be copied. The variable is reused, so that the batch on the host is
                # freed.
                batch = move_to_device(batch, target)
                self._advance(epoch, position)
                yield batch
        self._move_to(epoch + 1)

    def _advance(self, epoch: int, position: LoaderPosition) -> None:
        """Advance the position past a batch that is about to be returned."""
        # Another iterator over this loader, for example one that only inspected a batch, may have
        # moved the loader to another epoch.
        if self._epoch != epoch or not self._under_way:
            self._epoch = epoch
            self._under_way = True
        if self._epoch_batches is not None:
            self.batch_is_repeated = self._epoch_batches.is_repeated(epoch, self._position.consumed)
        self._position = position

    def _go_to_next_epoch(self) -> None:
        """Advance to the next epoch, and divide it among the current ranks."""
        self._update_ranks()
        if self._under_way:
            # As in torch, leaving an epoch early ends it.
            self._move_to(self._epoch + 1)
        epoch_on_sampler = None if self._sampler is None else self._sampler.take_epoch_set()
        epoch = self._host_epochs.choose_epoch(
            self._epoch, epoch_on_sampler, self._emit, begun=self._position.consumed > 0
        )
        if epoch != self._epoch:
            self._epoch = epoch
            self._position = LoaderPosition(consumed=0)

    def end_abandoned_epoch(self) -> None:
        """Advance to the next epoch if the current one was left early, as the next ``iter()`` does.

        A position that is saved between the two then belongs to the epoch that ``iter()`` starts.
        """
        if self._under_way and not is_iterated(self):
            self._move_to(self._epoch + 1)

    def _update_ranks(self) -> None:
        """Look up the ranks again, in case the process group was created after the loader."""
        if self._ranks_are_fixed:
            return
        self._ranks = ranks_now(self._ranks)
        if self._epoch_batches is not None:
            self._epoch_batches = self._epoch_batches.for_rank(*self._ranks)

    def _check_length(self) -> None:
        if self._length is None:
            return
        length = len(self.dataset)  # type: ignore[arg-type]
        if length != self._length:
            raise LoaderError(
                f"the dataset has {length} samples, but had {self._length} when the loader was"
                " created",
                limit="the order of samples depends on the length of the dataset",
                fix="create a new loader, or keep the dataset's length fixed.",
                rule="H608",
            )

    @property
    def _sampler(self) -> SamplerOrder | None:
        return None if self._epoch_batches is None else self._epoch_batches.sampler

    def _receive_batches(
        self, source: MapSource | StreamSource, drawn: Drawn | None
    ) -> Generator[tuple[Any, LoaderPosition | None]]:
        """Yield each batch with the position after it. A `FailedBatch` is yielded with None."""
        self._warn_if_nothing_is_left()
        if self._machine_is_unchecked:
            self._check_machine()
        # This is not set earlier, so that this epoch is still the next one if a check above raises
        # an error.
        self._under_way = True
        consumed_batches = self._position.consumed
        with contextlib.closing(self._recovery.batches(source)) as received:
            for batch, report in received:
                consumed_batches += 1
                if report.fatal is not None:
                    yield FailedBatch(as_error(report.fatal, report)), None
                    continue
                if self._machine_is_unchecked:
                    # The size of a batch, which the check uses, is only known now.
                    self._check_machine(batch)
                    self._machine_is_unchecked = False
                self._draws |= report.draws
                if isinstance(source, MapSource):
                    yield batch, LoaderPosition(source.position, report.indices, drawn=drawn)
                else:
                    parts = dict(source.positions)
                    yield batch, LoaderPosition(consumed_batches, None, parts, source.turn)

    def _warn_if_nothing_is_left(self) -> None:
        """Warn if the epoch has no batches left, unless ``set_epoch`` was called for this epoch."""
        if self._epoch_batches is None or not self._position.consumed:
            return
        if self._epoch_batches.steps_after(self._position.consumed):
            return
        if not self._host_epochs.is_named:
            why = (
                "the loaded position is after the last batch of its epoch, so this iteration is"
                " empty, and the next epoch begins with the next iteration. If your loop already"
                " counts this epoch as done, call loader.set_epoch(epoch) before each epoch"
            )
            self._emit(run_events.NothingLeft(epoch=self._epoch, why=why))

    def _report_changed_sampler(self) -> None:
        """Warn once if the loop changes the sampler between epochs, since this is not saved."""
        sampler = self._sampler
        if sampler is None or not sampler.changed_by_others or self._sampler_was_reported:
            return
        self._sampler_was_reported = True
        why = (
            "none, because the sampler was changed between epochs other than by iterating over it."
            " Checkpoints do not contain such changes, so a resume would be refused (H604). Add"
            " state_dict and load_state_dict to the sampler"
        )
        self._emit(run_events.ResumeMayDiffer(why=why))

    # --- sources ----------------------------------------------------------------------------------

    def _map_source(self) -> MapSource:
        assert self._epoch_batches is not None
        return MapSource(
            self._epoch_batches,
            self._epoch,
            self._position.consumed,
            self.ledger,
            self._make_fetcher,
            self._emit,
        )

    def _make_fetcher(self, board: Board | None) -> Fetcher:
        return Fetcher(
            self.dataset,
            self.seed,
            self.collate_fn,
            board,
            replaces=self._replaces_bad_samples,
            draws=self._draws,
        )

    def _stream_source(self) -> StreamSource:
        rank, world_size = self._ranks
        settings = StreamSettings(
            dataset=self.dataset,
            collate=self.collate_fn,
            seed=self.seed,
            epoch=self._epoch,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            sharded=self.sharded,
            hides_worker=self._hides_worker,
            rank=rank,
            world_size=world_size,
            initial_state=self._initial_state,
        )
        workers = max(1, self.num_workers)
        return StreamSource(settings, dict(self._position.stream), self._position.turn, workers)

    def _warn_about_stream(self) -> None:
        """Warn if a resume reads items again, or if every rank gets all items."""
        if self._position.stream and not is_stateful(self.dataset):
            why = (
                "the dataset has no state_dict and load_state_dict, so all items before the"
                " position are read again"
            )
            items = max(part.items for part in self._position.stream.values())
            self._emit(run_events.StreamReadOver(items=items, why=why))
        _, world_size_now = ranks_now((0, 1))
        if self._why_not_divided and world_size_now > 1:
            self._emit(run_events.RanksNotDivided(why=self._why_not_divided))

    def __len__(self) -> int:
        """Return the number of batches that this rank gets in an epoch."""
        self._update_ranks()
        if self._epoch_batches is not None:
            return self._epoch_batches.steps_after(0)
        # As in torch, this raises `TypeError` if the dataset has no length.
        items = len(self.dataset)  # type: ignore[arg-type]
        _, world_size = self._ranks
        return steps_left(0, items, self.batch_size or 1, world_size, drop_last=self.drop_last)

    @property
    def batch_indices(self) -> list[int] | None:
        """Dataset indices of the samples in the last returned batch, or None if unknown."""
        return self._position.dataset_indices()

    @property
    def place(self) -> LoaderPosition:
        """The position after the last returned batch."""
        return self._position

    # --- position ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last returned batch, as JSON values.

        If the stream or the sampler has its own ``state_dict``, the result of this method is
        included unchanged.
        """
        self.is_kept = True
        return self.with_sampler(self.position())

    def position(self) -> dict[str, Any]:
        """Return the `state_dict` without the state of the user's sampler, which may be large."""
        state = {
            "epoch": self._epoch,
            "consumed": self._position.consumed,
            "order": self._identity(),
        }
        # The host's number for the epoch is saved only if it differs from the loader's own number.
        if self._host_epochs.current not in (None, self._epoch):
            state["named"] = self._host_epochs.current
        if self._position.drawn is not None:
            state["drawn"] = self._position.drawn.digest
            state["drawn_rank"] = self._position.drawn.rank
        if self._iterable:
            state["stream"] = self._position.stream_state()
        return state

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the position at the beginning of an epoch."""
        state = {"epoch": epoch, "consumed": 0, "order": self._identity()}
        if self._iterable:
            state["stream"] = LoaderPosition(consumed=0).stream_state()
        return self.with_sampler(state)

    def with_sampler(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return the result of `position`, with the state of the user's sampler added to it."""
        if self._sampler is None:
            return position
        sampler_state = self._sampler.state_dict(position["epoch"])
        if sampler_state is None:
            return position
        return {**position, "sampler": sampler_state}

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next ``iter()`` starts, as counted by your loop.

        This never moves the loader back to an earlier epoch; use `go_to` for that. If you load a
        position at the end of an epoch and do not call this method, the first iteration yields no
        batches, because that epoch has none left.
        """
        self._host_epochs.named = int(epoch)

    def go_to(self, epoch: int) -> None:
        """Make the next ``iter()`` start at the beginning of the given epoch."""
        self._move_to(epoch)
        self._host_epochs.note_position(epoch)
        if self._sampler is not None:
            # Any epoch that was set on the sampler before this call is discarded.
            self._sampler.take_epoch_set()

    def _move_to(self, epoch: int) -> None:
        self._host_epochs.note_move(epoch - self._epoch)
        self._epoch = epoch
        self._position = LoaderPosition(consumed=0)
        self._under_way = False

    def _identity(self) -> dict[str, Any]:
        """Return the properties of this loader that must be the same when a position is loaded.

        If they are, the position refers to the same samples as in the run that saved it.
        """
        if self._epoch_batches is not None:
            return {"seed": self.seed, **self._epoch_batches.identity()}
        workers = max(1, self.num_workers) if self.sharded else None
        return {"seed": self.seed, "counts": "batches", "kind": "stream", "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``iter()`` continue from a position that `state_dict` returned.

        Raises:
            LoaderError: H604 if `state` is not a position, or would refer to different samples in
                this loader.
        """
        check_position(self._identity(), state)
        self.is_kept = True
        position = LoaderPosition.from_state(state)
        epoch = state["epoch"]
        if self._sampler is not None:
            self._sampler.load_state_dict(state.get("sampler"), epoch)
            if position.drawn is not None:
                self._sampler.check_drawn(epoch, position.drawn)
        self.go_to(epoch)
        self._host_epochs.note_position(state.get("named", epoch))
        self._position = position

    def close(self) -> None:
        """Shut down the workers that ``persistent_workers`` keeps alive."""
        self._recovery.close()
