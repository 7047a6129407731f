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
from holdfast.guard.state.states import StateKeeper, changeable_states


class LossCalls:
    """Provides the contexts in which loss functions are called, in steps and in checks.

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
        # Function that returns a context in which a loss function may not run backward or step an
        # optimizer; see `ReturningALoss`.
        self.forbid_training_calls = functools.partial(
            ReturningALoss, parts.optimizers.values(), parameters
        )

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Return a context that forbids training calls and autocasts to the policy's precision."""
        with (
            self.forbid_training_calls(),
            autocast(self._parts.device_type(), self._policy.precision),
        ):
            yield

    def new_keeper(self) -> BufferKeeper:
        """Return a new `BufferKeeper`, for extra passes whose changes of state must be undone."""
        untouched = self._buffers.states.untouched()
        states = {
            name: state
            for name, state in changeable_states(self._parts).items()
            if name not in untouched
        }
        return BufferKeeper(self._parts.models, StateKeeper(states, copy_large_objects=True))
