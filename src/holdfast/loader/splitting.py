"""Find the batch dimension of any pytree of tensors, and cut micro-batches out of it.

    default      every tensor and array with at least one dimension is cut along dimension 0; they
                 must agree on its size. A list of that many strings or numbers is cut too; all else
                 goes to every part.
    split=1      as above along dimension 1 (sequence-first batches)
    split={...}  a prefix of the batch's structure: a dimension, None (shared), or "items" (a
                 sequence with one entry per sample, of whatever shape)
    split=f      f(batch, micro_batch_size) returns the list of micro-batches

Tensors are cut as views: no copy. What cannot be cut is an error that names the leaves, never a
silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import BatchError

SplitSpec: TypeAlias = int | Literal["items"] | Mapping[Any, Any] | Sequence[Any] | None
SplitFunction: TypeAlias = Callable[[Any, int], Sequence[Any]]
Split: TypeAlias = SplitSpec | SplitFunction

_FIX = (
    "pass split= with the batch dimension of each part, for instance split={'frames': 1, 'mask':"
    " None, 'targets': 'items'}, or micro_batch_size=None to turn splitting off."
)


def batch_size(batch: Any, split: Split = 0) -> int:
    """Return the number of samples in a batch.

    H204 if leaves disagree, H205 if nothing can be cut or understood.
    """
    if callable(split):
        return len(split(batch, 1))
    sizes = set[int]()
    if split == 0 and _is_usual(batch):
        for leaf in batch:  # the usual batch, in a tenth of the time
            if leaf.ndim:
                sizes.add(leaf.shape[0])
    else:
        measured = (_size(path, leaf, how) for path, leaf, how in _leaves(batch, split, "batch"))
        sizes = {size for size in measured if size is not None}
    if len(sizes) > 1:
        raise _disagreement(batch, split)
    found: int | None = next(iter(sizes), None)
    if found is None:
        raise _uncuttable("the batch holds no tensor with a batch dimension")
    return found


def micro_batches(
    batch: Any, size: int, micro_batch_size: int, split: Split = 0, *, smallest: int = 1
) -> list[tuple[Any, int]]:
    """Cut a batch of `size` samples; return pairs of a part and its number of samples, in order.

    A part has at most `micro_batch_size`, but a rest shorter than `smallest` is added to the part
    before it. A function that cuts decides for itself.
    """
    if callable(split):
        parts = list(split(batch, micro_batch_size))
        whole, rest = divmod(size, micro_batch_size)
        sizes = [micro_batch_size] * whole + [rest] * (rest > 0)
        if len(parts) != len(sizes):
            raise BatchError(
                f"split(batch, {micro_batch_size}) returned {len(parts)} parts of {size} samples",
                limit=f"{len(sizes)} are needed, each of {micro_batch_size} samples but the last",
                fix="cut the batch in order into parts of exactly micro_batch_size samples.",
                rule="H204",
            )
        return list(zip(parts, sizes, strict=True))
    starts = list(range(0, size, micro_batch_size))
    if len(starts) > 1 and size - starts[-1] < smallest:
        starts.pop()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], size], strict=False)]
    ends = zip(starts, lengths, strict=True)
    return [
        (_part_of(batch, split, size, slice(start, start + length)), length)
        for start, length in ends
    ]


def select(batch: Any, size: int, indices: Sequence[int], split: Split = 0) -> Any:
    """Return a batch of some samples, in the order of `indices`, copied.

    H205 for a function that cuts.
    """
    if callable(split):
        raise _uncuttable("a batch that a function cuts")

    return _part_of(batch, split, size, list(indices))


def _is_usual(batch: Any) -> bool:
    """Say whether this is a tuple or list of plain tensors, which needs no search."""
    if type(batch) not in (tuple, list):
        return False
    for leaf in batch:  # a loop: asked three times in each step
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return False
    return len(batch) > 0


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return every tensor of a batch, in order."""
    if _is_usual(batch):
        return list(batch)
    leaves = (leaf for _, leaf, _ in _leaves(batch, 0, "batch"))
    leaves = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def leaves_of(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a batch with its path, in order.

    A list of strings or numbers is one leaf.
    """
    for path, leaf, _ in _leaves(batch, 0, "batch"):
        yield path, leaf


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return autograd's counters of in-place changes; -1 for a tensor that does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def fresh(batch: Any) -> Any:
    """Return the batch in new containers and with arrays copied, so that a loss function may change
    these.

    Tensors are shared: their version counters show whether they were changed; arrays have none.
    """
    if _is_usual(batch):
        return type(batch)(batch)
    return _map(
        batch, 0, "batch", lambda _, leaf, __: leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    )


def copied(batch: Any) -> Any:
    """Return the batch with every tensor and array copied."""
    return _map(batch, 0, "batch", lambda _, leaf, __: _copy(leaf))


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=leaf.data.clone())
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


_SHARED = (str, bytes, bool, int, float, complex, type(None), np.generic, torch.device, torch.dtype)


def _is_plain_list(node: Any) -> bool:
    """Say whether this is a list of values of one kind, such as utterance names, that is cut as
    a whole.
    """
    kinds: tuple[tuple[type, ...], ...] = ((str,), (bytes,), (int, float))
    return type(node) in (list, tuple) and any(
        all(isinstance(item, kind) for item in node) for kind in kinds
    )


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf."""
    if isinstance(node, PackedSequence) or _is_plain_list(node):
        # The first is a named tuple of tensors whose first dimension is no batch dimension
        return None
    return children_of(node)


def _spec_of(spec: SplitSpec, key: Any, path: str) -> SplitSpec:
    """Return the part of a prefix specification that is meant for one child."""
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
    children = None if spec == "items" else _children(node)
    if children is None:
        yield path, node, spec
        return
    for key, child in children.items():
        child_path = f"{path}[{key!r}]"
        yield from _leaves(child, _spec_of(spec, key, child_path), child_path)


def _map(
    node: Any, spec: SplitSpec, path: str, function: Callable[[str, Any, SplitSpec], Any]
) -> Any:
    children = None if spec == "items" else _children(node)
    if children is None:
        return function(path, node, spec)
    made = {}
    for key, child in children.items():
        child_path = f"{path}[{key!r}]"
        made[key] = _map(child, _spec_of(spec, key, child_path), child_path, function)
    return rebuilt(node, made)


def _size(path: str, leaf: Any, how: SplitSpec) -> int | None:
    """Return the samples of one leaf, or None for one that every part shares."""
    if how == "items" and hasattr(leaf, "__len__") and not isinstance(leaf, (str, bytes, Mapping)):
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
    if not _is_array(leaf) or (
        isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided)
    ):
        raise _uncuttable(
            f"{path} is a {type(leaf).__name__}, and whether each sample has a part in it is"
            " unknown"
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


def _part_of(batch: Any, spec: SplitSpec, size: int, part: slice | list[int]) -> Any:
    """Return some samples of a batch.

    Tensors as views for a slice, as copies for a list of places.
    """

    def choose(path: str, leaf: Any, how: SplitSpec) -> Any:
        if how == "items" or (how is not None and _is_plain_list(leaf) and len(leaf) == size):
            return (
                leaf[part]
                if isinstance(part, slice)
                else type(leaf)([leaf[place] for place in part])
            )
        if _size(path, leaf, how) is None:
            return leaf
        return leaf[(slice(None),) * (how % leaf.ndim) + (part,)]

    return _map(batch, spec, "batch", choose)


def _uncuttable(what: str) -> BatchError:
    return BatchError(
        what, limit="only parts with a known batch dimension can be cut", fix=_FIX, rule="H205"
    )


def _disagreement(batch: Any, spec: SplitSpec) -> BatchError:
    shapes = [
        f"{path} {tuple(leaf.shape) if _is_array(leaf) else f'{len(leaf)} items'}"
        for path, leaf, how in _leaves(batch, spec, "batch")
        if _size(path, leaf, how) is not None
    ]
    return BatchError(
        f"the parts of the batch disagree on the number of samples: {', '.join(shapes[:6])}",
        limit="all must have the same size along the batch dimension",
        fix=_FIX,
        rule="H204",
    )
