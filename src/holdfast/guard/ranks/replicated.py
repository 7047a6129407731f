"""A model in DistributedDataParallel: each rank holds all of it, and gradients are averaged in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


class Replicated:
    """One wrapped model."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self.group: Any = wrapper.process_group
        self.device: torch.device = next(wrapper.parameters()).device

    def rebuild(self) -> None:
        """Let the reducer rebuild its buckets now, if that is due: all ranks do so at the same place.

        It is due at the first forward after the first step; left to that, a rank that runs alone would wait for ever.
        """
        self._wrapper.reducer._rebuild_buckets()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let forward and backward talk to no other rank."""
        wrapper = self._wrapper
        before = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
        try:
            with _NoCollectives():  # type: ignore[no-untyped-call]
                yield
        finally:
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = before
            if wrapper.find_unused_parameters:  # else what was used now counts as used in the next step
                wrapper.reducer._reset_state()


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for what other ranks would have to take part in, such as that of a loss over all of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(f"{func} needs the other ranks, and this one makes the step again by itself")
        return func(*args, **(kwargs or {}))
