"""A run directory that is open: what is recorded there, saved there, and brought back from there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.saver import read_components, snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import CheckpointError, NonFiniteError, RunDirectoryError
from holdfast.core.events import Decision, Event
from holdfast.core.policy import Policy
from holdfast.data.random_state import RandomState, capture
from holdfast.memory.ladder import MemoryLadder
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_events
from holdfast.run.components import check_fits, component_names, gather, load
from holdfast.run.cursor import Cursor
from holdfast.run.directory import RunDirectory
from holdfast.run.parts import Parts
from holdfast.run.result import Counters

_log = logging.getLogger("holdfast")
# Events that people should see although they did not ask; the others are for the record.
_LOUD = {
    "out_of_memory", "split", "recompute", "skip_step", "roll_back", "stop", "save_failed", "save_refused",
    "checkpoint_damaged", "loss_scale_collapsed", "stop_requested", "buffer_not_restored", "recompute_impossible",
}  # fmt: skip


class Session:
    """Records, saves and restores one run.

    Args:
        directory: The run directory.
        parts: Objects to save and restore.
        policy: Settings.
        clock: Time.
        version: Of holdfast, for the manifests.
    """

    def __init__(self, directory: RunDirectory, parts: Parts, policy: Policy, clock: Clock, version: str) -> None:
        self.directory = directory
        self.store = Store(directory.checkpoints)
        self._parts = parts
        self._policy = policy
        self._clock = clock
        self._version = version
        self._box: BlackBox | None = None
        self._newest_id = 0
        self.global_step = 0
        self.counters = Counters()
        self.saved = 0
        self.failed = 0
        self.last_saved_step: int | None = None

    # --- open and close -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return whether the lock is held and the recording goes on."""
        return self._box is not None

    def open(self) -> None:
        """Take the lock and continue the recording.

        Raises:
            RunDirectoryError: H301 if another run holds it, H302 if the recording cannot be allocated, H306
                if another process has continued the run since this object closed it.
        """
        self.directory.acquire()
        try:
            self.store.clean_up()
            newest = self.store.next_save_id() - 1
            if self.last_saved_step is not None and newest != self._newest_id:
                raise RunDirectoryError(
                    f"run directory {self.directory.path} was continued by another process",
                    limit="the state in this process is not its newest any more",
                    fix="make a new Guard: it continues from the newest checkpoint.",
                    rule="H306",
                )
            self._newest_id = newest
            try:
                self._box = BlackBox(self.directory.recorder)
            except OSError as error:
                raise RunDirectoryError(
                    f"the recording in {self.directory.recorder} cannot be made ({error.strerror or error})",
                    limit="3 MiB are allocated when a run starts, so that a full disk cannot silence it later",
                    fix="free some space, or choose another run directory.",
                    rule="H302",
                ) from error
        except BaseException:
            self.directory.release()
            raise

    def close(self) -> None:
        """End the recording and give the lock back."""
        if self._box is not None:
            self._box.close()
            self._box = None
        self.directory.release()

    # --- record ---------------------------------------------------------------------------------------------

    def happened(self, kind: str, **facts: Any) -> None:
        """Record a fact, and tell people if it is one that they should see."""
        event = Event(kind=kind, global_step=self.global_step, unix_seconds=self._clock.unix_seconds(), data=facts)
        if self._box is not None:
            self._box.event(event)
        if kind in _LOUD:
            _log.warning("%s", event)

    def decided(self, decision: Decision, **facts: Any) -> None:
        """Record a decision."""
        self.happened(decision.name(), **decision.facts(), **facts)

    def step(self, mark: StepMark, micro_batch_size: int | None, loss: float, norm: float, seconds: float) -> None:
        """Record a mark of a step."""
        assert self._box is not None
        self._box.step(mark, self.global_step, micro_batch_size or 0, loss, norm, seconds)

    def events(self) -> list[Event]:
        """Return everything that was recorded in this run directory, oldest first."""
        return read_events(self.directory.recorder)

    # --- save -----------------------------------------------------------------------------------------------

    def save(
        self,
        *,
        cursor: Cursor | None,
        ladder: MemoryLadder,
        scaler: Any,
        buffers: list[tuple[str, torch.Tensor]],
    ) -> bool:
        """Write a checkpoint of everything. A save that fails is an event and does not stop training.

        Args:
            cursor: Position in the data.
            ladder: Memory ladder.
            scaler: Of fp16, or None.
            buffers: Mutable buffers, which must be finite too.

        Returns:
            Whether it was saved.

        Raises:
            CheckpointError: H310 at the first save of a run, if some state cannot be stored without pickle.
            NonFiniteError: H502 at the first save of a run, if the weights hold NaN or Inf already.
        """
        first = self.last_saved_step is None
        started = self._clock.monotonic_seconds()
        bad, count = nonfinite_tensors(self._must_be_finite(buffers))
        if count:
            if first:
                raise _unhealthy_start(bad, count)
            self.happened("save_refused", nonfinite=bad, count=count)
            self.failed += 1
            return False
        try:
            trees = gather(self._parts, self._training(cursor, ladder, scaler))
            shot = snapshot(trees, self.global_step)
            entry = write(self.store, shot, unix_seconds=self._clock.unix_seconds(), written_by=self._version)
            removed = self.store.prune(self._policy.keep_latest_k, known_good=entry)
        except Exception as error:
            if first and not isinstance(error, OSError):
                raise  # a state that cannot be saved at all is the caller's to know before any work is done
            self.failed += 1
            self.happened("save_failed", error=f"{type(error).__name__}: {error}"[:500])
            return False
        self._newest_id = entry.save_id
        self.last_saved_step = self.global_step
        self.saved += 1
        self.happened(
            "checkpoint_saved",
            checkpoint=entry.path.name,
            size_bytes=shot.size_bytes(),
            seconds=round(self._clock.monotonic_seconds() - started, 4),
            removed=[path.name for path in removed],
        )
        return True

    def _must_be_finite(self, buffers: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        named = [(name, p) for name, p in self._parts.named_parameters() if p.requires_grad]
        names = {id(p): name for name, p in self._parts.named_parameters()}
        for optimizer_name, optimizer in self._parts.optimizers.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        where = names.get(id(parameter), "?")
                        named.append((f"{optimizer_name}: {key} of {where}", value))
        return named + buffers

    def _training(self, cursor: Cursor | None, ladder: MemoryLadder, scaler: Any) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "counters": asdict(self.counters),
            "position": None if cursor is None else cursor.state_dict(),
            "random_state": capture(self._parts.devices()).to_tree(),
            "ladder": ladder.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    # --- restore --------------------------------------------------------------------------------------------

    def newest_good(self) -> Entry | None:
        """Return the newest checkpoint that verifies, setting those aside that do not.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            CheckpointError: H312 if there are some and none verifies.
            RunDirectoryError: H303 if one was written in a newer format.
        """
        entries = self.store.entries()
        for entry in entries:
            try:
                entry.verify()
            except CheckpointError as error:
                self.store.set_aside(entry)
                self.happened("checkpoint_damaged", checkpoint=entry.path.name, why=error.what)
                continue
            return entry
        found = entries or self.store.damaged()
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoint(s) in {self.store.directory} verifies",
                limit="starting from scratch without a word would hide the loss",
                fix="bring back a copy of this directory, or move it away to start again.",
                rule="H312",
            )
        return None

    def restore(self, entry: Entry) -> dict[str, Any]:
        """Load models, optimizers, schedulers and further state from a verified checkpoint.

        Returns:
            The component ``"training"``: random state, position, ladder, scaler, counters.

        Raises:
            RunDirectoryError: H304. CheckpointError: H313. Nothing is loaded then.
        """
        trees = read_components(entry, component_names(self._parts))
        check_fits(trees, self._parts, f"checkpoint {entry.path.name}")
        load(trees, self._parts)
        training: dict[str, Any] = trees["training"]
        self.global_step = training["global_step"]
        self.last_saved_step = self.global_step
        return training


def random_state_of(training: Mapping[str, Any]) -> RandomState:
    """Return the random state in the component ``"training"``."""
    return RandomState.from_tree(training["random_state"])


def _unhealthy_start(bad: list[str], count: int) -> NonFiniteError:
    return NonFiniteError(
        f"{count} tensor(s) hold NaN or Inf before the first step: {', '.join(bad)}",
        limit="training cannot recover from weights that are not finite",
        fix="check the initialisation or the weights that were loaded.",
        rule="H502",
    )
