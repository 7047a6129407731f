"""Two ways to see allocations: of fake tensors by their storages, of real ones by kineto's allocator events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.forecast.kernels import scratch, scratch_cpu


class FakeAllocations(TorchDispatchMode):
    """Live bytes of the storages made while this is active, with scratch while an operator runs."""

    def __init__(self, route: str) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: list[int] = []
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._route = route
        self._scratch_of = scratch_cpu.scratch_of if route == "cpu" else scratch.scratch_of

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (tensor.device.type == "cpu") == (self._route == "cpu"):
                self._note(tensor.untyped_storage())
        needed = self._scratch_of(func, args, kwargs, out)
        self.peak = max(self.peak, self.live + (0 if needed is None else needed.bytes))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or size == 0:
            return
        self._seen[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.sizes.append(size)
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self.live -= size


def real_allocations(run: Callable[[], Any], since: str = "") -> tuple[int, int]:
    """Run something on the real CPU, once to warm up and once watched.

    Returns:
        The most bytes that were live above the beginning, and those that its result keeps. The beginning is that of
        the part that is recorded by the name `since`, if one is given.
    """
    kept = run()
    del kept
    gc.collect()
    # acc_events: without it torch 2.11 warns that events are cleared.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        kept = run()
    stack, changes, begun = list(watched.profiler.kineto_results.experimental_event_tree()), [], 0
    del kept
    while stack:
        event = stack.pop()
        if "Allocation" in str(event.tag):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        begun = event.start_time_ns if event.name == since else begun
        stack.extend(event.children)
    before = sum(size for time, size in changes if time < begun)
    live = peak = before
    for _, size in sorted(change for change in changes if change[0] >= begun):
        live += size
        peak = max(peak, live)
    return peak - before, live - before
