"""`LossCalls`: the contexts in which the guard calls a loss function, and what to restore later."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from holdfast.core.policy.policy import Policy
from holdfast.guard.parts import Parts
from holdfast.guard.precision import autocast
from holdfast.guard.splitting.loss_functions import ReturningALoss
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.states import StateKeeper, kept_states


class LossCalls:
    """Prepares calls of loss functions, in steps and in checks.

    Args:
        parts: The models, optimizers and additional state of the run.
        policy: The policy of the run.
        buffers: The run's `BufferKeeper`, which knows which states change.
    """

    def __init__(self, parts: Parts, policy: Policy, buffers: BufferKeeper) -> None:
        self._parts = parts
        self._policy = policy
        self._buffers = buffers
        parameters = [parameter for _, parameter in parts.named_parameters()]
        # Function that returns a context in which optimizers refuse to step; see `ReturningALoss`.
        self.inside = functools.partial(ReturningALoss, parts.optimizers.values(), parameters)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Return the same context, with the precision of the policy."""
        with self.inside(), autocast(self._parts.device_type(), self._policy.precision):
            yield

    def keeper(self) -> BufferKeeper:
        """Return a new `BufferKeeper`, for extra passes whose changes of state must be undone."""
        untouched = self._buffers.states.untouched()
        states = {
            name: state for name, state in kept_states(self._parts).items() if name not in untouched
        }
        return BufferKeeper(self._parts.models, StateKeeper(states, copy_large_objects=True))
