"""What an operation costs.

Floating point operations, bytes read and written, and the type that it computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from holdfast.forecast.trace.events import DTYPES
from holdfast.memory.tensors import tensors_of

_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
_WITHOUT_KERNEL_NAMES = """
    _reshape_alias _unsafe_view empty empty_like empty_strided lift_fresh new_empty
    new_empty_strided resize_ set_
"""
_WITHOUT_KERNEL = frozenset(f"aten.{name}" for name in _WITHOUT_KERNEL_NAMES.split())
# They read as much of their first argument as they write, however large it is.
_PICKS = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select"})


class Operation(NamedTuple):
    """An operation as it was dispatched.

    `name` is an index into `Operations.names`, `dtype` one into `DTYPES`.

    `flops` follow torch's own formulas, 0 where there is none; `moved_bytes` is what it reads and
    writes.
    """

    name: int
    flops: int
    moved_bytes: int
    dtype: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    name: int
    launches: bool
    picks: bool
    formula: Callable[..., int] | None
    single: int  # what it computes in where its tensors are fp32
    written: tuple[int, ...]  # arguments that it writes and does not return


class Operations:
    """Measure operations; settings such as TF32 are those of the moment when this is built."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._kinds: dict[Any, _Kind] = {}

    def measure(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Operation | None:
        """Return what an operation costs, or None if it runs no kernel, as a view."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._describe(func)
        if not kind.launches:
            return None
        written = list(
            tensors_of(
                (out, *[args[position] for position in kind.written if position < len(args)])
            )
        )
        read = list(tensors_of((args[1:] if kind.picks else args, kwargs)))
        moved = _bytes_of(read) + _bytes_of(written) * (2 if kind.picks else 1)
        flops = 0 if kind.formula is None else _evaluate(kind.formula, args, kwargs, out)
        return Operation(kind.name, flops, moved, _format(kind.single, read, written))

    def _describe(self, func: Any) -> _Kind:
        packet = getattr(func, "overloadpacket", func)
        name = str(packet)
        if name not in self.names:
            self.names.append(name)
        formula = flop_registry.get(packet)
        schema = getattr(func, "_schema", None)
        written: tuple[int, ...] = ()
        asks = False  # for a fact, such as a device or a number
        if schema is not None:
            asks = not schema.is_mutable and not any(
                "Tensor" in str(one.type) for one in schema.returns
            )
        if schema is not None and not schema.returns:
            arguments = enumerate(schema.arguments)
            written = tuple(
                place
                for place, one in arguments
                if one.alias_info is not None and one.alias_info.is_write
            )
        return _Kind(
            name=self.names.index(name),
            launches=not (asks or getattr(func, "is_view", False) or name in _WITHOUT_KERNEL),
            picks=name in _PICKS,
            formula=formula,
            single=DTYPES.index("tf32" if formula is not None and _takes_tf32(name) else "fp32"),
            written=written,
        )


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """Return the sizes of dense tensors.

    A sparse one's parts were moved by the operations that made them.
    """
    return sum([tensor.nbytes for tensor in tensors if tensor.layout is torch.strided])


def _evaluate(
    formula: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> int:
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        return 0  # a formula of somebody else's that does not fit the call


def _format(single: int, read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
    for tensor in (*read, *written):
        if tensor.is_floating_point():
            name = _FORMATS.get(tensor.dtype, "other")
            return single if name == "fp32" else DTYPES.index(name)
    return DTYPES.index("other")


def _takes_tf32(name: str) -> bool:
    """Return whether CUDA may compute this fp32 operation in TF32, by torch's settings.

    Off for matrix products and on for convolutions by default (docs.pytorch.org, "CUDA semantics",
    TensorFloat-32).
    """
    try:
        if "convolution" in name:
            return bool(torch.backends.cudnn.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest" and "attention" not in name
    except RuntimeError:  # the old settings cannot be read once the new ones were used
        return False
