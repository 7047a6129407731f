"""Restore the state of a run: resume from a checkpoint, or roll back to an earlier state.

``saved_state`` defines what the saved state of a run contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.interval import SaveCost
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.read_errors import reading
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.containers import check_count, check_number
from holdfast.core.events import run_events
from holdfast.guard.context import RunContext
from holdfast.guard.cursor import check_position
from holdfast.guard.directory import RunDirectory
from holdfast.guard.ranks.interface import Ranks
from holdfast.guard.record import describe_error
from holdfast.guard.run.last_steps import last_step
from holdfast.guard.run.saved_state import SavedState
from holdfast.guard.saving.components import (
    check_fits,
    component_names,
    live_tensors,
    load,
    states_now,
)
from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.snapshots import HostSnapshot, Snapshots
from holdfast.guard.saving.unsaved import forget_left_steps
from holdfast.guard.schedule_length import LengthChange, ScriptLengths
from holdfast.guard.state.trees import copied_to_host
from holdfast.loader.random_state import RandomState, restore

# The maximum number of names in one event.
_MOST_NAMES = 10


class Restoration:
    """Restores the state of one run.

    Args:
        context: The shared objects of the run.
        directory: The run directory.
        store: The checkpoints in the run directory.
        saved_state: Gathers the state for checkpoints, and loads this rank's part of it.
        saving: Saves the checkpoints of the run.
        snapshots: The snapshots in host memory.
    """

    def __init__(
        self,
        context: RunContext,
        directory: RunDirectory,
        store: Store,
        saved_state: SavedState,
        saving: Saving,
        snapshots: Snapshots,
    ) -> None:
        self._context = context
        self._parts = context.parts
        self._policy = context.policy
        self._record = context.record
        self._ranks = context.ranks
        self._state = context.state
        self._cursor = context.cursor
        self._directory = directory
        self._store = store
        self._saved_state = saved_state
        self._saving = saving
        self._snapshots = snapshots
        # The step of the newest state that is known to predate the cause of a rollback, or -1. No
        # rollback needs to go further back than this step.
        self._known_good = -1
        # The random state to restore when a resumed run starts its loader. None afterwards.
        self._random_state: RandomState | None = None
        # The schedules whose length in the script differs from that in the last loaded state.
        self._length_changes: list[LengthChange] = []

    @property
    def random_state(self) -> RandomState | None:
        """Return the random state to restore when a resumed run starts its loader.

        Return None if the loader was started already or the run was not resumed.
        """
        return self._random_state

    # --- resuming in a new process

    def resume(
        self, before_step: int | None = None, *, reports_settings: bool = True
    ) -> Path | None:
        """Restore the newest intact checkpoint, and record that the run has been resumed.

        Args:
            before_step: Use only checkpoints from this step or earlier. None for all.
            reports_settings: Whether to report settings of the script that differ from those in the
                checkpoint, which replace them.

        Returns:
            The directory of the checkpoint, or None if the run starts from the beginning.
        """
        self._ranks.agree("opening", self._same_for_all)
        entry = self._newest_good(before_step)
        if entry is None:
            self._directory.check_not_lost()
            return None
        # All digests match, so an error from here on does not indicate that the checkpoint is
        # damaged, and the checkpoint must not be moved aside.
        training = self._restore(entry)
        with reading(entry.path):
            self.continue_from(training)
            costs = [
                SaveCost(stall_seconds=check_number(stall), seconds=check_number(whole))
                for stall, whole in training["save_costs"]
            ]
            self._directory.note_resumed_from(training["run"])
        # This is outside of `reading`, since an error in the loader's own code does not mean that
        # the checkpoint is damaged.
        self._go_to_position_of(training)
        with reading(entry.path):
            restore(RandomState.from_tree(training["random_state"]))
        self._saving.note_resumed(entry, costs)
        self._saved_state.settings.restore(training["settings"], is_reported=reports_settings)
        self._record.emit(
            run_events.Resumed(
                checkpoint=entry.path.name, trained_batches=self._saved_state.position()[1]
            )
        )
        for change in self._length_changes:
            self._record.emit(
                run_events.ScheduleLengthChanged(
                    scheduler=change.scheduler,
                    changed=change.changed,
                    rate_before=change.rate_before,
                    rate_now=change.rate_now,
                )
            )
        self._report_lost_state_of_ranks(training)
        self._compare_repeated_steps(training)
        return entry.path

    def _compare_repeated_steps(self, training: dict[str, Any]) -> None:
        """Let the recording compare the steps that the run is about to repeat.

        This is done only if the run will read the same batches and divide them among as many ranks
        as before, with the same schedules. Otherwise, a difference would mean nothing.

        Args:
            training: The guard's own part of the saved state.
        """
        if self._cursor is None or self._cursor.unkept is not None or self._ranks.rank != 0:
            return
        if self._length_changes:
            return
        if ranks_in(training) != self._ranks.world_size:
            return
        self._record.compare_repeated_steps(
            is_exact=is_deterministic(self._parts.device_type()), precision=self._policy.precision
        )

    def _same_for_all(self) -> dict[str, Any]:
        """Return the settings and shapes that must be the same on all ranks."""
        shapes = {name: list(parameter.shape) for name, parameter in self._parts.named_parameters()}
        facts: dict[str, Any] = {
            "run directory": self._directory.run_id,
            "state": list(self._parts.states),
            "model": shapes,
            # The order matters too: it is the order in which the ranks exchange the state.
            "optimizers": list(self._parts.optimizers),
        }
        for field in fields(self._policy):
            facts[f"policy.{field.name}"] = repr(getattr(self._policy, field.name))
        return {**facts, **self._parts.settings()}

    def _report_lost_state_of_ranks(self, training: Mapping[str, Any]) -> None:
        """Record which per-rank state cannot be restored from the checkpoint.

        Args:
            training: The guard's own state in the checkpoint.
        """
        of_ranks = (training.get("ranks") or {"each": []})["each"]
        names = dict.fromkeys(
            name
            for of_rank in of_ranks
            for kind in ("states", "buffers")
            for name in of_rank.get(kind, {})
        )
        if names and len(of_ranks) != self._ranks.world_size:
            self._record.emit(
                run_events.OwnStateNotKept(
                    names=tuple(names)[:_MOST_NAMES],
                    ranks_before=len(of_ranks),
                    ranks_now=self._ranks.world_size,
                )
            )
        positions = [of_rank["position"] for of_rank in of_ranks if of_rank["position"] is not None]
        batches = [position["batches"] for position in positions]
        if len({*batches}) > 1:
            self._record.emit(
                run_events.PositionNotKept(
                    why=(
                        f"the ranks were at batches {', '.join(map(str, batches))} when this"
                        " checkpoint was written, because one of them had skipped a batch; all of"
                        " them continue at the position of rank 0"
                    )
                )
            )

    def report_steps_left_behind(self) -> None:
        """Report the steps that an earlier guard in this process reached but did not save."""
        forget_left_steps(self._directory.path)
        previous_step = last_step(self._directory.run_id)
        if previous_step > self._record.global_step:
            self._record.emit(
                run_events.StepsLeftBehind(
                    from_step=previous_step, to_step=self._record.global_step
                )
            )

    def continue_from(self, training: Mapping[str, Any]) -> None:
        """Restore the counters, the memory ladder and the detectors from a saved state.

        Args:
            training: The guard's own part of the saved state.
        """
        context = self._context
        context.counters.restore(training["counters"])
        context.counters.note_resume()
        context.ladder.load_state_dict(training["ladder"])
        context.spikes.load_state_dict(training["spikes"])
        context.diagnosis.load_state_dict(training["diagnosis"])

    def note_loader_started(self) -> None:
        """Record that the loader has reached its position and the random state was restored."""
        self._random_state = None

    def restore_random_state(self) -> None:
        """Restore the random state of a resumed run now, and not when its loader starts."""
        if self._random_state is not None:
            restore(self._random_state)
            self._random_state = None

    def restore_again(self) -> None:
        """Restore the checkpoint of a resumed run again, which has not taken a step since."""
        entry = self._newest_good()
        if entry is None:
            return
        with self._state.rolling_back():
            training = self._restore(entry, in_place=True)
            self._context.counters.restore(training["counters"])
            self._go_to_position_of(training)

    # --- rolling back

    def roll_back(
        self, *, rewind_data: bool, before_step: int | None = None, trusted: bool = False
    ) -> dict[str, Any] | None:
        """Restore the newest good state, from a snapshot in host memory or else a checkpoint.

        Args:
            rewind_data: Whether the loader also returns to the position of the restored state. If
                so, only checkpoints are used.
            before_step: Use only states from this step or earlier. If None, use the newest state.
            trusted: Whether states from `before_step` or earlier are known to predate the cause of
                the rollback.

        Returns:
            The guard's own part of the restored state, or None if there is no such state.
        """
        self._saving.finish()
        if before_step is not None:
            before_step = max(before_step, self._known_good)
        earlier = self._earlier_state(before_step, from_memory=not rewind_data)
        if earlier is None:
            return None
        try:
            # If loading fails partway, the state in memory is inconsistent and must not be saved.
            with self._state.rolling_back():
                training = self._load_earlier(earlier)
                if rewind_data:
                    self._go_to_position_of(training)
        except BaseException as error:
            self._record.emit(run_events.RollbackFailed(error=describe_error(error)))
            raise
        if isinstance(earlier, HostSnapshot) and not trusted:
            # If the run fails again after this rollback, the next rollback uses an older snapshot.
            self._snapshots.distrust(earlier)
        self._record.stop_comparing()
        self._saving.note_rollback(to_checkpoint=isinstance(earlier, Entry))
        self._snapshots.returned_to(self._record.global_step)
        if trusted:
            # The restored state predates the cause, so no later rollback needs an older state.
            self._known_good = self._record.global_step
        return training

    def _earlier_state(
        self, before_step: int | None, *, from_memory: bool
    ) -> HostSnapshot | Entry | None:
        """Return the newest good state: a snapshot, or else a checkpoint, or None.

        Args:
            before_step: Use only states from this step or earlier. If None, use the newest state.
            from_memory: Whether a snapshot in host memory may be used.
        """
        if from_memory:
            newest_step = self._record.global_step if before_step is None else before_step
            snapshot = self._snapshots.newest(newest_step)
            if snapshot is not None:
                return snapshot
        if self._policy.save_interval_steps is None:
            return None
        return self._newest_good(before_step)

    def _load_earlier(self, earlier: HostSnapshot | Entry) -> dict[str, Any]:
        """Load a snapshot or a checkpoint.

        Returns:
            The guard's own part of the loaded state.
        """
        if isinstance(earlier, HostSnapshot):
            return self._load(copied_to_host(earlier.trees))
        return self._restore(earlier, in_place=True)

    # --- finding and loading a state

    def _newest_good(self, before_step: int | None = None) -> Entry | None:
        """Return the newest intact checkpoint, and move damaged ones aside.

        Args:
            before_step: Consider only checkpoints from this step or earlier. None for all.
        """

        def on_damaged(path: Path, why: str) -> None:
            self._record.emit(run_events.CheckpointDamaged(checkpoint=path.name, why=why))

        return chosen_on_first_rank(
            self._ranks,
            self._store,
            lambda: self._store.newest_good(on_damaged, before_step=before_step),
        )

    def _go_to_position_of(self, training: Mapping[str, Any]) -> None:
        """Move the cursor to a saved position, and keep the random state until a loop starts.

        Args:
            training: The guard's own part of the saved state.
        """
        if self._cursor is not None and training["position"] is not None:
            self._cursor.load_state_dict(training["position"])
            self._cursor.compare_ranks(ranks_in(training), self._ranks.world_size)
        self._random_state = RandomState.from_tree(training["random_state"])

    def _restore(self, entry: Entry, *, in_place: bool = False) -> dict[str, Any]:
        """Restore a checkpoint, and return the guard's own part of it.

        Args:
            entry: The checkpoint.
            in_place: Whether to read directly into the tensors of the run, which needs no
                additional memory.
        """
        targets = live_tensors(self._parts) if in_place else {}
        # With a sharded model, this rank reads only the rows of its own shards.
        share_of = self._ranks.rows_to_load(self._parts)
        trees = read_components(entry, component_names(self._parts), targets, share_of)
        live = states_now(self._parts)
        with reading(entry.path):
            check_fits(trees, live, self._parts, f"checkpoint {entry.path.name}")
            check_own(self._saved_state.of_this_rank(trees["training"]))
        return self._load(trees)

    def _load(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Load a saved state into the objects of the run.

        Args:
            trees: The state by component, as `SavedState.components` returns it.

        Returns:
            The guard's own part of the state, with this rank's values.
        """
        training = self._saved_state.of_this_rank(trees["training"])
        # The states of `state=` objects that differed between ranks were saved for each rank.
        states_of_rank = training.get("states", {})
        own_states = {f"state.{name}": tree for name, tree in states_of_rank.items()}
        lengths = ScriptLengths(self._parts.schedulers)
        load({**trees, **own_states}, self._parts)
        self._length_changes = lengths.restore(training["settings"])
        self._saved_state.load_own_tensors(training)
        self._context.loss_scale.load_state_dict(training["loss_scale"])
        self.note_state_replaced()
        self._record.move_to_step(training["global_step"])
        # Checkpoints from earlier versions contain no step counts of schedulers. In that case,
        # assume that each scheduler has counted every step of the run.
        self._context.schedules.load_state_dict(
            training.get("schedules", {}), default=training["global_step"]
        )
        return training

    def note_state_replaced(self) -> None:
        """Record that saved weights and optimizer state have replaced those in memory."""
        self._context.created_state.forget()


def chosen_on_first_rank(
    ranks: Ranks, store: Store, choose: Callable[[], Entry | None]
) -> Entry | None:
    """Choose a checkpoint on rank 0, and return the same checkpoint on all ranks.

    Args:
        ranks: The ranks of the run.
        store: The checkpoints of the run.
        choose: Called on rank 0 only. Returns the checkpoint, or None if there is none.
    """
    return ranks.choose_on_first(
        choose,
        lambda entry: entry.path.name,
        lambda name: next(entry for entry in store.entries() if entry.path.name == name),
    )


def ranks_in(training: Mapping[str, Any]) -> int:
    """Return the number of ranks that wrote a checkpoint.

    A checkpoint without per-rank state was written by a single rank.

    Args:
        training: The guard's own state in the checkpoint.
    """
    of_ranks = training.get("ranks")
    return 1 if of_ranks is None else len(of_ranks["each"])


def check_own(training: Mapping[str, Any]) -> None:
    """Check the structure of the guard's own state in a checkpoint.

    Raises:
        TypeError, LookupError or ValueError: If the structure is not the one that a guard writes.
            `reading` reports these errors as damage to the checkpoint.
    """
    check_count(training["global_step"])
    RandomState.from_tree(training["random_state"])
    if training["position"] is not None:
        check_position(training["position"])
    for name in training.get("schedules", {}):
        check_count(training["schedules"][name])
    # Reading these entries raises an error if one of them is missing or is not a mapping.
    _ = (
        training["loss_scale"],
        training["run"],
        {**training["settings"]},
        {**training["schedulers"]},
    )


def is_deterministic(device_type: str) -> bool:
    """Return whether a repeated step has the same bits on this type of device."""
    return device_type == "cpu" or torch.are_deterministic_algorithms_enabled()
