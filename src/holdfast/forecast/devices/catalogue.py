"""The catalogue of devices: their usable memory and their speed.

The figures are in ``devices.yaml``, each with its source. `find_device` takes the name of a device,
as people or torch write it, or a size such as ``24GiB``.
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
# Vendor words and separators that do not matter in a name.
_IGNORED_IN_NAMES = re.compile(r"nvidia|geforce|rtx|tesla|[\s_-]+")
# Compute capability of Ampere, the first of NVIDIA's architectures with bf16.
_FIRST_WITH_BF16 = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The memory and speed of a device.

    Args:
        name: Its name in the catalogue, or a size.
        usable_bytes: The total reported by `torch.cuda.mem_get_info`, which is available to
            processes.
        context_bytes: The part that a training process uses outside of torch's allocator: context,
            kernels, libraries.
        cublas_workspace_bytes: The workspace of one cuBLAS handle, which torch's allocator holds
            from the first matrix product on.
        bandwidth: Memory bandwidth in bytes per second.
        flops: Operations per second by ``"fp32"``, ``"tf32"``, ``"bf16"`` and ``"fp16"``; see
            `flops_per_second`.
        capability: CUDA's compute capability, such as ``(8, 9)``.
        is_measured: Whether forecasts were compared with real runs on this device. The figures of
            other devices come from public messages, so more memory is kept free on them.
        sources: Where the figures come from, by ``"usable"``, ``"context"``, ``"rates"``,
            ``"cublas"`` and ``"cublaslt"``.
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
        """The memory that torch's allocator can get from the driver."""
        return self.usable_bytes - self.context_bytes

    @property
    def has_bf16(self) -> bool:
        """Whether the device computes in bf16."""
        return self.capability >= _FIRST_WITH_BF16

    def flops_per_second(self, dtype: str) -> float:
        """Return the dense rate for a type of `trace.events.DTYPES`.

        A type without dedicated units has the rate of fp32. Training GPUs reach 1/2 to 1/64 of that
        rate in fp64; we use 1/2 because few models use fp64.
        """
        if dtype == "fp64":
            return self.flops["fp32"] / 2
        return self.flops.get(dtype, self.flops["fp32"])


def find_device(text: str) -> Device:
    """Return the device with a name or size given by a user.

    Args:
        text: A name such as ``RTX 4090``, ``A100-80GB`` or ``NVIDIA H100 PCIe``, or a size such as
            ``24GiB``: all memory that is available to processes on an unknown device.

    Raises:
        PolicyError: H416 if no device has that name, or the size is less than 1 GiB.
    """
    size_bytes = bytes_in(text)
    if size_bytes is None:
        return _find_by_name(text)
    if size_bytes < GIB:
        raise PolicyError(
            f"device size {text!r}",
            limit="a device has 1 GiB or more",
            fix="write the size as 24GiB.",
            rule="H416",
        )
    return _unknown_device(size_bytes)


def bytes_in(text: str) -> int | None:
    """Return the bytes in a text such as ``"24GiB"`` or ``"500 MB"``; None if it is not a size."""
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
        f"device {name!r}",
        limit=f"known are: {names}",
        fix="use one of these names, or a size such as 24GiB.",
        rule="H416",
    )


def _plain(name: str) -> str:
    """Return a name without the parts that people and torch write differently."""
    return _IGNORED_IN_NAMES.sub("", name.lower())


def _unknown_device(size_bytes: int) -> Device:
    """Return an unknown device with this much memory.

    It resembles the device since Ampere that is nearest in size, but has the largest context
    and the lowest capability of these devices. Older devices have no bf16 and half the context, and
    are rarely meant by a size.
    """
    candidates = [device for device in _catalogue().values() if device.has_bf16]
    nearest = min(candidates, key=lambda device: abs(device.usable_bytes - size_bytes))
    sources = {
        figure: f"that of {nearest.name}, the nearest by size: {source}"
        for figure, source in nearest.sources.items()
    }
    sources["usable"] = "as given"
    sources["context"] = "the largest of the catalogue's NVIDIA devices"
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
    """Return the devices by each of their names, as `_plain` writes it."""
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
        # The true usable memory may be smaller than in the message. The context may be larger,
        # because it is the difference of two such figures.
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
