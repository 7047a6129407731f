"""One item of a feature cache as bytes, and back.

Tensors, arrays, numbers, text, and containers of these.

An item is a safetensors file in memory, whose metadata describe the structure. So items may differ
in shape, and what is read is what was stored: type, shape and every bit.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import safetensors.torch
import torch

DIGEST_BYTES = 16
_KEYS = (str, int, bool, type(None))


def digest_of(index: int, data: bytes | bytearray) -> bytes:
    """Return the digest of an item at its place.

    Half a SHA-256, which also finds two items swapped.
    """
    digest = hashlib.sha256(index.to_bytes(8, "little"))
    digest.update(data)
    return digest.digest()[:DIGEST_BYTES]


def encode(value: Any) -> bytes:
    """Return an item as bytes; equal items give equal bytes.

    TypeError names the place of what cannot be stored.

    An item is a tensor on any device, a numpy array or scalar of numbers, a number, text or None,
    or a tuple, list or dict of these, its keys text or whole numbers.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_described(value, "", tensors))
    data: bytes = safetensors.torch.save(tensors, {"structure": structure})
    return data


def decode(data: bytearray) -> Any:
    """Return the item that `encode` was given."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return _built(
        json.loads(header["__metadata__"]["structure"]), safetensors.torch.load(bytes(data))
    )


def _described(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_storable(value):
        return ["tensor", _added(value, tensors)]
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        native = np.asarray(value, value.dtype.newbyteorder("="))
        if native.dtype.kind in "biufc":
            number = _added(
                (
                    torch.frombuffer(bytearray(native.tobytes()), dtype=torch.uint8)
                    if native.size
                    else torch.empty(0, dtype=torch.uint8)
                ),
                tensors,
            )
            return [
                "scalar" if isinstance(value, np.generic) else "array",
                number,
                native.dtype.str,
                native.shape,
            ]
    if value is None or type(value) in (bool, int, float, str):
        return ["plain", value]
    if type(value) in (tuple, list):
        items = [
            _described(item, f"{place}[{number}]", tensors) for number, item in enumerate(value)
        ]
        return [type(value).__name__, items]
    if type(value) is dict and all(type(key) in _KEYS for key in value):
        return [
            "dict",
            [[key, _described(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()],
        ]
    raise TypeError(
        f"features{place} is a {type(value).__module__}.{type(value).__qualname__}; a feature cache"
        " stores dense tensors, numpy arrays of numbers, numbers, text, and tuples, lists and"
        " dicts of these"
    )


def _is_storable(value: torch.Tensor) -> bool:
    if value.is_nested or value.is_meta or value.is_quantized or value.dtype == torch.complex128:
        return False  # safetensors has no such type
    return value.layout == torch.strided


def _added(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    # A copy: safetensors refuses two names for one memory.
    tensors[name] = (
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
    )
    return name


def _built(described: Any, tensors: dict[str, torch.Tensor]) -> Any:
    kind, content = described[:2]
    if kind == "tensor":
        return tensors[content]
    if kind in ("array", "scalar"):
        flat = np.frombuffer(tensors[content].numpy(), described[2]).reshape(described[3])
        return flat if kind == "array" else flat[()]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in content}
    items = [_built(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
