"""What a callback records of a loop that is somebody else's, and when it gives up.

It sees a loop only at the points where a framework calls it: a step cannot be retried, cut or taken back. The
callbacks of Lightning and of the Trainer differ in where they are called; what they do there is here.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.core.clock import SystemClock
from holdfast.core.errors import NonFiniteError
from holdfast.core.policy import Policy
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import RunRecord
from holdfast.integrations.protocol import check_one_process
from holdfast.learning.watch import Watch, watch
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
        self.skipped_in_a_row = 0
        self.skipped = False
        """Whether the step that runs was left out."""
        self.loss: float | None = None
        self.norm: float | None = None
        """Of the step that runs, or has ended and is not recorded yet; None: not known."""
        self._run_dir = run_dir
        self._instead = instead
        self._directory: RunDirectory | None = None
        self._record: RunRecord | None = None
        self._watch: Watch | None = None
        self._began = 0.0
        self._seconds: float | None = None  # of a step that has ended and is not recorded yet

    def open(self, usual: str | os.PathLike[str], *, by: str, world_size: int, global_step: int) -> None:
        """Begin to record.

        Args:
            usual: Directory of the run; the recording goes into ``holdfast`` there unless a directory was given.
            by: Whose loop it is.
            world_size: Processes that train together.
            global_step: Where training stands.

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
        self.note("loop", by=by)
        before = directory.saved_in
        if before is not None and not global_step:
            self.note("begins_anew", though_saved_in=before)
            directory.note_saved(None)

    def look_at(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Watch for reasons why a model does not learn, if the policy says so."""
        policy = self.policy
        if policy.diagnose:
            settings: dict[str, Any] = {"objective": policy.objective, "frozen": policy.frozen}
            self._watch = watch(model, optimizer, ignore=policy.ignore_rules, **settings)
            self._watch.__enter__()

    def close(self, error: BaseException | None = None) -> None:
        """Record what was found, and end; without effect if it is closed.

        Args:
            error: What ends the training.
        """
        self.record_step()
        watching, self._watch = self._watch, None
        if watching is not None:
            watching.__exit__(None, None, None)
            for found in watching.findings():
                self.note("finding", rule=found.rule, what=found.what, fix=found.fix, severity=found.severity)
        if self._record is not None:
            if error is not None:
                self._record.left_by(error)
            self._record.close(None if error is None else "failed")
        if self._directory is not None:
            self._directory.release()
        self._record = self._directory = None

    def note(self, kind: str, **facts: Any) -> None:
        """Record an event of the step that training stands at."""
        if self._record is not None:
            self._record.happened(kind, **facts)

    def saved(self, checkpoint: Path) -> None:
        """Record that the framework has saved, so that later restarts miss what is gone."""
        self.note("saved", checkpoint=checkpoint.name)
        if self._directory is not None:
            self._directory.note_saved(str(checkpoint.parent))

    def validated(self, loss: float) -> None:
        """Take in the loss of an evaluation; less is better."""
        self.note("validated", loss=loss)
        if self._watch is not None:
            self._watch.validated(loss)

    # --- steps ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Mark that a step has begun."""
        self.record_step()
        self._began, self.skipped = time.monotonic(), False
        self.loss = self.norm = None
        if self._record is not None:
            self._record.step(StepMark.BEGUN, None, None, None, 0.0)

    def end_step(self, global_step: int) -> None:
        """Take the time; the step can be recorded once its loss is known, and is by then in the count of steps."""
        self._seconds = time.monotonic() - self._began
        if self._record is not None:
            self._record.global_step = global_step

    def record_step(self) -> None:
        """Record the step that has ended, if there is one that is not recorded yet."""
        if self._seconds is not None and self._record is not None:
            mark = StepMark.SKIPPED if self.skipped else StepMark.COMMITTED
            self._record.step(mark, None, self.loss, self.norm, self._seconds)
        self._seconds = None

    def leave_out(self, optimizer: Any, reason: str) -> None:
        """Empty the gradients of the step that runs, so that the optimizer moves nothing.

        Raises:
            NonFiniteError: H501, after ``nonfinite_patience`` such steps in a row.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.skipped = True
        self.skipped_in_a_row += 1
        self.note("skip_step", reason=reason, promise="changes training")
        patience = self.policy.nonfinite_patience
        if patience is not None and self.skipped_in_a_row >= patience:
            raise self.given_up(reason)

    def given_up(self, reason: str) -> NonFiniteError:
        """Return the error that ends a training which only another state could save."""
        return NonFiniteError(
            reason,
            limit=f"{self.skipped_in_a_row} step(s) in a row were left out; a callback cannot go back to better ones",
            fix=f"lower the learning rate, check the data; or use {self._instead}, which traces and rolls back.",
            rule="H501",
        )
