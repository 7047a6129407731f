"""`GradientOrder`: preserve the order in which DistributedDataParallel sums gradients.

torch assigns gradients to buckets in the order in which they are computed in the first step. In the
first step of a resumed process, this order may be different, for example because the machine is
busy. The gradients would then be summed in a different order, and their last bits would differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch


@final
class GradientOrder:
    """Records and restores the order of the gradients, as a list of parameter indices.

    Used by `ReplicatedModel`.

    Args:
        wrapper: The DistributedDataParallel module.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._order: list[int] = []
        # The hooks that record the order in the first step.
        self._hooks: list[Any] = []
        # With two ranks, the order does not matter, since addition of two numbers is commutative.
        size = wrapper.process_group.size()
        if size > 2 and not (wrapper.find_unused_parameters or wrapper.static_graph):
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(
                    lambda _, at=at: self._order.append(at)
                )  # type: ignore[no-untyped-call]
                for at, parameter in enumerate(trained_parameters(wrapper))
            ]

    def begin_attempt(self) -> None:
        """Restart the recording of the order, unless the recording has ended."""
        if self._hooks:
            self._order.clear()

    def end_recording(self) -> None:
        """Stop recording at the end of the first attempt."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def recorded(self) -> list[int]:
        """Return the recorded order, or an empty list if it is unknown or does not matter."""
        if sorted(self._order) != list(range(len(trained_parameters(self._wrapper)))):
            return []
        return self._order

    def restore(self, order: list[int]) -> None:
        """Make torch assign gradients to its buckets in a given order. All ranks must call this.

        This has no effect after the first step of the process, in which torch creates the buckets.

        Args:
            order: The order that `recorded` returned in an earlier process.
        """
        parameters = trained_parameters(self._wrapper)
        if not self._hooks or len(order) != len(parameters):
            return
        self.end_recording()
        self._order = order
        self._wrapper.reducer.prepare_for_forward()
        self._wrapper.reducer.prepare_for_backward([])
        with without_hooks(parameters):
            # Pass one parameter at a time, because autograd would choose the order of several.
            for at in order:
                torch.autograd.backward(parameters[at], torch.zeros_like(parameters[at]))
        for parameter in parameters:
            parameter.grad = None


def trained_parameters(wrapper: Any) -> list[torch.Tensor]:
    """Return the parameters of a wrapped model that require a gradient, in the model's order."""
    return [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context in which the gradient hooks of these parameters do not run."""
    hook_dicts = [
        hooks
        for p in parameters
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if hooks
    ]
    # The dicts themselves must not be replaced, since autograd holds references to them.
    copies = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy in zip(hook_dicts, copies, strict=True):
            hooks.update(copy)
