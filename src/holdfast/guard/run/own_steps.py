"""Optimizer steps that a loop over `Guard.batches` makes itself, past the guard: refused at the first one.

Such a step is in the weights, and the guard knows nothing of it: it would save "0 steps", and a run that was killed
would begin again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.errors import BatchError
from holdfast.guard.parts import Parts
from holdfast.guard.phase import Phase, RunState

# Inside of `guard.step`, whose optimizers may be wrappers that step another optimizer.
_IN_A_GUARDED_STEP = (Phase.IN_STEP, Phase.COMMITTING, Phase.ROLLING_BACK)

# Of all guards in this process: a loop that nobody has closed must not refuse the steps of another guard.
_states: weakref.WeakSet[RunState] = weakref.WeakSet()


class OwnStepsRefused:
    """A context in which every optimizer that moves a parameter of the guard's models has to be stepped by the guard.

    Optimizers of other parameters, such as those of a discriminator that the guard does not hold, are free.

    Args:
        parts: The models and optimizers of the run.
        state: Says whether the guard is in a step of its own.
        record: Called with the error before it is raised.
    """

    def __init__(self, parts: Parts, state: RunState, record: Callable[[BaseException], None]) -> None:
        self._parts = parts
        self._state = state
        self._record = record
        self._parameters: set[int] = set()
        _states.add(state)

    def __enter__(self) -> None:
        self._parameters = {id(parameter) for _, parameter in self._parts.named_parameters()}
        # Torch's list of hooks lives as long as the process, and must not keep a run alive that was given up.
        reference = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            watcher = reference()
            if watcher is not None:
                watcher.check(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def check(self, optimizer: Optimizer) -> None:
        """Raise H212 if this optimizer is about to move guarded parameters outside of a guarded step.

        Cost: below a microsecond in a guarded step.
        """
        if self._state.phase in _IN_A_GUARDED_STEP:
            return
        if any(state.phase in _IN_A_GUARDED_STEP for state in _states):
            return
        name = self._name_of(optimizer)
        if name is None and not self._moves_guarded_parameters(optimizer):
            return
        error = _own_step(optimizer, name)
        self._record(error)
        raise error

    def _name_of(self, optimizer: Optimizer) -> str | None:
        for name, candidate in self._parts.optimizers.items():
            if candidate is optimizer:
                return name
        return None

    def _moves_guarded_parameters(self, optimizer: Optimizer) -> bool:
        return any(
            id(parameter) in self._parameters for group in optimizer.param_groups for parameter in group["params"]
        )


def _own_step(optimizer: Optimizer, name: str | None) -> BatchError:
    """Return the error about a step of the optimizer that the guard holds as `name`, or does not hold (None)."""
    if name is None:
        stepped = f"a {type(optimizer).__name__} that the guard does not hold"
        fix = (
            "give it to the Guard (optimizer=...) and replace zero_grad, backward and step by "
            "guard.step(batch, loss_fn), which makes the step."
        )
    else:
        stepped = f"optimizer {name!r}"
        fix = (
            "replace zero_grad, backward and step by guard.step(batch, loss_fn), where loss_fn returns the loss. To "
            f"step one of several optimizers: guard.step(batch, loss_fn, optimizer={name!r})."
        )
    return BatchError(
        f"{stepped} was stepped by the loop itself, outside of guard.step",
        limit="such a step is in no checkpoint: a run that is killed would begin again without it",
        fix=fix,
        rule="H212",
    )
