"""Operations whose scratch cannot be read from their arguments, and how much of it one needs on this machine.

A kernel's scratch lives only while it runs, so that neither fake tensors nor tensors show it: it is measured as the
peak of torch's allocator during the operation, less what lived before or after it.

Does not: time anything, or keep what was measured (``calibration``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Prepared = tuple[Callable[[], Tensor], Sequence[Tensor]]  # the operation, and what gets gradients


class Meter(Protocol):
    """What can be asked of the allocator of a device."""

    def reset_peak(self) -> None:
        """Let the peak begin anew, at what lives now."""

    def allocated_bytes(self) -> int:
        """Return what lives now."""

    def peak_bytes(self) -> int:
        """Return the most that lived since `reset_peak`."""


class CudaMeter:
    """The allocator of a CUDA device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        """Let the peak begin anew, at what lives now."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        """Return what lives now."""
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """Return the most that lived since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An operation to measure.

    Args:
        name: Such as ``"conv2d 3x3"``.
        make: Takes device and dtype, prepares parameters and input, and returns the operation and its leaves.
        cuda_only: Whether it asks for a kernel that only CUDA devices have.
        dtypes: That it can be run in; half precision is left out where the device has no units for it.
    """

    name: str
    make: Callable[[torch.device, torch.dtype], Prepared]
    cuda_only: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def measure_scratch(probe: Probe, device: torch.device, dtype: torch.dtype, meter: Meter) -> dict[str, int]:
    """Measure a probe's forward and, where it has a gradient, its backward pass.

    It is run once before, so that what is made for good on the first call (workspaces, plans) does not count.

    Args:
        probe: What to run.
        device: Where.
        dtype: Of its input and parameters.
        meter: The allocator of that device.

    Returns:
        Bytes by ``"NAME DTYPE forward"``, ``"NAME DTYPE kept"`` (what it keeps for the backward pass beyond its
        output) and ``"NAME DTYPE backward"``.
    """
    operation, leaves = probe.make(device, dtype)
    first = operation()
    if first.requires_grad:
        torch.autograd.backward(first, torch.ones_like(first))
    del first
    for leaf in leaves:
        leaf.grad = None  # else the next gradient would be a temporary that is added to it
    name = f"{probe.name} {str(dtype).removeprefix('torch.')}"
    meter.reset_peak()
    before = meter.allocated_bytes()
    output = operation()
    after = meter.allocated_bytes()
    found = {
        f"{name} forward": meter.peak_bytes() - max(before, after),
        f"{name} kept": max(0, after - before - output.untyped_storage().nbytes()),
    }
    if output.requires_grad:
        gradient = torch.ones_like(output)
        meter.reset_peak()
        before = meter.allocated_bytes()
        torch.autograd.backward(output, gradient)
        found[f"{name} backward"] = meter.peak_bytes() - max(before, meter.allocated_bytes())
    return found


def _input(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def _layer(build: Callable[..., nn.Module], *shape: int) -> Callable[[torch.device, torch.dtype], Prepared]:
    def make(device: torch.device, dtype: torch.dtype) -> Prepared:
        layer = build(device=device, dtype=dtype)
        given = _input(device, dtype, *shape)

        def operation() -> Tensor:
            output = layer(given)
            return output if isinstance(output, Tensor) else output[0]

        return operation, [given, *layer.parameters()]

    return make


def _attention(
    backend: SDPBackend, width: int, *, masked: bool = False
) -> Callable[[torch.device, torch.dtype], Prepared]:
    def make(device: torch.device, dtype: torch.dtype) -> Prepared:
        query, key, value = (_input(device, dtype, *ATTENTION_SHAPE, width) for _ in range(3))
        length = ATTENTION_SHAPE[2]
        mask = torch.zeros(length, length, device=device, dtype=dtype) if masked else None

        def operation() -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        return operation, [query, key, value]

    return make


def _channels_last(device: torch.device, dtype: torch.dtype) -> Prepared:
    given = torch.randn(16, 64, 56, 56, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    leaves = [given.requires_grad_(), weight.requires_grad_()]
    return lambda: functional.conv2d(given, weight, padding=1), leaves


def _index_put(device: torch.device, dtype: torch.dtype) -> Prepared:
    table = torch.zeros(1000, 64, device=device, dtype=dtype)
    index = torch.arange(1_000_000, device=device) % 1000
    values = torch.ones(1_000_000, 64, device=device, dtype=dtype)
    return lambda: table.index_put_((index,), values, accumulate=True), []


def _spectrum(device: torch.device, dtype: torch.dtype) -> Prepared:
    signal = _input(device, dtype, 32, 65_536)
    return lambda: torch.fft.rfft(signal).abs(), [signal]


def _embedding(device: torch.device, dtype: torch.dtype) -> Prepared:
    table = _input(device, dtype, 32_000, 512)
    index = torch.arange(8192, device=device) * 7 % 32_000
    return lambda: functional.embedding(index, table), [table]


def _cross_entropy(device: torch.device, dtype: torch.dtype) -> Prepared:
    logits = _input(device, dtype, 2048, 32_000)
    target = torch.arange(2048, device=device)
    return lambda: functional.cross_entropy(logits, target), [logits]


def _sort(device: torch.device, dtype: torch.dtype) -> Prepared:
    values = torch.randn(64, 100_000, device=device, dtype=dtype)
    return lambda: torch.sort(values)[0], []


ATTENTION_SHAPE = (4, 16, 2048)  # batch, heads, length; then the width of a head
SEQUENCE_SHAPE = (100, 32, 512)  # length, batch, width
_RECURRENT = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
PROBES = (
    Probe(name="conv2d 7x7", make=_layer(partial(nn.Conv2d, 3, 64, 7, stride=2, padding=3), 16, 3, 224, 224)),
    Probe(name="conv2d 3x3", make=_layer(partial(nn.Conv2d, 64, 64, 3, padding=1), 16, 64, 56, 56)),
    Probe(name="conv2d 3x3 channels last", make=_channels_last),
    Probe(name="conv2d 1x1", make=_layer(partial(nn.Conv2d, 256, 64, 1), 16, 256, 56, 56)),
    Probe(name="conv1d 5", make=_layer(partial(nn.Conv1d, 512, 512, 5, padding=2), 16, 512, 400)),
    Probe(name="conv_transpose1d 16", make=_layer(partial(nn.ConvTranspose1d, 256, 128, 16, 8, 4), 8, 256, 400)),
    *(
        Probe(name=f"{name}, {layers} layers", make=_layer(partial(kind, 512, 512, layers), *SEQUENCE_SHAPE))
        for name, kind in _RECURRENT.items()
        for layers in (1, 4)
    ),
    Probe(name="lstm both ways", make=_layer(partial(nn.LSTM, 512, 512, bidirectional=True), *SEQUENCE_SHAPE)),
    *(
        Probe(name=f"attention {name} {width}", make=_attention(backend, width), cuda_only=True)
        for name, backend in _BACKENDS.items()
        for width in (64, 128)
    ),
    Probe(
        name="attention efficient masked",
        make=_attention(SDPBackend.EFFICIENT_ATTENTION, 64, masked=True),
        cuda_only=True,
    ),
    Probe(name="layer_norm", make=_layer(partial(nn.LayerNorm, 1024), 8192, 1024)),
    Probe(name="batch_norm", make=_layer(partial(nn.BatchNorm2d, 64), 16, 64, 56, 56)),
    Probe(name="embedding", make=_embedding),
    Probe(name="cross_entropy", make=_cross_entropy),
    Probe(name="index_put", make=_index_put),
    Probe(name="sort", make=_sort),
    Probe(name="rfft", make=_spectrum, dtypes=(torch.float32,)),
)
