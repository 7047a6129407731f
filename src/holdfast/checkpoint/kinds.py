"""Copy, compare and measure tensors of any dtype and layout.

torch supports few operations on some dtypes and layouts. For example, ``nan_to_num`` does not
accept float8, ``equal`` does not accept complex32, and sparse tensors have no ``nbytes``. Code that
handles arbitrary tensors uses the functions in this module, which view a tensor as dense integer
tensors that share its memory.
"""

from __future__ import annotations

import torch

# An integer dtype for each element size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The compressed sparse layouts, each with the methods that return its indices.
_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
# The dtypes for which torch supports all the usual operations.
_WITH_ARITHMETIC = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
    }
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)

# The dtypes that torch can copy, but for which it supports few other operations. The set depends on
# the torch version.
STORED_ONLY = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and name.startswith(("float8_", "float4_", "uint16", "uint32", "uint64", "complex32"))
)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and torch supports all the usual operations on its dtype."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.dtype in _WITH_ARITHMETIC


def has_no_values(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor's values cannot be copied, or None if they can be copied.

    The reason is a word such as ``"meta"``, or the name of the layout or dtype.
    """
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        return str(tensor.layout)
    if tensor.dtype in _WITH_ARITHMETIC or tensor.dtype in STORED_ONLY:
        return None
    # torch cannot copy or load its integer types smaller than a byte or its raw bit types.
    return str(tensor.dtype)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that make up a tensor and share its memory.

    For a sparse tensor, these are its indices, followed by its values. `has_no_values` must return
    None for the tensor.
    """
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        indices = [read(tensor) for read in _COMPRESSED[tensor.layout]]
        return [*indices, tensor.values()]
    return [tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense tensor as an integer tensor.

    The result is a view, except for a lazily conjugated or negated tensor, which is copied.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's values in bytes, or 0 if they cannot be copied."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    return 0 if has_no_values(tensor) else sum(part.nbytes for part in parts_of(tensor))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same layout, dtype, shape and bits.

    Both tensors are read once. For tensors on an accelerator, the host waits for the result.
    """
    # If the values cannot be read, only a tensor and itself count as equal.
    if has_no_values(first) or has_no_values(second):
        return first is second
    if (first.layout, first.dtype, first.shape) != (second.layout, second.dtype, second.shape):
        return False
    # A coalesced and an uncoalesced tensor count as different, because later sums may be rounded
    # differently.
    if first.layout is torch.sparse_coo and first.is_coalesced() != second.is_coalesced():
        return False
    pairs = zip(parts_of(first), parts_of(second), strict=True)
    return all(
        part.shape == other.shape and torch.equal(bits_of(part), bits_of(other))
        for part, other in pairs
    )


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bits of a tensor into another tensor of the same layout, dtype and shape."""
    if target.layout is torch.sparse_coo:
        # The two tensors may have different numbers of entries, so their parts cannot be copied one
        # by one.
        with torch.no_grad():
            target.copy_(source)
            target._coalesced_(source.is_coalesced())
        return
    for part, other in zip(parts_of(target), parts_of(source), strict=True):
        bits_of(part).copy_(bits_of(other))


def computable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor in a dtype that torch can compute with.

    For a sparse tensor, only the stored values are returned. Returns None if the values cannot be
    copied (see `has_no_values`) or if torch cannot convert their dtype.
    """
    if has_no_values(tensor):
        return None
    # The last part of a sparse tensor is its values.
    values = parts_of(tensor)[-1]
    if values.dtype in _WITH_ARITHMETIC:
        return values
    try:
        return values.to(torch.complex64) if values.is_complex() else values.float()
    except (NotImplementedError, RuntimeError):
        # torch cannot convert its 4-bit types, but they cannot represent NaN or Inf anyway.
        return None
