"""Turn a tree of state into JSON and named tensors, and back. No pickle, no code in the file.

Known: None, bool, int, float, str, bytes, complex; dict, OrderedDict, Counter, defaultdict, list,
tuple, set, frozenset, deque; tensors (also tied ones), numpy arrays and scalars, dtype, device,
Size, Path. Anything else is an error that names the place in the tree.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.kinds import STORED_ONLY
from holdfast.core.errors import CheckpointError

_TAG = "$"
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, list, dict, set)
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (tuple, set, frozenset)},
    "size": torch.Size,
}
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
# The types of tensors in a checkpoint, as the format spells them.
SAVED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_AS_THEY_ARE = {int, bool, str, type(None)}
_PLAIN_VALUES = "let state_dict() return one of these, for instance a tensor or a dict of numbers."
_PLAIN_ARRAYS = (
    "let state_dict() return plain arrays, for instance numpy.asarray(x), and of a masked array"
    " x.data and x.mask (numpy.ma.getmaskarray(x)) as two."
)


class Encoder:
    """Encode one component of a checkpoint, such as ``"model"``; its name is for error messages."""

    def __init__(self, component: str) -> None:
        self._component = component
        self._names: dict[tuple[Any, ...], str] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return the JSON form of a value, whose tensors are gathered in `tensors`.

        H310 if that needs pickle.
        """
        if value is None or (
            isinstance(value, (bool, int, str)) and type(value) in (bool, int, str)
        ):
            return value
        if isinstance(value, torch.Tensor):
            if value.layout == torch.sparse_coo:
                return self._sparse(value.detach(), path)
            if value.is_complex():  # safetensors has no complex128
                pairs = torch.view_as_real(value.detach().resolve_conj())
                return {_TAG: "complex_tensor", "name": self._keep(pairs, path), **_layout(pairs)}
            if value.dtype in STORED_ONLY and value.dtype not in SAVED_AS:
                return self._as_bytes(value.detach(), path)
            return {_TAG: "tensor", "name": self._keep(value, path), **_layout(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self._sequence(value, path)
        return self._other(value, path)

    def _sparse(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        # As it lies: what is coalesced, and in which order, decides how later sums round.
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        encoded = {name: self.encode(part, (*path, name)) for name, part in parts.items()}
        return {
            _TAG: "sparse_tensor",
            **encoded,
            "size": list(tensor.shape),
            "coalesced": tensor.is_coalesced(),
        }

    def _as_bytes(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        # A type of one byte that the format has no name for, such as one of the float8 types of
        # AMD.
        if tensor.layout != torch.strided or tensor.is_meta:
            raise self._unsupported(f"a {tensor.dtype} tensor without values in one piece", path)
        stored = tensor.view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {
            _TAG: "bytes_tensor",
            "name": self._keep(stored, path),
            "dtype": dtype,
            **_layout(stored),
        }

    def _keep(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        tensor = tensor.detach().resolve_neg()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            kind = (
                "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
            )
            raise self._unsupported(f"a {kind} tensor", path)
        # Its values lie in others, where two of them are alike for us
        if hasattr(tensor, "__tensor_flatten__"):
            raise self._unsupported(
                f"a {type(tensor).__qualname__}, a tensor that wraps others", path
            )
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in self._names:
            return self._names[place]  # tied weights are stored once
        name = ".".join(path).encode(errors="replace").decode() or "value"
        while name in self.tensors or name == "__metadata__":  # that one is the format's own
            name += "_"
        self._names[place] = name
        self.tensors[name] = tensor
        return name

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        kind = type(value).__name__
        if kind == "dict" and all(isinstance(key, str) for key, _ in items) and _TAG not in value:
            return dict(items)
        body: dict[str, Any] = {
            _TAG: kind,
            "items": [[self.encode(key, path), item] for key, item in items],
        }
        if isinstance(value, collections.defaultdict):
            factory = getattr(value.default_factory, "__name__", None)
            if (
                value.default_factory is not None
                and _FACTORIES.get(str(factory)) is not value.default_factory
            ):
                raise self._unsupported(f"a defaultdict of {value.default_factory!r}", path)
            body["factory"] = factory
        if kind not in _MAPPINGS:
            raise self._unsupported(f"a {type(value).__module__}.{kind}", path)
        return body

    def _sequence(self, value: Any, path: tuple[str, ...]) -> Any:
        kinds = set(map(type, value))
        if kinds <= _AS_THEY_ARE or (kinds == {float} and all(map(math.isfinite, value))):
            items = list(value)  # losses, the words of a generator: thousands, again and again
        else:
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if type(value) is list:
            return items
        if isinstance(value, torch.Size):
            return {_TAG: "size", "items": items}
        if isinstance(value, collections.deque):
            return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
        kind = type(value).__name__
        if kind not in _SEQUENCES:
            raise self._unsupported(f"a {type(value).__module__}.{kind}", path)
        if isinstance(value, (set, frozenset)):
            # Each process has its own order, and equal states shall look equal
            items.sort(key=json.dumps)
        return {_TAG: kind, "items": items}

    def _other(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "text": repr(value)}
        # A masked array or a matrix would come back without what it is
        if type(value) in (np.ndarray, np.memmap):
            if value.dtype.kind not in "biuf":  # of complex numbers, texts, objects
                raise self._unsupported(f"an array of {value.dtype}", path)
            try:
                tensor = torch.from_numpy(np.array(value, copy=True))
            except (TypeError, ValueError) as error:  # longdouble, foreign byte order
                raise self._unsupported(f"an array of {value.dtype}", path) from error
            return {_TAG: "ndarray", "name": self._keep(tensor, path)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {_TAG: "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if type(value) is bytes:
            return {_TAG: "bytes", "hex": value.hex()}
        if type(value) is complex:
            return {_TAG: "complex", "text": repr(value)}
        if isinstance(value, (torch.dtype, torch.device)):
            return {_TAG: type(value).__name__, "text": str(value).removeprefix("torch.")}
        if isinstance(value, PurePath):
            return {_TAG: "path", "text": str(value)}
        fix = _PLAIN_ARRAYS if isinstance(value, np.ndarray) else _PLAIN_VALUES
        raise self._unsupported(f"a {type(value).__module__}.{type(value).__qualname__}", path, fix)

    def _unsupported(
        self, what: str, path: tuple[str, ...], fix: str = _PLAIN_VALUES
    ) -> CheckpointError:
        place = "".join(f"[{key!r}]" for key in path)
        return CheckpointError(
            f"{self._component}{place} is {what}",
            limit=(
                "a checkpoint holds tensors, arrays of numbers, text and standard containers, never"
                " pickle"
            ),
            fix=fix,
            rule="H310",
        )


def _layout(tensor: torch.Tensor) -> dict[str, list[int]]:
    """Return the strides of a dense tensor that does not lie row by row.

    Fused optimizers go by places in memory.
    """
    rows = [math.prod(tensor.shape[i + 1 :]) for i in range(tensor.dim())]
    other = list(tensor.stride()) != rows and _is_dense(tensor.shape, tensor.stride())
    return {"stride": list(tensor.stride())} if tensor.numel() and other else {}


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    strides = sorted((each, size) for each, size in zip(stride, shape, strict=True) if size > 1)
    sizes = [size for _, size in strides]
    return [each for each, _ in strides] == [math.prod(sizes[:i]) for i in range(len(sizes))]


def _stored(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[value["name"]]
    stride = tuple(value.get("stride", tensor.stride()))
    if stride != tensor.stride():
        if not (
            all(type(each) is int and each >= 0 for each in stride)
            and _is_dense(tensor.shape, stride)
        ):
            raise ValueError(f"a tensor has strides {stride!s:.80}")
        laid_out = torch.empty_strided(
            tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
        )
        # In its place: one at a time is in memory twice
        tensor = tensors[value["name"]] = laid_out.copy_(tensor)
    return tensor


_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
    "defaultdict": dict,
}


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that `Encoder.encode` was given, of its JSON form and the component's
    tensors by name.

    A tensor that lay in memory in another order is replaced by a copy that lies so again.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    if kind in _MAPPINGS:
        items = [(decode(key, tensors), decode(item, tensors)) for key, item in value["items"]]
        if kind == "defaultdict":
            return collections.defaultdict(_FACTORIES.get(str(value["factory"])), items)
        return _MAPPINGS[kind](items)
    if kind == "sparse_tensor":
        indices, values = decode(value["indices"], tensors), decode(value["values"], tensors)
        return torch.sparse_coo_tensor(
            indices, values, value["size"], is_coalesced=value["coalesced"], check_invariants=True
        )
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(item, tensors) for item in value["items"]])
    if kind == "deque":
        return collections.deque(
            [decode(item, tensors) for item in value["items"]], value["maxlen"]
        )
    return _LEAVES[kind](value, tensors)


_LEAVES: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "tensor": _stored,
    "bytes_tensor": lambda value, tensors: _stored(value, tensors).view(_DTYPES[value["dtype"]]),
    "complex_tensor": lambda value, tensors: torch.view_as_complex(_stored(value, tensors)),
    "ndarray": lambda value, tensors: tensors[value["name"]].numpy().copy(),
    "scalar": lambda value, _: np.frombuffer(bytes.fromhex(value["hex"]), dtype=value["dtype"])[0],
    "float": lambda value, _: float(value["text"]),
    "bytes": lambda value, _: bytes.fromhex(value["hex"]),
    "complex": lambda value, _: complex(value["text"]),
    "dtype": lambda value, _: _DTYPES[value["text"]],
    "device": lambda value, _: torch.device(value["text"]),
    "path": lambda value, _: Path(value["text"]),
}
