"""The contexts in which the guard calls a loss function, and the calls that it must not make.

A loss function must only return a loss. The guard itself runs backward and steps the optimizers.
The function may compute gradients, but not with respect to parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.errors import BatchError
from holdfast.core.policy.policy import Policy
from holdfast.core.text import counted
from holdfast.guard.parts import Parts
from holdfast.guard.precision import autocast
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.states import StateKeeper, changeable_states

# --- forbidden calls

Called: TypeAlias = Literal["backward", "save", "step", "zero_grad"]
_FIX = {
    "backward": (
        "remove loss.backward() and return the loss with its graph: guard.step runs backward. For"
        " any other gradient, such as that of an input, use torch.autograd.grad(loss, x)."
    ),
    "save": "call guard.save() in the loop body, after guard.step.",
    "step": (
        "remove optimizer.step(), and scaler.step() around it: guard.step runs it after checking"
        " the gradients. To step one of several optimizers, name it: guard.step(batch, loss_fn,"
        " optimizer=...)."
    ),
    "zero_grad": "remove it: guard.step clears the gradients itself.",
}


class CalledInsideError(BatchError):
    """H209: the loss function called a function that only the guard may call."""

    called: Called = "backward"


def called_inside(called: Called) -> CalledInsideError:
    """Return an H209 error for a loss function that made a forbidden call."""
    action = f"called {called}()"
    if called == "backward":
        action = "ran backward into parameters"
    error = CalledInsideError(
        f"loss_fn {action}",
        limit="it must only return a loss, because it may be called several times per step",
        fix=_FIX[called],
        rule="H209",
    )
    error.called = called
    return error


class ReturningALoss:
    """A context in which to call a loss function.

    Inside the context, optimizers refuse to step. On exit, H209 is raised if the ``.grad`` of a
    parameter has changed.

    Args:
        optimizers: The guard's optimizers.
        parameters: The guard's parameters.
    """

    __slots__ = ("_before", "_optimizers", "_own", "_parameters")

    def __init__(self, optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers = optimizers
        self._parameters = parameters

    def __enter__(self) -> None:
        self._before = _gradient_versions(self._parameters)
        self._own: list[tuple[dict[str, Any], Any]] = []
        for optimizer in self._optimizers:
            attributes = vars(optimizer)
            # A scheduler may already have replaced `step` on the instance in the same way, so keep
            # that attribute.
            self._own.append((attributes, attributes.get("step")))
            # `zero_grad` is not replaced, because frameworks may call it when there are no
            # gradients. If a call clears existing gradients, this is detected on exit.
            attributes["step"] = _refuse_step

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for attributes, original_step in self._own:
            if original_step is None:
                attributes.pop("step", None)
            else:
                attributes["step"] = original_step
        after = _gradient_versions(self._parameters)
        if kind is None and after != self._before:
            raise called_inside("zero_grad" if len(after) < len(self._before) else "backward")


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    raise called_inside("step")


def _gradient_versions(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the identity and version counter of each gradient."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]


@contextlib.contextmanager
def weights_stay(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context for backward that raises H211 if parameter hooks change weights."""
    hooked = [
        p
        for p in parameters
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if not hooked:
        yield
        return
    before = [p._version for p in hooked]
    # A fused optimizer changes parameters without changing their version counters.
    stepped: set[int] = set()

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        stepped.update(id(p) for group in groups for p in group["params"] if p.grad is not None)

    handle = register_optimizer_step_pre_hook(note_step)
    try:
        yield
    finally:
        handle.remove()
    moved = sum(
        p._version != version or id(p) in stepped for p, version in zip(hooked, before, strict=True)
    )
    if moved:
        raise BatchError(
            f"hooks have changed {counted(moved, 'parameter')} in backward",
            limit="a step can only be retried, clipped or skipped while the weights are unchanged",
            fix=(
                "remove the hooks that call optimizer.step(), pass the optimizer to Guard, and"
                " restart the run: the weights of this step cannot be restored."
            ),
            rule="H211",
        )


class FilledOutside:
    """Detects gradients that the script computed between creating the guard and the first step.

    Args:
        parameters: The guard's parameters.
    """

    # The number of steps started so far by all guards in this process.
    begun = 0

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._empty = [parameter for parameter in parameters if parameter.grad is None]
        self._begun_before = FilledOutside.begun

    def check(self) -> None:
        """In the first step, raise H210 if the script has already computed gradients.

        If there are gradients, this synchronizes with the device.
        """
        # If another guard has run a step since this guard was created, the gradients may come from
        # that step.
        others_have_stepped = FilledOutside.begun != self._begun_before
        FilledOutside.begun += 1
        were_empty = self._empty
        self._empty = []
        if others_have_stepped:
            return
        filled = [
            parameter
            for parameter in were_empty
            if parameter.grad is not None and parameter.grad.to_dense().count_nonzero() > 0
        ]
        if filled:
            raise BatchError(
                f"{counted(len(filled), 'parameter')} had a gradient before the first step",
                limit=(
                    "guard.step first clears all gradients, so gradients from a backward() outside"
                    " of it would be lost"
                ),
                fix=(
                    "include that loss in loss_fn, as in loss_a + loss_b, and remove the backward()"
                    " outside of it. If the gradients are not needed, call optimizer.zero_grad()"
                    " before guard.step."
                ),
                rule="H210",
            )


# --- calling a loss function


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
        self._parameters = [parameter for _, parameter in parts.named_parameters()]

    def forbid_training_calls(self) -> ReturningALoss:
        """Return a context in which a loss function may not run backward or step an optimizer."""
        return ReturningALoss(self._parts.optimizers.values(), self._parameters)

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
