"""Find the batch dimension of each tensor in a batch, and split the batch into micro-batches.

The argument ``split`` determines how a batch is split:

default
    Every tensor and array with at least one dimension is split along dimension 0, which must have
    the same size everywhere. Lists of strings or numbers with this length are split too. All other
    values are passed to every micro-batch.
``split=1``
    Like the default, but along dimension 1, for sequence-first batches.
``split={...}``
    A tree with the structure of the batch, or of its upper levels. Each leaf is a dimension, None
    (every micro-batch gets the whole value), or "items" (a sequence with one entry of any shape per
    sample).
``split=f``
    A function ``f(batch, micro_batch_size)`` that returns the list of micro-batches.

Micro-batches contain views of the batch's tensors, not copies. If a value cannot be split, the
error message names the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import BatchError

SplitSpec: TypeAlias = int | Literal["items"] | Mapping[Any, Any] | Sequence[Any] | None
SplitFunction: TypeAlias = Callable[[Any, int], Sequence[Any]]
Split: TypeAlias = SplitSpec | SplitFunction

# Types of leaves that are never split: every micro-batch gets the whole leaf.
_SHARED = (str, bytes, bool, int, float, complex, type(None), np.generic, torch.device, torch.dtype)

# A list whose values all have one of these types, such as a list of file names, is a single leaf.
_PLAIN_KINDS: tuple[tuple[type, ...], ...] = ((str,), (bytes,), (int, float))

# Maximum number of leaves listed in an error message.
_LEAVES_LISTED = 6

_FIX = (
    "pass split= with the batch dimension of each part, for example split={'frames': 1, 'mask':"
    " None, 'targets': 'items'}, or micro_batch_size=None to turn off splitting."
)


def batch_size(batch: Any, split: Split = 0) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: The batch.
        split: How to split the batch (see the docstring of this module).

    Raises:
        BatchError: H204 if the parts of the batch have different sizes, H205 if nothing can be
            split or a part has an unsupported type.
    """
    if callable(split):
        return len(split(batch, 1))
    sizes: set[int] = set()
    if split == 0 and _is_usual(batch):
        # In the usual case, this shortcut is ten times as fast as searching the tree below.
        for tensor in batch:
            if tensor.ndim:
                sizes.add(tensor.shape[0])
    else:
        for path, leaf, how in _leaves(batch, split, "batch"):
            size = _size(path, leaf, how)
            if size is not None:
                sizes.add(size)
    if len(sizes) > 1:
        raise _disagreement(batch, split)
    if not sizes:
        raise _unsplittable("the batch contains no tensor with a batch dimension")
    return sizes.pop()


def micro_batches(
    batch: Any, size: int, micro_batch_size: int, split: Split = 0, *, smallest: int = 1
) -> list[tuple[Any, int]]:
    """Split a batch, and return each micro-batch with its number of samples, in order.

    Args:
        batch: The batch.
        size: Number of samples in the batch.
        micro_batch_size: Maximum number of samples in a micro-batch.
        split: How to split the batch.
        smallest: If the last micro-batch would have fewer samples, it is merged into the previous
            one. Ignored if `split` is a function.

    Raises:
        BatchError: H204 if `split` is a function and returns the wrong number of micro-batches.
    """
    if callable(split):
        return _micro_batches_of_function(batch, size, micro_batch_size, split)
    starts = list(range(0, size, micro_batch_size))
    if len(starts) > 1 and size - starts[-1] < smallest:
        starts.pop()
    ends = [*starts[1:], size]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        parts.append((_part_of(batch, split, size, slice(start, end)), end - start))
    return parts


def _micro_batches_of_function(
    batch: Any, size: int, micro_batch_size: int, split: SplitFunction
) -> list[tuple[Any, int]]:
    parts = list(split(batch, micro_batch_size))
    full_parts, remainder = divmod(size, micro_batch_size)
    sizes = [micro_batch_size] * full_parts
    if remainder:
        sizes.append(remainder)
    if len(parts) != len(sizes):
        raise BatchError(
            f"split(batch, {micro_batch_size}) returned {len(parts)} micro-batches for a batch of"
            f" {size} samples",
            limit=(
                f"{len(sizes)} micro-batches are expected, each with {micro_batch_size} samples"
                " except the last"
            ),
            fix="split the batch in order into micro-batches of exactly micro_batch_size samples.",
            rule="H204",
        )
    return list(zip(parts, sizes, strict=True))


def select(batch: Any, size: int, indices: Sequence[int], split: Split = 0) -> Any:
    """Return a batch with copies of the selected samples, in the order of `indices`.

    Args:
        batch: The batch.
        size: Number of samples in the batch.
        indices: Positions of the samples in the batch.
        split: How to split the batch.

    Raises:
        BatchError: H205 if `split` is a function.
    """
    if callable(split):
        raise _unsplittable(
            "the batch is split by a function, so single samples cannot be selected"
        )
    return _part_of(batch, split, size, list(indices))


def _is_usual(batch: Any) -> bool:
    """Return whether a batch is a flat tuple or list of plain tensors."""
    if type(batch) not in (tuple, list):
        return False
    # A loop is faster than `all`, and this function runs three times per step.
    for leaf in batch:
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return False
    return len(batch) > 0


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return all tensors in a batch, in order."""
    if _is_usual(batch):
        return list(batch)
    tensors = []
    for _, leaf, _ in _leaves(batch, 0, "batch"):
        if isinstance(leaf, PackedSequence):
            tensors.append(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
    return tensors


def leaves_of(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a batch with their paths, in order.

    A list of strings or numbers is a single leaf.
    """
    for path, leaf, _ in _leaves(batch, 0, "batch"):
        yield path, leaf


def fresh(batch: Any) -> Any:
    """Return a batch with new containers and copied arrays, which a loss function may modify.

    Tensors are not copied, because their version counters show whether they were modified. Arrays
    have no such counters.
    """
    if _is_usual(batch):
        return type(batch)(batch)
    return _map(batch, 0, "batch", _copy_array)


def copied(batch: Any) -> Any:
    """Return a copy of the batch, including all tensors and arrays."""
    return _map(batch, 0, "batch", _copy_leaf)


def _copy_array(path: str, leaf: Any, how: SplitSpec) -> Any:  # noqa: ARG001
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _copy_leaf(path: str, leaf: Any, how: SplitSpec) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=leaf.data.clone())
    return _copy_array(path, leaf, how)


# --- the tree -------------------------------------------------------------------------------------


def _is_plain_list(node: Any) -> bool:
    """Return whether a node is a list or tuple of plain values, which counts as a single leaf.

    The values must be all strings, all bytes or all numbers.
    """
    if type(node) not in (list, tuple):
        return False
    return any(all(isinstance(value, kind) for value in node) for kind in _PLAIN_KINDS)


def _children(node: Any, spec: SplitSpec) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf."""
    if spec == "items" or _is_plain_list(node):
        return None
    # A PackedSequence is a named tuple of tensors, but their first dimension is not the batch
    # dimension.
    if isinstance(node, PackedSequence):
        return None
    return children_of(node)


def _spec_of(spec: SplitSpec, key: Any, path: str) -> SplitSpec:
    """Return the part of a `split` specification that applies to one child of a container.

    Args:
        spec: The part of the specification that applies to the container.
        key: The child's key in the container.
        path: The child's path in the batch, for the error message.

    Raises:
        BatchError: H204 if the specification has no entry for the child.
    """
    if spec is None or isinstance(spec, (int, str)):
        return spec
    try:
        return spec[key]
    except (KeyError, IndexError, TypeError) as error:
        raise BatchError(
            f"split= has no entry for {path}",
            limit="every part of the batch needs a dimension, None (shared) or 'items'",
            fix=f"add an entry for {path}, for example 0.",
            rule="H204",
        ) from error


def _leaves(node: Any, spec: SplitSpec, path: str) -> Iterator[tuple[str, Any, SplitSpec]]:
    """Yield every leaf with its path and its part of the `split` specification."""
    children = _children(node, spec)
    if children is None:
        yield path, node, spec
        return
    for key, child in children.items():
        child_path = f"{path}[{key!r}]"
        yield from _leaves(child, _spec_of(spec, key, child_path), child_path)


def _map(
    node: Any, spec: SplitSpec, path: str, function: Callable[[str, Any, SplitSpec], Any]
) -> Any:
    """Return the tree with every leaf replaced by the result of a function.

    The function is called with the leaf's path, the leaf, and the leaf's part of the `split`
    specification.
    """
    children = _children(node, spec)
    if children is None:
        return function(path, node, spec)
    mapped_children = {}
    for key, child in children.items():
        child_path = f"{path}[{key!r}]"
        mapped_children[key] = _map(child, _spec_of(spec, key, child_path), child_path, function)
    return rebuild(node, mapped_children)


# --- one leaf -------------------------------------------------------------------------------------


def _size(path: str, leaf: Any, how: SplitSpec) -> int | None:
    """Return the number of samples in a leaf, or None if the leaf is shared by all micro-batches.

    Raises:
        BatchError: H204 if `how` does not apply to the leaf, H205 if the leaf has an unsupported
            type.
    """
    if how == "items" and _is_sequence(leaf):
        return len(leaf)
    if how is not None and not isinstance(how, int):
        raise BatchError(
            f"split= has {how!r} for {path}, a {type(leaf).__name__}",
            limit=(
                "an entry must be a dimension, None (shared), or 'items' for a sequence with one"
                " entry per sample"
            ),
            fix=f"pass one of these for {path}.",
            rule="H204",
        )
    if how is None or isinstance(leaf, _SHARED) or _is_plain_list(leaf):
        return None
    if not _is_cuttable(leaf):
        raise _unsplittable(
            f"{path} is a {type(leaf).__name__}, and holdfast does not know how to split it by"
            " samples"
        )
    if leaf.ndim == 0:
        return None
    if not -leaf.ndim <= how < leaf.ndim:
        raise BatchError(
            f"{path} has shape {tuple(leaf.shape)}",
            limit=f"split= has dimension {how} for this value",
            fix=(
                f"pass a dimension from 0 to {leaf.ndim - 1}, or None if all micro-batches share"
                " the whole value."
            ),
            rule="H204",
        )
    return int(leaf.shape[how])


def _is_sequence(leaf: Any) -> bool:
    return hasattr(leaf, "__len__") and not isinstance(leaf, (str, bytes, Mapping))


def _is_cuttable(leaf: Any) -> bool:
    """Return whether a leaf is a NumPy array or a dense tensor, which can be split."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, np.ndarray)


def _part_of(batch: Any, spec: SplitSpec, size: int, part: slice | list[int]) -> Any:
    """Return the selected samples of a batch.

    With a slice, the result contains views of the batch's tensors. With a list, it contains copies.
    """

    def cut(path: str, leaf: Any, how: SplitSpec) -> Any:
        is_list_of_samples = how is not None and _is_plain_list(leaf) and len(leaf) == size
        if how == "items" or is_list_of_samples:
            if isinstance(part, slice):
                return leaf[part]
            return type(leaf)([leaf[place] for place in part])
        if _size(path, leaf, how) is None:
            return leaf
        # The remainder turns a negative dimension into the equivalent non-negative one.
        dimensions_before = how % leaf.ndim
        return leaf[(slice(None),) * dimensions_before + (part,)]

    return _map(batch, spec, "batch", cut)


# --- errors ---------------------------------------------------------------------------------------


def _unsplittable(problem: str) -> BatchError:
    return BatchError(
        problem, limit="only parts with a known batch dimension can be split", fix=_FIX, rule="H205"
    )


def _disagreement(batch: Any, spec: SplitSpec) -> BatchError:
    shapes = []
    for path, leaf, how in _leaves(batch, spec, "batch"):
        if _size(path, leaf, how) is not None:
            shapes.append(f"{path} {_describe_shape(leaf)}")
    return BatchError(
        "the parts of the batch disagree on the number of samples:"
        f" {', '.join(shapes[:_LEAVES_LISTED])}",
        limit="all parts must have the same size along the batch dimension",
        fix=_FIX,
        rule="H204",
    )


def _describe_shape(leaf: Any) -> str:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return str(tuple(leaf.shape))
    return f"{len(leaf)} items"
