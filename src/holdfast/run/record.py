"""What happens in a run, written into its black box and, where people should see it, into the log.

Facts may come from any thread. A process that was forked from the one that records must not write: both would count
the records by themselves, and a lock that another thread held at the fork is never given back there.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events import Decision, Event
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_events

_log = logging.getLogger("holdfast")
# People should see these although they did not ask; the others are for the record.
_LOUD = {
    "out_of_memory", "split", "recompute", "skip_step", "roll_back", "stop", "save_failed", "save_refused",
    "checkpoint_damaged", "loss_scale_collapsed", "stop_requested", "buffer_not_restored", "recompute_impossible",
    "cannot_split", "split_refused", "onednn_switched_off", "spike", "spike_clipped", "samples_dropped",
    "micro_batch_dropped", "learning_rate_lowered", "finding", "side_effects",
    "schedulers_wait", "rolled_back", "save_postponed", "saves_synchronous", "loader_healed",
    "sample_quarantined", "dataset_not_deterministic", "stream_read_over", "preflight", "quarantine_full",
    "ranks_not_divided",
}  # fmt: skip


class RunRecord:
    """The recording of one process of a run, and the step that it stands at.

    Args:
        directory: Where the recording lies.
        clock: Time.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._box: BlackBox | None = None
        self._lock = threading.RLock()  # reentrant, for a signal handler of the caller that records
        self._process = 0
        self.global_step = 0

    @property
    def is_open(self) -> bool:
        """Return whether records are written; without that they are only logged."""
        return self._box is not None

    def open(self) -> None:
        """Continue the recording.

        Raises:
            RunDirectoryError: H302 if it cannot be allocated.
        """
        try:
            self._box = BlackBox(self._directory)
            self._process = os.getpid()
        except OSError as error:
            raise RunDirectoryError(
                f"the recording in {self._directory} cannot be made ({error.strerror or error})",
                limit="3 MiB are allocated when a run starts, so that a full disk cannot silence it later",
                fix="free some space, or choose another run directory.",
                rule="H302",
            ) from error

    def close(self) -> None:
        """End the recording."""
        if self._box is not None:
            self._box.close()
            self._box = None

    def happened(self, kind: str, **facts: Any) -> None:
        """Record a fact of the step that the run stands at."""
        self.happened_at(self.global_step, kind, **facts)

    def happened_at(self, global_step: int, kind: str, /, **facts: Any) -> None:
        """Record a fact of an earlier step, such as a checkpoint of it that is finished now."""
        event = Event(kind=kind, global_step=global_step, unix_seconds=self._clock.unix_seconds(), data=facts)
        if os.getpid() == self._process:
            with self._lock:
                if self._box is not None:
                    self._box.event(event)
        if kind in _LOUD:
            _log.warning("%s", event)

    def decided(self, decision: Decision, **facts: Any) -> None:
        """Record a decision."""
        self.happened(decision.name(), **decision.facts(), **facts)

    def step(self, mark: StepMark, micro_batch_size: int | None, loss: float, norm: float, seconds: float) -> None:
        """Record a mark of a step. Cost: about 0.5 microseconds."""
        assert self._box is not None
        self._box.step(mark, self.global_step, micro_batch_size or 0, loss, norm, seconds)

    def events(self) -> list[Event]:
        """Return everything that was recorded in this run directory, oldest first."""
        return read_events(self._directory)
