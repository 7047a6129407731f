"""What a callback can do for a Hugging Face Trainer that cannot be subclassed: observe, record, stop, verify.

It cannot retry a step, split a batch or return to an earlier state: out of memory ends such a training.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.newest import move_aside
from holdfast.checkpoint.seal import check, seal
from holdfast.core.events import run_events
from holdfast.guard.stop import StopRequest
from holdfast.integrations.protocol import attempt_save
from holdfast.integrations.recording import Recording
from holdfast.integrations.transformers.checkpoints import check_best


class CallbackParts:
    """A ``TrainerCallback`` that records every step, leaves out those with NaN or Inf, and seals checkpoints.

    A step whose gradients are not finite moves no weight, buffer or random number: they are emptied before the
    optimizer sees them (the schedule goes on), and after ``nonfinite_patience`` of them in a row training ends.
    SIGTERM ends it after the step, with a checkpoint. What is saved gets digests; resuming from a checkpoint in the
    output directory, or loading the best one, is refused if bytes have changed, and `last_good_checkpoint` finds the
    one before. No callback hears that the Trainer is about to write: where nothing was sealed yet, a process that is
    killed in the first save leaves a folder that is taken for a whole one. ``logging_nan_inf_filter`` is off.

    Args:
        holdfast_policy: As for `HoldfastMixin`; used are ``nonfinite_patience``, ``diagnose``, ``objective``,
            ``frozen`` and ``ignore_rules``.
        holdfast_run_dir: Where it is recorded; None: ``holdfast`` in the output directory.
    """

    def __init__(self, holdfast_policy: Any = None, holdfast_run_dir: str | os.PathLike[str] | None = None) -> None:
        self._recording = Recording(holdfast_policy, holdfast_run_dir, instead="HoldfastMixin")
        self._stop = StopRequest()
        weakref.finalize(self, self._stop.uninstall)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:  # noqa: ARG002
        """Open the recording, and verify the checkpoint that was resumed from (H311)."""
        if state.global_step:
            check(_folder(args, state))
        self._stop.uninstall()
        given = {"world_size": args.world_size, "global_step": state.global_step, "model": model}
        self._recording.open(args.output_dir, by="the Trainer", **given)
        args.logging_nan_inf_filter = False
        self._stop.install()
        self._recording.watch(model, getattr(named["optimizer"], "optimizer", named["optimizer"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Record the findings, and close the recording."""
        self._stop.uninstall()
        self._recording.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark that a step has begun."""
        self._recording.begin_batch(first=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:  # noqa: ARG002
        """Empty gradients that hold NaN or Inf; after too many such steps in a row, raise H501."""
        optimizer = named["optimizer"]
        self._recording.before_step(optimizer, None, scaled=getattr(optimizer, "scaler", None) is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark that it has ended; stop if that was asked for."""
        self._recording.end_step(state.global_step)
        self._look(args, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Take the loss and the norm of logged steps; verify the best model before it is loaded (H311)."""
        if logs and "loss" in logs:
            norm = logs.get("grad_norm")
            self._recording.loss, self._recording.norm = float(logs["loss"]), None if norm is None else float(norm)
            self._recording.record_step()
        if logs and "train_loss" in logs and args.load_best_model_at_end:  # the last thing before that
            check_best(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Take in an evaluation; stop if that was asked for meanwhile."""
        loss = (metrics or {}).get("eval_loss")
        if loss is not None:
            self._recording.validated(float(loss))
        self._look(args, control)

    def _look(self, args: Any, control: Any) -> None:
        if self._stop.reason is not None and not control.should_training_stop:
            self._recording.emit(run_events.StopRequested(reason=self._stop.reason))
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:  # noqa: ARG002
        """Seal what the Trainer has written; if its weights or moments hold NaN or Inf, move it aside: H501."""
        folder = _folder(args, state)
        if not folder.is_dir():  # of a hyperparameter search
            return
        moments = [
            (f"{key} of a parameter", value)
            for kept in named["optimizer"].state.values()
            for key, value in kept.items()
            if hasattr(value, "is_floating_point")
        ]
        bad, count = nonfinite_tensors([*named["model"].named_parameters(), *moments])
        if count:
            reason = f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}"
            self._recording.emit(run_events.SaveRefused(why=reason, kept=move_aside(folder).name))
            raise self._recording.given_up(reason)

        def write() -> None:
            seal(folder, global_step=state.global_step, unix_seconds=time.time())

        if attempt_save(write, folder.name, self._recording.emit, lambda: None):
            self._recording.note_saved_in(folder.parent)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
