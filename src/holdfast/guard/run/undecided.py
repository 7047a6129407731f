"""A step whose result has not been read yet, and the result that `Guard.step` returns for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from holdfast.guard.decision import LateLoss, Readout, UnreadAttempt
from holdfast.guard.result import StepAttempt, StepResult
from holdfast.guard.run.sample_reports import BatchMark
from holdfast.guard.run.surroundings import Surroundings
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.work import Work
from holdfast.loader.random_state import RandomState
from holdfast.loader.splitting import Split

# The attributes of a result that are known before the step is decided.
_KNOWN_AT_ONCE = ("loss", "micro_batch_size", "attempts", "extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """The arguments of one call to `Guard.step`."""

    batch: Any
    loss_fn: LossFunction
    # The names of the optimizers to step.
    names: Sequence[str]
    # The position of the batch dimension, or None to use the guard's `split`.
    split: Split | None
    # Losses are compared within a series, that is, for the same loss function and optimizers.
    series: str
    # The monotonic time at the beginning of the call, in seconds.
    started: float


class LaunchedAttempt:
    """An attempt whose optimizers were launched before the host has read its result.

    Args:
        attempt: The attempt.
        readout: The result of the attempt, on its way to the host.
    """

    # An attempt that fails on this rank is not launched.
    has_failed = False

    def __init__(self, attempt: UnreadAttempt, readout: Readout) -> None:
        self._attempt = attempt
        self._readout = readout

    def was_refused(self) -> bool:
        """Return whether the device has refused the step, and wait for the result if necessary."""
        return self._readout.was_refused()

    def read(self) -> StepAttempt:
        """Return the attempt with its result, and wait for the result if necessary."""
        return self._attempt.with_facts(self._readout.facts())


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedAttempt:
    """An attempt that this rank has already undone, alone, and that all other ranks will refuse.

    There are two reasons: this rank has read the result at once and refused it, or the attempt has
    failed on this rank.
    """

    attempt: StepAttempt
    # Whether the attempt has failed on this rank, for example because it ran out of memory.
    has_failed: bool

    def was_refused(self) -> bool:
        """Return True."""
        return True

    def read(self) -> StepAttempt:
        """Return the attempt."""
        return self.attempt


class Settlement:
    """Settles one step when it is called, and does nothing once the step is decided.

    Args:
        settle: Function that settles the step. In any thread other than the step's, it does
            nothing. On one of several ranks, it leaves a refused step undecided.
        preliminary_result: Function that returns what is known about the step if `settle` does
            nothing.
    """

    def __init__(
        self, settle: Callable[[], None], preliminary_result: Callable[[], StepResult]
    ) -> None:
        self._settle: Callable[[], None] | None = settle
        self._preliminary_result = preliminary_result

    def __call__(self) -> None:
        """Settle the step if it is undecided."""
        # Another thread may settle the step in the meantime.
        settle = self._settle
        if settle is not None:
            settle()

    def preliminary_result(self) -> StepResult:
        """Return what is known about the step, which `settle` has left undecided."""
        return self._preliminary_result()

    def end(self, final: StepResult) -> None:
        """Note that the step is decided, and release it.

        The script may keep the step's result, which refers to this object, for a long time.

        Args:
            final: The result of the step.
        """
        self._settle = None
        self._preliminary_result = lambda: final


class UndecidedResult(StepResult):
    """The result of a step that has not been read yet.

    Reading an attribute that depends on the outcome waits for it. The attributes `loss`, `items`,
    `micro_batch_size`, `attempts` and `extra` are available at once. If the step is repeated, they
    are replaced by those of the repetition.

    With several ranks, the number of items is the total over the ranks, which is not known at once.

    Args:
        attempt: The attempt at the step.
        attempts: The number of attempts.
        settlement: Settles the step.
    """

    __slots__ = ("_final", "_items", "_settlement")

    # The final result. None until the step is decided.
    _final: StepResult | None
    # The number of items. None if it is part of the final result.
    _items: float | torch.Tensor | None
    _settlement: Settlement

    def __init__(
        self, attempt: UnreadAttempt | StepAttempt, attempts: int, settlement: Settlement
    ) -> None:
        self._set("_settlement", settlement)
        self._set("_final", None)
        self._set("micro_batch_size", attempt.micro_batch_size)
        self._set("attempts", attempts)
        if isinstance(attempt, StepAttempt):
            # This rank has read the attempt already.
            loss = attempt.loss
            items = None
            extra = attempt.extra
        else:
            loss = attempt.passed.loss
            items = None if attempt.items_are_of_all_ranks else attempt.passed.items
            extra = attempt.passed.extra
        self._set("loss", LateLoss.of(loss, settlement))
        self._set("_items", items)
        self._set("extra", extra or {})

    def _set(self, name: str, value: Any) -> None:
        # The base class is frozen, so attributes cannot be assigned.
        object.__setattr__(self, name, value)

    def set_final(self, final: StepResult, *, repeated: bool) -> None:
        """Take the values of the final result, once the step is decided.

        Args:
            final: The result.
            repeated: Whether the step was run again, which may have changed its loss.
        """
        self._set("_final", final)
        if repeated:
            self._set("_items", None)
            for name in _KNOWN_AT_ONCE:
                self._set(name, getattr(final, name))
        self._settlement.end(final)

    def __reduce__(self) -> Any:
        copy = self._plain_copy()
        values = {field.name: getattr(copy, field.name) for field in fields(copy)}
        return _result_of, (values,)

    def __repr__(self) -> str:
        return repr(self._plain_copy())

    def _plain_copy(self) -> StepResult:
        """Return the result as a plain `StepResult`, to be copied, pickled or printed."""
        final = self._wait_for_final()
        values = {name: getattr(self, name) for name in (*_KNOWN_AT_ONCE, "items")}
        if isinstance(self.loss, LateLoss):
            values["loss"] = self.loss.plain()
        return replace(final, **values)

    @property
    def items(self) -> float | torch.Tensor:
        """Return the number of items in the mean; see `StepResult`."""
        return self._wait_for_final().items if self._items is None else self._items

    def _wait_for_final(self) -> StepResult:
        if self._final is None:
            self._settlement()
        if self._final is None:
            # The step is still undecided: another thread reads this, or a scheduler while the step
            # is being settled, or one of several ranks after the step was refused.
            return self._settlement.preliminary_result()
        return self._final

    @property
    def grad_norm(self) -> Mapping[str, float]:
        """Return the norm of each group's gradients; see `StepResult`."""
        return self._wait_for_final().grad_norm

    @property
    def skipped(self) -> bool:
        """Return whether the step was skipped; see `StepResult`."""
        return self._wait_for_final().skipped

    @property
    def reason(self) -> str | None:
        """Return why the step was skipped; see `StepResult`."""
        return self._wait_for_final().reason

    @property
    def dropped_samples(self) -> tuple[int, ...]:
        """Return the positions of the samples that were left out; see `StepResult`."""
        return self._wait_for_final().dropped_samples


@dataclass(slots=True, kw_only=True)
class UndecidedStep:
    """A step that is counted, although it is not known whether it will be committed.

    Its optimizers were launched before its result was read. On one of several ranks, the step may
    instead have been undone, and wait until all ranks repeat it.
    """

    call: StepCall
    work: Work
    attempt: LaunchedAttempt | RefusedAttempt
    # The modes and hyperparameters of the step.
    surroundings: Surroundings
    # The random state after the backward pass.
    random_state_after: RandomState
    # Copies of the loss scale before it was updated. None without loss scaling.
    loss_scale: tuple[torch.Tensor, torch.Tensor] | None
    # The position of the batch in the data.
    mark: BatchMark
    # The global step after this step.
    global_step: int
    # The duration of the call to `Guard.step`, in seconds.
    seconds: float
    result: UndecidedResult
    # The identifier of the thread that has called `Guard.step`.
    thread: int


def _result_of(values: Mapping[str, Any]) -> StepResult:
    """Return a result with these attributes. A pickled result refers to this function."""
    return StepResult(**values)
