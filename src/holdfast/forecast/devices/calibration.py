"""Measuring what the forecast needs to know of a CUDA device: memory, workspaces and rates. In under a minute.

Run it in a fresh process on an idle device: what another process takes would count as this one's context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.core.errors import PolicyError
from holdfast.forecast.devices.catalogue import GIB, Device

# The largest context of the catalogue is 0.75 GiB: more than twice that before anything was done is another process.
_MOST_CONTEXT_BYTES = 2 * GIB
_TIMED_SECONDS = (
    0.5  # of each rate, so that the resolution of CUDA's events (0.5 us, CUDA runtime API) does not count
)


def calibrate(index: int = 0) -> Device:
    """Measure a CUDA device (H417 if there is none of that index, or something else uses it)."""
    _check_device(index)
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        _check_idle(device)
        cublas, cublaslt = workspaces_of(*measure_workspaces(device))
        bandwidth = measure_bandwidth(device)
        flops = measure_flops(device)
        context = _beside_allocator(device)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        name=properties.name,
        total_bytes=properties.total_memory,
        usable_bytes=torch.cuda.mem_get_info(device)[1],
        context_bytes=context,
        cublas_workspace_bytes=cublas,
        cublaslt_workspace_bytes=cublaslt,
        bandwidth=bandwidth,
        flops=flops,
        capability=(properties.major, properties.minor),
        measured=True,
        sources=dict.fromkeys(
            ("usable", "context", "cublas", "cublaslt", "rates"), "measured by `holdfast calibrate`"
        ),
    )


def workspaces_of(forward: int, fused: int, everything: int) -> tuple[int, int]:
    """Return the workspaces of one cuBLAS and one cuBLASLt handle, two of each of which hold all that was left.

    Args:
        forward: Bytes that a first matrix product left in torch's allocator.
        fused: What a first product with a bias, which cuBLASLt does, left beyond that.
        everything: What was left when a backward pass had run too.
    """
    return max(forward, -(-everything // 2) - fused), fused


def measure_workspaces(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes that a first product leaves, what one with a bias adds, and what is left after backward."""
    before = torch.cuda.memory_allocated(device)
    square = torch.randn(256, 256, device=device)
    torch.mm(square, square)
    forward = torch.cuda.memory_allocated(device) - before - _held(square)
    layer = nn.Linear(256, 256, device=device)
    layer(square)
    held = _held(square, *layer.parameters())
    fused = torch.cuda.memory_allocated(device) - before - held - forward
    layer(square).sum().backward()
    layer.zero_grad(set_to_none=True)
    everything = torch.cuda.memory_allocated(device) - before - held
    return forward, fused, everything


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that are read and written by a copy on the device."""
    size = min(GIB, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def measure_flops(device: torch.device) -> dict[str, float]:
    """Return operations per second by dtype, of a product of square matrices; dtypes without units are left out."""
    capability = torch.cuda.get_device_capability(device)
    width = 8192 if torch.cuda.mem_get_info(device)[0] > 4 * GIB else 4096
    rates = {"fp32": _product_rate(device, width, torch.float32, "highest")}
    if capability >= (8, 0):
        rates["tf32"] = _product_rate(device, width, torch.float32, "high")
        rates["bf16"] = _product_rate(device, width, torch.bfloat16, "highest")
    if capability >= (7, 0):
        rates["fp16"] = _product_rate(device, width, torch.float16, "highest")
    return rates


def _product_rate(device: torch.device, width: int, dtype: torch.dtype, precision: str) -> float:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        left = torch.randn(width, width, device=device, dtype=dtype)
        output = torch.empty_like(left)
        return 2 * width**3 / _seconds(lambda: torch.mm(left, left, out=output))
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(operation: Callable[[], object]) -> float:
    """Return the device time of an operation: the least of three rounds of many."""
    operation()
    once = _elapsed_seconds(operation, 1)
    count = max(1, min(1000, int(_TIMED_SECONDS / max(once, 1e-6))))
    return min(_elapsed_seconds(operation, count) for _ in range(3)) / count


def _elapsed_seconds(operation: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        operation()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _check_device(index: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise PolicyError(
            f"CUDA device {index}" if count else "no CUDA device",
            limit=f"calibration needs one, and this machine has {count}",
            fix='run it on a machine with that device; elsewhere name it: `holdfast plan … --device "RTX 4090"`.',
            rule="H417",
        )


def _check_idle(device: torch.device) -> None:
    torch.zeros(1, device=device)
    taken = _beside_allocator(device)
    if taken > _MOST_CONTEXT_BYTES:
        raise PolicyError(
            f"{taken / GIB:.1f} GiB of the device are taken",
            limit="a context needs less than 1 GiB, so another process uses it and would be measured too",
            fix="end that process (`nvidia-smi` names it), or calibrate an idle device with --index.",
            rule="H417",
        )


def _beside_allocator(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _held(*tensors: Tensor) -> int:
    return sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in tensors)
