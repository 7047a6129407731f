"""One process guards a run: several ranks are refused before anything is done."""

from __future__ import annotations

import torch

from holdfast.core.errors import PolicyError


def check_one_rank() -> None:
    """Raise H108 in a process group of more than one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise PolicyError(
            f"world_size={distributed.get_world_size()}",
            limit="this version guards one process; ranks that retry or skip by themselves would diverge",
            fix="run with one process per run directory.",
            rule="H108",
        )
