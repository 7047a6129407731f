"""The catalogue of devices: their usable memory and their speed.

The figures are in ``devices.yaml``, each with its source. `find_device` takes the name of a device,
as people or torch write it, or a size such as ``24GiB``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
_IGNORED_IN_NAMES = re.compile(r"nvidia|geforce|rtx|tesla|amd|instinct|[\s_-]+")
# A cuBLAS workspace is kept for each handle and stream, and each thread has its own handle
# (thread_local PoolWindow in CublasHandlePool.cpp). A step uses two threads: the one that runs
# forward, and autograd's.
_CUBLAS_HANDLES = 2
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
        cublaslt_workspace_bytes: The same for cuBLASLt; 0 if it shares cuBLAS's workspace.
        bandwidth: Memory bandwidth in bytes per second.
        flops: Operations per second by ``"fp32"``, ``"tf32"``, ``"bf16"`` and ``"fp16"``; see
            `flops_per_second`.
        capability: CUDA's compute capability, such as ``(8, 9)``; None if unknown.
        vendor: ``"nvidia"`` or ``"amd"``.
        is_measured: Whether forecasts were compared with real runs on this device. The figures of
            other devices come from public messages, so more memory is kept free on them.
        sources: Where the figures come from, by ``"usable"``, ``"context"``, ``"rates"``,
            ``"cublas"`` and ``"cublaslt"``.
    """

    name: str
    usable_bytes: int
    context_bytes: int
    cublas_workspace_bytes: int
    cublaslt_workspace_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    capability: tuple[int, int] | None = None
    vendor: str = "nvidia"
    is_measured: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def available_bytes(self) -> int:
        """The memory that torch's allocator can get from the driver."""
        return self.usable_bytes - self.context_bytes

    @property
    def has_bf16(self) -> bool:
        """Whether the device computes in bf16."""
        return self.capability is None or self.capability >= _FIRST_WITH_BF16

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """The workspaces that a training process never frees, in the order of allocation."""
        per_handle = [
            size for size in (self.cublas_workspace_bytes, self.cublaslt_workspace_bytes) if size
        ]
        return tuple(per_handle * _CUBLAS_HANDLES)

    def flops_per_second(self, dtype: str) -> float:
        """Return the dense rate for a type of `trace.events.DTYPES`.

        A type without dedicated units has the rate of fp32. Training GPUs reach 1/2 to 1/64 of that
        rate in fp64; we use 1/2 because few models use fp64.
        """
        if dtype == "fp64":
            return self.flops["fp32"] / 2
        return self.flops.get(dtype, self.flops["fp32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatalogueEntry:
    """A device, and the names by which it is found, normalized by `_plain`."""

    device: Device
    names: frozenset[str]


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
    plain = _plain(name)
    for entry in _catalogue():
        if plain in entry.names:
            return entry.device
    names = ", ".join(entry.device.name for entry in _catalogue())
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

    It resembles the NVIDIA device since Ampere that is nearest in size, but has the largest context
    and the lowest capability of these devices. Older devices have no bf16 and half the context, and
    are rarely meant by a size.
    """
    candidates = [
        entry.device
        for entry in _catalogue()
        if entry.device.vendor == "nvidia" and (entry.device.capability or (0, 0)) >= (8, 0)
    ]
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
        capability=min(device.capability for device in candidates if device.capability),
        is_measured=False,
        sources=sources,
    )


# --- reading devices.yaml -------------------------------------------------------------------------


@functools.cache
def _catalogue() -> tuple[_CatalogueEntry, ...]:
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    tables = yaml.safe_load(text)
    return tuple(
        _CatalogueEntry(
            device=_read_device(entry, tables),
            names=frozenset(_plain(name) for name in (entry["name"], *entry["aliases"])),
        )
        for entry in tables["devices"]
    )


def _read_device(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> Device:
    vendor = entry.get("vendor", "nvidia")
    major, minor = (int(part) for part in entry["capability"].split("."))
    cublas = _cublas_workspace(
        tables["cublas_workspaces"], vendor=vendor, major=major, name=entry["name"]
    )
    cublaslt = tables["cublaslt_workspaces"][vendor]
    return Device(
        name=entry["name"],
        # The true usable memory may be smaller than in the message. The context may be larger,
        # because it is the difference of two such figures.
        usable_bytes=int(entry["usable_gib"] * GIB) - _ROUNDING_BYTES,
        context_bytes=int(entry["context_gib"] * GIB) + 2 * _ROUNDING_BYTES,
        cublas_workspace_bytes=cublas["bytes"],
        cublaslt_workspace_bytes=cublaslt["bytes"],
        bandwidth=entry["bandwidth_gb"] * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry["tflops"].items()},
        capability=(major, minor),
        vendor=vendor,
        is_measured=entry.get("measured", False),
        sources={**entry["sources"], "cublas": cublas["source"], "cublaslt": cublaslt["source"]},
    )


def _cublas_workspace(
    rules: Iterable[Mapping[str, Any]], *, vendor: str, major: int, name: str
) -> Mapping[str, Any]:
    """Return the first rule of ``cublas_workspaces`` that applies to a device."""
    for rule in rules:
        applies_to_name = "only" not in rule or name in rule["only"]
        if rule["vendor"] == vendor and major >= rule["from_major"] and applies_to_name:
            return rule
    raise AssertionError(f"devices.yaml has no cuBLAS workspace for {name}")
