"""Convert a tree of state to JSON and named tensors, and back, without pickle.

Supported: None, bool, int, float, str, bytes, complex; dict, OrderedDict, Counter, defaultdict,
list, tuple, set, frozenset, deque; tensors (including tied ones), NumPy arrays and scalars, dtype,
device, Size, Path. Any other value raises an error that names the value's position in the tree.

A value that JSON cannot represent becomes an object whose key ``"$"`` names the value's kind.
`_DECODERS` lists all kinds.
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
from holdfast.checkpoint.safetensors_header import METADATA
from holdfast.core.errors import CheckpointError

_TAG = "$"
# The default factories with which a defaultdict can be saved, by name.
_FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
# The dtypes that a checkpoint can store, with their names in the safetensors format.
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
# Classes whose values are written to JSON unchanged.
_JSON_CLASSES = frozenset({bool, int, str})
# The same classes and None, used to check all items of a list at once.
_JSON_ITEMS = frozenset({bool, int, str, type(None)})
_SEQUENCE_CLASSES = (list, tuple, set, frozenset, collections.deque)
# NumPy's one-letter dtype kinds: boolean, signed and unsigned integer, float and complex.
_REAL_KINDS = "biuf"
_NUMBER_KINDS = "biufc"

_PLAIN_VALUES = "return one of these from state_dict(), for example a tensor or a dict of numbers."
_PLAIN_ARRAYS = (
    "return plain arrays from state_dict(), for example numpy.asarray(x). For a masked array,"
    " return x.data and numpy.ma.getmaskarray(x) separately."
)

# Position of a value in the tree: the keys and indices that lead to it.
_Place = tuple[str, ...]
# Location of a tensor in memory: device, address, shape, strides and dtype.
Memory = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype]


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory location of a dense tensor. Tied tensors have the same location."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Encoder:
    """Encodes one component of a checkpoint.

    Args:
        component: The component's name, such as ``"model"``, used in error messages.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        # Names of the encoded tensors by memory location, so that tied weights are stored only
        # once.
        self._names: dict[Memory, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, place: _Place = ()) -> Any:
        """Return the JSON form of a value, and add the value's tensors to `tensors`.

        Args:
            value: The value, which may contain further values.
            place: The value's position in the component. It is used to name tensors and in error
                messages.

        Raises:
            CheckpointError: H310 if the value cannot be stored without pickle.
        """
        if value is None or type(value) in _JSON_CLASSES:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, _SEQUENCE_CLASSES):
            return self._sequence(value, place)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, place)
        return self._leaf(value, place)

    # --- tensors

    def _tensor(self, tensor: torch.Tensor, place: _Place) -> Any:
        """Return the JSON form of a tensor, which depends on the tensor's layout and dtype."""
        if tensor.layout == torch.sparse_coo:
            return self._sparse(tensor.detach(), place)
        if tensor.is_complex():
            # Complex numbers are stored as pairs of real numbers, because the safetensors format
            # has no complex128.
            pairs = torch.view_as_real(tensor.detach().resolve_conj())
            return self._stored("complex_tensor", pairs, place)
        if tensor.dtype in STORED_ONLY and tensor.dtype not in SAVED_AS:
            return self._as_bytes(tensor.detach(), place)
        return self._stored("tensor", tensor, place)

    def _stored(self, kind: str, tensor: torch.Tensor, place: _Place) -> dict[str, Any]:
        return {_TAG: kind, "name": self._keep(tensor, place), **_layout(tensor)}

    def _sparse(self, tensor: torch.Tensor, place: _Place) -> Any:
        # The entries are stored exactly as in memory. Both their order and whether they are
        # coalesced affect how later sums are rounded.
        return {
            _TAG: "sparse_tensor",
            "indices": self.encode(tensor._indices(), (*place, "indices")),
            "values": self.encode(tensor._values(), (*place, "values")),
            "size": list(tensor.shape),
            "coalesced": tensor.is_coalesced(),
        }

    def _as_bytes(self, tensor: torch.Tensor, place: _Place) -> Any:
        """Encode a tensor of a one-byte dtype that safetensors lacks, such as AMD's float8."""
        if tensor.layout != torch.strided or tensor.is_meta:
            raise self._unsupported(f"a {tensor.dtype} tensor that is not dense", place)
        stored = tensor.view(torch.uint8)
        return {
            _TAG: "bytes_tensor",
            "name": self._keep(stored, place),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **_layout(stored),
        }

    def _keep(self, tensor: torch.Tensor, place: _Place) -> str:
        """Add a tensor to `tensors` unless a tied tensor is already there, and return its name."""
        tensor = tensor.detach().resolve_neg()
        self._check_dense(tensor, place)
        memory = memory_of(tensor)
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        # Surrogate characters are replaced, because they cannot be encoded in UTF-8.
        name = ".".join(place).encode(errors="replace").decode() or "value"
        # Different positions can lead to the same name, for example if a key contains a dot.
        while name in self.tensors or name == METADATA:
            name += "_"
        self._names[memory] = name
        self.tensors[name] = tensor
        return name

    def _check_dense(self, tensor: torch.Tensor, place: _Place) -> None:
        """Raise H310 if the tensor's values are not in one dense block of memory."""
        if tensor.is_nested:
            raise self._unsupported("a nested tensor", place)
        if tensor.is_meta:
            raise self._unsupported("a meta tensor", place)
        if tensor.layout != torch.strided:
            raise self._unsupported(f"a {tensor.layout} tensor", place)
        # A wrapper subclass keeps its values in inner tensors, so two different wrappers can appear
        # to have the same memory location.
        if hasattr(tensor, "__tensor_flatten__"):
            kind = type(tensor).__qualname__
            raise self._unsupported(f"a {kind}, a tensor that wraps others", place)

    # --- containers

    def _mapping(self, value: Mapping[Any, Any], place: _Place) -> Any:
        """Encode a dict with string keys as a JSON object, and other mappings as a tagged list."""
        items = [(key, self.encode(item, (*place, str(key)))) for key, item in value.items()]
        kind = type(value).__name__
        has_text_keys = all(isinstance(key, str) for key, _ in items)
        if kind == "dict" and has_text_keys and _TAG not in value:
            return dict(items)
        encoded: dict[str, Any] = {
            _TAG: kind,
            "items": [[self.encode(key, place), item] for key, item in items],
        }
        if isinstance(value, collections.defaultdict):
            encoded["factory"] = self._factory(value, place)
        if kind not in _MAPPINGS:
            raise self._unsupported(f"a {type(value).__module__}.{kind}", place)
        return encoded

    def _factory(self, value: collections.defaultdict[Any, Any], place: _Place) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        name = str(getattr(factory, "__name__", None))
        # Another factory may have the same name as one of the supported factories.
        if _FACTORIES.get(name) is not factory:
            raise self._unsupported(f"a defaultdict of {factory!r}", place)
        return name

    def _sequence(self, value: Any, place: _Place) -> Any:
        """Encode a list as a JSON list, and any other sequence or set as a tagged list."""
        items = self._items(value, place)
        if type(value) is list:
            return items
        if isinstance(value, torch.Size):
            return {_TAG: "size", "items": items}
        if isinstance(value, collections.deque):
            return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
        kind = type(value).__name__
        if kind not in _SEQUENCES:
            raise self._unsupported(f"a {type(value).__module__}.{kind}", place)
        if isinstance(value, (set, frozenset)):
            # A set's order differs between processes, but equal states must be written identically.
            items.sort(key=json.dumps)
        return {_TAG: kind, "items": items}

    def _items(self, value: Any, place: _Place) -> list[Any]:
        """Return the encoded items of a sequence or set."""
        classes = set(map(type, value))
        # A list may contain thousands of losses or the state of a random generator, so all items
        # are checked at once, which is faster.
        if classes <= _JSON_ITEMS:
            return list(value)
        if classes == {float} and all(map(math.isfinite, value)):
            return list(value)
        return [self.encode(item, (*place, str(index))) for index, item in enumerate(value)]

    # --- numpy and other leaves

    def _numpy(self, value: Any, place: _Place) -> Any:
        # Subclasses such as masked arrays are refused, because their class would be lost.
        if type(value) in (np.ndarray, np.memmap):
            return self._array(value, place)
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBER_KINDS:
            # `np.float64` is a subclass of float, but storing it as a float would lose its class.
            return {_TAG: "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        fix = _PLAIN_ARRAYS if isinstance(value, np.ndarray) else _PLAIN_VALUES
        raise self._unsupported(_qualified_name(value), place, fix)

    def _array(self, value: Any, place: _Place) -> Any:
        if value.dtype.kind not in _REAL_KINDS:
            raise self._unsupported(f"an array of {value.dtype}", place)
        try:
            tensor = torch.from_numpy(np.array(value, copy=True))
        except (TypeError, ValueError) as error:
            # torch supports neither long doubles nor non-native byte orders.
            raise self._unsupported(f"an array of {value.dtype}", place) from error
        return {_TAG: "ndarray", "name": self._keep(tensor, place)}

    def _leaf(self, value: Any, place: _Place) -> Any:
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "text": repr(value)}
        if type(value) is bytes:
            return {_TAG: "bytes", "hex": value.hex()}
        if type(value) is complex:
            return {_TAG: "complex", "text": repr(value)}
        if isinstance(value, (torch.dtype, torch.device)):
            return {_TAG: type(value).__name__, "text": str(value).removeprefix("torch.")}
        if isinstance(value, PurePath):
            return {_TAG: "path", "text": str(value)}
        raise self._unsupported(_qualified_name(value), place)

    def _unsupported(self, what: str, place: _Place, fix: str = _PLAIN_VALUES) -> CheckpointError:
        keys = "".join(f"[{key!r}]" for key in place)
        return CheckpointError(
            f"{self._component}{keys} is {what}, which a checkpoint cannot store",
            limit=(
                "without pickle, a checkpoint can store tensors, arrays of numbers, text and"
                " standard containers"
            ),
            fix=fix,
            rule="H310",
        )


def _qualified_name(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _layout(tensor: torch.Tensor) -> dict[str, list[int]]:
    """Return a tensor's strides as a JSON field, or an empty dict if they need not be saved.

    The strides of a dense tensor that is not row-major are saved, because fused optimizers match
    the elements of different tensors by their positions in memory.
    """
    row_by_row = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim())]
    strides = list(tensor.stride())
    if not tensor.numel() or strides == row_by_row or not _is_dense(tensor.shape, strides):
        return {}
    return {"stride": strides}


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor with this shape is contiguous in some order of its axes."""
    axes = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]
    expected = 1
    for stride, size in sorted(axes):
        if stride != expected:
            return False
        expected *= size
    return True


# --- decoding

_Tensors = dict[str, torch.Tensor]


def decode(value: Any, tensors: _Tensors) -> Any:
    """Rebuild a value from the JSON form that `Encoder.encode` returned.

    Args:
        value: The JSON form of the original value.
        tensors: The component's tensors by name. In this dict, each tensor that was not row-major
            when it was saved is replaced by a copy with the original strides.

    Raises:
        LookupError, TypeError, ValueError and others: `value` was not encoded by `Encoder`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    return _DECODERS[value[_TAG]](value, tensors)


def _decode_items(value: dict[str, Any], tensors: _Tensors) -> list[Any]:
    return [decode(item, tensors) for item in value["items"]]


def _decode_pairs(value: dict[str, Any], tensors: _Tensors) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(item, tensors)) for key, item in value["items"]]


def _decode_counter(value: dict[str, Any], tensors: _Tensors) -> Any:
    return collections.Counter(dict(_decode_pairs(value, tensors)))


def _decode_defaultdict(value: dict[str, Any], tensors: _Tensors) -> Any:
    factory = _FACTORIES.get(str(value["factory"]))
    return collections.defaultdict(factory, _decode_pairs(value, tensors))


def _decode_deque(value: dict[str, Any], tensors: _Tensors) -> Any:
    return collections.deque(_decode_items(value, tensors), value["maxlen"])


def _decode_tensor(value: dict[str, Any], tensors: _Tensors) -> torch.Tensor:
    tensor = tensors[value["name"]]
    strides = tuple(value.get("stride", tensor.stride()))
    if strides == tensor.stride():
        return tensor
    are_numbers = all(type(stride) is int and stride >= 0 for stride in strides)
    if not are_numbers or not _is_dense(tensor.shape, strides):
        raise ValueError(f"a tensor has strides {strides!s:.80}")
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor)
    # The tensor is replaced immediately, so that only one tensor at a time is in memory twice.
    tensors[value["name"]] = copy
    return copy


def _decode_sparse(value: dict[str, Any], tensors: _Tensors) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        decode(value["indices"], tensors),
        decode(value["values"], tensors),
        value["size"],
        is_coalesced=value["coalesced"],
        check_invariants=True,
    )


def _decode_scalar(value: dict[str, Any], _tensors: _Tensors) -> Any:
    return np.frombuffer(bytes.fromhex(value["hex"]), dtype=value["dtype"])[0]


_Decoder = Callable[[dict[str, Any], _Tensors], Any]

_MAPPINGS: dict[str, _Decoder] = {
    "dict": lambda value, tensors: dict(_decode_pairs(value, tensors)),
    "OrderedDict": lambda value, tensors: collections.OrderedDict(_decode_pairs(value, tensors)),
    "Counter": _decode_counter,
    "defaultdict": _decode_defaultdict,
}
_SEQUENCES: dict[str, _Decoder] = {
    "tuple": lambda value, tensors: tuple(_decode_items(value, tensors)),
    "set": lambda value, tensors: set(_decode_items(value, tensors)),
    "frozenset": lambda value, tensors: frozenset(_decode_items(value, tensors)),
    "size": lambda value, tensors: torch.Size(_decode_items(value, tensors)),
}
_DECODERS: dict[str, _Decoder] = {
    **_MAPPINGS,
    **_SEQUENCES,
    "deque": _decode_deque,
    "tensor": _decode_tensor,
    "sparse_tensor": _decode_sparse,
    "bytes_tensor": lambda value, tensors: _decode_tensor(value, tensors).view(
        _DTYPES[value["dtype"]]
    ),
    "complex_tensor": lambda value, tensors: torch.view_as_complex(_decode_tensor(value, tensors)),
    "ndarray": lambda value, tensors: tensors[value["name"]].numpy().copy(),
    "scalar": _decode_scalar,
    "float": lambda value, _: float(value["text"]),
    "bytes": lambda value, _: bytes.fromhex(value["hex"]),
    "complex": lambda value, _: complex(value["text"]),
    "dtype": lambda value, _: _DTYPES[value["text"]],
    "device": lambda value, _: torch.device(value["text"]),
    "path": lambda value, _: Path(value["text"]),
}
