"""Count the optimizer steps that a loop over `Guard.batches` takes itself, without `Guard.step`.

A script may keep its own forward pass, backward pass and ``optimizer.step()``. torch's global
optimizer hooks then report each step of a guarded optimizer, so that steps are counted, recorded
and saved as usual. Such a step cannot be taken back: NaN, Inf and spikes are reported, but the
batch takes effect.

Steps that no checkpoint could contain are refused before they change a weight;
``own_step_refusals`` has the errors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.core.errors import BatchError
from holdfast.core.events import run_events
from holdfast.guard.phase import RunState
from holdfast.guard.run.backward_losses import BackwardLosses, has_gradients
from holdfast.guard.run.fetch_ahead import FetchAhead
from holdfast.guard.run.own_step_refusals import (
    mixed_steps,
    settings_without_effect,
    step_of_unknown_optimizer,
    step_outside_guard,
)
from holdfast.guard.run.session import Session
from holdfast.guard.run.taken_steps import (
    TakenStep,
    TakenSteps,
    copy_to_host,
    norm_of_gradients,
)
from holdfast.guard.run.unseen_steps import UnseenSteps
from holdfast.memory.host_copy import HostCopy

# The states of all guards in this process. They are needed because a loop that was never closed
# must not refuse the steps of another guard.
_states: weakref.WeakSet[RunState] = weakref.WeakSet()

# An optimizer that has not stepped in this many batches is not accumulating gradients. Its model
# may be frozen, and receive gradients only because they pass through it.
_MOST_BATCHES_OF_A_STEP = 100

# The code of the function in which torch wraps the ``step`` of every optimizer to call the hooks.
_STEP_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__


class OwnSteps:
    """A context in which the loop may step the guarded optimizers itself.

    Optimizers of other parameters, such as those of a discriminator that was not passed to the
    guard, are neither counted nor refused.

    Args:
        session: The session of the run.
        open_again: Function that opens the run again if the script has closed it in its loop.
        note_new_weights: Function that is called after each step, when the weights have changed.
        why_only_guarded: Why this run must take all its steps with `Guard.step`, or None if it need
            not.
    """

    def __init__(
        self,
        session: Session,
        open_again: Callable[[], None],
        note_new_weights: Callable[[], None],
        why_only_guarded: str | None,
    ) -> None:
        self._session = session
        self._open_again = open_again
        self._note_new_weights = note_new_weights
        self._why_only_guarded = why_only_guarded
        self._record = session.record
        self._state = session.state
        self._parts = session.parts
        self._clock = session.clock
        # The `id` of each parameter of the guarded models, as of the beginning of the loop.
        self._parameter_ids: set[int] = set()
        # Whether the script has called `Guard.step`.
        self._guard_has_stepped = False
        # Whether the loop has stepped a guarded optimizer.
        self._loop_has_stepped = False
        # Whether there were gradients before the loop. If so, gradients do not show that the loop
        # accumulates them. True until a loop begins.
        self._had_gradients = True
        # The optimizer whose step is in progress, or has raised an error that `_note_failure` has
        # not recorded yet. None otherwise.
        self._stepping: Optimizer | None = None
        # The number of nested calls of its ``step``, as in a subclass whose ``step`` calls
        # ``super().step()``.
        self._nested_calls = 0
        # The name of an optimizer that has raised an error in its step, until `take_failure`.
        self._failed: str | None = None
        # Whether a step was taken since the last boundary.
        self._stepped_in_batch = False
        # The number of batches since the last step of each optimizer, or since the loop began.
        self._batches_since_step = dict.fromkeys(session.parts.optimizers, 0)
        self._unseen_steps = UnseenSteps(session)
        self._fetch_ahead = FetchAhead(session.record)
        # Whether the previous loop ended between a call of ``backward`` and the step.
        self._left_with_gradients = False
        self._taken_steps = TakenSteps(session)
        self._backward_losses = BackwardLosses(session.parts)
        # The norm of the gradients of the step in progress.
        self._grad_norm: HostCopy | None = None
        # The time of the newest step, or of the beginning of the loop, on the monotonic clock.
        self._last_step_at = 0.0
        # Functions that remove the hooks. Python also calls them if this object is freed.
        self._hook_removers: list[Callable[[], Any]] = []
        _states.add(session.state)

    # --- what the loop asks

    @property
    def are_recorded(self) -> bool:
        """Return whether the newest step has been recorded, so that `flush` does nothing."""
        return self._taken_steps.are_recorded

    @property
    def accumulates(self) -> bool:
        """Return whether the loop may be accumulating gradients for a step that is to come.

        The state between two batches of such a step is not saved, because a checkpoint holds no
        gradients.
        """
        if (
            self._why_only_guarded is not None
            or self._guard_has_stepped
            or self._unseen_steps.were_found
        ):
            return False
        if self._loop_has_stepped:
            return not self._stepped_in_batch or any(
                0 < batches < _MOST_BATCHES_OF_A_STEP
                and has_gradients(self._parts.optimizers[name])
                for name, batches in self._batches_since_step.items()
            )
        # Before the first step, new gradients exist only if the loop has called backward.
        return not self._had_gradients and self._any_gradient_exists()

    def _any_gradient_exists(self) -> bool:
        return any(parameter.grad is not None for _, parameter in self._parts.named_parameters())

    @property
    def has_called_backward(self) -> bool:
        """Return whether the loop has called ``backward`` on a loss since its last step."""
        return self.accumulates and (self._backward_losses.are_seen or self._left_with_gradients)

    def begin_batch(self) -> None:
        """Record that the loop body receives a batch."""
        self._stepped_in_batch = False
        for name in self._batches_since_step:
            self._batches_since_step[name] += 1
        if self._may_miss_steps:
            self._unseen_steps.begin_batch()

    def end_batch(self) -> None:
        """Record that the loop body has finished with its batch."""
        if self._stepping is not None:
            self._note_failure()
        was_used = self._stepped_in_batch or self._backward_losses.are_seen
        self._fetch_ahead.end_batch(was_used=was_used)
        if self._may_miss_steps and self._backward_losses.are_seen:
            self._unseen_steps.end_batch()

    @property
    def _may_miss_steps(self) -> bool:
        """Return whether no step was counted yet, so that the loop's steps may not be visible."""
        return not (
            self._loop_has_stepped or self._guard_has_stepped or self._unseen_steps.were_found
        )

    def take_failure(self) -> str | None:
        """Return the name of an optimizer whose step has failed since the last call, or None."""
        failed = self._failed
        self._failed = None
        return failed

    def flush(self) -> None:
        """Record the newest step, and wait for its loss and gradient norm if necessary."""
        self._taken_steps.flush()

    def note_guarded_step(self) -> None:
        """Record that the script calls `Guard.step`.

        Raises:
            BatchError: H212 if the loop has stepped a guarded optimizer itself.
        """
        if self._loop_has_stepped:
            raise mixed_steps("guard.step was called after the loop stepped an optimizer itself")
        if not self._guard_has_stepped:
            self._guard_has_stepped = True
            self._backward_losses.stop()

    # --- the context

    def begin_loop(self) -> None:
        """Begin to count the steps that `before_step` and `after_step` report."""
        self._left_with_gradients = False
        self._fetch_ahead.begin_loop()
        self._batches_since_step = dict.fromkeys(self._parts.optimizers, 0)
        self._parameter_ids = {id(parameter) for _, parameter in self._parts.named_parameters()}
        self._had_gradients = self._any_gradient_exists()
        self._last_step_at = self._clock.monotonic_seconds()
        if self._why_only_guarded is None and not self._guard_has_stepped:
            self._backward_losses.start()

    def end_loop(self) -> None:
        """Record the last step of the loop."""
        self._left_with_gradients = self.has_called_backward
        self._backward_losses.stop()
        self.end_batch()
        self.flush()

    def __enter__(self) -> None:
        self.begin_loop()
        # torch keeps hooks until they are removed, so a strong reference to this object would keep
        # an abandoned run alive.
        reference = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            own_steps = reference()
            if own_steps is not None:
                own_steps.before_step(optimizer)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            own_steps = reference()
            if own_steps is not None:
                own_steps.after_step(optimizer)

        handles = [
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ]
        self._hook_removers = [weakref.finalize(self, handle.remove) for handle in handles]

    def __exit__(self, *_: object) -> None:
        for remove_hook in self._hook_removers:
            remove_hook()
        self.end_loop()

    # --- the hooks

    def before_step(self, optimizer: Optimizer) -> None:
        """Begin to count a step of the loop, or refuse it.

        The hook calls this before each optimizer step in the process. In a guarded step, the call
        takes less than a microsecond.

        Raises:
            BatchError: H212 if the step would change guarded parameters, but cannot be counted.
        """
        if optimizer is self._stepping:
            if _calls_in_progress(optimizer) > 1:
                self._nested_calls += 1
                return
            # The script has caught an error of this optimizer's previous step.
            self._note_failure()
        # In a guarded step, any optimizer may step, since the guard's optimizers may be wrappers
        # around others. The same applies to a step of the loop.
        if self._state.is_changing or any(state.is_changing for state in _states):
            return
        name = self._name_of(optimizer)
        if name is None and not self._changes_guarded_parameters(optimizer):
            return
        error = self._refusal(optimizer, name)
        if error is not None:
            self._record.left_by(error)
            raise error
        assert name is not None
        self._begin(optimizer, name)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of the loop. The hook calls this after each optimizer step."""
        if optimizer is not self._stepping:
            return
        if self._nested_calls:
            self._nested_calls -= 1
            return
        name = self._name_of(optimizer)
        assert name is not None
        self._stepping = None
        self._stepped_in_batch = True
        self._batches_since_step[name] = 0
        self._record.count_step()
        self._session.counters.note_good_step(self._record.global_step)
        self._state.committed()
        self._note_new_weights()
        now = self._clock.monotonic_seconds()
        self._taken_steps.add(
            TakenStep(
                optimizer=name,
                loss=copy_to_host(self._backward_losses.take()),
                grad_norm=self._grad_norm,
                may_be_skipped=getattr(optimizer, "found_inf", None) is not None,
                seconds=now - self._last_step_at,
            )
        )
        self._last_step_at = now
        self._session.check_new_state([name])

    def _begin(self, optimizer: Optimizer, name: str) -> None:
        if not self._record.is_open:
            self._open_again()
        self.flush()
        if not self._loop_has_stepped:
            self._loop_has_stepped = True
            self._session.schedules.hand_over()
            self._record.allow_any_precision()
            self._record.emit(run_events.LoopSteps(optimizer=name))
        self._fetch_ahead.begin_step()
        self._grad_norm = norm_of_gradients(optimizer)
        self._stepping = optimizer
        self._state.begin()
        self._state.commit()

    def _note_failure(self) -> None:
        """Record that an optimizer has raised an error, which may have left its step half done."""
        assert self._stepping is not None
        self._failed = self._name_of(self._stepping)
        self._stepping = None
        self._nested_calls = 0
        self._state.step_failed()

    # --- what is refused

    def _refusal(self, optimizer: Optimizer, name: str | None) -> BatchError | None:
        """Return the error for a step that changes guarded parameters, or None if it is allowed."""
        if name is None:
            return step_of_unknown_optimizer(optimizer)
        if self._why_only_guarded is not None:
            return step_outside_guard(name, self._why_only_guarded)
        if self._guard_has_stepped:
            return mixed_steps(f"the loop stepped optimizer {name!r} itself, after guard.step")
        if self._loop_has_stepped:
            return None
        return settings_without_effect(name, self._session.policy)

    def _name_of(self, optimizer: Optimizer) -> str | None:
        """Return an optimizer's name in the guard, or None if it was not passed to the guard."""
        for name, candidate in self._parts.optimizers.items():
            if candidate is optimizer:
                return name
        return None

    def _changes_guarded_parameters(self, optimizer: Optimizer) -> bool:
        return any(
            id(parameter) in self._parameter_ids
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


def _calls_in_progress(optimizer: Optimizer) -> int:
    """Return how many calls of an optimizer's ``step`` are on the stack of this thread."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP_WRAPPER and frame.f_locals.get("self") is optimizer:
            calls += 1
        frame = frame.f_back
    return calls
