"""Gradient norms that do not overflow, one finite check, and clipping.

Order: norm → classify → clip. The norm that clipping needs is also the finite check, so it is free: per-tensor
norms in fp32, one norm over them, one read by the host. Only if that is not finite, a second look in fp64 tells
"the norm overflowed, the gradients are fine" from real NaN or Inf.

Clipping is torch's own arithmetic, bit for bit, wherever torch's norm is finite. Where it overflows (finite fp32
gradients of 1e20, fp16 gradients above 65 504) torch multiplies every gradient by 0; here the fp64 norm is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grads_with_norm_

from holdfast.core.policy import ClipBy

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group of one optimizer, as far as it has gradients.

    Args:
        name: Such as ``"generator.0"``, or the group's own ``"name"``.
        optimizer: Name of its optimizer.
        parameters: Those with a gradient, any shapes.
    """

    name: str
    optimizer: str
    parameters: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """What is known about the gradients of a step, before clipping.

    Args:
        norms: L2 norm by group name.
        total: L2 norm over everything.
        loss: The loss that was read along.
        overflowed: True if torch's own norm would be Inf although every gradient is finite.
        nonfinite: True if the loss or a gradient really holds NaN or Inf.
    """

    norms: dict[str, float]
    total: float
    loss: float
    overflowed: bool
    nonfinite: bool


def inspect(groups: Sequence[Group], loss: torch.Tensor) -> tuple[GradientFacts, torch.Tensor]:
    """Measure the gradients of a step.

    Args:
        groups: At least one parameter among them has a gradient.
        loss: The step's loss, shape ``()``, detached.

    Returns:
        The facts, and the norm of every single gradient, shape ``(number of gradients,)``, in the order of
        `groups`: fp32 (fp64 for fp64 gradients and after an overflow).

    Cost: one host sync.
    """
    gradients = [_dense(p.grad) for group in groups for p in group.parameters]
    kinds = {gradient.dtype for gradient in gradients}
    if kinds <= {torch.float32, *_HALF}:
        norms = list(torch._foreach_norm(gradients, 2.0, dtype=None if kinds == {torch.float32} else torch.float32))
    else:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32 if g.dtype in _HALF else None) for g in gradients]
    facts, each = _summarise(groups, norms, loss)
    if math.isfinite(facts.total) or not math.isfinite(facts.loss):
        return facts, each
    exact = [_norm_fp64(gradient) for gradient in gradients]
    facts, each = _summarise(groups, exact, loss)
    if facts.nonfinite:
        return facts, each
    return (
        GradientFacts(norms=facts.norms, total=facts.total, loss=facts.loss, overflowed=True, nonfinite=False),
        each,
    )


def _summarise(
    groups: Sequence[Group], norms: Sequence[torch.Tensor], loss: torch.Tensor
) -> tuple[GradientFacts, torch.Tensor]:
    first = norms[0]
    each = torch.stack([norm if norm.device == first.device else norm.to(first.device) for norm in norms])
    sizes = [len(group.parameters) for group in groups]
    parts = [each] if len(groups) == 1 else list(torch.split(each, sizes))
    wide = torch.float64 if each.device.type != "mps" else torch.float32
    wanted = [torch.linalg.vector_norm(part) for part in (each, *parts)] if len(parts) > 1 else []
    if not wanted:
        total = torch.linalg.vector_norm(each)
        wanted = [total, total]
    read = torch.stack([value.to(each.device, wide) for value in (*wanted, loss)]).tolist()
    total_norm, *by_group, loss_value = read
    return (
        GradientFacts(
            norms={group.name: norm for group, norm in zip(groups, by_group, strict=True)},
            total=total_norm,
            loss=loss_value,
            overflowed=False,
            nonfinite=not (math.isfinite(total_norm) and math.isfinite(loss_value)),
        ),
        each,
    )


def clip(groups: Sequence[Group], each: torch.Tensor, max_norm: float, clip_by: ClipBy) -> None:
    """Scale finite gradients down to a norm, in place.

    Args:
        groups: As given to `inspect`.
        each: The norms that `inspect` returned.
        max_norm: Above 0.
        clip_by: ``"global"``: one norm over all, the direction is kept. ``"optimizer"`` and ``"group"``: one
            norm for each; the direction changes, and the total may reach sqrt(number of groups) x max_norm.

    Cost: no host sync.
    """
    scopes: dict[str, list[tuple[Group, torch.Tensor]]] = {}
    for group, norms in zip(groups, torch.split(each, [len(group.parameters) for group in groups]), strict=True):
        scope = {"global": "", "optimizer": group.optimizer, "group": group.name}[clip_by]
        scopes.setdefault(scope, []).append((group, norms))
    for members in scopes.values():
        parameters = [parameter for group, _ in members for parameter in group.parameters]
        if parameters:
            norm = torch.linalg.vector_norm(torch.cat([norms for _, norms in members]))
            clip_grads_with_norm_(parameters, max_norm, norm)


def nonfinite_gradients(named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5) -> tuple[list[str], int]:
    """Return the names of parameters whose gradient holds NaN or Inf, and how many there are in all.

    Args:
        named: ``(name, parameter)`` pairs.
        most: Names to return.

    Cost: one host sync for each parameter. Call it after the fused check has failed.
    """
    names: list[str] = []
    count = 0
    for name, parameter in named:
        if parameter.grad is not None and not bool(torch.isfinite(_dense(parameter.grad)).all()):
            count += 1
            if len(names) < most:
                names.append(name)
    return names, count


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm_fp64(gradient: torch.Tensor) -> torch.Tensor:
    # No fp64 on Apple's GPUs: once, after a failure, on the CPU.
    source = gradient.cpu() if gradient.device.type == "mps" else gradient
    wide = torch.complex128 if source.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(source, dtype=wide)
    if not torch.isfinite(norm):
        largest = torch.linalg.vector_norm(source, math.inf, dtype=wide)
        if torch.isfinite(largest):  # fp64 gradients whose squares overflow
            norm = largest * torch.linalg.vector_norm(source / largest, dtype=wide)
    return norm
