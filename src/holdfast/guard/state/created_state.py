"""Create the state of torch optimizers before their first step.

An optimizer that allocates its state during its first step may run out of memory at that point,
when the step can no longer be rolled back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from holdfast.numerics.gradients import local


class CreatedState:
    """Creates the optimizer state of one run, and removes the state that stays unused.

    Args:
        optimizers: The optimizers by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        # The parameters whose state was created before their first step, keyed by the optimizer's
        # name. A list is emptied when the optimizer's unused state has been removed.
        self._created: dict[str, list[torch.Tensor]] = {}

    def forget(self) -> None:
        """Record that optimizer state was loaded, so state may have to be created again."""
        self._created.clear()

    def prepare(self, names: Sequence[str]) -> None:
        """Create the state of these optimizers before their first attempt.

        If this runs out of memory, the attempt can still be repeated.

        Args:
            names: The names of the optimizers.
        """
        for name in names:
            if name not in self._created:
                optimizer = self._optimizers[name]
                trainable = [p for p in _parameters_of(optimizer) if p.requires_grad]
                self._created[name] = _create_state(optimizer, trainable)

    def complete(self, names: Sequence[str]) -> None:
        """Create the state of parameters that have just received their first gradient."""
        for name in names:
            optimizer = self._optimizers[name]
            state = optimizer.state
            count = 0
            for group in optimizer.param_groups:
                count += len(group["params"])
            if state and len(state) < count:
                missing = [
                    p for p in _parameters_of(optimizer) if p.grad is not None and p not in state
                ]
                if missing:
                    _create_state(optimizer, missing)

    def drop_unused(self, name: str) -> None:
        """Remove the state of parameters that received no gradient in their optimizer's first step.

        The guard created this state before the step. Without the guard, the state would not exist.
        """
        # If an earlier state was loaded since the step began, it is unknown which state is unused.
        if self._created.get(name):
            unused = [p for p in self._created[name] if p.grad is None]
            _drop_state(self._optimizers[name], unused)
            self._created[name] = []


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _create_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Create the optimizer state of parameters that have none.

    If Adam runs out of memory while it allocates its moments, it leaves behind an entry that holds
    only ``step``, and every later step fails with ``KeyError: 'exp_avg'``. torch's optimizers
    create their state in ``_init_group``, which is called here before the step, with zero gradients
    that take no memory. SGD instead creates its momentum from the first gradient. If it runs out of
    memory in its first step, the run rolls back to the last good state, as after any out-of-memory
    error in an optimizer step.

    Returns:
        The parameters whose state was created. If an error is raised, no state was created.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return []
    missing = _without_state(optimizer, parameters)
    if not missing:
        return []
    # The first parameter of `_init_group` is the group. The others are lists that it fills for the
    # step.
    list_count = len(inspect.signature(init_group).parameters) - 1
    try:
        with _only_gradients_of(optimizer, missing):
            for group in optimizer.param_groups:
                init_group(group, *([] for _ in range(list_count)))
    except BaseException:
        _drop_state(optimizer, missing)
        raise
    # `_init_group` may leave the state of a parameter empty.
    _drop_state(optimizer, _without_state(optimizer, missing))
    return [p for p in missing if p in optimizer.state]


def _without_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of an optimizer's parameters that have no state, or an empty state.

    Args:
        optimizer: The optimizer.
        parameters: Consider only these parameters.
    """
    ids = {id(parameter) for parameter in parameters if not optimizer.state.get(parameter)}
    return [p for p in _parameters_of(optimizer) if id(p) in ids]


@contextlib.contextmanager
def _only_gradients_of(optimizer: Optimizer, chosen: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context in which only these parameters have gradients, which take no memory."""
    everything = _parameters_of(optimizer)
    before = [p.grad for p in everything]
    try:
        for p in everything:
            p.grad = None
        for p in chosen:
            is_sharded = local(p) is not p
            if is_sharded:
                # The values are not used, so any tensor with the same sharding is suitable.
                p.grad = p.detach()
            else:
                p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
        yield
    finally:
        for p, gradient in zip(everything, before, strict=True):
            p.grad = gradient


def _drop_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Remove the optimizer state of these parameters, as if they had never been stepped."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
