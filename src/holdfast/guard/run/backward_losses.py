"""Observe the losses on which a loop calls ``backward`` itself, without `Guard.step`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.guard.parts import Parts


class _Backward:
    """Replaces ``torch.autograd.backward`` while there are observers, since torch has no hook."""

    def __init__(self) -> None:
        self._observers: list[Callable[[object], None]] = []
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._is_running = False

    def add(self, observer: Callable[[object], None]) -> None:
        """Call a function with the first argument of each call to ``backward``."""
        self._observers.append(observer)
        if self._wrapper is None:
            self._install()

    def remove(self, observer: Callable[[object], None]) -> None:
        """Stop calling a function. Without it, ``torch.autograd.backward`` may be the original."""
        if observer in self._observers:
            self._observers.remove(observer)
        # If another tool has wrapped the function since then, it calls ours, which must stay.
        if not self._observers and torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._original  # type: ignore[assignment]
            self._wrapper = None

    def _install(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # A nested call comes from activation checkpointing.
            if self._is_running or torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            self._is_running = True
            try:
                for observer in self._observers:
                    observer(args[0] if args else kwargs.get("tensors"))
                return original(*args, **kwargs)
            finally:
                self._is_running = False

        self._original = original
        self._wrapper = backward
        torch.autograd.backward = backward


_backward = _Backward()


class BackwardLosses:
    """Adds up the losses on which the script calls ``backward``, until they are taken.

    If a step accumulates gradients over several batches, their losses are usually divided by the
    number of batches, so that their sum is the mean loss of the step.

    Args:
        parts: The objects of the run. If the additional state includes a ``GradScaler``, the losses
            are divided by its scale.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._scaler = next(
            (state for state in parts.states.values() if isinstance(state, GradScaler)), None
        )
        self._sum: torch.Tensor | None = None
        self._is_observing = False

    def start(self) -> None:
        """Begin to observe calls to ``backward``."""
        if not self._is_observing:
            self._is_observing = True
            _backward.add(self._add)

    def stop(self) -> None:
        """Stop observing."""
        self._is_observing = False
        _backward.remove(self._add)
        self._sum = None

    @property
    def are_seen(self) -> bool:
        """Return whether there was a loss since the last call of `take`."""
        return self._sum is not None

    def take(self) -> torch.Tensor | None:
        """Return the sum of the losses since the last call, shape ``()``, or None without any."""
        loss = self._sum
        self._sum = None
        return loss

    def _add(self, roots: object) -> None:
        """Add the losses among the tensors on which ``backward`` is called."""
        if self._sum is not None and not any(map(has_gradients, self._parts.optimizers.values())):
            # The gradients of the earlier losses were discarded. For example, `GradScaler` or the
            # script has skipped a step, or an optimizer calls its closure again.
            self._sum = None
        for root in roots if isinstance(roots, (list, tuple)) else [roots]:
            if _is_loss(root):
                loss = self._unscaled(root.detach().float().reshape(()))
                self._sum = loss if self._sum is None else self._sum + loss.to(self._sum.device)

    def _unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Divide a loss by the scale of the ``GradScaler``, if it is in use."""
        if self._scaler is None or not self._scaler.is_enabled():
            return loss
        scale = self._scaler._scale
        if scale is None:
            # `GradScaler.scale` has not been called yet.
            return loss
        return loss * scale.to(loss.device, non_blocking=True).float().reciprocal().reshape(())


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _is_loss(root: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``backward`` is called on a single number that can be read."""
    return (
        isinstance(root, torch.Tensor)
        and root.numel() == 1
        and root.layout is torch.strided
        and not root.is_meta
    )
