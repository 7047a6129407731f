"""An open run directory: what is saved there, and how everything comes back from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.saver import read_components, snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import CheckpointError, NonFiniteError, RunDirectoryError
from holdfast.core.policy import Policy
from holdfast.core.version import __version__
from holdfast.data.random_state import RandomState, capture, restore, seed_cpu
from holdfast.memory.host_memory import available_bytes
from holdfast.memory.ladder import MemoryLadder
from holdfast.numerics.spikes import SpikeDetector
from holdfast.run.components import check_fits, component_names, gather, load
from holdfast.run.cursor import Cursor
from holdfast.run.directory import RunDirectory
from holdfast.run.parts import Parts
from holdfast.run.record import RunRecord
from holdfast.run.result import Counters
from holdfast.run.snapshots import Snapshots, copied_to_host
from holdfast.run.transaction import Transaction


class Session:
    """Saves and restores one run.

    Args:
        directory: The run directory.
        record: Its recording.
        parts: Objects to save and restore.
        policy: Settings.
        clock: Time.
        cursor: Position in the data, or None if the loop is not driven by a guard.
        ladder: Memory ladder.
        transaction: Owner of the loss scaler and of the knowledge about buffers.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        record: RunRecord,
        parts: Parts,
        policy: Policy,
        clock: Clock,
        cursor: Cursor | None,
        ladder: MemoryLadder,
        transaction: Transaction,
    ) -> None:
        self._directory = directory
        self.record = record
        self.parts = parts
        self.policy = policy
        self._clock = clock
        self.cursor = cursor
        self._ladder = ladder
        self._transaction = transaction
        self._store = Store(directory.checkpoints)
        self._newest_id: int | None = None  # of the checkpoints when this object closed the directory
        self._saved_at: tuple[int, int] | None = None
        self._tried_at_step: int | None = None
        self.snapshots = Snapshots(policy.snapshot_interval_steps, clock, available_bytes)
        transaction.spare_memory = self.snapshots.give_up
        self.spikes = SpikeDetector(objective=policy.objective)
        self.counters = Counters()
        self.interventions: list[dict[str, Any]] = []
        self.saved = 0
        self.failed = 0
        self.validated = False  # a metric was told, for schedulers that need one
        self.refused: str | None = None  # why the last save was refused, if it was
        self.whole = True  # False while the state belongs to no boundary, so that it must not be saved
        self._known_good = -1  # newest step that a rollback has proved to be older than any trouble
        self.random_state: RandomState | None = None  # of a resumed run, until its loader is started

    @property
    def is_open(self) -> bool:
        """Return whether the lock is held."""
        return self.record.is_open

    def open(self) -> None:
        """Take the lock and continue the recording.

        Raises:
            RunDirectoryError: H301 if another run holds it, H302 if the recording cannot be allocated, H306 if
                another process has continued the run since this object closed it.
        """
        self._directory.acquire()
        try:
            self._store.clean_up()
            self._check_not_continued()
            self.record.open()
        except BaseException:
            self._directory.release()
            raise

    def _check_not_continued(self) -> None:
        if self._newest_id is not None and self._store.next_save_id() - 1 != self._newest_id:
            raise RunDirectoryError(
                f"run directory {self._directory.path} was continued by another process",
                limit="the state in this process is not its newest any more",
                fix="make a new Guard: it continues from the newest checkpoint.",
                rule="H306",
            )

    def close(self) -> None:
        """End the recording and give the lock back."""
        if self.is_open:
            self._newest_id = self._store.next_save_id() - 1
        self.record.close()
        self._directory.release()

    # --- save -----------------------------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        """Return what moves with each step and each batch; the turn of an epoch in itself changes nothing."""
        return self.record.global_step, 0 if self.cursor is None else self.cursor.trained

    @property
    def is_due(self) -> bool:
        """Return whether a multiple of the save interval was passed since the last attempt to save."""
        interval = self.policy.save_interval_steps
        if interval is None or self._tried_at_step is None:
            return interval is not None
        return self.record.global_step // interval > self._tried_at_step // interval

    @property
    def is_calm(self) -> bool:
        """Return whether the state may be called good; a suspicion that is not settled yet puts a save off."""
        return self.policy.spike_action in ("off", "warn") or self.spikes.is_calm()

    @property
    def has_unsaved(self) -> bool:
        """Return whether steps were made that no checkpoint holds, and that may be saved."""
        saves = self.policy.save_interval_steps is not None and self._tried_at_step is not None
        return saves and self.whole and self._saved_at != self._position()

    def save_first(self) -> None:
        """Have a state to return to before the first step.

        Raises:
            CheckpointError: H310, if some state cannot be stored without pickle.
            NonFiniteError: H502, if the weights hold NaN or Inf already.
        """
        if self._tried_at_step is None:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, unless the newest is of this very state or this state is not whole.

        A save that fails is an event and does not stop training. One of weights that are not finite is refused.

        Raises:
            RunDirectoryError: H301, if the lock was lost and another run has the directory.
        """
        self.refused = None
        if self.policy.save_interval_steps is None or not self.whole or self._saved_at == self._position():
            return
        first = self._tried_at_step is None
        bad, count = nonfinite_tensors(self._must_be_finite())
        if count and first:
            raise _unhealthy_start(bad, count)
        self._tried_at_step = self.record.global_step
        if count:
            self.failed += 1
            self.refused = f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}"
            self.record.happened("save_refused", nonfinite=bad, count=count)
            return
        self._directory.hold()
        started = self._clock.monotonic_seconds()
        try:
            self._write(started)
        except Exception as error:
            if first and not isinstance(error, OSError):
                self._tried_at_step = None
                raise  # a state that can never be saved is the caller's to know before any work is done
            self.failed += 1
            seconds = round(self._clock.monotonic_seconds() - started, 4)
            self.record.happened("save_failed", error=f"{type(error).__name__}: {error}"[:500], seconds=seconds)
        else:
            self.saved += 1
            self._saved_at = self._position()

    def keep_snapshot(self) -> None:
        """Copy the state in host memory, if that is due and the state is whole and good."""
        if self.snapshots.is_due(self.record.global_step) and self.whole and self.is_calm:
            bad, _ = nonfinite_tensors(self._must_be_finite())
            if not bad and not self.snapshots.keep(self.record.global_step, gather(self.parts, self._training())):
                self.record.happened("snapshots_do_not_fit", promise="rollbacks return to a checkpoint")

    def _write(self, started: float) -> None:
        shot = snapshot(gather(self.parts, self._training()), self.record.global_step)
        entry = write(self._store, shot, unix_seconds=self._clock.unix_seconds(), written_by=__version__)
        try:
            removed = self._store.prune(self.policy.keep_latest_k, known_good=entry)
        except OSError as error:
            removed = []  # the checkpoint is good all the same
            self.record.happened("prune_failed", error=str(error))
        self.record.happened(
            "checkpoint_saved",
            checkpoint=entry.path.name,
            size_bytes=shot.size_bytes(),
            seconds=round(self._clock.monotonic_seconds() - started, 4),
            removed=[path.name for path in removed],
        )

    def _must_be_finite(self) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[int, str] = {}
        parameter: torch.Tensor
        for name, parameter in self.parts.named_parameters():
            names[id(parameter)] = name
            if parameter.requires_grad:
                yield name, parameter
        for optimizer_name, optimizer in self.parts.optimizers.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        yield f"{optimizer_name}: {key} of {names.get(id(parameter), '?')}", value
        yield from self._transaction.buffers.running_statistics()

    def _training(self) -> dict[str, Any]:
        cursor = self.cursor
        random_state = capture(self.parts.devices()) if cursor is None else cursor.random_state()
        return {
            "global_step": self.record.global_step,
            "counters": asdict(self.counters),
            "position": None if cursor is None else cursor.state_dict(),
            "random_state": random_state.to_tree(),
            "ladder": self._ladder.state_dict(),
            "loss_scale": self._transaction.loss_scale.state_dict(),
            "spikes": self.spikes.state_dict(),
            "interventions": self.interventions,
            "diagnosis": self._transaction.diagnosis.state_dict(),
        }

    def intervened(self, kind: str, reason: str) -> None:
        """Note that training was changed, for the checkpoints to come: the newest 200 are kept."""
        self.interventions.append({"kind": kind, "global_step": self.record.global_step, "reason": reason})
        del self.interventions[:-200]

    def adopt(self, changed: str, evidence: Mapping[str, Any]) -> Path:
        """Write a checkpoint of a state that was changed on purpose, and record what and on which evidence.

        Raises:
            CheckpointError: H310, if it could not be written.
        """
        before, self._saved_at = self.saved, None
        self.record.happened("adopted", changed=changed, **evidence)
        self.intervened("adopted", changed)
        self.save()
        if self.saved == before:
            raise CheckpointError(
                f"the checkpoint with {changed} could not be written",
                limit=self.refused or "the events say why",
                fix="make room or repair what the event save_failed names, and try again.",
                rule="H310",
            )
        return self._store.entries()[0].path

    def go_elsewhere(self, number: int) -> None:
        """Let training go on at the beginning of a later epoch with other random numbers; for trials.

        Args:
            number: Epochs further on, and the seed.
        """
        if self.cursor is not None:
            self.cursor.go_to(self.cursor.epoch + number, number)
        self.random_state = None
        seed_cpu(number)
        torch.manual_seed(number)

    # --- restore --------------------------------------------------------------------------------------------

    def resume(self) -> Path | None:
        """Continue from the newest good checkpoint, if there is one.

        Returns:
            Its directory, or None at the start of a run.

        Raises:
            CheckpointError: H312 if there are checkpoints and none verifies, H313 if it does not fit.
            RunDirectoryError: H303 for a newer format, H304 for another model.
        """
        entry = self._newest_good()
        if entry is None:
            remembered = self._directory.recall_ladder()
            if remembered is not None:
                try:
                    self._ladder.load_state_dict(remembered)
                except (KeyError, TypeError, ValueError) as error:
                    self.record.happened("micro_batch_size_forgotten", why=repr(error))
            return None
        training = self._restore(entry)
        self._go_to_position_of(training)
        self._ladder.load_state_dict(training["ladder"])
        restore(RandomState.from_tree(training["random_state"]))
        self.counters = Counters(**training["counters"])
        self.counters.resumes += 1
        self.spikes.load_state_dict(training["spikes"])
        self.interventions = training["interventions"]
        self._transaction.diagnosis.load_state_dict(training["diagnosis"])
        self._tried_at_step = self.record.global_step
        self._saved_at = self._position()
        self.record.happened("resumed", checkpoint=entry.path.name, trained_batches=self._position()[1])
        return entry.path

    def roll_back(
        self, *, rewind_data: bool, before_step: int | None = None, trusted: bool = False
    ) -> dict[str, Any] | None:
        """Return to the newest good state: a copy in host memory, else a checkpoint.

        Args:
            rewind_data: Also go back in the data, and to the random state of then: always to a checkpoint.
            before_step: Newest step that may be trusted; None trusts all.
            trusted: Whether a copy so old is surely good, and may be returned to again.

        Returns:
            What the guard itself had saved in that state; None if there is none to return to.
        """
        kept = None
        if before_step is not None:
            before_step = max(before_step, self._known_good)
        if not rewind_data:
            kept = self.snapshots.newest(self.record.global_step if before_step is None else before_step)
        if kept is not None:
            training = self._put_back(copied_to_host(kept.trees))
            if not trusted:
                self.snapshots.distrust(kept)  # if it leads to the same trouble, the next one is older
            self._tried_at_step = min(self._tried_at_step or 0, self.record.global_step)
        else:
            entry = None if self.policy.save_interval_steps is None else self._newest_good(before_step)
            if entry is None:
                return None
            training = self._restore(entry)
            self._tried_at_step = self.record.global_step
            if rewind_data:
                self._go_to_position_of(training)
        self.snapshots.returned_to(self.record.global_step)
        if trusted:
            self._known_good = self.record.global_step  # so is all before it, whatever comes now
        return training

    def _go_to_position_of(self, training: Mapping[str, Any]) -> None:
        if self.cursor is not None and training["position"] is not None:
            self.cursor.load_state_dict(training["position"])
        self.random_state = RandomState.from_tree(training["random_state"])

    def _newest_good(self, before_step: int | None = None) -> Entry | None:
        """Return the newest checkpoint that verifies, of at most so many steps, setting those aside that do not."""
        entries = self._store.entries()
        if before_step is not None:
            entries = [entry for entry in entries if entry.global_step <= before_step]
        for entry in entries:
            try:
                entry.verify()
            except CheckpointError as error:
                self._store.set_aside(entry)
                self.record.happened("checkpoint_damaged", checkpoint=entry.path.name, why=error.what)
                continue
            return entry
        lost = entries or self._store.damaged()
        if lost and before_step is None:
            raise CheckpointError(
                f"none of the {len(lost)} checkpoint(s) in {self._store.directory} verifies",
                limit="starting from scratch without a word would hide the loss",
                fix="bring back a copy of this directory, or move it away to start again.",
                rule="H312",
            )
        return None

    def _restore(self, entry: Entry) -> dict[str, Any]:
        trees = read_components(entry, component_names(self.parts))
        check_fits(trees, self.parts, f"checkpoint {entry.path.name}")
        return self._put_back(trees)

    def _put_back(self, trees: dict[str, Any]) -> dict[str, Any]:
        load(trees, self.parts)
        training: dict[str, Any] = trees["training"]
        self._transaction.loss_scale.load_state_dict(training["loss_scale"])
        self._transaction.state_was_replaced()
        self.record.global_step = training["global_step"]
        self.whole = True
        return training


def _unhealthy_start(bad: list[str], count: int) -> NonFiniteError:
    return NonFiniteError(
        f"{count} tensor(s) hold NaN or Inf before the first step: {', '.join(bad)}",
        limit="training cannot recover from weights that are not finite",
        fix="check the initialisation or the weights that were loaded.",
        rule="H502",
    )
