"""The catalogue of devices.

What a process can use of their memory, how fast they are, each figure with its source.

`find_device` takes the name of one, as people or torch write it, or a size such as ``24GiB``.
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
# Messages give GiB with two digits: the true figure is up to 0.005 GiB less
_ROUNDING_BYTES = 5 << 20
_UNITS = {"gib": GIB, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)\s*", re.IGNORECASE)
_NOISE = re.compile(r"nvidia|geforce|rtx|tesla|amd|instinct|[\s_-]+")
# Each thread has a cuBLAS handle of its own (thread_local PoolWindow in CublasHandlePool.cpp), and
# a workspace is kept for each handle and stream: a step uses the thread that runs forward and the
# one that autograd keeps.
_HANDLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the forecast knows of a device.

    Args:
        usable_bytes: What `torch.cuda.mem_get_info` gives as the total: all that processes can
            have.
        context_bytes: What a training process takes of it beside torch's allocator: context,
            kernels, libraries.
        cublas_workspace_bytes: Of one handle, held by torch's allocator from the first matrix
            product on.
        cublaslt_workspace_bytes: The same of cuBLASLt; 0 where it shares that of cuBLAS.
        flops: Operations per second by ``"fp32"``, ``"tf32"``, ``"bf16"`` and ``"fp16"``; see
            `flops_per_second`.
        capability: CUDA's compute capability, such as ``(8, 9)``; None if unknown.
        is_measured: Whether forecasts were held against real runs on this device. What is known of
            the others is from public messages, so that more is kept free.
    """

    name: str
    usable_bytes: int
    context_bytes: int
    cublas_workspace_bytes: int
    cublaslt_workspace_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    capability: tuple[int, int] | None = None
    is_measured: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def available_bytes(self) -> int:
        """What torch's allocator can get from the driver."""
        return self.usable_bytes - self.context_bytes

    @property
    def has_bf16(self) -> bool:
        """Whether the device computes in bf16: NVIDIA's do from Ampere on (capability 8.0)."""
        return self.capability is None or self.capability >= (8, 0)

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """The workspaces that a training process holds for good, in the order of their
        allocation.
        """
        each = (self.cublas_workspace_bytes, self.cublaslt_workspace_bytes)
        return tuple(size for _ in range(_HANDLES) for size in each if size)

    def flops_per_second(self, dtype: str) -> float:
        """Return the dense rate for a dtype of `trace.DTYPES`.

        That of fp32 where there are no units for it.

        GPUs for training have 1/2 to 1/64 of that for fp64; it is taken as 1/2, since few models
        use it.
        """
        if dtype == "fp64":
            return self.flops["fp32"] / 2
        return self.flops.get(dtype, self.flops["fp32"])


def find_device(text: str) -> Device:
    """Return the device that a user means (H416 if nothing is known by that name).

    A name (``RTX 4090``, ``A100-80GB``, ``NVIDIA H100 PCIe``), or a size (``24GiB``: all that
    processes can have of an unknown device).
    """
    size = bytes_in(text)
    if size is None:
        return _named(text)
    if size < GIB:
        raise PolicyError(
            f"device size {text!r}",
            limit="it has 1 GiB or more",
            fix="write it as 24GiB.",
            rule="H416",
        )
    return _of_unknown_kind(size)


def _named(name: str) -> Device:
    wanted = _plain(name)
    found = next((device for device, names in _catalogue() if wanted in names), None)
    if found is not None:
        return found
    raise PolicyError(
        f"device {name!r}",
        limit=f"known are: {', '.join(device.name for device, _ in _catalogue())}",
        fix="use such a name, or a size such as 24GiB.",
        rule="H416",
    )


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())


def bytes_in(text: str) -> int | None:
    """Return the bytes in a text such as ``"24GiB"`` or ``"500 MB"``; None if it is no size."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def _of_unknown_kind(size: int) -> Device:
    """Return a device of which nothing but the size is known.

    NVIDIA's from Ampere on, with their largest context.

    What is older has no bf16 and a context that is smaller by half, which nobody who names a size
    means.
    """
    likely = [
        one
        for one, _ in _catalogue()
        if (one.capability or (0, 0)) >= (8, 0) and one.name[:2] != "MI"
    ]
    near = min(likely, key=lambda device: abs(device.usable_bytes - size))
    sources = {
        key: f"that of {near.name}, the nearest by size: {text}"
        for key, text in near.sources.items()
    }
    return replace(
        near,
        name=f"{size / GIB:.4g}GiB",
        usable_bytes=size,
        context_bytes=max(one.context_bytes for one in likely),
        capability=min(one.capability for one in likely if one.capability),
        is_measured=False,
        sources={
            **sources,
            "usable": "as given",
            "context": "the largest of the catalogue's NVIDIA devices",
        },
    )


@functools.cache
def _catalogue() -> tuple[tuple[Device, frozenset[str]], ...]:
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    named = (
        (one, frozenset(map(_plain, (one["name"], *one["aliases"])))) for one in found["devices"]
    )
    return tuple((_entry(one, found), names) for one, names in named)


def _entry(entry: Mapping[str, Any], found: Mapping[str, Any]) -> Device:
    vendor = entry.get("vendor", "nvidia")
    major, minor = map(int, entry["capability"].split("."))
    cublas = _workspace(found["cublas_workspaces"], vendor, major, entry["name"])
    cublaslt = found["cublaslt_workspaces"][vendor]
    return Device(
        name=entry["name"],
        usable_bytes=int(entry["usable_gib"] * GIB) - _ROUNDING_BYTES,
        context_bytes=int(entry["context_gib"] * GIB) + 2 * _ROUNDING_BYTES,
        cublas_workspace_bytes=cublas["bytes"],
        cublaslt_workspace_bytes=cublaslt["bytes"],
        bandwidth=entry["bandwidth_gb"] * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry["tflops"].items()},
        capability=(major, minor),
        is_measured=entry.get("measured", False),
        sources={**entry["sources"], "cublas": cublas["source"], "cublaslt": cublaslt["source"]},
    )


def _workspace(
    rules: Iterable[Mapping[str, Any]], vendor: str, major: int, name: str
) -> Mapping[str, Any]:
    return next(
        rule
        for rule in rules
        if rule["vendor"] == vendor
        and major >= rule["from_major"]
        and name in rule.get("only", [name])
    )
