"""`AverageUse`: notice that a script runs an averaged model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.optim.swa_utils import AveragedModel

from holdfast.learning.eager_hooks import Hook


class AverageUse:
    """Calls a function before an averaged model, or any module in it, runs its forward pass.

    An average is updated when the result of a step is read, which may be one step later. Before a
    script runs the average, this result must therefore be read.

    Args:
        averages: The averaged models.
        before_use: The function to call.
    """

    def __init__(self, averages: Iterable[AveragedModel], before_use: Callable[[], None]) -> None:
        self._before_use = before_use
        for average in averages:
            for module in average.modules():
                # In a copy of the average, the hook does nothing.
                module.register_forward_pre_hook(Hook(self._call))

    def _call(self, *_: object) -> None:
        self._before_use()
