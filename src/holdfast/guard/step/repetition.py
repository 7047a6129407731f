"""Run some steps twice from the same state, to detect hardware that computes wrong results.

A training step is a function of its state and its batch, so a second pass must give the same bits.
If it does not, either an operation in the step is nondeterministic, or something has gone wrong: a
race, uninitialized memory, or hardware that silently computes wrong results.

A repetition leaves no trace: the step is committed with the gradients, buffers and random state of
its first pass.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from holdfast.checkpoint.kinds import same_bits
from holdfast.core.events import run_events
from holdfast.core.events.run_events import AgreeingPass
from holdfast.guard.context import RunContext
from holdfast.guard.record import describe_error
from holdfast.guard.result import StepAttempt
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.work import Work
from holdfast.guard.step.attempts import Attempts
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.memory.oom import (
    clear_exception_frames,
    find_out_of_memory,
    is_sticky,
    release_memory,
)
from holdfast.memory.tensors import versions_of
from holdfast.numerics.eager import eager

# An event names at most this many parameters.
_MOST_NAMES = 5
# So many differences are all recorded. If every repetition differs, as with a nondeterministic
# operation, later ones are recorded only when their number doubles.
_MOST_RECORDED = 100
# The beginning of torch's warnings about nondeterministic operations, in torch 2.11 to 2.13.
# cuBLAS is left out: its warning appears in every model, but cuBLAS is nondeterministic only if
# several streams share a handle.
_NONDETERMINISTIC = re.compile(
    r"(?P<operation>.{1,80}?)"
    r" (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstPass:
    """The result of a step's first pass, and the state at its end."""

    # The mean loss, shape ``()``.
    loss: torch.Tensor
    # Copies of the gradients. None for a parameter without a gradient.
    gradients: dict[torch.Tensor, torch.Tensor | None]
    # Copies of the buffers and the ``state=`` objects.
    buffers: BufferKeeper
    random_state: RandomState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The results of a second pass whose bits differ from those of the first pass."""

    # The loss. None if it does not differ.
    loss: torch.Tensor | None
    # The gradients that differ. None for a parameter without a gradient.
    gradients: dict[torch.Tensor, torch.Tensor | None]

    @property
    def is_empty(self) -> bool:
        """Return whether the two passes agree."""
        return self.loss is None and not self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """The reason why a pass could not be run."""

    why: str


def is_repetition_due(context: RunContext) -> bool:
    """Return whether the current step must be repeated.

    Steps are counted over all restarts, so a restarted run repeats the same steps.
    """
    interval = context.policy.repeat_step_interval
    return interval is not None and (context.record.global_step + 1) % interval == 0


class Repetition:
    """Repeats the steps that ``Policy.repeat_step_interval`` selects, and compares the results.

    Args:
        context: The objects that the parts of the run share.
        attempts: The object that makes the attempts.
    """

    def __init__(self, context: RunContext, attempts: Attempts) -> None:
        self._context = context
        self._parts = context.parts
        self._record = context.record
        self._ladder = context.ladder
        self._buffers = context.buffers
        self._loss_scale = context.loss_scale
        self._earlier_gradients = context.earlier_gradients
        self._attempts = attempts
        self._devices = context.parts.devices()
        # The reasons for not repeating a step that have been reported. Each is reported once.
        self._reported = set[str]()
        # The number of steps that were repeated in this process, and how many of them differed.
        self._repeated_steps = 0
        self._differing_steps = 0

    def repeat_if_due(self, work: Work, attempt: StepAttempt) -> None:
        """Repeat a step that is due, and record an event if any bit of the result differs.

        Afterwards, everything is as the attempt left it. If a repetition is not possible, an
        event says why, and the step continues.

        Args:
            work: The input of the step.
            attempt: A successful attempt with finite values, whose gradients are in ``grad``.
        """
        if not is_repetition_due(self._context):
            return
        if versions_of(work.tensors) != work.versions:
            self._report_not_repeated("loss_fn changes its batch in place")
            return
        first = self._guarded(lambda: self._capture_first_pass(work, attempt))
        if isinstance(first, _Failed):
            # Nothing has changed yet.
            self._report_not_repeated(first.why)
            return
        event = self._compare(work, first)
        self._return_to_end_of(first)
        if event is not None:
            self._report_difference(event)

    def _report_difference(self, event: run_events.RepetitionDiffered) -> None:
        """Record a difference, and log it if the number of differences has doubled."""
        has_doubled = event.count & (event.count - 1) == 0
        if has_doubled or event.count <= _MOST_RECORDED:
            self._record.emit(event, is_logged=has_doubled)

    # --- the comparison

    def _compare(self, work: Work, first: _FirstPass) -> run_events.RepetitionDiffered | None:
        """Repeat a step. If the result differs, repeat it again to learn more about the cause.

        Returns:
            The event that describes the difference, or None if there is no difference or the step
            could not be repeated.
        """
        difference = self._guarded(lambda: self._second_pass(work, first))
        if isinstance(difference, _Failed):
            self._report_not_repeated(difference.why)
            return None
        self._repeated_steps += 1
        if difference.is_empty:
            return None
        self._differing_steps += 1
        third_agrees_with = self._guarded(lambda: self._third_pass(work, first, difference))
        operations = self._guarded(lambda: self._nondeterministic_operations(work))
        return run_events.RepetitionDiffered(
            parameters=self._names_of(difference.gradients)[:_MOST_NAMES],
            parameter_count=len(difference.gradients),
            loss_differs=difference.loss is not None,
            third_agrees_with=None if isinstance(third_agrees_with, _Failed) else third_agrees_with,
            operations=() if isinstance(operations, _Failed) else operations,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rule="H504",
            count=self._differing_steps,
            repeated=self._repeated_steps,
        )

    def _capture_first_pass(self, work: Work, attempt: StepAttempt) -> _FirstPass:
        """Copy the result of the first pass and the state at its end."""
        buffers = self._attempts.safety.loss_calls.new_keeper()
        buffers.capture()
        return _FirstPass(
            # A CUDA graph would overwrite the loss and the gradients in its next run.
            loss=attempt.loss.clone(),
            gradients={parameter: _copied(parameter.grad) for parameter in work.parameters},
            buffers=buffers,
            random_state=capture(self._devices),
        )

    def _return_to_end_of(self, first: _FirstPass) -> None:
        """Restore the result of the first pass and the state at its end."""
        for parameter, gradient in first.gradients.items():
            parameter.grad = gradient
        not_restored = first.buffers.restore()
        if not_restored:
            self._record.emit(run_events.NotRestored(names=tuple(not_restored)))
        restore(first.random_state)

    def _second_pass(self, work: Work, first: _FirstPass) -> _Difference:
        """Run a second pass, and return what differs from the first one."""
        loss = self._run_again(work)
        return _Difference(
            loss=None if same_bits(loss, first.loss) else loss.clone(),
            gradients={
                parameter: _copied(parameter.grad)
                for parameter, gradient in first.gradients.items()
                if not _same(parameter.grad, gradient)
            },
        )

    def _third_pass(self, work: Work, first: _FirstPass, difference: _Difference) -> AgreeingPass:
        """Run a third pass, and return which of the first two passes it agrees with."""
        loss = self._run_again(work)
        second_loss = first.loss if difference.loss is None else difference.loss
        agrees_with_first = same_bits(loss, first.loss)
        agrees_with_second = same_bits(loss, second_loss)
        for parameter, first_gradient in first.gradients.items():
            second_gradient = difference.gradients.get(parameter, first_gradient)
            agrees_with_first &= _same(parameter.grad, first_gradient)
            agrees_with_second &= _same(parameter.grad, second_gradient)
        if agrees_with_first:
            return "first"
        return "second" if agrees_with_second else "neither"

    def _nondeterministic_operations(self, work: Work) -> tuple[str, ...]:
        """Run another pass, and return the operations that torch reports as nondeterministic.

        The results of this pass are not compared, since some operations use other kernels in it. It
        runs in eager mode, because compiled code would first have to be compiled again.
        """
        with eager(), _nondeterminism_warnings() as caught:
            self._run_again(work)
        matches = [_NONDETERMINISTIC.match(str(warning.message)) for warning in caught]
        names = [match["operation"] for match in matches if match is not None]
        return tuple(dict.fromkeys(names))

    def _names_of(self, gradients: dict[torch.Tensor, torch.Tensor | None]) -> tuple[str, ...]:
        """Return the names of these parameters, in the model's order."""
        return tuple(
            name for name, parameter in self._parts.named_parameters() if parameter in gradients
        )

    # --- a pass

    def _run_again(self, work: Work) -> torch.Tensor:
        """Run the step's passes again, from the state at its start, with the same plan.

        Returns:
            The mean loss, shape ``()``. The gradients are left in ``grad``.
        """
        for parameter in work.parameters:
            parameter.grad = None
        changed = self._buffers.restore()
        if changed:
            # There are no copies of these from the start of the step.
            raise _StartUnknownError(changed)
        restore(work.random_state)
        with self._loss_scale.set_aside():
            passed = self._attempts.run(work, self._ladder.plan)
            self._earlier_gradients.add_to_parameters()
            if self._loss_scale.enabled:
                self._loss_scale.unscale(self._parts.optimizers, work.names)
        return passed.loss

    def _guarded(self, function: Callable[[], _Result]) -> _Result | _Failed:
        """Call a function, and return the reason if it fails, since training must continue.

        An error after which the device is unusable is raised.
        """
        try:
            return function()
        except Exception as error:
            if is_sticky(error):
                raise
            raised = error
        # The frames of the pass can be dropped only outside the exception handler.
        out_of_memory = find_out_of_memory(raised)
        why = str(raised) if isinstance(raised, _StartUnknownError) else describe_error(raised)
        clear_exception_frames(raised)
        del raised
        if out_of_memory is None:
            return _Failed(why=why)
        release_memory(self._devices)
        return _Failed(
            why="there is not enough memory for a second pass while the first gradients are kept"
        )

    def _report_not_repeated(self, why: str) -> None:
        """Record why a step was not repeated, once for each reason."""
        if why not in self._reported:
            self._reported.add(why)
            self._record.emit(run_events.StepNotRepeated(why=why))


class _StartUnknownError(Exception):
    """A state has changed that was not copied at the start of the step.

    Args:
        names: The names of the buffers or objects that have changed for the first time.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"{', '.join(names[:_MOST_NAMES])} changed for the first time in this step"
        )


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two gradients have the same bits, or are both missing."""
    if first is None or second is None:
        return first is second
    return same_bits(first, second)


@contextlib.contextmanager
def _nondeterminism_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Return a context in which torch warns about every nondeterministic operation.

    Yields:
        The list of warnings, which grows while the body runs. They are not shown.
    """
    mode = torch.get_deterministic_debug_mode()
    warns_always = torch.is_warn_always_enabled()
    torch.set_deterministic_debug_mode("warn")
    # Some operations would otherwise warn only once in each process.
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        torch.set_warn_always(warns_always)
        torch.set_deterministic_debug_mode(mode)
