"""Everything that makes the fake device behave as the real one: attention, recurrent layers, RMS norm, packing, CTC.

The rules are registered with torch.library on the device's autograd key, so every caller meets them: Python, C++
composites, and a checkpoint's recomputation in the backward pass. On the route ``"cpu"`` torch's own choices are the
real CPU's already; only what fake kernels forget is put right.

Does not: make the device (``fake_device``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.forecast.kernels.attention import install_attention
from holdfast.forecast.kernels.attention_choice import Hardware
from holdfast.forecast.kernels.fake_kernels import LOSSES, FakeKernel
from holdfast.forecast.kernels.normalization import install_normalization
from holdfast.forecast.kernels.recurrent import install_recurrent
from holdfast.forecast.kernels.recurrent_cpu import FAKE_KERNELS
from holdfast.forecast.kernels.scratch import Uncalibrated
from holdfast.forecast.kernels.sequences import Assume, Known, install_sequences


@contextlib.contextmanager
def emulated_kernels(
    route: str, *, hardware: Hardware, known: Known, assume: Assume, uncalibrated: Uncalibrated
) -> Iterator[Mapping[Any, FakeKernel]]:
    """Let the fake device run what the real one would.

    Args:
        route: ``"privateuse1"`` or ``"cpu"``.
        hardware: The device to stand in for.
        known: Returns the values of a fake tensor as a real one, or None if they are not known.
        assume: Called with what had to be assumed.
        uncalibrated: Takes down what may be larger than was counted.

    Yields:
        Fake kernels that the fake mode is to prefer to torch's own.
    """
    key = "AutogradPrivateUse1" if route == "privateuse1" else "AutogradCPU"
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    try:
        install_sequences(library, known, assume)
        if route == "privateuse1":
            install_attention(library, hardware)
            install_normalization(library)
            install_recurrent(library, hardware, uncalibrated.note_kept)
        yield LOSSES if route == "privateuse1" else {**LOSSES, **FAKE_KERNELS}
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
