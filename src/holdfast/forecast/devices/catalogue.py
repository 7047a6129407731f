"""Read the catalog of devices, which states the usable memory and the speed of each device.

The figures and their sources are in ``devices.yaml``. `find_device` accepts a device name in any
common spelling, or a size such as ``24GiB``.
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
# torch's messages round GiB to two decimals, so the true figure may be up to 0.005 GiB smaller.
_ROUNDING_BYTES = 5 << 20
_UNITS = {"gib": GIB, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)\s*", re.IGNORECASE)
# Matches brand names and separators, which are ignored when device names are compared.
_IGNORED_IN_NAMES = re.compile(r"nvidia|geforce|rtx|tesla|[\s_-]+")
# The compute capability of Ampere, the first NVIDIA architecture that supports bf16.
_FIRST_WITH_BF16 = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The memory and speed of a device.

    Args:
        name: The device's name in the catalog, or a size such as ``24GiB``.
        usable_bytes: How many bytes all processes together can use: the total reported by
            `torch.cuda.mem_get_info`.
        context_bytes: How many of the usable bytes a training process needs outside torch's
            allocator, for the CUDA context, kernels and libraries.
        cublas_workspace_bytes: The size of one cuBLAS handle's workspace. torch's allocator holds
            the workspace from the first matrix product on.
        bandwidth: The memory bandwidth in bytes per second.
        flops: Floating-point operations per second, keyed by data type. The keys are ``"fp32"`` and
            those of ``"tf32"``, ``"bf16"`` and ``"fp16"`` that the device has units for.
        capability: The CUDA compute capability, such as ``(8, 9)``.
        is_measured: Whether forecasts were compared with real runs on this device. The figures for
            all other devices come from public error messages, so their default margin is larger.
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
        """Return how many dense operations per second the device performs in a data type.

        A type without dedicated units runs at the fp32 rate. In fp64, training GPUs reach 1/64 to
        1/2 of the fp32 rate. The result assumes 1/2, because few models use fp64.

        Args:
            dtype: One of `trace.events.DTYPES`.
        """
        if dtype == "fp64":
            return self.flops["fp32"] / 2
        return self.flops.get(dtype, self.flops["fp32"])


def find_device(text: str) -> Device:
    """Return the device with the name or memory size that the user passed.

    Args:
        text: A name such as ``RTX 4090``, ``A100-80GB`` or ``NVIDIA H100 PCIe``. For a device that
            is not in the catalog, the size of its usable memory, such as ``24GiB``.

    Raises:
        PolicyError: H416 if no device has that name, or if the size is less than 1 GiB.
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
    """Parse a size such as ``"24GiB"`` or ``"500 MB"``, and return bytes, or None if not a size."""
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
    """Normalize a device name: convert it to lower case, without brand names and separators."""
    return _IGNORED_IN_NAMES.sub("", name.lower())


def _unknown_device(size_bytes: int) -> Device:
    """Return the description of a device that is not in the catalog and has this much memory.

    The figures are copied from the catalog's device with bf16 units (Ampere or later) that has the
    most similar memory size. The context size and the compute capability are exceptions: they are
    the largest and the lowest, respectively, of all devices with bf16 units. Older devices are
    ignored, because their contexts are about half as large, and few users who pass a size mean an
    older device.
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
    """Return all devices, keyed by their names and aliases, which are normalized by `_plain`."""
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
        # stated. The context is the difference between two such figures, so it may be larger than
        # stated by up to two rounding errors.
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
