"""Gradient norms that do not overflow, one finite check, and clipping.

The norm that clipping needs is also the finite check: one norm per tensor in fp32, one norm over
those, and one read by the host. Only if that is not finite, a second pass in fp64 distinguishes an
overflowed norm from real NaN or Inf.

Clipping is torch's own arithmetic, bit for bit, wherever torch's norm is finite. Where it overflows
(finite fp32 gradients of 1e20, fp16 gradients above 65,504) torch multiplies every gradient by 0;
here the fp64 norm is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils import clip_grads_with_norm_

from holdfast.core.policy.kinds import ClipBy

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Group:
    """One parameter group of one optimizer, with the parameters that have gradients."""

    # Such as "generator.0", or the name that the group was given.
    name: str
    optimizer: str
    parameters: list[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class GradientFacts:
    """What is known about the gradients of a step, before clipping. Norms are L2 norms."""

    # By group name.
    norms: dict[str, float]
    # The norm of all gradients together.
    total: float
    loss: float
    # torch's own norm would be Inf although every gradient is finite.
    overflowed: bool
    # The loss or a gradient really holds NaN or Inf.
    nonfinite: bool
    # The items of the loss, if they were on a device until now.
    items: float | None = None


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
    """Measure the gradients of a step. Cost: one host sync.

    Args:
        groups: At least one parameter among them has a gradient.
        loss: The step's loss, shape ``()``, detached.
        items: Items of the loss to read in the same sync, shape ``()``, or None if they are known.
        share: Converts the norms of the local shards to the norms of whole gradients, or None if no
            gradient is sharded.

    Returns:
        The facts, and the norm of every single gradient, shape ``(number of gradients,)``, in the
        order of `groups`: fp32, or fp64 for fp64 gradients and after an overflow.
    """
    gradients = _gradients_of(groups)
    if share is None:
        norms = _norms(gradients)
    else:
        gradients = [local(gradient) for gradient in gradients]
        norms = share(_norms(gradients))
    facts, stacked = _summarize(groups, norms, loss, items)
    if math.isfinite(facts.total) or not math.isfinite(facts.loss):
        return facts, stacked
    exact_norms = [_norm_fp64(gradient) for gradient in gradients]
    if share is not None:
        exact_norms = share(exact_norms)
    facts, stacked = _summarize(groups, exact_norms, loss, items)
    return replace(facts, overflowed=not facts.nonfinite), stacked


def _gradients_of(groups: Sequence[Group]) -> list[torch.Tensor]:
    gradients = []
    for group in groups:
        for parameter in group.parameters:
            gradient = parameter.grad
            assert gradient is not None
            # The check for the usual case is inline because this runs for every parameter in every
            # step.
            if gradient.layout is not torch.strided:
                gradient = _dense(gradient)
            gradients.append(gradient)
    return gradients


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor, in fp32 for half types."""
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


def _summarize(
    groups: Sequence[Group],
    norms: Sequence[torch.Tensor],
    loss: torch.Tensor,
    items: torch.Tensor | None,
) -> tuple[GradientFacts, torch.Tensor]:
    """Return the facts and the norms as one tensor, from the norm of each gradient."""
    device = norms[0].device
    stacked = torch.stack(
        [norm if norm.device == device else norm.to(device) for norm in norms],
    )
    total = torch.linalg.vector_norm(stacked)
    group_norms: list[torch.Tensor] = []
    if len(groups) > 1:
        sizes = [len(group.parameters) for group in groups]
        group_norms = [torch.linalg.vector_norm(part) for part in torch.split(stacked, sizes)]
    scalars = [total, loss, *group_norms]
    if items is not None:
        scalars.append(items)
    values = _read(scalars)
    total_value = values[0]
    loss_value = values[1]
    # The norm of a single group is the total.
    norms_by_group = values[2 : 2 + len(group_norms)] or [total_value]
    facts = GradientFacts(
        norms=dict(zip([group.name for group in groups], norms_by_group, strict=True)),
        total=total_value,
        loss=loss_value,
        overflowed=False,
        nonfinite=not (math.isfinite(total_value) and math.isfinite(loss_value)),
        items=None if items is None else values[-1],
    )
    return facts, stacked


def _read(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalar tensors. Cost: one host sync, or none if all are on the CPU."""
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
    """Scale finite gradients down to a norm, in place. Cost: no host sync.

    The three ways are different algorithms. They agree only where no scope is above the limit.

    =========  =============================  =======================  ===========================
    clip_by    one norm and one factor for    direction of the step    its norm is at most
    =========  =============================  =======================  ===========================
    global     everything                     kept                     max_norm
    optimizer  each optimizer                 turned between them      sqrt(optimizers) x max_norm
    group      each group of each optimizer   turned between groups    sqrt(groups) x max_norm
    =========  =============================  =======================  ===========================

    ``benchmarks/clipping`` measures the difference: where three groups of a small transformer are
    above the limit, the step of ``"group"`` has a cosine of 0.83 with that of ``"global"``, and is
    1.73 times as long.

    Args:
        groups: As given to `inspect`.
        norms: The norm of every gradient, as `inspect` returned them.
        max_norm: Above 0.
        clip_by: The scope of a norm.
        order: For ``"global"``, indices into `norms` that give the order of summation, or None for
            the order of `norms`.
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


def nonfinite_gradients(
    named_parameters: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Return the first few parameters whose gradients hold NaN or Inf, and how many there are.

    Cost: one host sync for each parameter. Call it after the fused check has failed.
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
    # The gradient is fp64 and its squares overflow.
    scaled: torch.Tensor = torch.linalg.vector_norm(gradient / largest, dtype=wide)
    return largest * scaled
