"""The session of a run in one process: from opening its directory to closing it.

It defines what belongs to the state of a run, and restores that state from checkpoints and from
snapshots in host memory. When and how checkpoints are written is in ``saving``.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.background import wait_for_jobs
from holdfast.checkpoint.codec import Encoder
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.interval import SaveCost
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.read_errors import reading
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.containers import check_count, check_number
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.events import run_events
from holdfast.guard.context import RunContext
from holdfast.guard.cursor import Cursor, check_position
from holdfast.guard.directory import RunDirectory
from holdfast.guard.optimizer_state import describe_state, state_tensors
from holdfast.guard.optimizers import SHARDED_STATE_FIX, SHARDED_STATE_LIMIT
from holdfast.guard.record import End, describe_error
from holdfast.guard.result import Counters, Statistics
from holdfast.guard.run.last_steps import last_step, note_last_step
from holdfast.guard.saving.components import (
    changes_without_a_step,
    check_fits,
    check_saveable,
    component_names,
    gather,
    has_weights_of,
    live_tensors,
    load,
    states_now,
)
from holdfast.guard.saving.reserves import Reserves
from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.snapshots import Kept, Snapshots
from holdfast.guard.saving.unsaved import forget_left_steps
from holdfast.guard.schedules import Schedules
from holdfast.guard.splitting.loss_functions import called_inside
from holdfast.guard.state.trees import copied_to_host
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes
from holdfast.numerics.gradients import local
from holdfast.numerics.spikes import SpikeDetector
from holdfast.recorder.run_files import announce_recording, guarded
from holdfast.recorder.scalars import CheckedScalars, outlets

# Created once, since `log` may be called in every step.
_OPEN = contextlib.nullcontext()
# The maximum number of names in one event.
_MOST_NAMES = 10
_CHANGED = (
    "the weights, buffers or moments were changed without a step, so they are not those that"
    " training produced"
)


class Session:
    """The state of one run, and its restoration.

    Args:
        context: What the objects of the run share.
        directory: The run directory.
        clock: The source of time.
        cursor: The position in the loader, or None if the guard has no loader.
        schedules: The schedulers of the run.
    """

    def __init__(
        self,
        context: RunContext,
        directory: RunDirectory,
        clock: Clock,
        cursor: Cursor | None,
        schedules: Schedules,
    ) -> None:
        self._context = context
        self._directory = directory
        self.clock = clock
        self.cursor = cursor
        self.schedules = schedules
        self.record = record = context.record
        self.ranks = ranks = context.ranks
        # The state of each rank that the next checkpoint will hold; None with a single rank.
        self._of_ranks: dict[str, Any] | None = None
        self.parts = parts = context.parts
        self.policy = policy = context.policy
        self.ladder = context.ladder
        self.state = context.state
        self._store = Store(directory.checkpoints)
        # The id of the newest checkpoint when this session last closed the directory.
        self._newest_id: int | None = None
        self.saving = Saving(
            directory=directory,
            store=self._store,
            record=record,
            policy=policy,
            clock=clock,
            run_state=self.state,
            state=lambda: ranks.part_to_save(gather(parts, self.training_state())),
            must_be_finite=self.must_be_finite,
            position=self._position,
            cuda=next((device for device in parts.devices() if device.type == "cuda"), None),
            writers=ranks.writers,
        )
        self.snapshots = Snapshots(policy.snapshot_interval_steps, clock, available_bytes)
        # Memory that the engine may free.
        self.reserves = Reserves(self.snapshots, self.saving)
        self.spikes = SpikeDetector(objective=policy.objective)
        self.counters = Counters()
        # The settings that the run began with.
        self._settings = parts.settings()
        # The number of parameter groups; None once a change was reported.
        self._groups: int | None = len(parts.rates())
        # Optimizers that have not been stepped yet. Their state is checked after the first step,
        # which creates most of it.
        self._new_state = set(parts.optimizers)
        # The step of a state to which the run has rolled back, and which predates the cause of the
        # rollback. No rollback has to go further back than this.
        self._known_good = -1
        # The random state of a resumed run, until its loader is started.
        self.random_state: RandomState | None = None
        # A position, and the random state to save with it instead of the current one.
        self._drawn_at: tuple[tuple[int, int], RandomState] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the lock is held."""
        return self.record.is_open

    def open(self) -> None:
        """Lock the directory and continue the recording."""
        # An abandoned guard in this process holds the lock until its last save is written.
        wait_for_jobs(self._directory.path)
        self._directory.acquire()
        try:
            if self.ranks.rank == 0:
                self._store.clean_up()
            self._check_not_continued()
            self.record.open()
            announce_recording(self._directory.path)
            self._describe()
            if self.cursor is not None:
                self.cursor.attach(self.record.emit, self._directory.path)
        except BaseException:
            self._directory.release()
            raise
        self.state.open()
        self.ranks.open()
        outlets[self] = None
        for name, optimizer in self.parts.optimizers.items():
            guarded[id(optimizer)] = (name, weakref.ref(self.record))

    def _describe(self) -> None:
        """Record the settings of the run: optimizers, batch size, and non-default policy fields."""
        settings: dict[str, Any] = {}
        for field in fields(self.policy):
            value = getattr(self.policy, field.name)
            if value != field.default:
                settings[f"policy.{field.name}"] = value
        for name, optimizer in self.parts.optimizers.items():
            settings[name] = type(optimizer).__name__
        settings |= self._settings
        batch_size = None if self.cursor is None else self.cursor.batch_size
        if batch_size is not None:
            settings["batch_size"] = batch_size
        self.record.describe(settings)

    def check_not_in_step(self) -> None:
        """Raise H209 within a loss function, and H105 while averaged weights are in the models."""
        if self.state.is_attempting:
            raise called_inside("step")
        self.check_averages()

    def check_averages(self, *, there: bool = False) -> None:
        """Raise H105 while averaged weights are in the models.

        Args:
            there: Whether to raise it also if the guard has no averages.
        """
        if self.state.averaged or (there and not self.parts.averages):
            problem = "guard.averaged() without an average"
            if self.state.averaged:
                problem = "a step, a save or the next batch was requested inside guard.averaged()"
            raise PolicyError(
                problem,
                limit=(
                    "inside this context the model holds the weights of Guard(averaged=...), for"
                    " evaluation only"
                ),
                fix=(
                    "pass averaged= to Guard; evaluate inside the context, and call"
                    " guard.validated(...) and guard.step(...) after it."
                ),
                rule="H105",
            )

    def _check_not_continued(self) -> None:
        """Raise H306 if another process has saved since this session closed the directory."""
        if self._newest_id is not None and self._store.next_save_id() - 1 != self._newest_id:
            raise RunDirectoryError(
                f"another process has continued the run in {self._directory.path}",
                limit="the state in this process is no longer the newest",
                fix="create a new Guard: it resumes from the newest checkpoint.",
                rule="H306",
            )

    def close(self, how: End | None = None) -> None:
        """Wait for the save that is being written, end the recording, and unlock the directory.

        Args:
            how: How the run ended, as for `RunRecord.close`.
        """
        try:
            self.saving.finish()
            # A refusal concerns only the state of now, which the script may repair before it opens
            # the run again.
            self.saving.take_refusal()
            if self.is_open:
                note_last_step(self._directory.run_id, self.record.global_step)
                self._newest_id = None
                # If the checkpoints cannot be read, `report_loss` reports what is lost.
                with contextlib.suppress(CheckpointError):
                    self._newest_id = (
                        self._store.next_save_id() - 1 if self.ranks.rank == 0 else None
                    )
                self.saving.report_loss(left=how == "left")
                forget_left_steps(self._directory.path)
                if how == "left":
                    self.saving.note_left_steps()
            self.record.close(how)
            self.ranks.close(in_order=how != "failed" and sys.exception() is None)
        finally:
            outlets.pop(self, None)
            for optimizer in self.parts.optimizers.values():
                guarded.pop(id(optimizer), None)
            self.state.close()
            self._directory.release()

    def recording(self, *, events: bool = True) -> AbstractContextManager[None]:
        """Return a context in which events can be recorded, even after the end of the run.

        Args:
            events: Whether events will be recorded; False if only numbers will be.

        Raises:
            RunDirectoryError: H301 on entering, if another run has locked the directory.
        """
        return _OPEN if self.is_open else self._after_the_loop(events=events)

    @contextlib.contextmanager
    def _after_the_loop(self, *, events: bool) -> Iterator[None]:
        """Open the record of a run that has ended; close it with the same ending afterwards."""
        ending = self.record.ended
        with contextlib.ExitStack() as stack:
            self._directory.acquire()
            stack.callback(self._directory.release)
            stack.callback(self.record.close, ending)
            if events and ending != "failed":
                self.record.open()
            yield

    def log(self, scalars: CheckedScalars, step: int | None = None) -> None:
        """Record numbers.

        Args:
            scalars: The numbers by name.
            step: The step that they belong to; None for the current one.

        Raises:
            RunDirectoryError: H301 if the run is closed and another one has locked the directory.
        """
        with self.recording(events=False):
            epoch = None if self.cursor is None else self.cursor.epoch
            self.record.scalars.write(
                scalars, self.record.global_step if step is None else step, epoch
            )

    def statistics(self) -> Statistics:
        """Return the run's current totals. With fp16 this synchronizes with the device once."""
        counters = self.counters
        saving = self.saving.collected()
        plan = self.ladder.plan
        return Statistics(
            global_step=self.record.global_step,
            epoch=0 if self.cursor is None else self.cursor.epoch,
            steps=counters.steps,
            skipped_steps=counters.skipped_steps,
            out_of_memory=counters.out_of_memory,
            rollbacks=counters.rollbacks,
            resumes=counters.resumes,
            checkpoints_saved=saving.saved,
            checkpoints_failed=saving.failed,
            micro_batch_size=plan.micro_batch_size,
            recompute=bool(plan.recompute),
            loss_scale=self._context.loss_scale.value(),
        )

    # --- what is saved

    @property
    def is_calm(self) -> bool:
        """Return whether no spike is suspected. While one is, saves are postponed."""
        return self.policy.spike_action == "off" or self.spikes.is_calm()

    def check_new_state(self, names: Sequence[str]) -> None:
        """Raise H310 or H105 if no checkpoint can hold the state of an optimizer.

        Called after each step; only the first step of an optimizer is checked. Without this, every
        save would fail, and the whole run would be lost.
        """
        if self._new_state:
            new = self._new_state.intersection(names)
            self._new_state -= new
            if new and self.policy.save_interval_steps is not None:
                check_saveable(self.parts, new)

    def save_first(self) -> None:
        """Save a checkpoint before the first step, so that there is a state to roll back to."""
        self._hear_ranks()
        self.saving.save_first()

    def save(self) -> None:
        """Save a checkpoint of the current state and wait until it is written.

        Nothing is saved while the state is incomplete, for example after a step failed partway.
        """
        self._hear_ranks()
        self.saving.save()

    def checkpoint_of_now(self, and_then: Callable[[Entry], None]) -> Entry | None:
        """Return the checkpoint of the current state; it is saved now if the run is open.

        Args:
            and_then: Called with the checkpoint, on the first rank. If it raises an OSError, that
                is recorded, and None is returned.

        Returns:
            The checkpoint, or None if there is none of the current state.
        """
        if self.ranks.has_left_group:
            return None
        if self.is_open:
            self.save()

        def newest_if_current() -> Entry | None:
            entry = self.saving.saved_as
            if entry is None or self.saving.has_unsaved:
                return None
            try:
                and_then(entry)
            except OSError as error:
                self.record.emit(
                    run_events.SaveFailed(checkpoint=entry.path.name, error=describe_error(error))
                )
                return None
            return entry

        return self._chosen(newest_if_current)

    def save_when_due(self) -> None:
        """Start saving the current state in the background."""
        self.saving.save_when_due(busy=self._hear_ranks())

    def _hear_ranks(self) -> bool:
        """Exchange the state that differs between ranks.

        Returns:
            Whether a rank is still writing the previous checkpoint.
        """
        self._of_ranks = self.states_of_ranks()
        if self._of_ranks is None:
            return False
        states = self._of_ranks["each"]
        # These two are exchanged on this occasion, but are not part of the checkpoint.
        busy = [state.pop("busy") for state in states]
        forms = {state.pop("form_of_optimizers") for state in states}
        if len(forms) > 1:
            self._check_state_is_alike()
        return any(busy)

    def _check_state_is_alike(self) -> None:
        """Raise H108 on all ranks if their optimizers hold different tensors.

        The first rank saves the state of the optimizers for all.
        """
        optimizers = self.parts.optimizers.items()
        forms = {
            f"the state of optimizer {name!r}": describe_state(optimizer)
            for name, optimizer in optimizers
        }
        try:
            self.ranks.agree("the state of optimizers", lambda: forms)
        except PolicyError as error:
            raise PolicyError(
                error.what, limit=SHARDED_STATE_LIMIT, fix=SHARDED_STATE_FIX, rule="H108"
            ) from None

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank that may differ between ranks."""
        return {
            "random_state": self._random_state().to_tree(),
            "position": None if self.cursor is None else self.cursor.state_dict(),
            "ladder": self.ladder.state_dict(),
            "busy": self.saving.is_busy,
            "form_of_optimizers": zlib.crc32(
                repr(list(map(describe_state, self.parts.optimizers.values()))).encode()
            ),
        }

    def states_of_ranks(self) -> dict[str, Any] | None:
        """Return the state that a checkpoint holds for each rank; see `Ranks.gather_states`."""
        return self.ranks.gather_states(
            self.own_state, self._own_trees, self._context.buffers.constant, self._unsaved_buffers
        )

    def _unsaved_buffers(self) -> list[str]:
        """Return the names of mutable buffers with ``persistent=False``.

        These are in no ``state_dict``.
        """
        changing = self._context.buffers.now()
        return [
            name
            for model_name, model in self.parts.models.items()
            for prefix, module in model.named_modules()
            for key in sorted(module._non_persistent_buffers_set)
            if (name := ".".join(part for part in (model_name, prefix, key) if part)) in changing
        ]

    def _own_trees(self) -> dict[str, dict[str, Any]]:
        """Return the buffers and ``state=`` objects that may differ between ranks."""
        return {"buffers": self._own_tensors(), "states": self._own_states()}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Return by name the buffers and frozen weights that the ranks do not share.

        These are buffers that are not broadcast, frozen weights that the wrapper ignores, and the
        buffers of averages.
        """
        keeper, parts = self._context.buffers, self.parts
        buffers = keeper.now() | keeper.constant()
        own = {name: buffer for name, buffer in buffers.items() if self.ranks.may_differ(name)}
        for model_name, model in parts.models.items():
            frozen = {
                f"{model_name}.{key}": p
                for key, p in model.named_parameters()
                if not p.requires_grad
            }
            own |= {name: frozen[name] for name in self.ranks.ignored if name in frozen}
        # Buffers of an average depend on the batches of the rank, even if those of the model are
        # broadcast.
        for model_name, average in parts.averages.items():
            own |= {
                f"averaged.{model_name}.{key}": buffer
                for key, buffer in average.module.named_buffers()
            }
        return {name: tensor.detach() for name, tensor in own.items()}

    def _own_states(self) -> dict[str, Any]:
        """Return the state of the ``state=`` objects.

        Averages are left out, since their weights are equal on all ranks.
        """
        averages = {id(average) for average in self.parts.averages.values()}
        own = {}
        for name, stateful in self.parts.states.items():
            if id(stateful) in averages:
                continue
            try:
                tree = stateful.state_dict()
                Encoder(f"state.{name}").encode(tree)
            except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
                let_through(error)
                # The first rank raises the same error when it saves.
                if self.ranks.rank:
                    self.record.emit(run_events.SaveFailed(error=describe_error(error)))
            else:
                own[name] = tree
        return own

    def _random_state(self) -> RandomState:
        """Return the random state to save with the current position."""
        if self._drawn_at is not None and self._drawn_at[0] == self._position():
            return self._drawn_at[1]
        return capture(self.parts.devices()) if self.cursor is None else self.cursor.random_state()

    def save_the_rest(self, open_again: Callable[[], None]) -> None:
        """Save what no checkpoint holds when a run is closed: steps, or changes without a step.

        If the script has changed weights or moments without a step, they are not saved: it may have
        put an average in their place, cast them for an export, or collected statistics on other
        data.

        Args:
            open_again: Opens the run directory if it is closed.
        """
        self.saving.finish()
        if self.ranks.has_left_group:
            # The other ranks' shards of the state can no longer be collected.
            return
        self._hear_ranks()
        try:
            if not self.saving.has_unsaved:
                if self.ranks.shards_state:
                    # One rank cannot know whether another has changed its shard.
                    return
                entry = self._saved_without_changes()
                if entry is None:
                    return
                if not has_weights_of(self.parts, entry):
                    self.record.emit(run_events.ChangesNotSaved(why=_CHANGED))
                    return
                self._keep_random_state_of(entry)
            if not self.is_open:
                open_again()
        except Exception as error:
            let_through(error)
            if self.saving.has_unsaved:
                raise
            self.record.emit(run_events.ChangesNotSaved(why=describe_error(error)))
            return
        self.saving.save_again()

    def _saved_without_changes(self) -> Entry | None:
        """Return the checkpoint of this position, if state has changed since then without a step.

        None if nothing has changed, or if the checkpoint must not be replaced.
        """
        entry = self.saving.saved_as
        if (
            entry is None
            or not self.saving.may_save_more
            or (self.cursor is not None and self.cursor.left_in_batch)
        ):
            # Nothing may be saved now. For example, the loop was left in the middle of a batch,
            # which is not a position to resume from.
            return None
        if [newest.save_id for newest in self._store.entries()[:1]] != [entry.save_id]:
            # Another process has continued the run.
            return None
        return entry if changes_without_a_step(self.parts, entry) else None

    def _keep_random_state_of(self, entry: Entry) -> None:
        """Make the next save of this position use the random state of its current checkpoint.

        Random numbers that the script draws in the middle of an epoch, or before the loop, are not
        part of training.
        """
        if self.cursor is not None and (self.cursor.batches or self.random_state is not None):
            training = read_components(entry, ["training"])["training"]
            random_state = RandomState.from_tree(training["random_state"])
            self._drawn_at = (self._position(), random_state)

    def keep_snapshot(self) -> None:
        """Take a snapshot in host memory, if one is due and the state is complete and finite."""
        step = self.record.global_step
        if not (self.snapshots.is_due(step) and self.state.may_be_saved and self.is_calm):
            return
        try:
            if not self.snapshots.keep(step, self._good_state):
                self.record.emit(run_events.SnapshotsDoNotFit())
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
            let_through(error)
            self.snapshots.failed(step)
            self.record.emit(run_events.SnapshotFailed(error=describe_error(error)))

    def _good_state(self) -> dict[str, Any] | None:
        """Return the state by component, or None if it holds NaN or Inf."""
        bad, _ = nonfinite_tensors(self.must_be_finite())
        return None if bad else gather(self.parts, self.training_state())

    def _position(self) -> tuple[int, int]:
        """Return two numbers that change with every step or batch, but not at the end of an epoch.

        They are the global step and the number of batches trained.
        """
        return self.record.global_step, 0 if self.cursor is None else self.cursor.trained

    def must_be_finite(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that must hold no NaN or Inf in a state to save, with their names."""
        names: dict[int, str] = {}
        parameter: torch.Tensor
        for name, parameter in self.parts.named_parameters():
            names[id(parameter)] = name
            if parameter.requires_grad:
                yield name, local(parameter)
        for optimizer_name, optimizer in self.parts.optimizers.items():
            for key, value in state_tensors(optimizer, names):
                yield f"{optimizer_name}: {key}", local(value)
        yield from self._context.buffers.running_statistics()

    def training_state(self) -> dict[str, Any]:
        """Return the guard's own state, which a checkpoint holds in its component "training"."""
        self._report_changed_groups()
        state: dict[str, Any] = {}
        if self._of_ranks is not None:
            state["ranks"] = self._of_ranks
        return state | {
            "global_step": self.record.global_step,
            "counters": asdict(self.counters),
            "position": None if self.cursor is None else self.cursor.state_dict(),
            "random_state": self._random_state().to_tree(),
            "ladder": self.ladder.state_dict(),
            "loss_scale": self._context.loss_scale.state_dict(),
            "spikes": self.spikes.state_dict(),
            "diagnosis": self._context.diagnosis.state_dict(),
            "save_costs": [
                [cost.stall_seconds, cost.seconds] for cost in self.saving.chooser.costs
            ],
            "run": self._directory.run_id,
            "settings": self._settings,
            "schedules": self.schedules.state_dict(),
        }

    def _report_changed_groups(self) -> None:
        """Report once that an optimizer has a different number of parameter groups than before."""
        if self._groups is not None and self._groups != len(self.parts.rates()):
            self._groups = None
            self.record.emit(run_events.GroupsChanged())

    # --- restore

    def resume(self) -> Path | None:
        """Restore the newest checkpoint that can be verified.

        Returns:
            The directory of the checkpoint, or None at the start of a run.
        """
        self.ranks.agree("opening", self._same_for_all)
        entry = self._newest_good()
        if entry is None:
            self._directory.check_not_lost()
            return None
        # All digests match, so an error from here on does not indicate damage, and the checkpoint
        # must not be moved aside.
        training = self._restore(entry)
        with reading(entry.path):
            self.go_on_from(training)
            costs = [
                SaveCost(stall_seconds=check_number(stall), seconds=check_number(whole))
                for stall, whole in training["save_costs"]
            ]
            self._directory.note_resumed_from(training["run"])
        # This is outside of `reading`, since an error in the loader's own code is not damage.
        self._go_to_position_of(training)
        with reading(entry.path):
            restore(RandomState.from_tree(training["random_state"]))
        self.saving.chooser.costs.extend(costs)
        self.saving.resumed(entry)
        self._compare_settings(training["settings"])
        self.record.emit(
            run_events.Resumed(checkpoint=entry.path.name, trained_batches=self._position()[1])
        )
        self._report_lost_state_of_ranks(training)
        return entry.path

    def _report_lost_state_of_ranks(self, training: Mapping[str, Any]) -> None:
        """Record which state of the individual ranks this resume cannot restore."""
        of_ranks = (training.get("ranks") or {"each": []})["each"]
        names = dict.fromkeys(
            name
            for of_rank in of_ranks
            for kind in ("states", "buffers")
            for name in of_rank.get(kind, {})
        )
        if names and len(of_ranks) != self.ranks.world_size:
            self.record.emit(
                run_events.OwnStateNotKept(
                    names=tuple(names)[:_MOST_NAMES],
                    ranks_before=len(of_ranks),
                    ranks_now=self.ranks.world_size,
                )
            )
        positions = [of_rank["position"] for of_rank in of_ranks if of_rank["position"] is not None]
        batches = [position["batches"] for position in positions]
        if len({*batches}) > 1:
            self.record.emit(
                run_events.PositionNotKept(
                    why=(
                        f"the ranks were at batches {', '.join(map(str, batches))} when this"
                        " checkpoint was written, because one of them had skipped a batch; all of"
                        " them continue at the position of rank 0"
                    )
                )
            )

    def report_steps_left_behind(self) -> None:
        """Report it if an earlier guard in this process had reached a later step of the run."""
        forget_left_steps(self._directory.path)
        previous_step = last_step(self._directory.run_id)
        if previous_step > self.record.global_step:
            self.record.emit(
                run_events.StepsLeftBehind(from_step=previous_step, to_step=self.record.global_step)
            )

    def _same_for_all(self) -> dict[str, Any]:
        """Return the facts that must be the same on all ranks."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parts.named_parameters()}
        facts: dict[str, Any] = {
            "run directory": self._directory.run_id,
            "state": list(self.parts.states),
            "model": shapes,
        }
        for field in fields(self.policy):
            facts[f"policy.{field.name}"] = repr(getattr(self.policy, field.name))
        return {**facts, **self.parts.settings()}

    def _compare_settings(self, begun_with: dict[str, Any]) -> None:
        """Report settings of the script that the checkpoint has overridden.

        Args:
            begun_with: The settings that the run began with.
        """
        own_settings = self._settings
        self._settings = begun_with
        changed = [
            f"{name}: {value!r} stays, not {own_settings[name]!r}"
            for name, value in begun_with.items()
            if name in own_settings and own_settings[name] != value
        ]
        if changed:
            self.record.emit(run_events.SettingsKept(changed=tuple(changed[:_MOST_NAMES])))

    def go_on_from(self, training: Mapping[str, Any]) -> None:
        """Restore the counters and the detectors of the process that saved this state."""
        self.counters = Counters(
            **{name: check_count(value) for name, value in training["counters"].items()}
        )
        self.counters.note_resume()
        self.ladder.load_state_dict(training["ladder"])
        self.spikes.load_state_dict(training["spikes"])
        self._context.diagnosis.load_state_dict(training["diagnosis"])

    def roll_back(
        self, *, rewind_data: bool, before_step: int | None = None, trusted: bool = False
    ) -> dict[str, Any] | None:
        """Return to the newest good state: a snapshot in host memory, or otherwise a checkpoint.

        Args:
            rewind_data: Whether the loader also returns to the position of that state. Only
                checkpoints are used then.
            before_step: Use only states taken at or before this step; None for the newest.
            trusted: Whether states that old are known to predate the cause of the rollback.

        Returns:
            The guard's own part of that state, or None if there is no state to return to.
        """
        self.saving.finish()
        kept = None
        entry = None
        if before_step is not None:
            before_step = max(before_step, self._known_good)
        if not rewind_data:
            kept = self.snapshots.newest(
                self.record.global_step if before_step is None else before_step
            )
        if kept is None and self.policy.save_interval_steps is not None:
            entry = self._newest_good(before_step)
        if kept is None and entry is None:
            return None
        try:
            # If reading fails partway, the state is inconsistent and must not be saved.
            with self.state.rolling_back():
                training = self._load_earlier(kept, entry)
                if rewind_data:
                    self._go_to_position_of(training)
        except BaseException as error:
            self.record.emit(run_events.RollbackFailed(error=describe_error(error)))
            raise
        if kept is not None and not trusted:
            # If the run fails again after this, the next rollback uses an older snapshot.
            self.snapshots.distrust(kept)
        self.saving.returned(to_checkpoint=kept is None)
        self.snapshots.returned_to(self.record.global_step)
        if trusted:
            # Earlier states are good as well, so no rollback needs to go further back.
            self._known_good = self.record.global_step
        return training

    def _load_earlier(self, kept: Kept | None, entry: Entry | None) -> dict[str, Any]:
        """Load a snapshot or a checkpoint, and return the guard's own part of it."""
        if kept is not None:
            return self._put_back(copied_to_host(kept.trees))
        assert entry is not None
        return self._restore(entry, in_place=True)

    def note_loader_started(self) -> None:
        """Note that the loader is at its position, so that its random state was restored."""
        self.random_state = None

    def _go_to_position_of(self, training: Mapping[str, Any]) -> None:
        """Move the cursor to a saved position, and keep its random state for when a loop starts."""
        if self.cursor is not None and training["position"] is not None:
            self.cursor.load_state_dict(training["position"])
            self.cursor.compare_ranks(ranks_in(training), self.ranks.world_size)
        self.random_state = RandomState.from_tree(training["random_state"])

    def _newest_good(self, before_step: int | None = None) -> Entry | None:
        """Return the newest checkpoint that can be verified; damaged ones are moved aside.

        Args:
            before_step: Consider only checkpoints saved at or before this step; None for all.
        """

        def on_damaged(path: Path, why: str) -> None:
            self.record.emit(run_events.CheckpointDamaged(checkpoint=path.name, why=why))

        return self._chosen(lambda: self._store.newest_good(on_damaged, before_step=before_step))

    def _chosen(self, choose: Callable[[], Entry | None]) -> Entry | None:
        """Choose a checkpoint on the first rank, and return it on all ranks."""
        return self.ranks.choose_on_first(
            choose,
            lambda entry: entry.path.name,
            lambda name: next(entry for entry in self._store.entries() if entry.path.name == name),
        )

    def _restore(self, entry: Entry, *, in_place: bool = False) -> dict[str, Any]:
        """Restore a checkpoint, and return the guard's own part of it.

        Args:
            entry: The checkpoint.
            in_place: Whether to overwrite the tensors while they are read, which needs no
                additional memory.
        """
        targets = live_tensors(self.parts) if in_place else {}
        # With a sharded model, this rank reads only its own rows.
        share_of = self.ranks.rows_to_load(self.parts)
        trees = read_components(entry, component_names(self.parts), targets, share_of)
        live = states_now(self.parts)
        with reading(entry.path):
            check_fits(trees, live, self.parts, f"checkpoint {entry.path.name}")
            check_own(self._of_this_rank(trees["training"]))
        return self._put_back(trees)

    def _put_back(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Load a saved state into the objects of the run.

        Args:
            trees: The state by component, as `gather` returns it.

        Returns:
            The guard's own part of the state, as it applies to this rank.
        """
        training = self._of_this_rank(trees["training"])
        # The `state=` objects that differed between ranks are saved separately for each rank.
        states_of_rank = training.get("states", {})
        own_states = {f"state.{name}": tree for name, tree in states_of_rank.items()}
        load({**trees, **own_states}, self.parts)
        self.load_own_tensors(training)
        self._context.loss_scale.load_state_dict(training["loss_scale"])
        self.note_state_replaced()
        self.record.global_step = training["global_step"]
        # Checkpoints of earlier versions hold no counts. In that case, each schedule has counted
        # every step of the run.
        self.schedules.load_state_dict(
            training.get("schedules", {}), default=training["global_step"]
        )
        return training

    def note_state_replaced(self) -> None:
        """Note that weights and optimizer state were loaded from elsewhere."""
        self._context.created_state.forget()

    def load_own_tensors(self, training: Mapping[str, Any]) -> None:
        """Restore the buffers and frozen weights that this rank does not share with others."""
        saved = training.get("buffers", {})
        self._context.buffers.load(saved)
        if not saved:
            return
        for name, tensor in self._own_tensors().items():
            if name in saved:
                tensor.copy_(saved[name])

    def _of_this_rank(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return the guard's own state with the entries that differ between ranks for this rank."""
        return {**training, **self.ranks.own_state(training)}


def ranks_in(training: Mapping[str, Any]) -> int:
    """Return the number of ranks that wrote a checkpoint.

    A checkpoint without per-rank state was written by a single rank.
    """
    of_ranks = training.get("ranks")
    return 1 if of_ranks is None else len(of_ranks["each"])


def check_own(training: Mapping[str, Any]) -> None:
    """Check the guard's own state in a checkpoint.

    Raises:
        TypeError, LookupError or ValueError: If it does not have the form that a guard writes.
            `reading` reports these errors as damage.
    """
    check_count(training["global_step"])
    RandomState.from_tree(training["random_state"])
    if training["position"] is not None:
        check_position(training["position"])
    for name in training.get("schedules", {}):
        check_count(training["schedules"][name])
    _ = (
        training["loss_scale"],
        training["run"],
        {**training["settings"]},
        {**training["schedulers"]},
    )
