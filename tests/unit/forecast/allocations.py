"""What the real CPU allocates, by kineto's allocator events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def real_allocations(run: Callable[[], Any], since: str = "") -> tuple[int, int]:
    """Run something on the real CPU, once to warm up and once watched.

    Return the most bytes that were live above the beginning, and those that its result keeps. The
    beginning is that of the part that is recorded by the name `since`, if one is given.
    """
    kept = run()
    del kept
    gc.collect()
    # acc_events: without it torch 2.11 warns that events are cleared.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as watched:
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
