"""`DataLoader`: torch's loader with an order and augmentation that resume exactly, and workers that
are replaced.

Order comes from (seed, epoch), each sample's random numbers from (seed, epoch, index), and the
position counts what was handed out. Nothing else is state, so a run goes on at any batch, with
another number of workers, another batch size or another number of ranks.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.loader.arguments import (
    as_torch,
    check_arguments,
    check_position,
    plan_of,
    ranks_of,
    start_method,
    why_undivided,
)
from holdfast.loader.device import moved, target_of
from holdfast.loader.machine import Load, Machine, concerns
from holdfast.loader.order.host_epochs import HostEpochs
from holdfast.loader.order.ranks import ranks_now, steps_left
from holdfast.loader.order.sampled import Drawn, Sampled
from holdfast.loader.quarantine import FILE_NAME, Ledger
from holdfast.loader.random_state import SeededGenerator
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import note_handlers
from holdfast.loader.streams.sharding import shards_itself
from holdfast.loader.streams.stream import (
    Beginning,
    StreamPlan,
    StreamPosition,
    StreamSource,
    keeps_state,
)
from holdfast.loader.weak_calls import WeakCall
from holdfast.loader.workers.board import Board
from holdfast.loader.workers.fetch import Fetcher, as_error
from holdfast.loader.workers.map_source import MapSource
from holdfast.loader.workers.pool import WorkerSettings
from holdfast.loader.workers.recovery import WorkerRecovery

_log = logging.getLogger("holdfast")


class Place(NamedTuple):
    """Where an epoch stands after a batch.

    A position counts samples of all ranks, or batches of a batch sampler or a stream.
    """

    position: int
    indices: tuple[Any, ...] | None = None
    streamed: Mapping[int, StreamPosition] = {}  # never changed; a proxy could not be pickled
    turn: int = 0
    drawn: Drawn | None = None

    def dataset_indices(self) -> list[int] | None:
        """Return the dataset indices of the samples in the batch before this place.

        None if not known.
        """
        indices = self.indices or ()
        known = bool(indices) and all(isinstance(index, (int, np.integer)) for index in indices)
        return [int(index) for index in indices] if known else None

    @classmethod
    def of(cls, state: dict[str, Any]) -> Place:
        """Return the place that a loader's state holds."""
        stream = state.get("stream", {"parts": [], "turn": 0})
        streamed = {
            shard: StreamPosition(items=items, state=kept, ended=ended)
            for shard, items, kept, ended in stream["parts"]
        }
        known = state["consumed"] and "drawn" in state  # at the beginning it may draw what it likes
        drawn = Drawn(state["drawn"], state.get("drawn_rank")) if known else None
        return cls(state["consumed"], None, streamed, stream["turn"], drawn)


class _Failed(NamedTuple):
    """An error in the place of a batch.

    Raised outside of the generators, which an exception would end.
    """

    error: Exception


class Epoch:
    """The batches of an epoch, which go on after an error in the place of one, as torch's do."""

    under_way: ClassVar[weakref.WeakSet[Epoch]] = weakref.WeakSet()
    """Those that have handed out a batch since `take_unkept_loaders`, and have not reached their
    end.

    One that was given up is gone by itself.
    """

    handed_out: ClassVar[int] = 0
    """Batches that all loaders of this process have handed out."""

    def __init__(self, batches: Generator[Any], loader: DataLoader) -> None:
        self._batches = batches
        self.loader = loader

    def __len__(self) -> int:
        """Return the batches of an epoch, as an iterator of torch's."""
        return len(self.loader)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.under_way.discard(self)
            raise
        self.under_way.add(self)
        Epoch.handed_out += 1
        if isinstance(batch, _Failed):
            raise batch.error
        return batch

    def close(self) -> None:
        """Give up the rest."""
        self.under_way.discard(self)
        self._batches.close()


def batches_handed_out() -> int:
    """Return how many batches all `DataLoader` of this process have handed out.

    More tells that one was read.
    """
    return Epoch.handed_out


def take_unkept_loaders() -> list[DataLoader]:
    """Return the loaders that are in the middle of an epoch and whose position nobody has asked for
    to keep it.

    Only those that have handed out a batch since the last call.
    """
    epochs = list(Epoch.under_way)
    Epoch.under_way.clear()
    return [epoch.loader for epoch in epochs if not epoch.loader.is_kept]


class DataLoader(TorchDataLoader[Any]):
    """A drop-in `torch.utils.data.DataLoader` that resumes exactly and replaces its workers when
    they are lost.

    Each ``iter()`` is one epoch, as with torch; the position is in `state_dict`. Workers that die,
    are stopped or hang are replaced, and the batches go on as if nothing had happened. A sample
    that cannot be read is tried again and then quarantined: the next readable one of the epoch's
    order takes its place.

    Under ``torch.distributed`` the samples are divided among the ranks, as they are when an epoch
    begins, unless you give a ``batch_sampler`` or a ``sampler`` of your own, which says itself what
    this rank gets. Its ``set_epoch`` is called for each epoch. If you have called it, and its
    attribute ``epoch`` shows that, the epoch you named comes next: not if `load_state_dict` or
    `go_to` was called since, and in the middle of an epoch only a later one.

    Args:
        dataset: As torch. An ``IterableDataset`` that does not divide its items among workers is
            divided here, and continues by its own ``state_dict`` if it has one, else by reading
            over. A map-style one is read by ``__getitem__``, also if it has ``__getitems__``: each
            sample has random numbers of its own. To read many at once, pass ``batch_size=None`` and
            a sampler of lists, such as a ``BatchSampler``. One that you have divided among ranks
            yourself, such as a ``Subset``, is divided again unless you pass ``rank=0`` and
            ``world_size=1``.
        *args: As torch.
        seed: Decides the order of every epoch and the random numbers of every sample;
            ``torch.manual_seed`` does not. If torch's ``generator`` is given, its initial seed is
            used instead. Two loaders that are zipped need different seeds, or equal lengths are
            shuffled alike.
        quarantine: Most samples that may be quarantined: a share of the dataset below 1, which
            allows at least one, or a number. 0: none, the sample's own exception ends the epoch.
        repeats: Whether your sampler may yield an index more than once an epoch; None: only if it
            says that it draws with replacement.
        sharded: Whether an ``IterableDataset`` divides its items among workers itself; None: as its
            code shows. Such items, and those of a dataset that asks for ranks, are divided among
            ranks only if you pass ``rank``.
        rank: Which rank this is; None: as ``torch.distributed`` says.
        world_size: Number of ranks; None: as ``torch.distributed`` says.
        device: Where each batch is copied to when it is asked for; best with ``pin_memory=True``,
            so that the host does not wait. None leaves them on the host.
        **kwargs: As torch. ``timeout`` is how long the loop waits for a batch before workers are
            replaced; also without it a worker that is stuck is found, after a minute or eight times
            the longest sample so far. Its start and ``worker_init_fn`` may take ten times as long.
            Batches always come in order, since a position is one number: ``in_order=False`` is
            taken as True.

    Raises:
        LoaderError: H603 for a sampler without a length, H607 for arguments that cannot be used,
            H610 for a dataset without samples.

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
        given = check_arguments(dataset, args, kwargs, seed=seed, quarantine=quarantine)
        self._iterable = isinstance(dataset, IterableDataset)
        by_code = (
            sharded is None
            and self._iterable
            and shards_itself(dataset, given.get("worker_init_fn"))
        )
        self.sharded = self._iterable and (by_code if sharded is None else sharded)
        self._sharding_given = sharded is not None
        super().__init__(**given)
        self.seed = int(seed) if self.generator is None else self.generator.initial_seed()
        named = rank is not None
        self._undivided = (
            why_undivided(dataset, sharded=self.sharded) if self._iterable and not named else ""
        )
        self._ranks_fixed = named or bool(self._undivided)
        self._ranks = (0, 1) if self._undivided else ranks_of(rank, world_size)
        self._plan = (
            None
            if self._iterable
            else plan_of(self, given, self._ranks, repeats=repeats, named=named)
        )
        self._replaces = quarantine > 0
        self._length = len(dataset) if isinstance(dataset, Sized) and not self._iterable else None
        self.ledger = Ledger(quarantine, self._length, time.time)
        """Samples that are quarantined, with the evidence."""
        self._epoch = 0
        self._at = Place(position=0)
        self.repeats = False
        """Whether the batch that was handed out last is one of another rank too.

        Of fewer samples than ranks.
        """
        self.is_kept = False
        """Whether a guard iterates this loader, or somebody has asked for its `state_dict`."""
        self.device = device
        self._under_way = False
        self._sampler_reported = False
        self._host_epochs = HostEpochs(self)
        # Whether samples draw from python's or numpy's generator, as far as is known
        self._draws = False
        self._record: Callable[[EventData], None] | None = None
        self._beginning = Beginning()
        # A private one: starting an epoch leaves the global one alone
        self._base_seeds = SeededGenerator()
        keep = given.get("persistent_workers", False) and not self._iterable
        # Workers that are kept end with the loader, not when garbage is collected
        emit = WeakCall(self, "_emit")
        settings = WorkerSettings(
            workers=self.num_workers,
            method=start_method(given.get("multiprocessing_context")),
            options=as_torch(self, generator=self._base_seeds, keep=keep),
            timeout_seconds=given.get("timeout", 0),
            keep=keep,
        )
        self._recovery = WorkerRecovery(settings, emit)
        self._checked: set[str] = set()  # rules of which was warned
        self._unchecked = self.num_workers > 0

    # --- what happens

    def attach(self, record: Callable[[EventData], None], run_dir: Path) -> None:
        """Call `record` with each event, and keep the ledger in the run's directory."""
        self._record = record
        self.is_kept = True
        self.ledger.keep_in(run_dir / FILE_NAME)

    def _emit(self, data: EventData) -> None:
        if self._record is not None:
            self._record(data)
        else:
            _log.warning("%s", data)

    def quarantine(self, index: int, kind: str, evidence: str) -> None:
        """Replace a sample by another one from the next epoch on.

        H612 if that would be one too many.
        """
        if event := self.ledger.add(index, kind, self._epoch + 1, evidence):
            self._emit(event)

    def _check_machine(self, batch: Any = None) -> None:
        """Warn of workers that the machine is not enough for; of each rule once."""
        load = Load.of(batch, self._recovery.settings.workers, self.prefetch_factor)
        for concern in concerns(load, Machine.here()):
            if concern.rule not in self._checked:
                self._checked.add(concern.rule)
                self._emit(concern)

    # --- batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the batches of the next epoch.

        After an error in the place of one they go on, as torch's do.
        """
        return Epoch(self._epoch_batches(), self)

    def _epoch_batches(self) -> Generator[Any]:
        """Yield the batches of the next epoch, or what is left after `load_state_dict`."""
        note_handlers()
        self._move_on()
        epoch = self._epoch
        self._check_length()
        # Drawn here, where an error of the sampler is no worker's.
        drawn = None if self._sampler is None else self._sampler.in_short(epoch, self._at.drawn)
        self._report_a_changed_sampler()
        self._base_seeds.manual_seed(derive_seed(self.seed, epoch, "workers"))
        source = self._stream_source() if self._plan is None else self._map_source()
        target = target_of(self.device)
        with contextlib.closing(self._batches(source, drawn)) as batches:
            for batch, place in batches:
                if place is not None:
                    # First: a copy that fails is no batch that was handed out
                    batch = moved(batch, target)
                    # Another iterator of this loader, such as a look at a batch, may have moved on
                    # meanwhile.
                    if self._epoch != epoch or not self._under_way:
                        self._epoch, self._under_way = epoch, True
                    self.repeats = self._plan is not None and self._plan.repeats(
                        epoch, self._at.position
                    )
                    self._at = place
                yield batch
        self._move_to(epoch + 1)

    def _move_on(self) -> None:
        """Go to the epoch that comes next, among the ranks that there are now."""
        self._look_at_ranks()
        if self._under_way:  # an epoch that was left before its end, as torch: the next one starts
            self._move_to(self._epoch + 1)
        on_sampler = None if self._sampler is None else self._sampler.epoch_set()
        epoch = self._host_epochs.follow(
            self._epoch, on_sampler, self._emit, begun=self._at.position > 0
        )
        if epoch != self._epoch:
            self._epoch, self._at = epoch, Place(position=0)

    def _look_at_ranks(self) -> None:  # anew: the process group may be younger than the loader
        if not self._ranks_fixed:
            self._ranks = ranks_now(self._ranks)
            self._plan = None if self._plan is None else self._plan.among(*self._ranks)

    def _check_length(self) -> None:
        if self._length is not None and len(self.dataset) != self._length:  # type: ignore[arg-type]
            raise LoaderError(
                f"the dataset has {len(self.dataset)} samples"  # type: ignore[arg-type]
                f" and had {self._length} when the loader was made",
                limit="an order is made for one length",
                fix="make a new loader, or keep the length fixed.",
                rule="H608",
            )

    @property
    def _sampler(self) -> Sampled | None:
        return None if self._plan is None else self._plan.sampler

    def _batches(
        self, source: MapSource | StreamSource, drawn: Drawn | None
    ) -> Generator[tuple[Any, Place | None]]:
        """Yield batches with where the epoch stands after each.

        None for an error that stands in the place of one.
        """
        if self._plan is not None and self._at.position and not self._plan.steps(self._at.position):
            self._nothing_left()
        if self._unchecked:
            self._check_machine()
        # Not before: after what raises until here, the epoch is still the next one
        self._under_way = True
        with contextlib.closing(self._recovery.batches(source)) as made:
            for count, (batch, report) in enumerate(made, start=self._at.position + 1):
                if report.fatal is not None:
                    yield _Failed(as_error(report.fatal, report)), None
                    continue
                if self._unchecked:  # once the size of a batch is known
                    self._check_machine(batch)
                    self._unchecked = False
                self._draws |= report.draws
                if isinstance(source, MapSource):
                    yield batch, Place(source.position, report.indices, drawn=drawn)
                else:
                    yield batch, Place(count, None, dict(source.positions), source.turn)

    def _nothing_left(self) -> None:
        """Warn of an iteration without batches, unless the host has said that it means this
        epoch.
        """
        if not self._host_epochs.followed:
            why = (
                "the position that was loaded is behind the last batch of its epoch, so the next"
                " one is the next iteration; if your loop counts this epoch as done, call"
                " loader.set_epoch(epoch) before each"
            )
            self._emit(run_events.NothingLeft(epoch=self._epoch, why=why))

    def _report_a_changed_sampler(self) -> None:
        """Say once that the loop changes the sampler between epochs, so that no checkpoint can
        bring it back.
        """
        if self._sampler is None or not self._sampler.changed_by_others or self._sampler_reported:
            return
        self._sampler_reported = True
        why = (
            "none, because the sampler was changed between epochs, and not by being iterated: no"
            " checkpoint holds that, and a resume is refused (H604). Give the sampler state_dict"
            " and load_state_dict"
        )
        self._emit(run_events.ResumeMayDiffer(why=why))

    def _map_source(self) -> MapSource:
        assert self._plan is not None

        def make_fetcher(board: Board | None) -> Fetcher:
            how = {"replaces": self._replaces, "draws": self._draws}
            return Fetcher(self.dataset, self.seed, self.collate_fn, board, **how)

        return MapSource(
            self._plan, self._epoch, self._at.position, self.ledger, make_fetcher, self._emit
        )

    def _stream_source(self) -> StreamSource:
        rank, world_size = self._ranks
        plan = StreamPlan(
            dataset=self.dataset,
            collate=self.collate_fn,
            seed=self.seed,
            epoch=self._epoch,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            sharded=self.sharded,
            certain=self._sharding_given,
            rank=rank,
            world_size=world_size,
            beginning=self._beginning,
        )
        if self._at.streamed and not keeps_state(self.dataset):
            why = (
                "the dataset has no state_dict and load_state_dict: what comes before the position"
                " is read again"
            )
            items = max(each.items for each in self._at.streamed.values())
            self._emit(run_events.StreamReadOver(items=items, why=why))
        if self._undivided and ranks_now((0, 1))[1] > 1:
            self._emit(run_events.RanksNotDivided(why=self._undivided))
        return StreamSource(plan, dict(self._at.streamed), self._at.turn, max(1, self.num_workers))

    def __len__(self) -> int:
        """Return the batches of an epoch, of this rank."""
        self._look_at_ranks()
        if self._plan is not None:
            return self._plan.steps(0)
        items, size = len(self.dataset), self.batch_size or 1  # type: ignore[arg-type] # as torch, if it has no length
        return steps_left(0, items, size, self._ranks[1], drop_last=self.drop_last)

    @property
    def batch_indices(self) -> list[int] | None:
        """Return the dataset indices of the samples in the batch that was handed out last.

        None if not known.
        """
        return self._at.dataset_indices()

    @property
    def place(self) -> Place:
        """Return where the epoch stands after the batch that was handed out last."""
        return self._at

    # --- position

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what was handed out so far, as numbers and text.

        What a stream or a sampler returns from a ``state_dict`` of its own is part of it.
        """
        self.is_kept = True
        return self.with_sampler(self.position())

    def position(self) -> dict[str, Any]:
        """Return `state_dict` without what belongs to a sampler of the user's, whose state may
        be large.
        """
        state = {"epoch": self._epoch, "consumed": self._at.position, "order": self._identity()}
        if self._host_epochs.current not in (None, self._epoch):
            state["named"] = self._host_epochs.current
        if self._at.drawn is not None:
            state["drawn"], state["drawn_rank"] = self._at.drawn
        if self._iterable:
            parts = [
                [shard, each.items, each.state, each.ended]
                for shard, each in sorted(self._at.streamed.items())
            ]
            state["stream"] = {"parts": parts, "turn": self._at.turn}
        return state

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the position at the beginning of an epoch."""
        state = {"epoch": epoch, "consumed": 0, "order": self._identity()}
        return self.with_sampler(
            {**state, "stream": {"parts": [], "turn": 0}} if self._iterable else state
        )

    def with_sampler(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return a `position` together with what belongs to the sampler."""
        kept = None if self._sampler is None else self._sampler.state_dict(position["epoch"])
        return position if kept is None else {**position, "sampler": kept}

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` is, as you count them.

        Earlier ones do not come again, see `go_to`.

        Without it, a position that was loaded at the last batch of an epoch gives the rest of it:
        no batch.
        """
        self._host_epochs.named = int(epoch)

    def go_to(self, epoch: int) -> None:
        """Let the next ``iter()`` be the whole of this epoch."""
        self._move_to(epoch)
        self._host_epochs.placed(epoch)
        if self._sampler is not None:
            self._sampler.epoch_set()  # whatever was set on it before

    def _move_to(self, epoch: int) -> None:
        self._host_epochs.moved(epoch - self._epoch)
        self._epoch, self._at, self._under_way = epoch, Place(position=0), False

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a position to point at the same samples."""
        if self._plan is not None:
            return {"seed": self.seed, **self._plan.identity()}
        workers = max(1, self.num_workers) if self.sharded else None
        return {"seed": self.seed, "counts": "batches", "kind": "stream", "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position at the next ``iter()``.

        H604 if it is none, or would point at other samples.
        """
        check_position(self._identity(), state)
        at = Place.of(state)
        if self._sampler is not None:
            self._sampler.load_state_dict(state.get("sampler"), state["epoch"])
        if self._sampler is not None and at.drawn is not None:
            self._sampler.in_short(state["epoch"], at.drawn)
        self.go_to(state["epoch"])
        self._host_epochs.placed(state.get("named", state["epoch"]))
        self._at = at

    def close(self) -> None:
        """End workers that ``persistent_workers`` kept."""
        self._recovery.close()
