"""Launch a step before its result is known, and read the result one step later.

By default, the host waits for a step's loss and gradient norms before it launches the optimizer.
During that wait, an accelerator runs out of queued work. With ``Policy(decide="late")``, the device
itself decides. It computes a flag that is 1 if the step must not take effect. The optimizer kernels
and the buffer updates read this flag, called the *gate*, and have no effect if it is 1. The host
reads the result of a step just before it launches the optimizer of the next one. At that point, the
next forward and backward pass is already queued, so the device stays busy.

The gate is conservative: it also refuses some steps that the host would accept, such as one whose
norm overflows although its gradients are finite. A refused step is repeated from the state before
it and decided as usual, so the result does not depend on when it is read.

``timing`` states which steps can be decided late. ``run.steps`` decides them, and
``run.joint_steps`` does so with several ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.core.containers import children_of, rebuild
from holdfast.guard.result import PassResult, StepAttempt
from holdfast.memory.host_copy import HostCopy
from holdfast.numerics.gradients import GradientFacts, Group, Measurement

# On an accelerator, two runs of the same step may sum in a different order. They count as equal if
# they differ by less than this fraction, a quarter of the precision of bf16 (0.004). If they differ
# by more, the step is skipped instead of decided by its repetition.
_RELATIVE_TOLERANCE = 1e-3
# The limit for the loss is lowered by this fraction before it is compared, because the comparison
# rounds it to fp32. The precision of fp32 is 6e-8.
_LIMIT_MARGIN = 1e-6
_NOT_SET = object()


@dataclass(slots=True, kw_only=True)
class UnreadAttempt:
    """An attempt whose backward pass has been launched but whose result has not been read."""

    passed: PassResult
    # The parameter groups, each reduced to the parameters that have gradients.
    groups: list[Group]
    measurement: Measurement
    # The largest number of samples in one pass, or None if unknown.
    micro_batch_size: int | None
    # Whether the number of items is the total over all ranks. If so, the host learns it only when
    # it reads the result.
    items_are_of_all_ranks: bool = False

    def copy_outputs(self) -> None:
        """Replace what the loss function has returned by copies, which nothing overwrites.

        A CUDA graph overwrites its outputs when it is replayed.
        """
        extra = None if self.passed.extra is None else _cloned(self.passed.extra)
        self.passed = self.passed._replace(loss=self.passed.loss.clone(), extra=extra)

    def with_facts(self, facts: GradientFacts) -> StepAttempt:
        """Return the attempt with its result.

        Args:
            facts: The loss, the norms and the number of items that the host has read.
        """
        passed = self.passed
        if self.items_are_of_all_ranks:
            assert facts.items is not None
            passed = passed._replace(items=facts.items)
        return StepAttempt.of(
            passed, self.groups, facts, self.measurement.norms, self.micro_batch_size
        )


def should_refuse(attempt: UnreadAttempt, loss_limit: float) -> torch.Tensor:
    """Return a flag that is True if a step must not take effect, without synchronizing.

    Args:
        attempt: The attempt at the step.
        loss_limit: The step is refused if its loss is larger than this.

    Returns:
        A bool tensor of shape ``()`` on the device of the gradients.
    """
    measurement = attempt.measurement
    loss = measurement.loss.to(measurement.total.device)
    # NaN or Inf in one of the two makes the sum NaN or Inf. Subtracting it from itself gives 0 if
    # it is finite, and NaN otherwise. `torch.isfinite` would launch four kernels instead of two.
    total = measurement.total + loss
    refused = (total - total) != 0
    if loss_limit < math.inf:
        # A comparison with a number rounds the number to the dtype of the tensor, which would raise
        # the limit by up to 0.4 % for a loss in bf16.
        precise = loss if loss.dtype is torch.float64 else loss.to(torch.float32)
        refused = refused | (precise > loss_limit - abs(loss_limit) * _LIMIT_MARGIN)
    if measurement.items is not None:
        items = measurement.items.to(measurement.total.device)
        # Negated, so that NaN is refused too.
        refused = refused | ~(items > 0)
        if attempt.passed.counted:
            refused = refused | (items != items.floor())
    return refused


@contextlib.contextmanager
def gated(optimizers: Sequence[Optimizer], refused: torch.Tensor) -> Iterator[None]:
    """Make optimizer steps inside the context do nothing if a flag on the device is set.

    torch's fused optimizers read the flag from their attribute ``found_inf``, which torch's
    gradient scaler sets in the same way.

    Args:
        optimizers: Fused optimizers.
        refused: The flag, bool, shape ``()``.
    """
    # The kernels compare the value with 1.0, and treat any other value as "no Inf found".
    found_inf = refused.to(torch.float32)
    previous_values = [vars(optimizer).get("found_inf", _NOT_SET) for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        yield
    finally:
        for optimizer, value in zip(optimizers, previous_values, strict=True):
            if value is _NOT_SET:
                del optimizer.found_inf  # type: ignore[attr-defined]
            else:
                optimizer.found_inf = value  # type: ignore[attr-defined]


class Readout:
    """The result of a step on its way from the device to the host.

    Args:
        measurement: The loss and the norms of the step.
        refused: The flag that gates the step, bool, shape ``()``.
    """

    def __init__(self, measurement: Measurement, refused: torch.Tensor) -> None:
        self._measurement = measurement
        scalars = [*measurement.scalars(), refused]
        device = measurement.total.device
        # fp32 represents fp16 and bf16 values exactly, but not large item counts. The flag, which
        # is the last scalar, fits into any dtype.
        is_fp32 = all(
            scalar.is_floating_point() and scalar.dtype is not torch.float64
            for scalar in scalars[:-1]
        )
        dtype = torch.float32 if is_fp32 else torch.float64
        self._copy = HostCopy(torch.stack([scalar.to(device, dtype) for scalar in scalars]))
        self._values: list[float] | None = None

    def facts(self) -> GradientFacts:
        """Return the loss and the norms, and wait for them if necessary."""
        return self._measurement.facts(self._read()[:-1])

    def was_refused(self) -> bool:
        """Return whether the gate kept the step from taking effect, and wait if necessary."""
        return self._read()[-1] != 0

    def _read(self) -> list[float]:
        if self._values is None:
            self._values = self._copy.read().tolist()
        return self._values


def has_reproduced(first: GradientFacts, second: GradientFacts, *, exact: bool) -> bool:
    """Return whether a repeated step has reproduced its first result.

    It may not if the loss function reads something that has changed since, such as a variable of
    the training loop.

    Args:
        first: The facts of the step, measured by `measure`, so that an overflowing norm is Inf.
        second: The facts of the repeated step.
        exact: Whether the values must be equal bit for bit, as on the CPU.
    """
    tolerance = 0.0 if exact else _RELATIVE_TOLERANCE
    if second.overflowed:
        # The first measurement could not tell an overflowing norm from Inf, so compare with Inf.
        second = replace(second, total=math.inf)
    return _is_close(first.loss, second.loss, tolerance) and _is_close(
        first.total, second.total, tolerance
    )


def _is_close(first: float, second: float, tolerance: float) -> bool:
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return math.isclose(first, second, rel_tol=tolerance)


class LateLoss(torch.Tensor):
    """The loss of a step whose result is unknown. Reading its value settles the step first.

    Arithmetic returns plain tensors and does not wait. The methods below wait.
    """

    # Without this, every result of an operation would be a `LateLoss` too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # Function that settles the step.
    _settle: Callable[[], None]

    @classmethod
    def of(cls, loss: torch.Tensor, settle: Callable[[], None]) -> torch.Tensor:
        """Return a late view of a loss, or the loss itself if it is a tensor subclass.

        Args:
            loss: The loss, shape ``()``, detached.
            settle: Function that settles the step, that is, reads its result and repeats the step
                if it was refused. It may leave the step undecided; see `Settlement`.
        """
        if type(loss) is not torch.Tensor:
            # A DTensor, for example, cannot be viewed in this way.
            return loss
        late: LateLoss = torch.Tensor._make_subclass(cls, loss)
        late._settle = settle
        return late

    def plain(self) -> torch.Tensor:
        """Return the loss as a plain tensor, without waiting."""
        return self.as_subclass(torch.Tensor)

    def _read(self) -> torch.Tensor:
        self._settle()
        return self.plain()

    def item(self) -> Any:
        """Settle the step, and return the loss as a number."""
        return self._read().item()

    def tolist(self) -> Any:
        """Settle the step, and return the loss as a number."""
        return self._read().tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Settle the step, and return the loss on the CPU."""
        return self._read().cpu(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Settle the step, and return the loss as a NumPy array."""
        return self._read().numpy(*args, **kwargs)

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._read())

    def __format__(self, format_spec: str) -> str:
        return format(self._read(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.__reduce_ex__(self._read(), protocol)  # type: ignore[no-untyped-call]


# Loggers such as tensorboardX recognize a tensor by the name of its type.
LateLoss.__module__ = torch.Tensor.__module__
LateLoss.__name__ = torch.Tensor.__name__
LateLoss.__qualname__ = torch.Tensor.__qualname__


def _cloned(tree: Any) -> Any:
    """Return a copy of a tree of tensors, so that a replayed CUDA graph cannot overwrite it."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    children = children_of(tree)
    if not children:
        return tree
    return rebuild(tree, {key: _cloned(child) for key, child in children.items()})
