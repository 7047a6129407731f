"""Find the batch dimension of any tree of tensors, and cut the tree into micro-batches.

How a batch is cut depends on ``split``:

default
    Every tensor and array with at least one dimension is cut along dimension 0; all must have the
    same size there. A list of that many strings or numbers is cut too. Everything else is passed to
    every part.
``split=1``
    The same along dimension 1, for sequence-first batches.
``split={...}``
    A prefix of the batch's structure. Each leaf is a dimension, None (every part shares it), or
    "items" (a sequence with one entry per sample, of any shape).
``split=f``
    ``f(batch, micro_batch_size)`` returns the list of micro-batches.

Tensors are cut as views, without a copy. If something cannot be cut, the error names it; nothing is
silently ignored.
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

# Types of leaves that are never cut: every part gets the whole leaf.
_SHARED = (str, bytes, bool, int, float, complex, type(None), np.generic, torch.device, torch.dtype)

# A list of values of one of these kinds, such as the names of utterances, is one leaf.
_PLAIN_KINDS: tuple[tuple[type, ...], ...] = ((str,), (bytes,), (int, float))

# The number of leaves that an error message lists.
_LEAVES_LISTED = 6

_FIX = (
    "pass split= with the batch dimension of each part, for instance split={'frames': 1, 'mask':"
    " None, 'targets': 'items'}, or micro_batch_size=None to turn splitting off."
)


def batch_size(batch: Any, split: Split = 0) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: The batch.
        split: How it is cut.

    Raises:
        BatchError: H204 if its parts have different sizes, H205 if nothing can be cut or a part is
            of an unknown kind.
    """
    if callable(split):
        return len(split(batch, 1))
    sizes: set[int] = set()
    if split == 0 and _is_usual(batch):
        # This takes a tenth of the time of the search below.
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
        raise _uncuttable("the batch holds no tensor with a batch dimension")
    return sizes.pop()


def micro_batches(
    batch: Any, size: int, micro_batch_size: int, split: Split = 0, *, smallest: int = 1
) -> list[tuple[Any, int]]:
    """Cut a batch; return pairs of a part and its number of samples, in order.

    Args:
        batch: The batch.
        size: Its number of samples.
        micro_batch_size: Samples in a part, at most.
        split: How it is cut.
        smallest: A last part that is shorter than this is merged into the one before it. If `split`
            is a function, it decides that itself.

    Raises:
        BatchError: H204 if a function returns the wrong number of parts.
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
            f"split(batch, {micro_batch_size}) returned {len(parts)} parts of {size} samples",
            limit=f"{len(sizes)} are needed, each of {micro_batch_size} samples except the last",
            fix="cut the batch in order into parts of exactly micro_batch_size samples.",
            rule="H204",
        )
    return list(zip(parts, sizes, strict=True))


def select(batch: Any, size: int, indices: Sequence[int], split: Split = 0) -> Any:
    """Return a batch of some samples, in the order of `indices`, as a copy.

    Args:
        batch: The batch.
        size: Its number of samples.
        indices: Places of the samples in the batch.
        split: How it is cut.

    Raises:
        BatchError: H205 if `split` is a function.
    """
    if callable(split):
        raise _uncuttable("a batch that a function cuts")
    return _part_of(batch, split, size, list(indices))


def _is_usual(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of plain tensors, which needs no search."""
    if type(batch) not in (tuple, list):
        return False
    # A loop rather than `all`, because this runs three times in each step.
    for leaf in batch:
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return False
    return len(batch) > 0


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return every tensor of a batch, in order."""
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
    """Yield every leaf of a batch with its path, in order.

    A list of strings or numbers is one leaf.
    """
    for path, leaf, _ in _leaves(batch, 0, "batch"):
        yield path, leaf


def fresh(batch: Any) -> Any:
    """Return the batch with new containers and copied arrays, so that a loss function may change
    both. Tensors are shared, because their version counters show whether they were changed; arrays
    have no such counters.
    """
    if _is_usual(batch):
        return type(batch)(batch)
    return _map(batch, 0, "batch", _copy_array)


def copied(batch: Any) -> Any:
    """Return the batch with every tensor and array copied."""
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
    """Return whether this is a list of values of one kind, which is treated as a single leaf."""
    if type(node) not in (list, tuple):
        return False
    return any(all(isinstance(value, kind) for value in node) for kind in _PLAIN_KINDS)


def _children(node: Any, spec: SplitSpec) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf."""
    if spec == "items" or _is_plain_list(node):
        return None
    # It is a named tuple of tensors, but their first dimension is not a batch dimension.
    if isinstance(node, PackedSequence):
        return None
    return children_of(node)


def _spec_of(spec: SplitSpec, key: Any, path: str) -> SplitSpec:
    """Return the part of a `split` specification that applies to one child of a container.

    Raises:
        BatchError: H204 if there is none.
    """
    if spec is None or isinstance(spec, (int, str)):
        return spec
    try:
        return spec[key]
    except (KeyError, IndexError, TypeError) as error:
        raise BatchError(
            f"split= says nothing about {path}",
            limit="every part of the batch needs a dimension, None (shared) or 'items'",
            fix=f"add an entry for {path}, for instance 0.",
            rule="H204",
        ) from error


def _leaves(node: Any, spec: SplitSpec, path: str) -> Iterator[tuple[str, Any, SplitSpec]]:
    """Yield every leaf with its path and how it is cut."""
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
    """Return the tree with every leaf replaced by what a function returns for it.

    The function is called with the leaf's path, the leaf, and how it is cut.
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
    """Return the number of samples in one leaf, or None if every part shares it.

    Raises:
        BatchError: H204 if `how` does not apply to the leaf, H205 if the leaf is of an unknown
            kind.
    """
    if how == "items" and _is_sequence(leaf):
        return len(leaf)
    if how is not None and not isinstance(how, int):
        raise BatchError(
            f"split= says {how!r} about {path}, a {type(leaf).__name__}",
            limit=(
                "it takes a dimension, None (shared), or 'items' for a sequence with one entry per"
                " sample"
            ),
            fix=f"name one of these for {path}.",
            rule="H204",
        )
    if how is None or isinstance(leaf, _SHARED) or _is_plain_list(leaf):
        return None
    if not _is_cuttable(leaf):
        raise _uncuttable(
            f"{path} is a {type(leaf).__name__}, and it is unknown whether each sample has a part"
            " in it"
        )
    if leaf.ndim == 0:
        return None
    if not -leaf.ndim <= how < leaf.ndim:
        raise BatchError(
            f"{path} has shape {tuple(leaf.shape)}",
            limit=f"split= names its dimension {how}",
            fix=f"name a dimension from 0 to {leaf.ndim - 1}, or None if every part shares it.",
            rule="H204",
        )
    return int(leaf.shape[how])


def _is_sequence(leaf: Any) -> bool:
    return hasattr(leaf, "__len__") and not isinstance(leaf, (str, bytes, Mapping))


def _is_cuttable(leaf: Any) -> bool:
    """Return whether a leaf is an array, or a tensor that is neither sparse nor nested."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, np.ndarray)


def _part_of(batch: Any, spec: SplitSpec, size: int, part: slice | list[int]) -> Any:
    """Return some samples of a batch.

    Tensors are views if the samples are given as a slice, and copies if they are given as a list.
    """

    def cut(path: str, leaf: Any, how: SplitSpec) -> Any:
        is_list_of_samples = how is not None and _is_plain_list(leaf) and len(leaf) == size
        if how == "items" or is_list_of_samples:
            if isinstance(part, slice):
                return leaf[part]
            return type(leaf)([leaf[place] for place in part])
        if _size(path, leaf, how) is None:
            return leaf
        dimensions_before = how % leaf.ndim
        return leaf[(slice(None),) * dimensions_before + (part,)]

    return _map(batch, spec, "batch", cut)


# --- errors ---------------------------------------------------------------------------------------


def _uncuttable(what: str) -> BatchError:
    return BatchError(
        what, limit="only parts with a known batch dimension can be cut", fix=_FIX, rule="H205"
    )


def _disagreement(batch: Any, spec: SplitSpec) -> BatchError:
    shapes = []
    for path, leaf, how in _leaves(batch, spec, "batch"):
        if _size(path, leaf, how) is not None:
            shapes.append(f"{path} {_describe_shape(leaf)}")
    return BatchError(
        "the parts of the batch disagree on the number of samples:"
        f" {', '.join(shapes[:_LEAVES_LISTED])}",
        limit="all must have the same size along the batch dimension",
        fix=_FIX,
        rule="H204",
    )


def _describe_shape(leaf: Any) -> str:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return str(tuple(leaf.shape))
    return f"{len(leaf)} items"
