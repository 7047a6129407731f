"""What a callback can do in a loop that is somebody else's: record, leave steps out, and give up.

It sees a loop only at the points where a framework calls it: a step cannot be retried, cut or taken back. The
callbacks of Lightning and of the Trainer differ in where they are called; what they do there is here.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.clock import SystemClock
from holdfast.core.errors import NonFiniteError
from holdfast.core.events import run_events
from holdfast.core.events.event import EventData, SkipStep
from holdfast.core.policy.policy import Policy
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import RunRecord
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.integrations.protocol import check_one_process
from holdfast.learning.watch import Watch, watch
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.numerics.gradients import Group, inspect, nonfinite_gradients
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.run_files import announce_recording

_open: weakref.WeakValueDictionary[str, Recording] = weakref.WeakValueDictionary()


class Recording:
    """A recording that can be opened for one training after another; while it is closed, nothing is recorded.

    Args:
        policy: As `Policy.of` takes it; used are ``nonfinite_patience``, ``diagnose``, ``objective``, ``frozen`` and
            ``ignore_rules``.
        run_dir: Where it is recorded; None: where `open` says.
        instead: What of the same framework can go back to better weights, for messages.
    """

    def __init__(self, policy: Any, run_dir: str | os.PathLike[str] | None, *, instead: str) -> None:
        self.policy = Policy.of(policy)
        self.loss: float | None = None
        self.norm: float | None = None
        """Of the step that runs, or has ended and is not recorded yet; None: not known."""
        self._run_dir = run_dir
        self._instead = instead
        self._directory: RunDirectory | None = None
        self._record: RunRecord | None = None
        self._watch: Watch | None = None
        self._model: nn.Module | None = None
        self._buffers: BufferKeeper | None = None
        self._random: RandomState | None = None  # at the beginning of the step
        self._skipped, self._skipped_in_a_row = False, 0
        self._began = 0.0
        self._seconds: float | None = None  # of a step that has ended and is not recorded yet

    @property
    def is_open(self) -> bool:
        """Return whether a training is recorded."""
        return self._record is not None

    def open(self, usual: Any, *, by: str, world_size: int, global_step: int, model: nn.Module) -> None:
        """Begin to record at a step of a model's training, in ``holdfast`` of the usual folder if none was given.

        Raises:
            PolicyError: H108, for several processes. RunDirectoryError: H30x.
        """
        check_one_process(world_size, "world_size")
        self.close()
        directory = RunDirectory(self._run_dir or Path(usual, "holdfast"))
        left = _open.get(str(directory.path.resolve()))
        if left is not None:
            left.close()  # of a training that ended with an exception, of which no callback hears
        directory.acquire()
        self._directory = directory  # not before: what was left may be this object
        _open[str(directory.path.resolve())] = self
        self._record = RunRecord(directory.recorder, SystemClock())
        self._record.open()
        announce_recording(directory.path)
        self._record.global_step = global_step
        self._model, self._buffers = model, BufferKeeper({"model": model})
        self.emit(run_events.Loop(by=by))
        before = directory.saved_in
        if before is not None and not global_step:
            self.emit(run_events.BeginsAnew(though_saved_in=before))
            directory.note_saved(None)

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Look for reasons why a model does not learn, if the policy says so."""
        policy = self.policy
        if policy.diagnose:
            settings: dict[str, Any] = {"objective": policy.objective, "frozen": policy.frozen}
            self._watch = watch(model, optimizer, ignore=policy.ignore_rules, **settings)
            self._watch.__enter__()

    def close(self, error: BaseException | None = None) -> None:
        """Record what was found, and the error that ends the training, if one does."""
        self.record_step()
        watching, self._watch = self._watch, None
        if watching is not None:
            watching.__exit__(None, None, None)
            for found in watching.findings():
                self.emit(
                    run_events.Finding(rule=found.rule, what=found.what, fix=found.fix, severity=found.severity)
                )
        if self._record is not None:
            if error is not None:
                self._record.left_by(error)
            self._record.close(None if error is None else "failed")
        if self._directory is not None:
            self._directory.release()
        self._record = self._directory = self._model = self._buffers = self._random = None

    def emit(self, data: EventData) -> None:
        """Record an event of the step that training stands at."""
        if self._record is not None:
            self._record.emit(data)

    def note_saved_in(self, folder: Path) -> None:
        """Keep where the framework has saved, so that later restarts miss what is gone."""
        if self._directory is not None:
            self._directory.note_saved(str(folder))

    def validated(self, loss: float) -> None:
        """Take in the loss of an evaluation; less is better."""
        self.emit(run_events.Validated(loss=loss))
        if self._watch is not None:
            self._watch.validated(loss)

    def begin_batch(self, *, first: bool) -> None:
        """Mark that a batch has begun; at the first one of a step keep what a forward pass may change."""
        self.record_step()
        self._began, self._skipped = time.monotonic(), False
        self.loss = self.norm = None
        if self._record is not None:
            self._record.step(StepMark.BEGUN, None, None, None, 0.0)
        if first and self._buffers is not None and self._model is not None:
            self._buffers.keep()
            devices = {parameter.device for parameter in self._model.parameters()}
            self._random = capture([device for device in devices if device.type != "cpu"])

    def before_step(self, optimizer: Any, loss: torch.Tensor | None, *, scaled: bool, undo: bool = True) -> None:
        """Empty gradients that hold NaN or Inf, so that the optimizer moves nothing.

        Args:
            optimizer: About to be stepped.
            loss: Of the step, shape ``()``, if it is known.
            scaled: Whether fp16 finds its scale by trying, and skips by itself.
            undo: Whether buffers and random numbers of the step are its own.

        Raises:
            NonFiniteError: H501, after ``nonfinite_patience`` such steps in a row.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not held or self._buffers is None or self._model is None:
            return
        facts, _ = inspect([Group("optimizer.0", "optimizer", held)], held[0].new_zeros(()) if loss is None else loss)
        if loss is not None:  # else the gradients are clipped already
            self.loss, self.norm = facts.loss, facts.total
        self._skipped = facts.nonfinite
        if not facts.nonfinite or scaled:
            self._skipped_in_a_row = 0
            if not facts.nonfinite:
                self._buffers.learn()
            return
        names, count = nonfinite_gradients(self._model.named_parameters())
        if undo and self._random is not None:
            self._buffers.put_back()
            restore(self._random)
        for parameter in held:
            parameter.grad = None
        self._skipped_in_a_row += 1
        reason = f"{count} gradient(s) hold NaN or Inf: {', '.join(names)}"
        self.emit(SkipStep(reason=reason, promise="changes training"))
        patience = self.policy.nonfinite_patience
        if patience is not None and self._skipped_in_a_row >= patience:
            raise self.given_up(reason)

    def end_step(self, global_step: int) -> None:
        """Take the time; the step can be recorded once its loss is known, and is by then in the count of steps."""
        self._seconds = time.monotonic() - self._began
        if self._record is not None:
            self._record.global_step = global_step

    def record_step(self) -> None:
        """Record the step that has ended, if there is one that is not recorded yet."""
        if self._seconds is not None and self._record is not None:
            mark = StepMark.SKIPPED if self._skipped else StepMark.COMMITTED
            self._record.step(mark, None, self.loss, self.norm, self._seconds)
        self._seconds = None

    def given_up(self, reason: str) -> NonFiniteError:
        """Return the error that ends a training which only another state could save."""
        return NonFiniteError(
            reason,
            limit=f"{self._skipped_in_a_row} step(s) in a row were left out; a callback cannot return to better ones",
            fix=f"lower the learning rate, check the data; or use {self._instead}, which traces and rolls back.",
            rule="H501",
        )
