"""The simulated caching allocator, with a slow model of it as oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.forecast.allocator.caching import Block, CachingAllocator, OutOfDeviceMemoryError
from holdfast.forecast.allocator.replay import replay, smallest_cap_bytes
from holdfast.forecast.devices.catalogue import find_device
from holdfast.forecast.plan.fit import LEAST_MARGIN_BYTES, check_fit, default_margin_bytes
from holdfast.forecast.trace.events import live_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SETTINGS = settings(deadline=None, max_examples=60)


SIZES = st.sampled_from(
    [
        512,
        4 * KIB,
        700 * KIB,
        MIB,
        MIB + 512,
        3 * MIB,
        9 * MIB,
        10 * MIB,
        13 * MIB,
        21 * MIB,
        48 * MIB,
    ]
)
STEPS = st.lists(
    st.tuples(st.sampled_from("aaaaffffffe"), SIZES, st.integers(0, 1000)), max_size=120
)


# A slow model as oracle: lists that are searched from end to end, no joined bookkeeping


@dataclass
class SlowAllocator:
    """The allocator without anything clever: each segment is a list of [size, owner]."""

    cap: int
    segments: list[tuple[bool, list[list[int]]]] = field(default_factory=list)
    retries: int = 0

    def reserved(self) -> int:
        return sum(size for _, parts in self.segments for size, _ in parts)

    def allocated(self) -> int:
        return sum(size for _, parts in self.segments for size, owner in parts if owner)

    def allocate(self, size: int, owner: int) -> bool:
        small = size <= MIB
        fitting = [
            (part[0], number, place)
            for number, (is_small, parts) in enumerate(self.segments)
            for place, part in enumerate(parts)
            if is_small == small and not part[1] and part[0] >= size
        ]
        if fitting:
            _, number, place = min(fitting)
        else:
            wanted = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            if self.reserved() + wanted > self.cap:
                self.retries += 1
                self.segments = [
                    entry for entry in self.segments if any(owner for _, owner in entry[1])
                ]
            if self.reserved() + wanted > self.cap:
                return False
            self.segments.append((small, [[wanted, 0]]))
            number, place = len(self.segments) - 1, 0
        parts = self.segments[number][1]
        rest = parts[place][0] - size
        if (rest >= 512) if small else (rest > MIB):
            parts[place : place + 1] = [[size, owner], [rest, 0]]
        else:
            parts[place][1] = owner
        return True

    def free(self, owner: int) -> None:
        for number, (small, parts) in enumerate(self.segments):
            joined: list[list[int]] = []
            for size, held in parts:
                now = 0 if held == owner else held
                if joined and not now and not joined[-1][1]:
                    joined[-1][0] += size
                else:
                    joined.append([size, now])
            self.segments[number] = (small, joined)


@given(STEPS, st.integers(20, 300))
@SETTINGS
def test_it_does_what_the_slow_model_does(steps: list[tuple[str, int, int]], cap: int) -> None:
    """Reserved and allocated bytes, retries and failures equal those of the slow model after
    each step.
    """
    slow, fast = SlowAllocator(cap * MIB), CachingAllocator(cap_bytes=cap * MIB)
    live: list[tuple[int, Block]] = []
    for owner, (action, size, index) in enumerate(steps, start=1):
        if action == "a":
            could = slow.allocate(size, owner)
            if could:
                live.append((owner, fast.allocate(size)))
            else:
                with pytest.raises(OutOfDeviceMemoryError):
                    fast.allocate(size)
        elif action == "f" and live:
            freed, block = live.pop(index % len(live))
            slow.free(freed)
            fast.free(block)
        assert (fast.reserved_bytes, fast.allocated_bytes, fast.retries) == (
            slow.reserved(),
            slow.allocated(),
            slow.retries,
        )


# Replay and fit


def trace_of(
    steps: list[tuple[str, int, int]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for action, size, index in steps:
        if action == "f" and live:
            events.append(-live.pop(index % len(live)) - 1)
        else:
            live.append(len(sizes))
            sizes.append(size)
            events.append(len(sizes))
    return np.array(events, dtype=np.int32), np.array(sizes, dtype=np.int64)


@pytest.mark.parametrize(
    ("events", "text"), [([1, 1], "allocates storage 0"), ([-1], "frees storage 0")]
)
def test_replay_refuses_a_trace_that_cannot_be(events: list[int], text: str) -> None:
    """A storage that is allocated twice or freed before it is there is an error, never a silent
    count.
    """
    with pytest.raises(ValueError, match=text):
        replay(np.array(events, dtype=np.int32), np.array([512]))


@given(STEPS)
@SETTINGS
def test_caps_where_they_are_monotone(steps: list[tuple[str, int, int]]) -> None:
    """The peak without a cap is a cap without retries; below the live peak none suffices.

    The smallest found does.
    """
    events, sizes = trace_of(steps)
    free = replay(events, sizes)
    assert replay(events, sizes, cap_bytes=free.peak_reserved_bytes) == free
    live = int(live_bytes(events, sizes, 512).max(initial=0))
    assert live <= free.peak_allocated_bytes <= free.peak_reserved_bytes
    if live:
        assert replay(events, sizes, cap_bytes=live - 1).failed_at is not None
    smallest = smallest_cap_bytes(events, sizes, step_bytes=MIB)
    assert replay(events, sizes, cap_bytes=smallest).failed_at is None
    assert live <= smallest <= free.peak_reserved_bytes


def test_fit_on_a_device() -> None:
    """A trace fits if it is played within usable memory less context and margin, the workspaces
    counted.
    """
    device = find_device("RTX 4090")
    free = device.available_bytes - default_margin_bytes(device) - 2 * device.cublas_workspace_bytes
    events = np.array([1], dtype=np.int32)
    fitting = check_fit(events, np.array([free - 64 * MIB]), device)
    assert fitting.fits
    assert fitting.process_bytes == fitting.replay.peak_reserved_bytes + device.context_bytes
    assert (
        fitting.replay.peak_allocated_bytes >= free - 64 * MIB + 2 * device.cublas_workspace_bytes
    )
    assert not check_fit(events, np.array([free + MIB]), device).fits
    assert check_fit(events, np.array([free + MIB]), device, margin_bytes=0).fits


def test_a_workspace_that_backward_needs_first_takes_what_forward_has_left() -> None:
    """So what the next forward asks for comes from the driver."""
    device, events, sizes = (
        find_device("H100"),
        np.array([1, -1, 2]),
        np.array([128 * MIB, 128 * MIB]),
    )
    first, then = (
        check_fit(events, sizes, device, products=(0, at)).replay.peak_reserved_bytes
        for at in (0, 2)
    )
    assert (first, then) == ((2 * 32 + 128) * MIB, (32 + 2 * 128) * MIB)


def test_the_margin_has_a_floor_and_keeps_all_unknown_scratch() -> None:
    """A small H100 keeps 512 MiB back, a large one 10 percent, and unknown scratch comes on top
    of either.
    """
    small, large = (replace(find_device("H100"), usable_bytes=gib * GIB) for gib in (4, 100))
    assert default_margin_bytes(small) == LEAST_MARGIN_BYTES
    assert default_margin_bytes(large, uncalibrated_scratch_bytes=7) == 10 * GIB + 7


@pytest.mark.parametrize(
    "name", ["V100-16GB", "V100-32GB", "T4", "A100-80GB", "RTX 4090", "24GiB", "140GiB", "B200"]
)
def test_a_forecast_that_is_a_fifth_too_low_still_fits_where_none_was_measured(name: str) -> None:
    """The worst of ten published peaks was 21 % above its forecast, on a V100 with an older
    torch.
    """
    device = find_device(name)
    margin = default_margin_bytes(device)
    assert not device.is_measured
    assert (device.usable_bytes - margin) / (1 - 0.21) <= device.usable_bytes
    assert default_margin_bytes(replace(device, is_measured=True)) < margin


@pytest.mark.parametrize("name", ["T4", "V100-16GB", "A100-80GB", "RTX 3090", "24GiB", "80GiB"])
def test_a_device_that_old_cuda_runs_on_keeps_its_context_free(name: str) -> None:
    """Context and margin hold a tenth of the device and the largest context seen with CUDA 11."""
    device = find_device(name)
    assert (
        default_margin_bytes(device) + device.context_bytes >= 0.1 * device.usable_bytes + 1.3 * GIB
    )
