"""One item of a feature cache as bytes, and back: tensors, arrays, numbers, text, and containers of these.

An item is a length, a JSON header that tells structure, types and shapes, and the raw values behind it, each at a
multiple of 16 bytes. So items may differ in shape, and what is read is what was stored: type, shape and every bit.

Does not know where items lie (``feature_files``) or how they are computed (``feature_workers``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from typing import Any

import numpy as np
import torch

DIGEST_BYTES = 16
_ALIGNMENT = 16  # the widest element, complex128
_ARRAY_KINDS = "biufcSUmM"
_KEYS = (str, int, bool, type(None))


def digest_of(index: int, data: bytes | bytearray) -> bytes:
    """Return the digest of an item at its place: half a SHA-256, so that two items changed round are found too."""
    digest = hashlib.sha256(index.to_bytes(8, "little"))
    digest.update(data)
    return digest.digest()[:DIGEST_BYTES]


def encode(value: Any) -> bytes:
    """Return an item as bytes; equal items give equal bytes.

    Args:
        value: A tensor on any device, a numpy array or scalar, a number, text, bytes or None, or a tuple, list or
            dict of these.

    Raises:
        TypeError: naming the place of a value that cannot be stored without pickle.
    """
    parts: list[bytes] = []
    header = json.dumps(_described(value, "", _Body(parts)), separators=(",", ":")).encode()
    start = len(header).to_bytes(4, "little") + header
    return b"".join([start, bytes(-len(start) % _ALIGNMENT), *parts])


def decode(data: bytearray) -> Any:
    """Return the item that `encode` was given. Tensors and arrays are views of ``data``, which they keep alive."""
    length = int.from_bytes(data[:4], "little")
    start = 4 + length
    return _built(_parsed(bytes(data[4:start])), data, start + -start % _ALIGNMENT)


class _Body:
    """The raw values of one item, as they are gathered."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self._length = 0

    def add(self, data: bytes) -> int:
        """Add the bytes of one value and return where they begin."""
        begin = self._length
        padding = -len(data) % _ALIGNMENT
        self._parts += [data, bytes(padding)]
        self._length += len(data) + padding
        return begin


def _described(value: Any, place: str, body: _Body) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, place, body)
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in _ARRAY_KINDS:
        return ["array", value.dtype.str, list(value.shape), body.add(value.tobytes())]
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return ["scalar", value.dtype.str, [], body.add(value.tobytes())]
    if value is None or type(value) in (bool, int, float, str):
        return ["plain", value]
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if type(value) in (bytes, bytearray):
        return [type(value).__name__, len(value), body.add(bytes(value))]
    if type(value) in (tuple, list):
        items = [_described(item, f"{place}[{number}]", body) for number, item in enumerate(value)]
        return [type(value).__name__, items]
    if type(value) is dict and all(type(key) in _KEYS for key in value):
        return ["dict", [[key, _described(item, f"{place}[{key!r}]", body)] for key, item in value.items()]]
    raise _unsupported(f"{type(value).__module__}.{type(value).__qualname__}", place)


def _tensor(value: torch.Tensor, place: str, body: _Body) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise _unsupported(f"{type(value).__module__}.{type(value).__qualname__}, a kind of tensor of its own", place)
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise _unsupported("tensor that is sparse, quantized, nested or without values", place)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), body.add(raw)]


def _unsupported(kind: str, place: str) -> TypeError:
    return TypeError(
        f"features{place} is a {kind}; a feature cache stores tensors, numpy arrays, numbers, text, and tuples, "
        "lists and dicts of these"
    )


@functools.lru_cache(maxsize=4096)
def _parsed(header: bytes) -> Any:
    return json.loads(header)  # items of one shape share a header, and nothing changes what is returned


def _built(spec: Any, data: bytearray, start: int) -> Any:
    kind = spec[0]
    if kind == "tensor":
        dtype: torch.dtype = getattr(torch, spec[1])
        count = math.prod(spec[2])
        if not count:
            return torch.empty(spec[2], dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start + spec[3]).reshape(spec[2])
    if kind in ("array", "scalar"):
        count, element = math.prod(spec[2]), np.dtype(spec[1])
        some = count and element.itemsize  # an empty text has no bytes
        flat = np.frombuffer(data, element, count, start + spec[3]) if some else np.ndarray(count, element)
        return flat.reshape(spec[2]) if kind == "array" else flat[0]
    if kind == "plain":
        return spec[1]
    if kind == "complex":
        return complex(spec[1], spec[2])
    if kind in ("bytes", "bytearray"):
        found = data[start + spec[2] : start + spec[2] + spec[1]]
        return bytes(found) if kind == "bytes" else found
    if kind == "dict":
        return {key: _built(item, data, start) for key, item in spec[1]}
    items = [_built(item, data, start) for item in spec[1]]
    return tuple(items) if kind == "tuple" else items
