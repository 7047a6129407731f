"""Decide whether a traced step fits a device, and how much memory to keep free as a margin.

A step fits if the simulated allocator can replay its trace within the device's available memory
minus the margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.forecast.allocator.replay import Events, ReplayResult, Sizes, replay
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.trace.events import allocation_of

_MIB = 1 << 20
# The fraction of usable memory to keep free on devices on which forecasts were compared with real
# runs. It covers scratch memory of kernels and growth of the CUDA context. It is about twice 4.9 %,
# the median error of holdfast's forecasts for 15 published peaks. These forecasts were too low.
MARGIN_SHARE = 0.10
# The fraction to keep free on all other devices. It also covers larger CUDA contexts of other
# drivers and builds, cuDNN, and more fragmentation. Forecasts were compared with ten peaks that
# other people had published and measured with their own software. Eight of the peaks were above the
# forecast, by at most 21 % of the peak (BERT-large in fp32, 512 tokens, on a V100 with an older
# torch; the next largest errors were 17 % and 11 %).
UNMEASURED_MARGIN_SHARE = 0.22
# The smallest margin. On a small device, it covers the different sizes that the CUDA context has in
# different builds (287 to 667 MB, pytorch PR 86509).
LEAST_MARGIN_BYTES = 512 * _MIB
# The size of the CUDA context before CUDA 11.7. Until then, CUDA loaded all kernels into the
# context (pytorch#107667). With CUDA 11.0 on an RTX 3090, a process used 1644 MiB, of which 156 MiB
# were for a tensor (pytorch#49877).
OLD_CONTEXT_BYTES = 1488 * _MIB
# The compute capability of Ada. Since Ada requires CUDA 11.8 or later, devices from Ada on never
# have the old, large context.
_FIRST_CAPABILITY_WITHOUT_OLD_CUDA = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of checking whether a trace fits a device.

    Args:
        margin_bytes: How many bytes are kept free for everything that the forecast does not cover.
        replay: The result of replaying the trace within the device's available memory minus the
            margin.
        process_bytes: The expected device memory of the whole process: the allocator's peak of
            reserved memory plus the CUDA context.
    """

    margin_bytes: int
    replay: ReplayResult
    process_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every allocation in the replay succeeded."""
        return self.replay.failed_at is None


def default_margin_bytes(device: Device, *, uncalibrated_scratch_bytes: int = 0) -> int:
    """Return how many bytes to keep free on a device if the user sets no margin.

    Args:
        device: The device.
        uncalibrated_scratch_bytes: How many bytes of scratch memory the step's kernels may need
            beyond the forecast. They are added to the margin.
    """
    margin = max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * device.usable_bytes))
    if device.capability < _FIRST_CAPABILITY_WITHOUT_OLD_CUDA:
        margin += max(0, OLD_CONTEXT_BYTES - device.context_bytes)
    if not device.is_measured:
        margin = max(margin, int(UNMEASURED_MARGIN_SHARE * device.usable_bytes))
    return margin + uncalibrated_scratch_bytes


def with_workspaces(
    events: Events, sizes: Sizes, device: Device, products: tuple[int, int] = (0, 0)
) -> tuple[Events, Sizes]:
    """Add the allocations of two cuBLAS workspaces to a trace. They are never freed.

    torch keeps a workspace for each combination of a cuBLAS handle and a stream, and each thread
    has its own handle (thread_local PoolWindow in CublasHandlePool.cpp). Two threads run a step:
    one runs the forward pass, and autograd's thread runs the backward pass.

    The positions of the allocations matter, because the backward pass's workspace takes up part of
    the memory that the forward pass has just freed. For a contrastive loss with 15.8 GB of live
    tensors, torch reserved 20.2 GB on an H200. When both workspaces were allocated before the step,
    torch reserved only 15.9 GB.

    Args:
        events: Allocations and frees, as in `Trace.events`.
        sizes: The size of each storage in bytes.
        device: The device whose workspace size is used.
        products: The positions in `events` at which the workspaces of the forward pass and of the
            backward pass are inserted; see `first_products`.

    Returns:
        The events and sizes with the workspaces.
    """
    # The workspaces are the last two storages, so that the numbers of all others stay the same.
    workspaces = np.array([len(sizes), len(sizes) + 1], dtype=np.int32)
    workspace_sizes = np.full(2, device.cublas_workspace_bytes, dtype=np.int64)
    return (
        np.insert(events, products, allocation_of(workspaces)),
        np.concatenate([sizes, workspace_sizes]),
    )


def check_fit(
    events: Events,
    sizes: Sizes,
    device: Device,
    *,
    products: tuple[int, int] = (0, 0),
    margin_bytes: int | None = None,
) -> Fit:
    """Check whether a trace fits a device by replaying it with the simulated allocator.

    Args:
        events: Allocations and frees in several steps, because a later step may have the peak.
        sizes: The size of each storage in bytes, without the cuBLAS workspaces, which this function
            adds.
        device: The device.
        products: Where the workspaces are allocated; see `with_workspaces`.
        margin_bytes: How many bytes to keep free, or None for `default_margin_bytes`.
    """
    if margin_bytes is None:
        margin_bytes = default_margin_bytes(device)
    events, sizes = with_workspaces(events, sizes, device, products)
    result = replay(events, sizes, cap_bytes=device.available_bytes - margin_bytes)
    return Fit(
        margin_bytes=margin_bytes,
        replay=result,
        process_bytes=result.peak_reserved_bytes + device.context_bytes,
    )
