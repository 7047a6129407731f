"""An open run directory.

What belongs to a run's state, and how everything comes back from its checkpoints.

Does not: write them (see ``saving``).
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
from holdfast.guard.cursor import Cursor, check_position
from holdfast.guard.directory import RunDirectory
from holdfast.guard.optimizer_state import describe_state, state_tensors
from holdfast.guard.optimizers import SHARDED_STATE_FIX, SHARDED_STATE_LIMIT
from holdfast.guard.phase import Phase
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
from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.snapshots import Kept, Snapshots
from holdfast.guard.saving.unsaved import forget_left_steps
from holdfast.guard.schedules import Schedules
from holdfast.guard.splitting.loss_functions import called_inside
from holdfast.guard.state.trees import copied_to_host
from holdfast.guard.step.engine import StepEngine
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes
from holdfast.numerics.gradients import local
from holdfast.numerics.spikes import SpikeDetector
from holdfast.recorder.run_files import announce_recording, guarded
from holdfast.recorder.scalars import CheckedScalars, outlets

_OPEN = contextlib.nullcontext()  # made once: `log` is called in each step
_MOST_NAMES = 10  # in one event
_CHANGED = (
    "the weights, buffers or moments were changed without a step, so they are not those of the"
    " training"
)


class Session:
    """Restores one run, and knows what its checkpoints hold."""

    def __init__(
        self,
        engine: StepEngine,
        directory: RunDirectory,
        clock: Clock,
        cursor: Cursor | None,
        schedules: Schedules,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self.clock = clock
        self.cursor = cursor
        self.schedules = schedules
        self.record = record = engine.record
        self.ranks = ranks = engine.ranks
        self._of_ranks: dict[str, Any] | None = None  # what the newest checkpoint holds of each
        self.parts = parts = engine.parts
        self.policy = policy = engine.policy
        self.ladder = engine.ladder
        self.state = engine.state
        self._store = Store(directory.checkpoints)
        # Of the checkpoints when this object closed the directory
        self._newest_id: int | None = None
        self.saving = Saving(
            directory=directory,
            store=self._store,
            record=record,
            policy=policy,
            clock=clock,
            run_state=self.state,
            state=lambda: ranks.share(gather(parts, self.training_state())),
            must_be_finite=self.must_be_finite,
            position=self._position,
            cuda=next((device for device in parts.devices() if device.type == "cuda"), None),
            writers=ranks.writers,
        )
        self.snapshots = Snapshots(policy.snapshot_interval_steps, clock, available_bytes)
        engine.spare_memory = self._spare_memory
        self.spikes = SpikeDetector(objective=policy.objective)
        self.counters = Counters()
        self.validated = False  # a metric was given, for schedulers that need one
        self._settings = parts.settings()  # those that the run began with
        self._groups: int | None = len(parts.rates())  # None: it is said that there are others now
        # Optimizers whose state has not been checked since their first step, which creates most of
        # it.
        self._new_state = set(parts.optimizers)
        self._known_good = -1  # newest step that a rollback has proved to be older than any trouble
        # Of a resumed run, until its loader is started
        self.random_state: RandomState | None = None
        # Belongs to that position for certain
        self._drawn_at: tuple[tuple[int, int], RandomState] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the lock is held."""
        return self.record.is_open

    def open(self) -> None:
        """Take the lock and continue the recording."""
        wait_for_jobs(self._directory.path)  # of a guard that was given up: it still holds the lock
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
        guarded.update(
            {
                id(each): (name, weakref.ref(self.record))
                for name, each in self.parts.optimizers.items()
            }
        )

    def _describe(self) -> None:
        """Keep what this run is set to, beside its recording.

        What is otherwise than usual, and the optimizers.
        """
        own = {
            f"policy.{each.name}": getattr(self.policy, each.name) for each in fields(self.policy)
        }
        usual = {f"policy.{each.name}": each.default for each in fields(self.policy)}
        classes = {name: type(each).__name__ for name, each in self.parts.optimizers.items()}
        found = (
            {name: value for name, value in own.items() if value != usual[name]}
            | classes
            | self._settings
        )
        size = None if self.cursor is None else self.cursor.batch_size
        self.record.describe(found if size is None else {**found, "batch_size": size})

    def check_not_in_step(self) -> None:
        """Raise H209 if a loss function makes a step itself, H105 where averaged weights would
        move.
        """
        if self.state.phase is Phase.IN_STEP:
            raise called_inside("step")
        self.check_averages()

    def check_averages(self, *, there: bool = False) -> None:
        """Raise H105 if averages are in the models, or if they must be `there` and are not."""
        if self.state.averaged or (there and not self.parts.averages):
            inside = (
                "a step, a checkpoint or the next batch was asked for inside of guard.averaged()"
            )
            raise PolicyError(
                inside if self.state.averaged else "guard.averaged() without an average",
                limit="it has the weights of Guard(averaged=...) in the model, for evaluation only",
                fix=(
                    "give an average; evaluate inside, and call guard.validated(...) and"
                    " guard.step(...) after it."
                ),
                rule="H105",
            )

    def _check_not_continued(self) -> None:
        if self._newest_id is not None and self._store.next_save_id() - 1 != self._newest_id:
            raise RunDirectoryError(
                f"run directory {self._directory.path} was continued by another process",
                limit="the state in this process is not its newest any more",
                fix="make a new Guard: it continues from the newest checkpoint.",
                rule="H306",
            )

    def close(self, how: End | None = None) -> None:
        """Finish the save that is under way, end the recording, as `RunRecord.close` says, and
        give the lock back.
        """
        try:
            self.saving.finish()
            self.saving.take_refusal()  # whoever opens it again may have repaired the state
            if self.is_open:
                note_last_step(self._directory.run_id, self.record.global_step)
                self._newest_id = None
                with contextlib.suppress(CheckpointError):  # out of reach: what is lost is said
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
            for each in self.parts.optimizers.values():
                guarded.pop(id(each), None)
            self.state.close()
            self._directory.release()

    def recording(self, *, events: bool = True) -> AbstractContextManager[None]:
        """Return what to record within: after the loop the record is opened once more.

        H301 as in `log`.
        """
        return _OPEN if self.is_open else self._after_the_loop(events=events)

    @contextlib.contextmanager
    def _after_the_loop(self, *, events: bool) -> Iterator[None]:
        """Record what is measured after the loop; the last word is then said again."""
        with contextlib.ExitStack() as stack:
            self._directory.acquire()
            stack.callback(self._directory.release)
            stack.callback(self.record.close, how := self.record.ended)
            if events and how != "failed":
                self.record.open()
            yield

    def log(self, found: CheckedScalars, step: int | None = None) -> None:
        """Record scalars at the present step or at their own.

        H301 if this is closed and another run goes on.
        """
        with self.recording(events=False):
            epoch = None if self.cursor is None else self.cursor.epoch
            self.record.scalars.write(
                found, self.record.global_step if step is None else step, epoch
            )

    def statistics(self) -> Statistics:
        """Return a snapshot of the run's totals. Cost: in fp16, one host sync."""
        counters, saving, plan = self.counters, self.saving.collected(), self.ladder.plan
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
            loss_scale=self._engine.loss_scale.value(),
        )

    # --- what is saved

    @property
    def is_calm(self) -> bool:
        """Return whether the state may be called good.

        A suspicion that is not settled yet puts a save off.
        """
        return self.policy.spike_action == "off" or self.spikes.is_calm()

    def check_new_state(self, names: Sequence[str]) -> None:
        """Raise H310 or H105 after the first step of an optimizer if no checkpoint can hold its
        state.

        Otherwise each save would fail, and the whole run would be lost.
        """
        if self._new_state:
            new = self._new_state.intersection(names)
            self._new_state -= new
            if new and self.policy.save_interval_steps is not None:
                check_saveable(self.parts, new)

    def save_first(self) -> None:
        """Have a state to return to before the first step."""
        self._hear_ranks()
        self.saving.save_first()

    def save(self) -> None:
        """Have a checkpoint of this very state when this returns, unless the state is not whole."""
        self._hear_ranks()
        self.saving.save()

    def checkpoint_of_now(self, and_then: Callable[[Entry], None]) -> Entry | None:
        """Return the checkpoint of this very state, made if the run is open; None if there is none.

        `and_then` is called with it by the one rank that chooses; an OSError is an event, and there
        is none then.
        """
        if self.ranks.has_parted:
            return None
        if self.is_open:
            self.save()

        def found() -> Entry | None:
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

        return self._chosen(found)

    def save_when_due(self) -> None:
        """Begin a save of this state."""
        self.saving.save_when_due(busy=self._hear_ranks())

    def _hear_ranks(self) -> bool:
        """Learn what a checkpoint holds of each.

        Return whether one of them still writes the last one.
        """
        self._of_ranks = found = self.states_of_ranks()
        each_rank = [] if found is None else found["each"]
        busy = [rank.pop("busy") for rank in each_rank]
        forms = {rank.pop("form_of_optimizers") for rank in each_rank}
        if len(forms) > 1:
            self._check_state_is_alike()
        return any(busy)

    def _check_state_is_alike(self) -> None:
        """Raise H108 on all ranks if their optimizers hold different tensors, since one rank
        saves for all.
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
        """Return what may differ between ranks."""
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
        """Return what a checkpoint holds of each of several ranks, see `Ranks.states`."""
        return self.ranks.states(
            self.own_state, self._own_trees, self._engine.buffers.constant, self._unsaved_buffers
        )

    def _unsaved_buffers(self) -> list[str]:
        """Return the names of buffers with ``persistent=False`` that steps change, which no
        `state_dict` holds.
        """
        changing = self._engine.buffers.now()
        return [
            name
            for model_name, model in self.parts.models.items()
            for prefix, module in model.named_modules()
            for key in sorted(module._non_persistent_buffers_set)
            if (name := ".".join(part for part in (model_name, prefix, key) if part)) in changing
        ]

    def _own_trees(self) -> dict[str, dict[str, Any]]:
        """Return the buffers and the caller's state that may differ between ranks, by kind and
        name.
        """
        return {"buffers": self._own_tensors(), "states": self._own_states()}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that no rank broadcasts.

        Buffers, and frozen weights that a wrapper ignores.
        """
        keeper, parts = self._engine.buffers, self.parts
        buffers = keeper.now() | keeper.constant()
        own = {name: buffer for name, buffer in buffers.items() if self.ranks.keeps_apart(name)}
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
        """Return the state of the caller's objects, without averages, whose weights are equal on
        all ranks.
        """
        averages = {id(average) for average in self.parts.averages.values()}
        own = {}
        for name, stateful in self.parts.states.items():
            if id(stateful) in averages:
                continue
            try:
                tree = stateful.state_dict()
                Encoder(f"state.{name}").encode(tree)
            except Exception as error:  # noqa: BLE001 - whatever a part of the caller's raises
                let_through(error)
                if self.ranks.rank:  # the first rank meets the same as it saves
                    self.record.emit(run_events.SaveFailed(error=describe_error(error)))
            else:
                own[name] = tree
        return own

    def _random_state(self) -> RandomState:
        if self._drawn_at is not None and self._drawn_at[0] == self._position():
            return self._drawn_at[1]
        return capture(self.parts.devices()) if self.cursor is None else self.cursor.random_state()

    def save_the_rest(self, open_again: Callable[[], None]) -> None:
        """Save what no checkpoint holds as a run is closed: steps, or what has changed without one.

        What was done to weights or moments without a step, such as an average put in their place,
        another type for an export, or statistics of other data, never replaces the state of the
        training.
        """
        self.saving.finish()
        if self.ranks.has_parted:
            return  # the others' share of the state is out of reach
        self._hear_ranks()
        try:
            if not self.saving.has_unsaved:
                if self.ranks.shares is not None:
                    return  # one rank alone cannot say that another has changed nothing
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
        """Return the checkpoint of this position, if it may be replaced and lacks what has
        changed without a step.
        """
        entry = self.saving.saved_as
        if (
            entry is None
            or not self.saving.may_save_more
            or (self.cursor is not None and self.cursor.left_in_batch)
        ):
            return None  # half of what is done with a batch belongs to no position
        if [each.save_id for each in self._store.entries()[:1]] != [entry.save_id]:
            return None  # another process has continued the run
        return entry if changes_without_a_step(self.parts, entry) else None

    def _keep_random_state_of(self, entry: Entry) -> None:
        """In the middle of an epoch, or before the loop, what the caller draws is no part of the
        training.
        """
        if self.cursor is not None and (self.cursor.batches or self.random_state is not None):
            training = read_components(entry, ["training"])["training"]
            self._drawn_at = self._position(), RandomState.from_tree(training["random_state"])

    def keep_snapshot(self) -> None:
        """Copy the state in host memory, if that is due and the state is whole and good."""
        step = self.record.global_step
        if not (self.snapshots.is_due(step) and self.state.may_be_saved and self.is_calm):
            return
        try:
            if not self.snapshots.keep(step, self._good_state):
                self.record.emit(run_events.SnapshotsDoNotFit())
        except Exception as error:  # noqa: BLE001 - such as a part of the caller's that cannot give its state
            let_through(error)
            self.snapshots.failed(step)
            self.record.emit(run_events.SnapshotFailed(error=describe_error(error)))

    def _good_state(self) -> dict[str, Any] | None:
        bad, _ = nonfinite_tensors(self.must_be_finite())
        return None if bad else gather(self.parts, self.training_state())

    def _spare_memory(self) -> None:
        self.snapshots.give_up()
        self.saving.give_up_buffers()

    def _position(self) -> tuple[int, int]:
        """Return what moves with each step and each batch.

        The turn of an epoch in itself changes nothing.
        """
        return self.record.global_step, 0 if self.cursor is None else self.cursor.trained

    def must_be_finite(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what may hold neither NaN nor Inf, by name."""
        names: dict[int, str] = {}
        parameter: torch.Tensor
        for name, parameter in self.parts.named_parameters():
            names[id(parameter)] = name
            if parameter.requires_grad:
                yield name, local(parameter)
        for optimizer_name, optimizer in self.parts.optimizers.items():
            for key, value in state_tensors(optimizer, names):
                yield f"{optimizer_name}: {key}", local(value)
        yield from self._engine.buffers.running_statistics()

    def training_state(self) -> dict[str, Any]:
        """Return what the guard itself adds to a checkpoint."""
        if self._groups is not None and self._groups != len(self.parts.rates()):
            self._groups = None
            self.record.emit(run_events.GroupsChanged())
        cursor = self.cursor
        of_ranks = {} if self._of_ranks is None else {"ranks": self._of_ranks}
        return of_ranks | {
            "global_step": self.record.global_step,
            "counters": asdict(self.counters),
            "position": None if cursor is None else cursor.state_dict(),
            "random_state": self._random_state().to_tree(),
            "ladder": self.ladder.state_dict(),
            "loss_scale": self._engine.loss_scale.state_dict(),
            "spikes": self.spikes.state_dict(),
            "diagnosis": self._engine.diagnosis.state_dict(),
            "save_costs": [
                [cost.stall_seconds, cost.seconds] for cost in self.saving.chooser.costs
            ],
            "run": self._directory.run_id,
            "settings": self._settings,
            "schedules": self.schedules.state_dict(),
        }

    # --- restore

    def resume(self) -> Path | None:
        """Continue from the newest good checkpoint and return its directory.

        None at the start of a run.
        """
        self.ranks.agree("opening", self._same_for_all)
        entry = self._newest_good()
        if entry is None:
            self._directory.check_not_lost()
            return None
        # All digests are right, so an error from here on does not show damage, and the files must
        # stay.
        training = self._restore(entry)
        with reading(entry.path):
            self.go_on_from(training)
            costs = [
                SaveCost(stall_seconds=check_number(stall), seconds=check_number(whole))
                for stall, whole in training["save_costs"]
            ]
            self._directory.note_resumed_from(training["run"])
        self._go_to_position_of(training)  # by the loader's own code, whose errors are no damage
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
        """Record the state of single ranks in a checkpoint that this resume cannot restore."""
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
                        " checkpoint was written, because one of them had skipped a batch. All"
                        " ranks continue at the position of rank 0"
                    )
                )
            )

    def report_steps_left_behind(self) -> None:
        """Report that the run resumes at an earlier step than a previous guard of this process
        had reached.
        """
        forget_left_steps(self._directory.path)
        previous_step = last_step(self._directory.run_id)
        if previous_step > self.record.global_step:
            self.record.emit(
                run_events.StepsLeftBehind(from_step=previous_step, to_step=self.record.global_step)
            )

    def _same_for_all(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self.parts.named_parameters()}
        policy = {
            f"policy.{each.name}": repr(getattr(self.policy, each.name))
            for each in fields(self.policy)
        }
        facts = {
            "run directory": self._directory.run_id,
            "state": list(self.parts.states),
            "model": shapes,
        }
        return {**facts, **policy, **self.parts.settings()}

    def _compare_settings(self, begun_with: dict[str, Any]) -> None:
        given, self._settings = self._settings, begun_with
        names = [
            name for name, value in begun_with.items() if name in given and given[name] != value
        ]
        if names:
            changed = tuple(
                f"{name}: {begun_with[name]!r} stays, not {given[name]!r}" for name in names[:10]
            )
            self.record.emit(run_events.SettingsKept(changed=changed))

    def go_on_from(self, training: Mapping[str, Any]) -> None:
        """Go on counting and judging as the process did that saved this state."""
        self.counters = Counters(
            **{name: check_count(value) for name, value in training["counters"].items()}
        )
        self.counters.resumes += 1
        self.ladder.load_state_dict(training["ladder"])
        self.spikes.load_state_dict(training["spikes"])
        self._engine.diagnosis.load_state_dict(training["diagnosis"])

    def roll_back(
        self, *, rewind_data: bool, before_step: int | None = None, trusted: bool = False
    ) -> dict[str, Any] | None:
        """Return to the newest good state: a copy in host memory, else a checkpoint.

        None if there is none.

        What is returned is what the guard itself had saved in that state.
        """
        self.saving.finish()
        kept, entry = None, None
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
            with self.state.rolling_back():  # a read that fails half-way leaves half of it
                training = self._load_earlier(kept, entry)
                if rewind_data:
                    self._go_to_position_of(training)
        except BaseException as error:
            self.record.emit(run_events.RollbackFailed(error=describe_error(error)))
            raise
        if kept is not None and not trusted:
            self.snapshots.distrust(kept)  # if it leads to the same trouble, the next one is older
        self.saving.returned(to_checkpoint=kept is None)
        self.snapshots.returned_to(self.record.global_step)
        if trusted:
            self._known_good = self.record.global_step  # so is all before it, whatever comes now
        return training

    def _load_earlier(self, kept: Kept | None, entry: Entry | None) -> dict[str, Any]:
        if kept is not None:
            return self._put_back(copied_to_host(kept.trees))
        assert entry is not None
        return self._restore(entry, in_place=True)

    def _go_to_position_of(self, training: Mapping[str, Any]) -> None:
        if self.cursor is not None and training["position"] is not None:
            self.cursor.load_state_dict(training["position"])
            self.cursor.compare_ranks(ranks_in(training), self.ranks.world_size)
        self.random_state = RandomState.from_tree(training["random_state"])

    def _newest_good(self, before_step: int | None = None) -> Entry | None:
        """Return the newest checkpoint that verifies, of at most so many steps.

        Damaged ones are moved aside.
        """

        def on_damaged(path: Path, why: str) -> None:
            self.record.emit(run_events.CheckpointDamaged(checkpoint=path.name, why=why))

        return self._chosen(lambda: self._store.newest_good(on_damaged, before_step=before_step))

    def _chosen(self, choose: Callable[[], Entry | None]) -> Entry | None:
        """Return the checkpoint that the first rank chooses."""
        return self.ranks.chosen(
            choose,
            lambda entry: entry.path.name,
            lambda name: next(entry for entry in self._store.entries() if entry.path.name == name),
        )

    def _restore(self, entry: Entry, *, in_place: bool = False) -> dict[str, Any]:
        """Put a checkpoint back.

        In place, tensors are overwritten as they are read, which needs no memory beside.
        """
        into = live_tensors(self.parts) if in_place else {}
        shares = {} if self.ranks.shares is None else {"share_of": self.ranks.shares(self.parts)}
        trees = read_components(entry, component_names(self.parts), into, **shares)
        live = states_now(self.parts)
        with reading(entry.path):
            check_fits(trees, live, self.parts, f"checkpoint {entry.path.name}")
            check_own(self._of_this_rank(trees["training"]))
        return self._put_back(trees)

    def _put_back(self, trees: dict[str, Any]) -> dict[str, Any]:
        training = self._of_this_rank(trees["training"])
        load(
            trees | {f"state.{name}": tree for name, tree in training.get("states", {}).items()},
            self.parts,
        )
        self.load_own_tensors(training)
        self._engine.loss_scale.load_state_dict(training["loss_scale"])
        self._engine.state_was_replaced()
        self.record.global_step = training["global_step"]
        # Checkpoints of earlier versions hold no counts. Then every step of the run counts for each
        # schedule.
        self.schedules.load_state_dict(
            training.get("schedules", {}), default=training["global_step"]
        )
        return training

    def load_own_tensors(self, training: Mapping[str, Any]) -> None:
        """Restore the buffers in which this rank differed from others."""
        saved = training.get("buffers", {})
        self._engine.buffers.load(saved)
        for name, tensor in self._own_tensors().items() if saved else ():
            if name in saved:
                tensor.copy_(saved[name])

    def _of_this_rank(self, training: Mapping[str, Any]) -> dict[str, Any]:
        return {**training, **self.ranks.own_state(training)}


def ranks_in(training: Mapping[str, Any]) -> int:
    """Return the number of ranks that wrote a checkpoint.

    One process alone adds no state of ranks to it.
    """
    of_ranks = training.get("ranks")
    return 1 if of_ranks is None else len(of_ranks["each"])


def check_own(training: Mapping[str, Any]) -> None:
    """Raise what `reading` takes for damage if the guard's own state is not what a guard writes."""
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
