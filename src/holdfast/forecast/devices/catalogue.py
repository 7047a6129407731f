"""The catalog of devices, with the usable memory and the speed of each.

The figures and their sources are in ``devices.yaml``. `find_device` accepts a device name, spelled
as people or torch spell it, or a size such as ``24GiB``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import yaml

from holdfast.core.errors import PolicyError

GIB = 1 << 30
# torch's messages round GiB to two digits, so the true figure may be up to 0.005 GiB smaller.
_ROUNDING_BYTES = 5 << 20
_UNITS = {"gib": GIB, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)\s*", re.IGNORECASE)
# Vendor names and separators, which are ignored when device names are compared.
_IGNORED_IN_NAMES = re.compile(r"nvidia|geforce|rtx|tesla|[\s_-]+")
# Compute capability of Ampere, the first NVIDIA architecture that supports bf16.
_FIRST_WITH_BF16 = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The memory and speed of a device.

    Args:
        name: The device's name in the catalog, or a size such as ``24GiB``.
        usable_bytes: The memory that all processes together can use: the total reported by
            `torch.cuda.mem_get_info`.
        context_bytes: The part of it that a training process uses outside torch's allocator, for
            the CUDA context, kernels and libraries.
        cublas_workspace_bytes: The workspace of one cuBLAS handle. torch's allocator holds it from
            the first matrix product on.
        bandwidth: Memory bandwidth in bytes per second.
        flops: Floating-point operations per second. The keys are ``"fp32"``, ``"tf32"``,
            ``"bf16"`` and ``"fp16"``, as far as the device has units for them.
        capability: The CUDA compute capability, such as ``(8, 9)``.
        is_measured: Whether forecasts were compared with real runs on this device. The figures for
            all other devices come from public error messages, so their margin is larger.
        sources: Where the figures come from. The keys are ``"usable"``, ``"context"``,
            ``"rates"``, ``"cublas"`` and ``"cublaslt"``.
    """

    name: str
    usable_bytes: int
    context_bytes: int
    cublas_workspace_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    capability: tuple[int, int]
    is_measured: bool
    sources: Mapping[str, str]

    @property
    def available_bytes(self) -> int:
        """The bytes that torch's allocator can get from the driver."""
        return self.usable_bytes - self.context_bytes

    @property
    def has_bf16(self) -> bool:
        """Whether the device has bf16 units."""
        return self.capability >= _FIRST_WITH_BF16

    def flops_per_second(self, dtype: str) -> float:
        """Return the operations per second in one of `trace.events.DTYPES`, without sparsity.

        A type without dedicated units runs at the fp32 rate. In fp64, training GPUs reach 1/2 to
        1/64 of the fp32 rate. We use 1/2, because few models use fp64.
        """
        if dtype == "fp64":
            return self.flops["fp32"] / 2
        return self.flops.get(dtype, self.flops["fp32"])


def find_device(text: str) -> Device:
    """Return the device with a name or size that the user passed.

    Args:
        text: A name such as ``RTX 4090``, ``A100-80GB`` or ``NVIDIA H100 PCIe``. Or a size such as
            ``24GiB``, for a device that is not in the catalog: its usable memory.

    Raises:
        PolicyError: H416 if no device has that name, or the size is less than 1 GiB.
    """
    size_bytes = bytes_in(text)
    if size_bytes is None:
        return _find_by_name(text)
    if size_bytes < GIB:
        raise PolicyError(
            f"device size {text!r} is too small",
            limit="a device must have at least 1 GiB",
            fix="pass the device's memory, for example 24GiB.",
            rule="H416",
        )
    return _unknown_device(size_bytes)


def bytes_in(text: str) -> int | None:
    """Parse a size such as ``"24GiB"`` or ``"500 MB"``. Return bytes, or None if it is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _find_by_name(name: str) -> Device:
    device = _catalogue().get(_plain(name))
    if device is not None:
        return device
    names = ", ".join(dict.fromkeys(device.name for device in _catalogue().values()))
    raise PolicyError(
        f"unknown device {name!r}",
        limit=f"the known devices are {names}",
        fix="use one of these names, or a size such as 24GiB.",
        rule="H416",
    )


def _plain(name: str) -> str:
    """Return a device name without the parts that people and torch spell differently."""
    return _IGNORED_IN_NAMES.sub("", name.lower())


def _unknown_device(size_bytes: int) -> Device:
    """Return a device that is not in the catalog and has this much memory.

    Its figures are those of the device with bf16 (Ampere or later) that is nearest in size, but
    with the largest context and the lowest capability of all such devices. Devices before Ampere
    are ignored: they have no bf16 and about half the context, and few users who pass a size mean
    one of them.
    """
    candidates = [device for device in _catalogue().values() if device.has_bf16]
    nearest = min(candidates, key=lambda device: abs(device.usable_bytes - size_bytes))
    sources = {
        figure: f"same as {nearest.name}, the nearest device by size: {source}"
        for figure, source in nearest.sources.items()
    }
    sources["usable"] = "the requested size"
    sources["context"] = "the largest context of any device with bf16 in the catalog"
    return replace(
        nearest,
        name=f"{size_bytes / GIB:.4g}GiB",
        usable_bytes=size_bytes,
        context_bytes=max(device.context_bytes for device in candidates),
        capability=min(device.capability for device in candidates),
        is_measured=False,
        sources=sources,
    )


# --- reading devices.yaml -------------------------------------------------------------------------


@functools.cache
def _catalogue() -> dict[str, Device]:
    """Return the devices by name and alias. The keys are normalized by `_plain`."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    tables = yaml.safe_load(text)
    devices: dict[str, Device] = {}
    for entry in tables["devices"]:
        device = _read_device(entry, tables)
        for name in (entry["name"], *entry["aliases"]):
            devices.setdefault(_plain(name), device)
    return devices


def _read_device(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> Device:
    major, minor = (int(part) for part in entry["capability"].split("."))
    cublas = next(rule for rule in tables["cublas_workspaces"] if major >= rule["from_major"])
    return Device(
        name=entry["name"],
        # Figures in error messages are rounded. The usable memory may therefore be smaller than
        # stated. The context may be larger, by up to two rounding errors, because it is the
        # difference between two such figures.
        usable_bytes=int(entry["usable_gib"] * GIB) - _ROUNDING_BYTES,
        context_bytes=int(entry["context_gib"] * GIB) + 2 * _ROUNDING_BYTES,
        cublas_workspace_bytes=cublas["bytes"],
        bandwidth=entry["bandwidth_gb"] * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry["tflops"].items()},
        capability=(major, minor),
        is_measured=entry.get("measured", False),
        sources={
            **entry["sources"],
            "cublas": cublas["source"],
            "cublaslt": tables["cublaslt_source"],
        },
    )
