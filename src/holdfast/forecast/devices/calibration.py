"""Measuring what the forecast needs to know of a CUDA device: memory, workspaces, rates, scratch. In under 3 minutes.

Run it in a fresh process on an idle device: what another process takes would count as this one's context.

Does not: decide where the result is kept (``devices``, ``cli.calibrate``), or run without CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import PolicyError
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.devices.probes import PROBES, CudaMeter, measure_scratch

_GIB = 1 << 30
# The largest context of the catalogue is 0.75 GiB: more than twice that before anything was done is another process.
_MOST_CONTEXT_BYTES = 2 * _GIB
_SCRATCH_SECONDS = 100.0  # what is left of 3 minutes; probes that come later are left out, and said to be
_TIMED_SECONDS = (
    0.5  # of each rate, so that the resolution of CUDA's events (0.5 us, CUDA runtime API) does not count
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was seen on a device.

    Args:
        name: As torch writes it.
        total_bytes: Of `torch.cuda.get_device_properties`.
        usable_bytes: The total of `torch.cuda.mem_get_info`.
        context_bytes: What the process took beside torch's allocator when all had run.
        forward_workspace_bytes: What a first matrix product left in torch's allocator.
        fused_workspace_bytes: What a first product with a bias, which cuBLASLt does, left beyond that.
        all_workspaces_bytes: What was left when a backward pass had run too.
        bandwidth: Bytes per second, copying on the device.
        flops: Operations per second by dtype, of square matrix products.
        capability: CUDA's compute capability.
        scratch_bytes: By probe.
        software: Versions.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    context_bytes: int
    forward_workspace_bytes: int
    fused_workspace_bytes: int
    all_workspaces_bytes: int
    bandwidth: float
    flops: dict[str, float]
    capability: tuple[int, int]
    scratch_bytes: dict[str, int]
    software: dict[str, str]


def calibrate(
    index: int = 0, *, on_progress: Callable[[str], None] = lambda _: None, clock: Clock | None = None
) -> Device:
    """Measure a CUDA device.

    Args:
        index: Which.
        on_progress: Is told what is measured next.
        clock: That keeps it within 3 minutes.

    Raises:
        PolicyError: There is no CUDA device of that index, or something else uses it (H417).
    """
    _check_device(index)
    clock = clock or SystemClock()
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        _check_idle(device)
        on_progress("cuBLAS workspaces")
        forward, fused, everything = measure_workspaces(device)
        on_progress("memory bandwidth")
        bandwidth = measure_bandwidth(device)
        on_progress("matrix products")
        flops = measure_flops(device)
        scratch = _measure_all_scratch(device, on_progress, clock)
        context = _beside_allocator(device)
    properties = torch.cuda.get_device_properties(device)
    return device_of(
        Measurements(
            name=properties.name,
            total_bytes=properties.total_memory,
            usable_bytes=torch.cuda.mem_get_info(device)[1],
            context_bytes=context,
            forward_workspace_bytes=forward,
            fused_workspace_bytes=fused,
            all_workspaces_bytes=everything,
            bandwidth=bandwidth,
            flops=flops,
            capability=(properties.major, properties.minor),
            scratch_bytes=scratch,
            software=_software(),
        )
    )


def device_of(measured: Measurements) -> Device:
    """Return what the forecast takes from measurements: two handles' workspaces that hold all that was left."""
    cublas = max(
        measured.forward_workspace_bytes, -(-measured.all_workspaces_bytes // 2) - measured.fused_workspace_bytes
    )
    by = "measured by `holdfast calibrate`"
    return Device(
        name=measured.name,
        total_bytes=measured.total_bytes,
        usable_bytes=measured.usable_bytes,
        context_bytes=measured.context_bytes,
        cublas_workspace_bytes=cublas,
        cublaslt_workspace_bytes=measured.fused_workspace_bytes,
        bandwidth=measured.bandwidth,
        flops=measured.flops,
        capability=measured.capability,
        scratch_bytes=measured.scratch_bytes,
        measured=True,
        software=measured.software,
        sources=dict.fromkeys(("usable", "context", "cublas", "cublaslt", "rates", "scratch"), by),
    )


def measure_workspaces(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes that a first product leaves, what one with a bias adds, and what is left after backward."""
    before = torch.cuda.memory_allocated(device)
    square = torch.randn(256, 256, device=device)
    _run_and_drop(lambda: square @ square)
    forward = torch.cuda.memory_allocated(device) - before - _held(square)
    layer = nn.Linear(256, 256, device=device)
    _run_and_drop(lambda: layer(square))
    held = _held(square, *layer.parameters())
    fused = torch.cuda.memory_allocated(device) - before - held - forward
    layer(square).sum().backward()
    layer.zero_grad(set_to_none=True)
    everything = torch.cuda.memory_allocated(device) - before - held
    return forward, fused, everything


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that are read and written by a copy on the device."""
    size = min(_GIB, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def measure_flops(device: torch.device) -> dict[str, float]:
    """Return operations per second by dtype, of a product of square matrices; dtypes without units are left out."""
    capability = torch.cuda.get_device_capability(device)
    width = 8192 if torch.cuda.mem_get_info(device)[0] > 4 * _GIB else 4096
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


def _measure_all_scratch(device: torch.device, on_progress: Callable[[str], None], clock: Clock) -> dict[str, int]:
    half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    begin = clock.monotonic_seconds()
    found: dict[str, int] = {}
    for probe, dtype in itertools.product(PROBES, (torch.float32, half)):
        if dtype not in probe.dtypes:
            continue
        if clock.monotonic_seconds() - begin > _SCRATCH_SECONDS:
            on_progress(f"no time left for the scratch of {probe.name}")
            continue
        on_progress(f"scratch of {probe.name}, {dtype}")
        try:
            found |= measure_scratch(probe, device, dtype, CudaMeter(device))
        except RuntimeError as error:  # no such kernel here, or too little memory: the figure is left out
            on_progress(f"left out: {str(error).splitlines()[0]}")
    return found


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
            f"{taken / _GIB:.1f} GiB of the device are taken",
            limit="a context needs less than 1 GiB, so another process uses it and would be measured too",
            fix="end that process (`nvidia-smi` names it), or calibrate an idle device with --index.",
            rule="H417",
        )


def _beside_allocator(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _run_and_drop(operation: Callable[[], Tensor]) -> None:
    operation()


def _held(*tensors: Tensor) -> int:
    return sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in tensors)


def _software() -> dict[str, str]:
    driver = Path("/proc/driver/nvidia/version")
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
    }
    return {name: version for name, version in found.items() if version is not None}
