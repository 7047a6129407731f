"""What a user's loss function or step did: the loss that it returned, or that it ran backward and stepped by itself.

Does not: call it (``jobs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watch:
    """See whether a function runs backward and steps optimizers; its autocast is for what it does before that.

    Args:
        autocast: Makes the context of a forward pass.
    """

    def __init__(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.backward = False
        self.steps = 0
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

        def count(*_: Any) -> None:
            self.steps += 1

        torch.autograd.backward = backward
        self._cleanup.callback(setattr, torch.autograd, "backward", original)
        self._cleanup.callback(register_optimizer_step_post_hook(count).remove)
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


def find_loss(returned: Any) -> torch.Tensor | None:
    """Return the loss in what a loss function returned, or None.

    It may be a tensor, a ``Loss`` or an output with one, a pair of mean and items, or a sequence or dict of ``Loss``.
    """
    if isinstance(returned, torch.Tensor):
        return returned
    for name in ("mean", "loss"):
        if isinstance(found := getattr(returned, name, None), torch.Tensor):
            return found
    if isinstance(returned, Mapping):
        return find_loss(returned["loss"] if "loss" in returned else list(returned.values()))
    if not isinstance(returned, (list, tuple)) or not returned:
        return None
    if all(isinstance(getattr(term, "mean", None), torch.Tensor) for term in returned):
        means = [term.mean for term in returned]
        total: torch.Tensor = sum(means[1:], means[0])
        return total
    return find_loss(returned[0])
