"""Observe the losses on which a loop calls ``backward`` itself, without `Guard.step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler


class BackwardLosses:
    """Adds up the losses on which the script calls ``backward``, until they are taken.

    If a step accumulates gradients over several batches, their losses are usually divided by the
    number of batches, so that their sum is the mean loss of the step.

    torch has no hook for this, so ``torch.autograd.backward`` is replaced by a wrapper between
    `start` and `stop`.

    Args:
        state: The additional state that was passed to the guard. If it includes a ``GradScaler``,
            the losses are divided by its scale.
    """

    def __init__(self, state: Iterable[object]) -> None:
        self._scaler = next((each for each in state if isinstance(each, GradScaler)), None)
        self._sum: torch.Tensor | None = None
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._is_in_backward = False

    def start(self) -> None:
        """Begin to observe calls to ``backward``."""
        if self._wrapper is not None:
            return
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # A nested call comes from activation checkpointing.
            if self._is_in_backward or torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            self._is_in_backward = True
            try:
                self._add(args[0] if args else kwargs.get("tensors"))
                return original(*args, **kwargs)
            finally:
                self._is_in_backward = False

        self._original = original
        self._wrapper = backward
        torch.autograd.backward = backward

    def stop(self) -> None:
        """Stop observing."""
        # Another tool may have wrapped the function since then, and calls ours.
        if self._wrapper is not None and torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._original  # type: ignore[assignment]
        self._wrapper = None
        self._sum = None

    def take(self) -> torch.Tensor | None:
        """Return the sum of the losses since the last call, shape ``()``, or None without any."""
        loss = self._sum
        self._sum = None
        return loss

    def _add(self, root: object) -> None:
        """Add the tensor on which ``backward`` is called, if it is a loss."""
        if not isinstance(root, torch.Tensor) or root.numel() != 1:
            return
        loss = root.detach().float().reshape(())
        if self._scaler is not None and self._scaler.is_enabled():
            loss = loss * self._inverse_scale(loss)
        self._sum = loss if self._sum is None else self._sum + loss

    def _inverse_scale(self, loss: torch.Tensor) -> torch.Tensor:
        assert self._scaler is not None
        scale = self._scaler._scale
        assert scale is not None
        return scale.to(loss.device, non_blocking=True).float().reciprocal().reshape(())
