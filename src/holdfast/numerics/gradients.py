"""Compute gradient norms that do not overflow, check a step for NaN and Inf, and clip gradients.

The norm that clipping needs also shows whether the step is finite. It is computed from the fp32
norm of each tensor, and the host reads only the result. If the result is not finite, a second pass
in fp64 determines whether the norm has overflowed or a gradient really contains NaN or Inf.

If torch's norm is finite, the clipped gradients are bit-identical to those of torch's own function.
For large finite gradients, such as fp32 gradients of 1e20, torch's norm overflows. torch would then
multiply every gradient by 0, whereas this module clips with the fp64 norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils import clip_grads_with_norm_

from holdfast.core.policy.kinds import ClipBy

_HALF = (torch.float16, torch.bfloat16)
_DOUBLE = (torch.float64, torch.complex128)


@dataclass(slots=True)
class Group:
    """A parameter group of an optimizer. It contains only parameters that have gradients."""

    # The name that the user gave the group, or a name such as "generator.0".
    name: str
    # The name of the optimizer.
    optimizer: str
    parameters: list[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class GradientFacts:
    """The loss of a step, and the L2 norms of its gradients before clipping."""

    # The norm of each group, keyed by the group's name.
    norms: dict[str, float]
    # The norm of all gradients together.
    total: float
    loss: float
    # Whether torch's own norm would be Inf although every gradient is finite.
    overflowed: bool
    # Whether the loss or a gradient contains NaN or Inf.
    nonfinite: bool
    # The number of items over which the loss is a mean, if `inspect` has read it from a device.
    items: float | None = None


@dataclass(slots=True, kw_only=True)
class Measurement:
    """The loss of a step and the norms of its gradients, before the host has read them."""

    # The norm of each gradient, in the order of the groups, shape ``(number of gradients,)``.
    norms: torch.Tensor
    # The norm of all gradients together, shape ``()``.
    total: torch.Tensor
    # The loss of the step, shape ``()``.
    loss: torch.Tensor
    # The norm of each group, each of shape ``()``. Empty if there is only one group.
    group_norms: list[torch.Tensor]
    # The number of items over which the loss is a mean, shape ``()``. None if the host knows it.
    items: torch.Tensor | None
    # The names of the groups.
    group_names: list[str]

    def scalars(self) -> list[torch.Tensor]:
        """Return the values that `facts` needs, each of shape ``()``."""
        scalars = [self.total, self.loss, *self.group_norms]
        if self.items is not None:
            scalars.append(self.items)
        return scalars

    def facts(self, values: Sequence[float]) -> GradientFacts:
        """Return the facts of the step.

        Args:
            values: The values of `scalars`, as read by the host.
        """
        total = values[0]
        loss = values[1]
        # A single group has no norm of its own, since its norm is the total.
        group_norms = values[2 : 2 + len(self.group_norms)] or [total]
        return GradientFacts(
            norms=dict(zip(self.group_names, group_norms, strict=True)),
            total=total,
            loss=loss,
            overflowed=False,
            nonfinite=not (math.isfinite(total) and math.isfinite(loss)),
            items=None if self.items is None else values[-1],
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor, or the tensor itself if it is not sharded."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def inspect(
    groups: Sequence[Group],
    loss: torch.Tensor,
    items: torch.Tensor | None = None,
    *,
    share: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> tuple[GradientFacts, torch.Tensor]:
    """Measure the gradients of a step. Cost: one host sync if all of them are finite.

    Args:
        groups: The parameter groups. At least one of them must have a parameter.
        loss: The step's loss, shape ``()``, detached.
        items: The number of items over which the loss is a mean, shape ``()``, which is read in the
            same sync. None if the host already knows it.
        share: Converts the norms of local shards to the norms of whole gradients. None if no
            gradient is sharded.

    Returns:
        The loss and the norms as numbers, and the norm of each gradient in the order of `groups`,
        shape ``(number of gradients,)``. These norms are fp32, or fp64 if gradients are fp64 or a
        norm overflowed.
    """
    gradients = _gradients_of(groups)
    if share is None:
        norms = _norms(gradients)
    else:
        gradients = [local(gradient) for gradient in gradients]
        norms = share(_norms(gradients))
    measurement = _summarize(groups, norms, loss, items)
    facts = measurement.facts(_read(measurement.scalars()))
    if math.isfinite(facts.total) or not math.isfinite(facts.loss):
        return facts, measurement.norms
    exact_norms = [_norm_fp64(gradient) for gradient in gradients]
    if share is not None:
        exact_norms = share(exact_norms)
    measurement = _summarize(groups, exact_norms, loss, items)
    facts = measurement.facts(_read(measurement.scalars()))
    return replace(facts, overflowed=not facts.nonfinite), measurement.norms


def measure(
    groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None = None
) -> Measurement:
    """Measure the gradients of a step without reading the result. Cost: no host sync.

    Unlike `inspect`, this cannot tell a norm that has overflowed from gradients with NaN or Inf.

    Args:
        groups: The parameter groups. At least one of them must have a parameter.
        loss: The step's loss, shape ``()``, detached.
        items: The number of items over which the loss is a mean, shape ``()``. None if the host
            already knows it.
    """
    return _summarize(groups, _norms(_gradients_of(groups)), loss, items)


def _gradients_of(groups: Sequence[Group]) -> list[torch.Tensor]:
    gradients = []
    for group in groups:
        for parameter in group.parameters:
            gradient = parameter.grad
            assert gradient is not None
            # Call `_dense` only if necessary, because this runs for every parameter in every step.
            if gradient.layout is not torch.strided:
                gradient = _dense(gradient)
            gradients.append(gradient)
    return gradients


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor. Norms of fp16 and bf16 tensors are computed in fp32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes == {torch.float32}:
        return list(torch._foreach_norm(list(tensors), 2.0))
    if dtypes <= {torch.float32, *_HALF}:
        return list(torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32))
    norms = []
    for tensor in tensors:
        dtype = torch.float32 if tensor.dtype in _HALF else None
        norms.append(torch.linalg.vector_norm(tensor, dtype=dtype))
    return norms


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all elements of dense tensors together, shape ``()``.

    Norms of fp16 and bf16 tensors are computed in fp32, in which they do not overflow. The result
    is on the device of the first tensor, and the host does not wait for it.
    """
    total: torch.Tensor = torch.linalg.vector_norm(_stacked(_norms(tensors)))
    return total


def _stacked(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalars from any devices as one tensor on the device of the first one."""
    device = norms[0].device
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in norms])


def _summarize(
    groups: Sequence[Group],
    norms: Sequence[torch.Tensor],
    loss: torch.Tensor,
    items: torch.Tensor | None,
) -> Measurement:
    """Combine the norms of the gradients into those of the groups and of the whole step."""
    stacked = _stacked(norms)
    group_norms: list[torch.Tensor] = []
    if len(groups) > 1:
        sizes = [len(group.parameters) for group in groups]
        group_norms = [torch.linalg.vector_norm(part) for part in torch.split(stacked, sizes)]
    return Measurement(
        norms=stacked,
        total=torch.linalg.vector_norm(stacked),
        loss=loss,
        group_norms=group_norms,
        items=items,
        group_names=[group.name for group in groups],
    )


def _read(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return scalar tensors as Python numbers. Cost: one host sync, or none for CPU tensors."""
    device = scalars[0].device
    if all(scalar.is_cpu for scalar in scalars):
        return [scalar.item() for scalar in scalars]
    wide = [scalar.to(device, torch.float64) for scalar in scalars]
    values: list[float] = torch.stack(wide).tolist()
    return values


def clip(
    groups: Sequence[Group],
    norms: torch.Tensor,
    max_norm: float,
    clip_by: ClipBy,
    order: torch.Tensor | None = None,
) -> None:
    """Clip finite gradients to a maximum norm, in place. Cost: no host sync.

    The three values of `clip_by` select different algorithms, which give the same result only if no
    norm is above the limit.

    =========  =============================  =======================  ===========================
    clip_by    one norm and one factor for    direction of the step    largest possible norm
    =========  =============================  =======================  ===========================
    global     all gradients                  unchanged                max_norm
    optimizer  each optimizer                 changed                  sqrt(optimizers) x max_norm
    group      each group of each optimizer   changed                  sqrt(groups) x max_norm
    =========  =============================  =======================  ===========================

    ``benchmarks/clipping`` measures the difference. If three groups of a small transformer are
    above the limit, the steps with ``"group"`` and ``"global"`` have a cosine similarity of 0.83,
    and the one with ``"group"`` is 1.73 times as long.

    Args:
        groups: The groups that were passed to `inspect`.
        norms: The norm of each gradient, as returned by `inspect`.
        max_norm: The maximum norm, above 0.
        clip_by: Which gradients share one norm and one factor; see the table.
        order: For ``"global"``, indices into `norms` that define the order of summation. None to
            sum `norms` in the given order.
    """
    if clip_by == "global":
        parameters = [parameter for group in groups for parameter in group.parameters]
        total = torch.linalg.vector_norm(norms if order is None else norms[order])
        clip_grads_with_norm_(parameters, max_norm, total)
        return
    parameters_by_scope: dict[str, list[torch.Tensor]] = {}
    norms_by_scope: dict[str, list[torch.Tensor]] = {}
    sizes = [len(group.parameters) for group in groups]
    for group, group_norms in zip(groups, torch.split(norms, sizes), strict=True):
        scope = group.optimizer if clip_by == "optimizer" else group.name
        parameters_by_scope.setdefault(scope, []).extend(group.parameters)
        norms_by_scope.setdefault(scope, []).append(group_norms)
    for scope, parameters in parameters_by_scope.items():
        if parameters:
            total = torch.linalg.vector_norm(torch.cat(norms_by_scope[scope]))
            clip_grads_with_norm_(parameters, max_norm, total)


def multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a factor, in place. Cost: no host sync.

    Each product is rounded once, as if the factor were a Python number.

    Args:
        gradients: The gradients.
        factor: The factor, shape ``()``, fp64.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, same_dtype in by_dtype.items():
        if dtype not in _HALF:
            real_dtype = torch.float64 if dtype in _DOUBLE else torch.float32
            torch._foreach_mul_(same_dtype, factor.to(real_dtype))
            continue
        # torch would round the factor to 8 or 11 bits first.
        for gradient in same_dtype:
            gradient.copy_(gradient.to(torch.float32) * factor.to(torch.float32))


def nonfinite_gradients(
    named_parameters: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Find the parameters whose gradients contain NaN or Inf.

    Cost: one host sync per parameter, so call this only if `inspect` reports a non-finite step.

    Returns:
        The names of the first `most` such parameters, and the total number of such parameters.
    """
    names = []
    for name, parameter in named_parameters:
        if parameter.grad is None:
            continue
        if not bool(torch.isfinite(local(_dense(parameter.grad))).all()):
            names.append(name)
    return names[:most], len(names)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm_fp64(gradient: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    if torch.isfinite(norm):
        return norm
    largest: torch.Tensor = torch.linalg.vector_norm(gradient, math.inf, dtype=wide)
    if not torch.isfinite(largest):
        return norm
    # The gradient is finite, but its squares overflow even in fp64. Scale it down before squaring.
    scaled: torch.Tensor = torch.linalg.vector_norm(gradient / largest, dtype=wide)
    return largest * scaled
