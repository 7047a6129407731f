"""What a guarded Trainer puts into the Trainer's loop: a callback that stops it, and a step that was made already."""

from __future__ import annotations

from typing import Any


class StopWhenAsked:
    """Ends a training after SIGTERM or ``request_stop``, with a checkpoint, and hands evaluations on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look for a request."""
        self._look(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Look again, since an evaluation lasts; tell the guard its loss."""
        self._look(args, state, control)
        guard, loss = self._trainer.holdfast_guard, (metrics or {}).get("eval_loss")
        if guard is not None and loss is not None:
            guard.validated(loss)

    def _look(self, args: Any, state: Any, control: Any) -> None:
        guard = self._trainer.holdfast_guard
        if guard is not None and guard.stop_reason is not None and not control.should_training_stop:
            guard.note("stop_requested", reason=guard.stop_reason, at=state.global_step)
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"


class StepMade:
    """Stands in for the step of an optimizer that was stepped already."""

    _wrapped_by_lr_sched = True  # as torch's schedulers want to see it

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, _closure: Any = None) -> None:
        """Step nothing."""
        self._optimizer._opt_called = True  # likewise
