"""Does a trace fit a device.

The replay under what the driver can give, with a margin, and how much is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.forecast.allocator.replay import Events, Replay, Sizes, replay
from holdfast.forecast.devices.catalogue import Device

_MIB = 1 << 20
# The margin covers what the forecast does not know. On devices that forecasts were measured on,
# that is scratch of kernels and growth of the context: twice the 4.9 % by which forecasts of 15
# published peaks were too low in the median.
MARGIN_SHARE = 0.10
# On every other device it also covers the context of other drivers and builds, cuDNN, and an
# allocator that fragments more. Of ten published peaks, on other people's stacks, 8 were above
# their forecast, by 21 % of the peak at most (BERT-large in fp32, 512 tokens, on a V100 with an
# older torch; 17 % and 11 % came next).
UNMEASURED_MARGIN_SHARE = 0.22
# Covers the spread of the context between builds (287 to 667 MB, pytorch PR 86509) on a small
# device.
LEAST_MARGIN_BYTES = 512 * _MIB
# CUDA before 11.7 loads all kernels into the context (pytorch#107667): 1644 MiB less a tensor of
# 156 MiB, on an RTX 3090 with CUDA 11.0 (pytorch#49877). Devices from Ada on (8.9) need CUDA 11.8.
OLD_CONTEXT_BYTES = 1488 * _MIB
_FIRST_WITHOUT_OLD_CUDA = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a trace fits.

    Args:
        margin_bytes: What was kept back for what the forecast does not know.
        replay: What the allocator did under the device's memory less the context and the margin.
        process_bytes: What the process is expected to take: what the allocator held at its peak,
            and the context.
    """

    margin_bytes: int
    replay: Replay
    process_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the whole trace was played."""
        return self.replay.failed_at is None


def default_margin_bytes(device: Device, *, uncalibrated_scratch_bytes: int = 0) -> int:
    """Return what to keep back where nothing is asked for.

    What a trace could not count comes on top of it.
    """
    margin = max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * device.usable_bytes))
    if (device.capability or (0, 0)) < _FIRST_WITHOUT_OLD_CUDA:
        margin += max(0, OLD_CONTEXT_BYTES - device.context_bytes)
    if not device.is_measured:
        margin = max(margin, int(UNMEASURED_MARGIN_SHARE * device.usable_bytes))
    return margin + uncalibrated_scratch_bytes


def with_workspaces(
    events: Events, sizes: Sizes, device: Device, products: tuple[int, int] = (0, 0)
) -> tuple[Events, Sizes]:
    """Return a trace with the device's cuBLAS workspaces, which stay for ever, at its first matrix
    products.

    `products` is `first_products` of what was played. The second workspace tears a hole into what
        forward has left: a
    contrastive loss of 15.8 GB held 20.2 GB of an H200, and 15.9 GB where both workspaces came
    first.
    """
    workspaces = np.array(device.workspace_bytes, dtype=np.int64)
    ids = np.arange(len(sizes) + 1, len(sizes) + 1 + len(workspaces), dtype=np.int32)
    places = np.repeat(products, len(ids) // len(products))
    # Behind them: no id changes
    return np.insert(events, places, ids), np.concatenate([sizes, workspaces])


def check_fit(
    events: Events,
    sizes: Sizes,
    device: Device,
    *,
    products: tuple[int, int] = (0, 0),
    margin_bytes: int | None = None,
) -> Fit:
    """Play a trace of several steps, since the first is not the peak, on a device.

    Workspaces are added here.
    """
    margin = default_margin_bytes(device) if margin_bytes is None else margin_bytes
    events, sizes = with_workspaces(events, sizes, device, products)
    played = replay(events, sizes, cap_bytes=device.available_bytes - margin)
    return Fit(
        margin_bytes=margin,
        replay=played,
        process_bytes=played.peak_reserved_bytes + device.context_bytes,
    )
