"""A loss function returns a loss, and leaves backward and the optimizers to the guard; what it calls itself is found.

Does not: look at gradients of anything but parameters: ``torch.autograd.grad`` and ``backward(inputs=[x])`` are free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch.optim import Optimizer

from holdfast.core.errors import BatchError

Called: TypeAlias = Literal["backward", "step", "zero_grad"]
_FIX = {
    "backward": "leave out loss.backward() and return the loss with its graph: guard.step runs backward. For a "
    "gradient of something else, such as an input, call torch.autograd.grad(loss, x).",
    "step": "leave out optimizer.step(), and scaler.step() around it: guard.step does that, after a look at the "
    "gradients. To step one of several optimizers, name it: guard.step(batch, loss_fn, optimizer=...).",
    "zero_grad": "leave it out: guard.step empties the gradients itself.",
}


class CalledInsideError(BatchError):
    """H209, and what the loss function called."""

    called: Called = "backward"


def called_inside(called: Called) -> CalledInsideError:
    """Return the error about a loss function that does the guard's work."""
    error = CalledInsideError(
        f"loss_fn {'ran backward into parameters' if called == 'backward' else f'called {called}()'}",
        limit="it may only return a loss: it can run several times in a step, which must stay one step",
        fix=_FIX[called],
        rule="H209",
    )
    error.called = called
    return error


@contextlib.contextmanager
def returning_a_loss(optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context for a loss function, in which optimizers refuse to move and ``.grad`` must stay as it is."""
    before = _marks(parameters)
    replaced: list[tuple[dict[str, Any], Any]] = []
    for attributes in map(vars, optimizers):
        replaced.append((attributes, attributes.get("step")))  # schedulers put theirs there too
        # Only `step`: zero_grad is found where it empties something, since frameworks call it in between.
        attributes["step"] = _refuse_step
    try:
        yield
    finally:
        for attributes, own in replaced:
            if own is None:
                attributes.pop("step", None)
            else:
                attributes["step"] = own
    after = _marks(parameters)
    if after != before:
        emptied = any(now is None and was is not None for now, was in zip(after, before, strict=True))
        raise called_inside("zero_grad" if emptied else "backward")


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    raise called_inside("step")


def _marks(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Return which gradient each parameter has, and how often it was changed in place."""
    return [None if (gradient := p.grad) is None else (id(gradient), gradient._version) for p in parameters]


@contextlib.contextmanager
def weights_stay(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context for forward and backward in which hooks of parameters may look, and must not step."""
    hooked = [p for p in parameters if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    before = [p._version for p in hooked]
    yield
    moved = sum(p._version != version for p, version in zip(hooked, before, strict=True))
    if moved:
        raise BatchError(
            f"hooks have moved {moved} parameter(s) in backward",
            limit="a step can only be retried, clipped or skipped while its weights have not moved",
            fix="remove the hooks that call optimizer.step(), give the optimizer to the Guard, and start again: the "
            "weights of this step cannot be taken back.",
            rule="H211",
        )


class FilledOutside:
    """Finds gradients that the caller has filled before the first step, which begins without any."""

    begun = 0  # steps of all guards in this process

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._empty = [parameter for parameter in parameters if parameter.grad is None]
        self._begun_before = FilledOutside.begun

    def check(self) -> None:
        """Raise H210 the first time, if gradients are there. Cost: if so, host syncs."""
        others = FilledOutside.begun != self._begun_before  # another guard may have stepped the same parameters
        FilledOutside.begun += 1
        left = [] if others else self._empty
        self._empty = []
        filled = [p for p in left if p.grad is not None and bool(p.grad.to_dense().count_nonzero())]
        if filled:
            raise BatchError(
                f"{len(filled)} parameter(s) had a gradient before the first step",
                limit="guard.step empties the gradients first: what backward() outside of it has added would be lost",
                fix="return that loss from loss_fn too, as loss_a + loss_b, and leave out backward() outside; if the "
                "gradients are not wanted, call optimizer.zero_grad() before.",
                rule="H210",
            )
