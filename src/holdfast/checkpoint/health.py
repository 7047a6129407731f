"""Say whether state may be saved as good.

No NaN, no Inf in weights, statistics or optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from holdfast.checkpoint.kinds import computable


def nonfinite_tensors(
    named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Return the names of the tensors that hold NaN or Inf, `most` of them, and how many there are
    in all.

    Cost: reads every tensor once, no temporaries; one host sync for each device.
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
        # The Euclidean norm: on the CPU the largest value takes twenty times as long.
        norms = torch._foreach_norm([tensor for _, tensor in pairs])
        numbers = torch.stack([norm.float() for norm in norms]).tolist()
        bad += [
            name
            for (name, tensor), norm in zip(pairs, numbers, strict=True)
            if not _is_finite(tensor, norm)
        ]
    return bad[:most], len(bad)


def _is_finite(tensor: torch.Tensor, norm: float) -> bool:
    # The norm of finite values may be Inf as well, if the sum of their squares overflows.
    return math.isfinite(norm) or bool(torch.isfinite(tensor).all())
