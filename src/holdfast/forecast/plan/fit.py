"""Decide whether a trace fits a device.

A trace fits if it plays through the simulated allocator (`allocator`) with the memory that the
driver can provide, less a margin. The margins are here, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.forecast.allocator.replay import Events, ReplayResult, Sizes, replay
from holdfast.forecast.devices.catalogue import Device

_MIB = 1 << 20
# Share of the usable memory kept free on devices on which forecasts were measured. It covers
# the scratch memory of kernels and the growth of the context. It is twice 4.9 %, the median by
# which forecasts of 15 published peaks were too low.
MARGIN_SHARE = 0.10
# The same share on all other devices, where it also covers the context of other drivers and builds,
# cuDNN, and an allocator that fragments more. Of ten published peaks, measured with other people's
# software, 8 were above their forecast, by at most 21 % of the peak (BERT-large in fp32, 512
# tokens, on a V100 with an older torch; the next were 17 % and 11 %).
UNMEASURED_MARGIN_SHARE = 0.22
# The least margin. On a small device it covers the spread of the context between builds (287 to 667
# MB, pytorch PR 86509).
LEAST_MARGIN_BYTES = 512 * _MIB
# Before CUDA 11.7 all kernels were loaded into the context (pytorch#107667). It took 1644 MiB less
# a tensor of 156 MiB on an RTX 3090 with CUDA 11.0 (pytorch#49877).
OLD_CONTEXT_BYTES = 1488 * _MIB
# Compute capability of Ada, the first architecture that needs CUDA 11.8 or later, so that it never
# has the old context.
_FIRST_CAPABILITY_WITHOUT_OLD_CUDA = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a trace fits a device, and how.

    Args:
        margin_bytes: Memory kept free for everything that the forecast does not cover.
        replay: The result of the replay within the device's memory, less the context and the
            margin.
        process_bytes: Memory that the process is expected to take: the peak of the allocator's
            reserved memory, and the context.
    """

    margin_bytes: int
    replay: ReplayResult
    process_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there was memory for every allocation of the trace."""
        return self.replay.failed_at is None


def default_margin_bytes(device: Device, *, uncalibrated_scratch_bytes: int = 0) -> int:
    """Return how much memory to keep free on a device if the user names no margin.

    Args:
        device: The device.
        uncalibrated_scratch_bytes: Scratch memory that kernels of the step may need but that is in
            no table. It is added to the margin.
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
    """Return a trace with the allocations of the device's cuBLAS workspaces, which are never freed.

    There are two. A workspace is kept for each handle and stream, and each thread has its own
    handle (thread_local PoolWindow in CublasHandlePool.cpp): the thread that runs forward, and
    autograd's.

    The position matters. The workspace of the backward pass takes a part of the memory that the
    forward pass has just freed: a contrastive loss of 15.8 GB reserved 20.2 GB of an H200, and 15.9
    GB with both workspaces allocated first.

    Args:
        events: Allocations and frees, as in `Trace.events`.
        sizes: Bytes of each storage.
        device: The device whose workspaces are added.
        products: Number of events before the first matrix product of the forward and of the
            backward pass; see `first_products`.
    """
    # The workspaces get the last ids, so that no other id changes.
    ids = np.array([len(sizes) + 1, len(sizes) + 2], dtype=np.int32)
    workspaces = np.full(2, device.cublas_workspace_bytes, dtype=np.int64)
    return np.insert(events, products, ids), np.concatenate([sizes, workspaces])


def check_fit(
    events: Events,
    sizes: Sizes,
    device: Device,
    *,
    products: tuple[int, int] = (0, 0),
    margin_bytes: int | None = None,
) -> Fit:
    """Play a trace through the allocator of a device.

    Args:
        events: Allocations and frees of several steps, since the first step is not always the peak.
        sizes: Bytes of each storage, without cuBLAS workspaces, which are added here.
        device: The device.
        products: Where the workspaces are allocated; see `with_workspaces`.
        margin_bytes: Memory to keep free, or None for `default_margin_bytes`.
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
