"""Find NaN and Inf in weights, buffers and optimizer state before a checkpoint is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from holdfast.checkpoint.kinds import computable


def nonfinite_tensors(
    named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Return the names of tensors that contain NaN or Inf, and the number of such tensors.

    At most `most` names are returned. Every tensor is read once, without temporary copies, and the
    host waits for each device once.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = computable(tensor)
        if values is not None and values.numel():
            by_device.setdefault(values.device, []).append((name, values))
    bad: list[str] = []
    for pairs in by_device.values():
        # The Euclidean norm is used because the maximum norm takes twenty times as long on CPUs.
        norms = torch._foreach_norm([tensor for _, tensor in pairs])
        values_of_norms = torch.stack([norm.float() for norm in norms]).tolist()
        for (name, tensor), norm in zip(pairs, values_of_norms, strict=True):
            if not _is_finite(tensor, norm):
                bad.append(name)
    return bad[:most], len(bad)


def _is_finite(tensor: torch.Tensor, norm: float) -> bool:
    # The norm of finite values is Inf if the sum of their squares overflows. In that case, the
    # values themselves are checked.
    return math.isfinite(norm) or bool(torch.isfinite(tensor).all())
