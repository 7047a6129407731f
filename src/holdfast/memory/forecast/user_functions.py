"""What a user's loss function or step did: the loss that it returned, or that it ran backward and stepped by itself.

Also the guard that a step is given.

Does not: call it (``jobs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watch:
    """See whether a function runs backward and steps optimizers; its autocast is for what it does before that.

    Args:
        autocast: Makes the context of a forward pass.
    """

    def __init__(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.backward = False
        self.optimizers: list[Optimizer] = []
        self._autocast = autocast
        self._open: contextlib.ExitStack | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._open is None:
                return original(*args, **kwargs)
            self.backward = True
            self._open.close()
            try:
                return original(*args, **kwargs)
            finally:
                self._open.enter_context(self._autocast())

        def note(optimizer: Optimizer, *_: Any) -> None:
            self.optimizers.append(optimizer)

        torch.autograd.backward = backward
        self._cleanup.callback(setattr, torch.autograd, "backward", original)
        self._cleanup.callback(register_optimizer_step_post_hook(note).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
def precision_seen(models: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Find out what of half precision a job has by itself, while its step is made.

    Returns:
        Words for it; complete when the context is left.
    """
    found: list[str] = []
    casts: set[bool] = set()
    every = (p for model in models.values() for p in model.parameters() if p.is_floating_point() and p.itemsize < 4)
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in every})
    handle = register_module_forward_pre_hook(lambda *_: casts.add(torch.is_autocast_enabled("cuda")))
    try:
        yield found
    finally:
        handle.remove()
    found += [f"parameters in {' and '.join(kinds)}"] if kinds else []
    found += ["an autocast of its own"] if True in casts else []


def find_loss(returned: Any) -> torch.Tensor | None:
    """Return the loss in what a loss function returned, or None.

    It may be a tensor, a ``Loss`` or an output with one, a pair of mean and items, or a sequence or dict of ``Loss``.
    Plain tensors in a list or dict are several losses or none: which of them is trained is not for us to say.
    """
    if isinstance(returned, torch.Tensor):
        return returned
    for name in ("mean", "loss"):
        if isinstance(found := getattr(returned, name, None), torch.Tensor):
            return found
    if isinstance(returned, Mapping):
        if "loss" in returned:
            return find_loss(returned["loss"])
        returned = list(returned.values())
    if not isinstance(returned, (list, tuple)) or not returned:
        return None
    if all(isinstance(getattr(term, "mean", None), torch.Tensor) for term in returned):
        means = [term.mean for term in returned]
        total: torch.Tensor = sum(means[1:], means[0])
        return total
    return find_loss(returned[0]) if isinstance(returned, tuple) else None


class GuardStandIn:
    """What a ``step(guard, batch)`` is given for a guard: its `step` makes the same step, and reports nothing.

    Args:
        optimizers: Their names.
        make: Makes a step of a batch, a loss function and names of optimizers, and returns the loss.
    """

    def __init__(
        self, optimizers: Sequence[str], make: Callable[[Any, Callable[..., Any], Sequence[str]], torch.Tensor | None]
    ) -> None:
        self._optimizers, self._make = optimizers, make
        self.asked = False  # for a step so far

    def step(
        self,
        batch: Any,
        loss_fn: Callable[..., Any],
        *,
        optimizer: Any = None,
        split: Any = None,  # noqa: ARG002
    ) -> Any:
        """Make one step of one or several optimizers; see ``Guard.step``."""
        self.asked = True
        chosen = self._optimizers if optimizer is None else optimizer
        loss = self._make(batch, loss_fn, [chosen] if isinstance(chosen, str) else list(chosen))
        facts = {"items": 1, "grad_norm": {}, "micro_batch_size": None, "attempts": 1, "dropped_samples": ()}
        return SimpleNamespace(loss=loss, skipped=False, reason=None, **facts)
