"""What a user's loss function or step did: whether it ran backward and stepped by itself.

Also the guard that a step is given.
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
from holdfast.forecast.job.building import Built, Function


class Watch:
    """See whether a function runs backward and steps optimizers.

    `autocast` is for what it does before that.
    """

    def __init__(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.acted = False  # whether the function itself ran backward or stepped an optimizer
        # Stepped by anybody, the hooks of a backward pass included
        self.optimizers: list[Optimizer] = []
        self._autocast = autocast
        self._open: contextlib.ExitStack | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._open is None:
                return original(*args, **kwargs)
            self.acted = True
            self._open.close()
            try:
                return original(*args, **kwargs)
            finally:
                self._open.enter_context(self._autocast())

        def note(optimizer: Optimizer, *_: Any) -> None:
            self.optimizers.append(optimizer)
            self.acted |= self._open is not None

        torch.autograd.backward = backward
        self._cleanup.callback(setattr, torch.autograd, "backward", original)
        self._cleanup.callback(register_optimizer_step_post_hook(note).remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Call the function in here."""
        with contextlib.ExitStack() as self._open:
            self._open.enter_context(self._autocast())
            yield
        self._open = None


@contextlib.contextmanager
def own_autocasts(added: type[torch.autocast]) -> Iterator[list[torch.autocast]]:
    """Yield a list of the autocasts that a job enters by itself meanwhile.

    `added` is the forecast's own kind.
    """
    enter, own = torch.autocast.__enter__, []

    def entered(context: torch.autocast) -> Any:
        # A checkpoint enters again what was there
        recomputes = torch._C._current_graph_task_id() != -1
        if context._enabled and not isinstance(context, added) and not recomputes:
            own.append(context)
        return enter(context)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.autocast, "__enter__", entered):
        yield own


def is_hooked(parameter: torch.Tensor) -> bool:
    """Return whether a hook is given the parameter's gradient, as one that steps an optimizer in
    backward.
    """
    return bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


class GuardStandIn:
    """What a ``step(guard, batch)`` is given for a guard.

    Its `step` makes the same step, and reports nothing.
    """

    def __init__(
        self,
        optimizers: Sequence[str],
        make: Callable[[Any, Callable[..., Any], Sequence[str]], torch.Tensor | None],
    ) -> None:
        self._optimizers, self._make = optimizers, make

    def step(
        self,
        batch: Any,
        loss_fn: Callable[..., Any],
        *,
        optimizer: Any = None,
        split: Any = None,  # noqa: ARG002
    ) -> Any:
        """Make one step of one or several optimizers; see ``Guard.step``."""
        chosen = self._optimizers if optimizer is None else optimizer
        loss = self._make(batch, loss_fn, [chosen] if isinstance(chosen, str) else list(chosen))
        facts = {
            "items": 1,
            "grad_norm": {},
            "micro_batch_size": None,
            "attempts": 1,
            "dropped_samples": (),
        }
        return SimpleNamespace(loss=loss, skipped=False, reason=None, **facts)


def called_with_batch(built: Built, guard: GuardStandIn) -> Function:
    """Return what a factory returned as a function of a batch, or of its size where the step
    makes its own.
    """
    function, names = built.function, building.positional_parameters(built.function)
    single = len(built.models) == 1 and "model" in built.models
    model: Any = built.models["model"] if single else built.models
    if names[:1] == ["guard"]:
        return lambda batch: function(guard, batch)
    if len(names) == len(("model", "batch")):
        return lambda batch: function(model, batch)
    return function
