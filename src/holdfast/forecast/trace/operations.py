"""Compute the cost of an operation: floating-point operations, memory traffic, and data type.

From these costs, `devices.timing` estimates how long an operation takes on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from holdfast.forecast.trace.events import DTYPES
from holdfast.memory.tensors import tensors_of

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
# Operators that launch no kernel although they are not views.
_WITHOUT_KERNEL_NAMES = """
    _reshape_alias _unsafe_view empty empty_like empty_strided lift_fresh new_empty
    new_empty_strided resize_ set_
"""
_WITHOUT_KERNEL = frozenset(f"aten.{name}" for name in _WITHOUT_KERNEL_NAMES.split())
# Operators that read only a part of their first argument, as large as their result.
_GATHERING = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select"})


class Cost(NamedTuple):
    """The cost of one operation."""

    # An index into `Operations.names`.
    name: int
    # The number of floating-point operations according to torch's formula for the operator, or 0 if
    # there is no formula.
    flops: int
    # The number of bytes that the operation reads and writes.
    moved_bytes: int
    # The data type in which the operation computes, as an index into `DTYPES`.
    dtype: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """Properties that all calls of an operator have in common.

    Args:
        name: Index into `Operations.names`.
        launches_kernel: Whether the operator launches a kernel on the device.
        gathers: Whether the operator reads only a part of its first argument, as large as its
            result.
        flop_formula: torch's formula for the number of floating-point operations, if any.
        single_dtype: The data type in which the operator computes if the tensors are fp32: fp32 or
            TF32, as an index into `DTYPES`.
        written_arguments: Positions of the arguments that the operator writes to, if it returns
            nothing; otherwise empty.
    """

    name: int
    launches_kernel: bool
    gathers: bool
    flop_formula: Callable[..., int] | None
    single_dtype: int
    written_arguments: tuple[int, ...]


class Operations:
    """Computes the cost of operations. Reads the TF32 settings only at an operator's first call."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._operators: dict[Any, _Operator] = {}

    def measure(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Cost | None:
        """Return the cost of an operation, or None if it launches no kernel, like a view.

        Args:
            func: The operator's overload.
            args: The operation's positional arguments.
            kwargs: The operation's keyword arguments.
            out: The operation's result.
        """
        operator = self._operators.get(func)
        if operator is None:
            operator = self._describe(func)
            self._operators[func] = operator
        if not operator.launches_kernel:
            return None
        written_arguments = [args[i] for i in operator.written_arguments if i < len(args)]
        written = list(tensors_of((out, *written_arguments)))
        if operator.gathers:
            read = list(tensors_of((args[1:], kwargs)))
            moved_bytes = _dense_bytes(read) + 2 * _dense_bytes(written)
        else:
            read = list(tensors_of((args, kwargs)))
            moved_bytes = _dense_bytes(read) + _dense_bytes(written)
        return Cost(
            name=operator.name,
            flops=_evaluate_formula(operator.flop_formula, args, kwargs, out),
            moved_bytes=moved_bytes,
            dtype=_compute_dtype(operator.single_dtype, [*read, *written]),
        )

    def _describe(self, func: Any) -> _Operator:
        packet = getattr(func, "overloadpacket", func)
        name = str(packet)
        if name not in self.names:
            self.names.append(name)
        formula = flop_registry.get(packet)
        single_dtype = "tf32" if formula is not None and _may_take_tf32(name) else "fp32"
        return _Operator(
            name=self.names.index(name),
            launches_kernel=_launches_kernel(func, name),
            gathers=name in _GATHERING,
            flop_formula=formula,
            single_dtype=DTYPES.index(single_dtype),
            written_arguments=_written_arguments(func),
        )


def _launches_kernel(func: Any, name: str) -> bool:
    if getattr(func, "is_view", False) or name in _WITHOUT_KERNEL:
        return False
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return True
    # An operator that returns no tensor only queries a property, such as a device or a number.
    return any("Tensor" in str(result.type) for result in schema.returns)


def _written_arguments(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes to, if it returns nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.returns:
        return ()
    return tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _dense_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the total size of the dense tensors in bytes.

    Sparse tensors are skipped. The operations on their indices and values account for them.
    """
    return sum([tensor.nbytes for tensor in tensors if tensor.layout is torch.strided])


def _evaluate_formula(
    formula: Callable[..., int] | None, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> int:
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        # A formula registered by an extension may not support these arguments.
        return 0


def _compute_dtype(single_dtype: int, tensors: list[torch.Tensor]) -> int:
    """Return the data type in which an operation computes, as an index into `DTYPES`.

    This is the type of the first floating-point tensor, or `single_dtype` if that type is fp32.
    """
    for tensor in tensors:
        if tensor.is_floating_point():
            name = _DTYPE_NAMES.get(tensor.dtype, "other")
            return single_dtype if name == "fp32" else DTYPES.index(name)
    return DTYPES.index("other")


def _may_take_tf32(name: str) -> bool:
    """Return whether torch's settings allow an fp32 operation to run in TF32 on CUDA.

    By default, TF32 is off for matrix products and on for convolutions (docs.pytorch.org, "CUDA
    semantics", section "TensorFloat-32").
    """
    try:
        if "convolution" in name:
            return bool(torch.backends.cudnn.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest" and "attention" not in name
    except RuntimeError:
        # torch raises if the old TF32 settings are read after the new ones were changed.
        return False
