"""Tensors of rare kinds, as plain tensors that share their memory and can be copied, compared and saved.

torch has types and layouts that it stores and hardly computes with: float8 knows no ``nan_to_num``, complex-half no
``equal``, sparse tensors no ``nbytes``. Whoever handles all the tensors of a model goes through here.
"""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_WITH_ARITHMETIC = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)

STORED_ONLY = frozenset(
    kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype)
    and name.startswith(("float8_", "float4_", "uint16", "uint32", "uint64", "complex32"))
)
"""Types that torch copies, and hardly computes with. Which there are depends on the version of torch."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether torch copies, compares and computes with such a tensor as with any other."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.dtype in _WITH_ARITHMETIC


def has_no_values(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor whose values torch does not copy, such as ``"meta"``; None if it does."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        return str(tensor.layout)
    # Integers of less than a byte and bare bits: torch has no copy of them, and no load_state_dict.
    is_copied = tensor.dtype in _WITH_ARITHMETIC or tensor.dtype in STORED_ONLY
    return None if is_copied else str(tensor.dtype)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that hold a tensor's values: of a sparse one its indices too. They share its memory.

    Not for what `has_no_values` names.
    """
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        indices = [read(tensor) for read in _COMPRESSED[tensor.layout]]
        return [*indices, tensor.values()]
    return [tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as integers of the same bits; a view, but of a tensor that is conjugated lazily."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that the values of a tensor take; of a kind that has none in memory, 0."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    return 0 if has_no_values(tensor) else sum(part.nbytes for part in parts_of(tensor))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are of one kind and hold the same bits. Cost: on a device a host sync."""
    if has_no_values(first) or has_no_values(second):
        return first is second
    if (first.layout, first.dtype, first.shape) != (second.layout, second.dtype, second.shape):
        return False
    # How a sparse tensor is stored decides how later sums round.
    if first.layout is torch.sparse_coo and first.is_coalesced() != second.is_coalesced():
        return False
    pairs = zip(parts_of(first), parts_of(second), strict=True)
    return all(one.shape == other.shape and torch.equal(bits_of(one), bits_of(other)) for one, other in pairs)


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the values of a tensor of a rare kind into another one of its kind and shape."""
    if target.layout is torch.sparse_coo:
        # The number of its entries may differ, so that the tensor itself must take new ones.
        with torch.no_grad():
            target.copy_(source)
            target._coalesced_(source.is_coalesced())
        return
    for part, other in zip(parts_of(target), parts_of(source), strict=True):
        bits_of(part).copy_(bits_of(other))


def computable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor in a type that torch computes with; None where there are none, or no such type.

    Of a sparse tensor those that are stored.
    """
    if has_no_values(tensor):
        return None
    values = parts_of(tensor)[-1]
    if values.dtype in _WITH_ARITHMETIC:
        return values
    try:
        return values.to(torch.complex64) if values.is_complex() else values.float()
    except (NotImplementedError, RuntimeError):
        return None  # such as types of 4 bits, which know neither NaN nor Inf
