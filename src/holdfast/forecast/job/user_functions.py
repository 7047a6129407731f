"""Call the user's loss function or step function, and observe which parts of a step it performs.

The function may run backward and step optimizers, either directly or through the guard that is
passed to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.forecast.job import building
from holdfast.forecast.job.building import BuiltJob, Function


class CallObserver:
    """Context manager that observes whether functions run backward and step optimizers.

    Call each function inside `calling`.

    Args:
        autocast: Creates the autocast context under which a function is called. Autocast is exited
            while the function runs backward.
    """

    def __init__(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        # Whether an observed function itself ran backward or stepped an optimizer.
        self.acted = False
        # All optimizers that were stepped, including those stepped by hooks in a backward pass.
        self.stepped: list[Optimizer] = []
        self._make_autocast = autocast
        # The autocast context of the running function call, or None between calls.
        self._current_autocast: contextlib.ExitStack | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._current_autocast is None:
                return original(*args, **kwargs)
            self.acted = True
            self._current_autocast.close()
            try:
                return original(*args, **kwargs)
            finally:
                self._current_autocast.enter_context(self._make_autocast())

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            self.stepped.append(optimizer)
            if self._current_autocast is not None:
                self.acted = True

        torch.autograd.backward = backward
        self._cleanup.callback(setattr, torch.autograd, "backward", original)
        self._cleanup.callback(register_optimizer_step_post_hook(note_step).remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Run the ``with`` block, which must call one function, under autocast and observe it."""
        with contextlib.ExitStack() as self._current_autocast:
            self._current_autocast.enter_context(self._make_autocast())
            yield
        self._current_autocast = None


@contextlib.contextmanager
def own_autocasts(added: type[torch.autocast]) -> Iterator[list[torch.autocast]]:
    """Collect the autocast contexts that the job's own code enters during the ``with`` block.

    Args:
        added: The class of the autocast contexts that the forecast adds, which are not collected.

    Yields:
        A list to which each context is appended when it is entered.
    """
    enter = torch.autocast.__enter__
    autocasts: list[torch.autocast] = []

    def note_and_enter(context: torch.autocast) -> Any:
        # Recomputing activations re-enters the autocast context of the forward pass, which was
        # already collected.
        is_recomputation = torch._C._current_graph_task_id() != -1
        if context._enabled and not isinstance(context, added) and not is_recomputation:
            autocasts.append(context)
        return enter(context)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.autocast, "__enter__", note_and_enter):
        yield autocasts


def is_hooked(parameter: torch.Tensor) -> bool:
    """Return whether a hook receives a parameter's gradient. The hook may step an optimizer."""
    return bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


class GuardStandIn:
    """Replaces the `Guard` that the user's ``step(guard, batch)`` expects.

    The stand-in runs steps on the fake device, and reports each of them as a normal step.

    Args:
        optimizers: Names of the job's optimizers.
        make_step: Runs a step, given a batch, a loss function and the names of the optimizers to
            step. Returns the loss, or None if there is none.
    """

    def __init__(
        self,
        optimizers: Sequence[str],
        make_step: Callable[[Any, Function, Sequence[str]], torch.Tensor | None],
    ) -> None:
        self._optimizers = optimizers
        self._make_step = make_step

    def step(
        self,
        batch: Any,
        loss_fn: Function,
        *,
        optimizer: Any = None,
        split: Any = None,  # noqa: ARG002 - an argument of Guard.step
    ) -> Any:
        """Run one training step as `Guard.step` does, and report it as a successful step."""
        if optimizer is None:
            names = self._optimizers
        elif isinstance(optimizer, str):
            names = [optimizer]
        else:
            names = list(optimizer)
        loss = self._make_step(batch, loss_fn, names)
        return SimpleNamespace(
            loss=loss,
            skipped=False,
            reason=None,
            items=1,
            grad_norm={},
            micro_batch_size=None,
            attempts=1,
            dropped_samples=(),
        )


def takes_guard(function: Function) -> bool:
    """Return whether the first parameter of a function is called ``guard``."""
    return building.positional_parameters(function)[:1] == ["guard"]


def called_with_batch(built: BuiltJob, guard: GuardStandIn) -> Function:
    """Return the job's function with all arguments bound except the batch or batch size."""
    function = built.function
    if takes_guard(function):
        return lambda batch: function(guard, batch)
    return with_models_bound(built, function)


def with_models_bound(built: BuiltJob, function: Function) -> Function:
    """Return a function that takes only the batch, binding the models if `function` takes them.

    A function that takes the models has two parameters: the models and the batch. A single model is
    passed directly, and several models are passed as a dict.
    """
    if len(building.positional_parameters(function)) == 2:
        is_single = list(built.models) == ["model"]
        model: Any = built.models["model"] if is_single else built.models
        return lambda batch: function(model, batch)
    return function
