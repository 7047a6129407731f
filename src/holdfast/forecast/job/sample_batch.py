"""Create batches of any size from the user's sample batch.

Every sample in a new batch is a copy of the longest sample, so that the plan covers the worst case
and memory grows evenly with the batch size. The parts of a batch that depend on its size are
inferred, and reported as an assumption. They are all tensors and arrays whose dimension 0 equals
the batch size, and all lists with one plain value per sample, such as file names.

Lists with a tensor or a dict per sample are refused: user code loops over such a list, so it runs a
different sequence of operations for each length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import BatchError
from holdfast.forecast.trace.events import Assumption
from holdfast.loader.splitting import Split, batch_size, micro_batches

Values = npt.NDArray[Any]

_PLAIN_TYPES = (str, bytes, bool, int, float, complex, type(None), np.generic)
# A message lists at most this many parts of a batch.
_MOST_NAMED = 4
# The depth to which objects are searched for hidden tensors. For example, torch_geometric's Data
# keeps its tensors in a dict inside an attribute.
_SEARCH_DEPTH = 4
_OWN_BATCH = "write the step as step(batch_size), so that it creates its own batch."
_NAME_SIZE = (
    'add "batch_size": ... to the dict that build() returns, or give build() a parameter'
    " micro_batch_size and create a batch of that size."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The description of a tensor or numpy array in a batch.

    Args:
        shape: The shape of the tensor or array.
        dtype: The torch or numpy dtype.
        device: The tensor's device, or None for an array.
        requires_grad: Whether a tensor requires a gradient.
        is_floating: Whether the elements are floating-point or complex numbers.
        values: The known values of an integer or boolean tensor or array, otherwise None.
    """

    shape: tuple[int, ...]
    dtype: Any
    device: torch.device | None
    requires_grad: bool
    is_floating: bool
    values: Values | None


# A function that returns the values of an integer or boolean tensor, or None if they are unknown.
Read = Callable[[torch.Tensor], Values | None]
# A function that creates a tensor from its description.
Make = Callable[[ArraySpec], torch.Tensor]


class SampleBatch:
    """The user's sample batch, from which batches of any size can be created.

    Args:
        batch: A tensor or any nested container.
        read: A function that reads the values of tensors in the batch.
        make: A function that creates the tensors of new batches.
        size: The number of samples in the batch. It is inferred from the shapes if it is None, or
            if no tensor or array has this size in dimension 0.

    Raises:
        BatchError: H413 if the batch cannot be resized, or its size cannot be inferred.
    """

    def __init__(self, batch: Any, *, read: Read, make: Make, size: int | None = None) -> None:
        self._make = make
        # The batch, with each tensor and each array replaced by its `ArraySpec`.
        self._batch = _map_leaves(batch, lambda leaf, path: _describe(leaf, path, read))
        nodes = list(_nodes(self._batch))
        self._leaves = [(path, node) for path, node in nodes if _children(node) is None]
        self._check_not_empty()
        _check_no_list_of_samples(nodes)
        self.size = size or 0
        if not any(self._is_batched(leaf) for _, leaf in self._leaves):
            self.size = self._find_size()
        # The paths of lists with one plain value per sample.
        self._lists = [path for path, node in nodes if self._has_value_per_sample(node)]
        self._longest = self._find_longest()

    def resized(self, size: int) -> Any:
        """Return a new batch with `size` copies of the longest sample."""
        return self._rebuild(self._batch, "batch", size)

    def parts(self, batch: Any, count: int) -> list[Any]:
        """Split a batch into equal micro-batches, as `Guard` does.

        Args:
            batch: A batch returned by `resized`. Its size must be a multiple of `count`.
            count: The number of micro-batches.
        """
        return cut(batch, count, self._how_to_split(self._batch, "batch"))

    def assumptions(self) -> Iterator[Assumption]:
        """Yield the assumptions about which parts of the batch depend on its size."""
        yield Assumption(
            what=(
                f"the sample batch was assumed to have {self.size} samples:"
                f" {_describe_shapes(self._leaves)}; in batches of other sizes, every"
                " sample is a copy of the longest one"
            )
        )
        fixed = [
            (path, leaf)
            for path, leaf in self._leaves
            if isinstance(leaf, ArraySpec) and leaf.shape and not self._is_batched(leaf)
        ]
        if fixed:
            yield Assumption(
                what=(
                    "these tensors were assumed not to depend on the batch size:"
                    f" {_describe_shapes(fixed)}"
                )
            )

    # Infer which parts depend on the batch size.

    def _arrays(self) -> list[ArraySpec]:
        """Return the specs of all tensors and arrays with at least one dimension."""
        return [leaf for _, leaf in self._leaves if isinstance(leaf, ArraySpec) and leaf.shape]

    def _check_not_empty(self) -> None:
        arrays = self._arrays()
        if arrays and all(spec.shape[0] == 0 for spec in arrays):
            raise _unusable(
                f"the sample batch is empty: {_describe_shapes(self._leaves)}",
                "all other batches are made of copies of a sample of the sample batch",
                "return a batch with at least one sample.",
            )

    def _find_size(self) -> int:
        """Return the most frequent size of dimension 0 among the tensors and arrays.

        A size of 1 counts only if no other size occurs, because it often marks a broadcast
        dimension.
        """
        counts = Counter(int(spec.shape[0]) for spec in self._arrays())
        larger = Counter({size: count for size, count in counts.items() if size != 1})
        ranked = (larger or counts).most_common(2)
        if not ranked:
            raise _unusable(
                f"the sample batch has no batch dimension: {_describe_shapes(self._leaves)}",
                "dimension 0 of its tensors must be the batch dimension",
                _NAME_SIZE,
            )
        if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
            sizes = sorted(size for size, _ in ranked)
            raise _unusable(
                f"the sample batch may have {' or '.join(map(str, sizes))} samples:"
                f" {_describe_shapes(self._leaves)}",
                "the batch size is the most frequent size of dimension 0 of its tensors",
                _NAME_SIZE,
            )
        return ranked[0][0]

    def _is_batched(self, leaf: Any) -> TypeGuard[ArraySpec]:
        """Return whether a leaf is a tensor or array with one slice per sample."""
        if not isinstance(leaf, ArraySpec) or not leaf.shape:
            return False
        return leaf.shape[0] == self.size

    def _has_value_per_sample(self, node: Any) -> bool:
        if not isinstance(node, (list, tuple)) or len(node) != self.size:
            return False
        return all(isinstance(item, _PLAIN_TYPES) for item in node)

    def _find_longest(self) -> int:
        """Return the index of the longest sample in the user's batch.

        The index is derived from a tensor of lengths or from a mask in the batch. It is 0 if the
        batch has neither.
        """
        length = self._find_length()
        for _, leaf in self._leaves:
            if not self._is_batched(leaf) or leaf.values is None or leaf.values.size == 0:
                continue
            values = leaf.values
            if values.ndim == 1 and values.max() == length:
                # The tensor contains the length of each sample, because its maximum is the padded
                # length.
                return int(values.argmax())
            if values.ndim > 1 and {int(values.min()), int(values.max())} <= {0, 1}:
                # The tensor is a mask, in which the longest sample has the most ones.
                return int(values.reshape(len(values), -1).sum(axis=1).argmax())
        return 0

    def _find_length(self) -> int | None:
        """Return the length of the padded samples, which is the largest size of dimension 1.

        If the batch has integer tensors, such as token ids, floating-point tensors are ignored,
        because their dimension 1 is often not the length.

        Returns:
            The length, or None if no tensor has a dimension 1.
        """
        of_integers: list[int] = []
        of_floats: list[int] = []
        for _, leaf in self._leaves:
            if self._is_batched(leaf) and len(leaf.shape) > 1:
                lengths = of_floats if leaf.is_floating else of_integers
                lengths.append(leaf.shape[1])
        return max(of_integers or of_floats, default=None)

    # Making and splitting batches.

    def _how_to_split(self, node: Any, path: str) -> Any:
        """Return the `split` argument that makes `micro_batches` split a part of the batch.

        Args:
            node: The part: a container or a leaf.
            path: The path of the part in the batch.
        """
        if path in self._lists:
            return "items"
        children = _children(node)
        if children is None:
            return 0 if self._is_batched(node) else None
        return {
            key: self._how_to_split(child, f"{path}[{key!r}]") for key, child in children.items()
        }

    def _rebuild(self, node: Any, path: str, size: int) -> Any:
        """Return a copy of a part of the batch, resized to `size` samples.

        Args:
            node: The part: a container or a leaf.
            path: The path of the part in the batch.
            size: The number of samples in the copy.
        """
        if path in self._lists:
            items = itertools.islice(itertools.cycle(node), size)
            return _with_children(node, dict(enumerate(items)))
        children = _children(node)
        if children is not None:
            resized = {
                key: self._rebuild(child, f"{path}[{key!r}]", size)
                for key, child in children.items()
            }
            return _with_children(node, resized)
        if not isinstance(node, ArraySpec):
            return node
        if self._is_batched(node):
            node = self._resize(node, size)
        return self._make_array(node)

    def _resize(self, spec: ArraySpec, size: int) -> ArraySpec:
        values = spec.values
        if values is not None:
            values = np.repeat(values[[self._longest]], size, axis=0)
        return dataclasses.replace(spec, shape=(size, *spec.shape[1:]), values=values)

    def _make_array(self, spec: ArraySpec) -> Any:
        if spec.device is not None:
            return self._make(spec)
        if spec.values is not None:
            return spec.values
        return np.zeros(spec.shape, spec.dtype)


# --- describing a batch ---------------------------------------------------------------------------


def _describe(leaf: Any, path: str, read: Read) -> Any:
    """Return the `ArraySpec` of a tensor or array, or any other leaf unchanged."""
    if isinstance(leaf, PackedSequence) or _hides_tensors(leaf):
        raise _unusable(
            f"the sample batch has a {type(leaf).__name__} that contains tensors, at {path}",
            "only tensors in dicts, lists, tuples and dataclasses can be resized",
            f"return one of these containers, or {_OWN_BATCH}",
        )
    if isinstance(leaf, np.ndarray):
        is_floating = bool(np.issubdtype(leaf.dtype, np.inexact))
        return ArraySpec(
            shape=leaf.shape,
            dtype=leaf.dtype,
            device=None,
            requires_grad=False,
            is_floating=is_floating,
            values=None if is_floating else leaf,
        )
    if isinstance(leaf, torch.Tensor):
        return _describe_tensor(leaf, read)
    return leaf


def _describe_tensor(tensor: torch.Tensor, read: Read) -> ArraySpec:
    if tensor.layout != torch.strided or tensor.is_nested:
        nested = ", nested" if tensor.is_nested else ""
        raise _unusable(
            f"the sample batch has a tensor of layout {tensor.layout}{nested}",
            "only dense tensors can be resized",
            _OWN_BATCH,
        )
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    return ArraySpec(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
        is_floating=is_floating,
        values=None if is_floating else read(tensor),
    )


def _check_no_list_of_samples(nodes: Sequence[tuple[str, Any]]) -> None:
    """Refuse a batch that has a list with a tensor or a dict per sample (H413).

    A top-level tuple is allowed: collated dataset items have one entry per column, not per sample.
    """
    for path, node in nodes:
        if path == "batch" and isinstance(node, tuple):
            continue
        if _is_list_of_dicts(node) or _is_list_of_ragged_arrays(node):
            raise _unusable(
                f"the sample batch has a list with a tensor or a dict for each sample, at {path}",
                (
                    "each length of such a list runs different operations, so the memory of other"
                    " sizes cannot be extrapolated"
                ),
                f"collate the list into one tensor in the data loader, or {_OWN_BATCH}",
            )


def _is_list_of_dicts(node: Any) -> bool:
    """Return whether a node is a list or tuple of dicts that all have the same keys."""
    if not isinstance(node, (list, tuple)) or not node:
        return False
    if not all(isinstance(item, Mapping) for item in node):
        return False
    return all(item.keys() == node[0].keys() for item in node)


def _is_list_of_ragged_arrays(node: Any) -> bool:
    """Return whether a node is a list or tuple of arrays whose sizes differ only in dimension 0.

    Such a list has one array per sample. If the items were columns of a batch, dimension 0 would
    have the same size in all of them.
    """
    if not isinstance(node, (list, tuple)) or len(node) < 2:
        return False
    if not all(isinstance(item, ArraySpec) and item.shape for item in node):
        return False
    rests = {(str(item.dtype), item.shape[1:]) for item in node}
    lengths = {item.shape[0] for item in node}
    return len(rests) == 1 and len(lengths) > 1


def _hides_tensors(leaf: Any, depth: int = _SEARCH_DEPTH) -> bool:
    """Return whether an object that cannot be resized contains tensors in its attributes.

    Args:
        leaf: The object.
        depth: How many more levels of attributes and containers to search.
    """
    if isinstance(leaf, torch.Tensor):
        # At the first level, the tensor is the leaf itself and therefore not hidden.
        return depth < _SEARCH_DEPTH
    if depth == 0 or isinstance(leaf, (*_PLAIN_TYPES, np.ndarray, type, nn.Module)):
        return False
    children = children_of(leaf)
    if children is None:
        children = getattr(leaf, "__dict__", {})
    return any(_hides_tensors(value, depth - 1) for value in children.values())


def _describe_shapes(leaves: Sequence[tuple[str, Any]]) -> str:
    """List the first few arrays with their shapes or, without arrays, other leaves with types."""
    arrays = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, ArraySpec)]
    others = [
        f"{path} a {type(leaf).__name__}"
        for path, leaf in leaves
        if not isinstance(leaf, ArraySpec)
    ]
    parts = arrays or others or ["it is empty"]
    text = ", ".join(parts[:_MOST_NAMED])
    return f"{text}, ..." if len(parts) > _MOST_NAMED else text


# --- nested containers ----------------------------------------------------------------------------


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container, keyed by position or name, or None for a leaf."""
    if isinstance(node, (PackedSequence, ArraySpec)):
        return None
    return children_of(node)


def _with_children(node: Any, children: dict[Any, Any]) -> Any:
    """Return a copy of a container with new children.

    A dataclass is rebuilt without running its ``__init__``, because checks there would reject an
    `ArraySpec` in place of a tensor.
    """
    return rebuild(node, children, checked=False)


def _map_leaves(node: Any, function: Callable[[Any, str], Any], path: str = "batch") -> Any:
    children = _children(node)
    if children is None:
        return function(node, path)
    mapped = {
        key: _map_leaves(child, function, f"{path}[{key!r}]") for key, child in children.items()
    }
    return _with_children(node, mapped)


def _nodes(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each container and leaf, outermost first."""
    yield path, node
    for key, child in (_children(node) or {}).items():
        yield from _nodes(child, f"{path}[{key!r}]")


def cut(batch: Any, count: int, split: Split = 0) -> list[Any]:
    """Split a batch into `count` equal micro-batches, whose tensors are views of the batch."""
    size = batch_size(batch, split)
    return [part for part, _ in micro_batches(batch, size, size // count, split)]


def _unusable(what: str, limit: str, fix: str) -> BatchError:
    return BatchError(what, limit=limit, fix=fix, rule="H413")
