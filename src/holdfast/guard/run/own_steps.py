"""Refuse optimizer steps that a loop over `Guard.batches` runs without `Guard.step`.

Such a step changes the weights, but the guard does not count it. If all steps were run this way, no
save would ever be due, and a killed run would start again from step 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.errors import BatchError
from holdfast.guard.parts import Parts
from holdfast.guard.phase import RunState

# The states of all guards in this process. They are needed because a loop that was never closed
# must not refuse the steps of another guard.
_states: weakref.WeakSet[RunState] = weakref.WeakSet()


class OwnStepsRefused:
    """A context that raises H212 if an optimizer updates guarded parameters outside `Guard.step`.

    Optimizers of other parameters, such as those of a discriminator that was not passed to the
    guard, are not affected.

    Args:
        parts: The models and optimizers of the run.
        state: The guard's state, which shows whether a guarded step is in progress.
        record: Function that is called with the error before the error is raised.
    """

    def __init__(
        self, parts: Parts, state: RunState, record: Callable[[BaseException], None]
    ) -> None:
        self._parts = parts
        self._state = state
        self._record = record
        self._parameters: set[int] = set()
        _states.add(state)

    def __enter__(self) -> None:
        self._parameters = {id(parameter) for _, parameter in self._parts.named_parameters()}
        # torch keeps the hook until it is removed, so a strong reference to this object would keep
        # an abandoned run alive.
        reference = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            context = reference()
            if context is not None:
                context.check(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def check(self, optimizer: Optimizer) -> None:
        """Raise H212 if an optimizer would now update guarded parameters outside a guarded step.

        The hook calls this before each optimizer step. In a guarded step, the call takes less than
        a microsecond.
        """
        # In a guarded step, any optimizer may step, since the guard's optimizers may be wrappers
        # around others.
        if self._state.is_changing:
            return
        if any(state.is_changing for state in _states):
            return
        name = self._name_of(optimizer)
        if name is None and not self._moves_guarded_parameters(optimizer):
            return
        error = _unguarded_step(optimizer, name)
        self._record(error)
        raise error

    def _name_of(self, optimizer: Optimizer) -> str | None:
        """Return an optimizer's name in the guard, or None if it was not passed to the guard."""
        for name, candidate in self._parts.optimizers.items():
            if candidate is optimizer:
                return name
        return None

    def _moves_guarded_parameters(self, optimizer: Optimizer) -> bool:
        return any(
            id(parameter) in self._parameters
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


def _unguarded_step(optimizer: Optimizer, name: str | None) -> BatchError:
    """Return an H212 error for an optimizer that was stepped outside `Guard.step`.

    Args:
        optimizer: The optimizer.
        name: The optimizer's name in the guard, or None if it was not passed to the guard.
    """
    if name is None:
        subject = f"a {type(optimizer).__name__} that the guard does not hold"
        fix = (
            "pass it to Guard (optimizer=...) and replace zero_grad, backward and step with "
            "guard.step(batch, loss_fn)."
        )
    else:
        subject = f"optimizer {name!r}"
        fix = (
            "replace zero_grad, backward and step with guard.step(batch, loss_fn), where loss_fn"
            " returns the loss. To step one of several optimizers: guard.step(batch, loss_fn,"
            f" optimizer={name!r})."
        )
    return BatchError(
        f"the loop stepped {subject} outside of guard.step",
        limit="the guard does not see such steps, so no checkpoint would include them",
        fix=fix,
        rule="H212",
    )
