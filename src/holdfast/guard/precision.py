"""The autocast context of the forward pass. Loss scaling for fp16 is in ``numerics``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from holdfast.core.policy.kinds import Precision

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NO_AUTOCAST = contextlib.nullcontext()


def autocast(device_type: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context for a forward pass, which does nothing for fp32."""
    dtype = _AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return _NO_AUTOCAST
    return torch.autocast(device_type, dtype)
