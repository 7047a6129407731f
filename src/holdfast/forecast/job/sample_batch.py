"""A sample batch, and how it becomes a batch of another size.

Every sample of the new batch is like the longest of the sample batch, so that a plan holds for the
worst batch, and memory grows evenly with the size. What is the batch's is found by looking, and
written down: dimension ``split`` (0) of every tensor and array where it is the batch size, and
lists with one plain value for each sample, such as names.

A list with a tensor or a dict for each sample is refused: each size of it would be another program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import BatchError
from holdfast.forecast.trace.events import Assumption
from holdfast.loader.splitting import Split, batch_size, micro_batches

Values = npt.NDArray[Any]
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.generic)
_MOST_NAMED = 4  # leaves in a message
# To which objects are looked into: torch_geometric's Data keeps its tensors in a dict of an
# attribute
_DEPTH = 4
_OWN_BATCH = "write the step as step(batch_size), so that it makes its own batch."
_SAID_SIZE = (
    'return {"batch_size": ...} with it, or write build(micro_batch_size=...) so that it makes one.'
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What there is to know of a tensor or an array of a batch, which itself is not kept.

    `device` is None for an array; `values` are those of integers and booleans, where they are
    known.
    """

    shape: tuple[int, ...]
    dtype: Any
    device: torch.device | None
    requires_grad: bool
    is_floating: bool
    values: Values | None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


Read = Callable[[torch.Tensor], Values | None]
Make = Callable[[Leaf], torch.Tensor]


class SampleBatch:
    """A batch, any pytree, that can be made again in any size (H413 if nobody can say which its
    batch dimension is).

    `read` returns the values of a tensor of integers or booleans, or None where they are unknown;
    `make` a new tensor as it is described. A `size` that nothing in it has, or None, is found by
    looking.
    """

    def __init__(
        self, batch: Any, *, read: Read, make: Make, size: int | None = None, split: int = 0
    ) -> None:
        self._make = make
        self._split = split
        self._batch = _mapped(batch, lambda leaf, path: _described(leaf, path, read))
        self._leaves = list(_walk(self._batch, leaves=True))
        self._arrays = [
            leaf for _, leaf in self._leaves if isinstance(leaf, Leaf) and leaf.ndim > split
        ]
        if self._arrays and all(leaf.shape[split] == 0 for leaf in self._arrays):
            raise _unusable(
                f"the sample batch is empty: {_shapes(self._leaves)}",
                "every sample of another batch is like one of it",
                "return a batch of at least one sample.",
            )
        nodes = list(_walk(self._batch, leaves=False))
        self.size = size or 0
        for path, node in nodes:
            if _has_samples(node) and (path != "batch" or not isinstance(node, tuple)):
                raise _unusable(
                    "the sample batch holds a list with a tensor or a dict for each sample:"
                    f" {path}",
                    "each size of it is another program, which cannot be extrapolated",
                    f"let the loader collate it into one tensor, or {_OWN_BATCH}",
                )
        if not any(self._is_batched(leaf) for _, leaf in self._leaves):
            self.size = self._find_size()
        lists = [
            (path, node)
            for path, node in nodes
            if isinstance(node, (list, tuple)) and len(node) == self.size
        ]
        self._lists = [
            path for path, node in lists if all(isinstance(item, _PLAIN) for item in node)
        ]
        self._longest = self._find_longest()

    def resized(self, size: int) -> Any:
        """Return a new batch of `size` equal samples."""
        return self._made(self._batch, "batch", size)

    def parts(self, batch: Any, count: int) -> list[Any]:
        """Cut a batch that was made here into equal parts, as a guard does.

        Its size is a multiple of `count`.
        """
        return cut(batch, count, self._how(self._batch, "batch"))

    def _how(self, node: Any, path: str) -> Any:
        """Return how a batch like this one is cut; see `Split`."""
        children = _children(node)
        if path in self._lists or children is None:
            return (
                "items" if path in self._lists else self._split if self._is_batched(node) else None
            )
        return {key: self._how(child, f"{path}[{key!r}]") for key, child in children.items()}

    def assumptions(self) -> Iterator[Assumption]:
        """Yield what was found by looking."""
        yield Assumption(
            what=(
                f"the sample batch was taken to have {self.size} samples: {_shapes(self._leaves)}; "
                "in a batch of another size all are like its longest"
            )
        )
        arrays = [
            (path, leaf) for path, leaf in self._leaves if isinstance(leaf, Leaf) and leaf.ndim
        ]
        same = [pair for pair in arrays if not self._is_batched(pair[1])]
        if same:
            yield Assumption(what=f"in a batch of any size these stay as they are: {_shapes(same)}")

    def _find_size(self) -> int:
        sizes = Counter(int(leaf.shape[self._split]) for leaf in self._arrays)
        ranked = Counter(
            {size: count for size, count in sizes.items() if size != 1} or sizes
        ).most_common(2)
        if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
            found = sorted(size for size, _ in ranked)
            raise _unusable(
                f"nobody can say whether the sample batch has {' or '.join(map(str, found))}"
                f" samples: {_shapes(self._leaves)}",
                f"the batch is dimension {self._split} of its tensors, of the same size in most",
                _SAID_SIZE,
            )
        if not ranked:
            raise _unusable(
                f"the sample batch has no batch dimension: {_shapes(self._leaves)}",
                f"dimension {self._split} of its tensors must be the samples",
                _SAID_SIZE,
            )
        return ranked[0][0]

    def _is_batched(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Leaf)
            and leaf.ndim > self._split
            and leaf.shape[self._split] == self.size
        )

    def _find_length(self) -> int | None:
        whole: list[int] = []
        floating: list[int] = []
        for _, leaf in self._leaves:
            if self._is_batched(leaf) and leaf.ndim > 1:
                (floating if leaf.is_floating else whole).append(leaf.shape[1 - self._split])
        return max(whole or floating, default=None)

    def _find_longest(self) -> int:
        """Return the position of the longest sample, where lengths or a mask tell.

        Else of the first.
        """
        length = self._find_length()
        for _, leaf in self._leaves:
            if not self._is_batched(leaf) or leaf.values is None or leaf.values.size == 0:
                continue
            rows = np.moveaxis(leaf.values, self._split, 0)
            if rows.ndim == 1 and rows.max() == length:
                return int(rows.argmax())
            if rows.ndim > 1 and {int(rows.min()), int(rows.max())} <= {0, 1}:
                return int(rows.reshape(len(rows), -1).sum(axis=1).argmax())
        return 0

    def _made(self, node: Any, path: str, size: int) -> Any:
        if path in self._lists:
            return _rebuilt(node, dict(enumerate(itertools.islice(itertools.cycle(node), size))))
        children = _children(node)
        if children is not None:
            made = {
                key: self._made(child, f"{path}[{key!r}]", size) for key, child in children.items()
            }
            return _rebuilt(node, made)
        if not isinstance(node, Leaf):
            return node
        return self._filled(self._resized(node, size) if self._is_batched(node) else node)

    def _resized(self, leaf: Leaf, size: int) -> Leaf:
        shape, values = list(leaf.shape), leaf.values
        shape[self._split] = size
        if values is not None:
            values = np.repeat(
                values.take([self._longest], axis=self._split), size, axis=self._split
            )
        return dataclasses.replace(leaf, shape=tuple(shape), values=values)

    def _filled(self, leaf: Leaf) -> Any:
        if leaf.device is not None:
            return self._make(leaf)
        return np.zeros(leaf.shape, leaf.dtype) if leaf.values is None else leaf.values


def _described(leaf: Any, path: str, read: Read) -> Any:
    if isinstance(leaf, PackedSequence) or _hides_tensors(leaf):
        raise _unusable(
            f"the sample batch holds a {type(leaf).__name__} with tensors in it: {path}",
            "only dicts, lists, tuples and dataclasses can be made in another size",
            f"return one of these, or {_OWN_BATCH}",
        )
    if isinstance(leaf, np.ndarray):
        floating = bool(np.issubdtype(leaf.dtype, np.inexact))
        facts = {
            "dtype": leaf.dtype,
            "device": None,
            "requires_grad": False,
            "values": None if floating else leaf,
        }
        return Leaf(shape=leaf.shape, is_floating=floating, **facts)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout != torch.strided or leaf.is_nested:
        raise _unusable(
            f"the sample batch holds a tensor of layout {leaf.layout}"
            + (", nested" if leaf.is_nested else ""),
            "only dense tensors can be made in another size",
            _OWN_BATCH,
        )
    floating = leaf.is_floating_point() or leaf.is_complex()
    return Leaf(
        shape=tuple(leaf.shape),
        dtype=leaf.dtype,
        device=leaf.device,
        requires_grad=leaf.requires_grad,
        is_floating=floating,
        values=None if floating else read(leaf),
    )


def _has_samples(node: Any) -> bool:
    """Return whether this is a sequence of samples, since its entries cannot be columns of a
    batch.
    """
    if not isinstance(node, (list, tuple)):
        return False
    if node and all(isinstance(item, Mapping) and item.keys() == node[0].keys() for item in node):
        return True
    if len(node) < 2 or not all(isinstance(item, Leaf) and item.shape for item in node):
        return False
    alike = len({(str(item.dtype), item.shape[1:]) for item in node}) == 1
    return alike and len({item.shape[0] for item in node}) > 1


def _hides_tensors(leaf: Any, depth: int = _DEPTH) -> bool:
    """Return whether an object that is no container holds tensors in its attributes."""
    if isinstance(leaf, torch.Tensor):
        return depth < _DEPTH
    if isinstance(leaf, (*_PLAIN, np.ndarray, type, nn.Module)) or depth == 0:
        return False
    children = children_of(leaf)
    inside = getattr(leaf, "__dict__", {}) if children is None else children
    return any(_hides_tensors(value, depth - 1) for value in inside.values())


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf."""
    return None if isinstance(node, (PackedSequence, Leaf)) else children_of(node)


def _rebuilt(node: Any, children: dict[Any, Any]) -> Any:
    return rebuilt(node, children, checked=False)  # what is only described yet passes no checks


def _mapped(node: Any, function: Callable[[Any, str], Any], path: str = "batch") -> Any:
    children = _children(node)
    if children is None:
        return function(node, path)
    return _rebuilt(
        node, {key: _mapped(child, function, f"{path}[{key!r}]") for key, child in children.items()}
    )


def _walk(node: Any, path: str = "batch", *, leaves: bool) -> Iterator[tuple[str, Any]]:
    """Yield the leaves, or the containers, the outermost first."""
    children = _children(node)
    if (children is None) == leaves:
        yield path, node
    if children is not None:
        for key, child in children.items():
            yield from _walk(child, f"{path}[{key!r}]", leaves=leaves)


def cut(batch: Any, count: int, split: Split = 0) -> list[Any]:
    """Cut a batch into equal parts, as views."""
    size = batch_size(batch, split)
    return [part for part, _ in micro_batches(batch, size, size // count, split)]


def leaves_of(batch: Any) -> list[Any]:
    """Return all that is in the containers of a batch."""
    return [leaf for _, leaf in _walk(batch, leaves=True)]


def _shapes(leaves: Sequence[tuple[str, Any]]) -> str:
    arrays = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, Leaf)]
    other = [
        f"{path} a {type(leaf).__name__}" for path, leaf in leaves if not isinstance(leaf, Leaf)
    ]
    named = (arrays or other or ["it is empty"])[:_MOST_NAMED]
    return ", ".join(named) + (", ..." if len(arrays or other) > _MOST_NAMED else "")


def _unusable(what: str, limit: str, fix: str) -> BatchError:
    return BatchError(what, limit=limit, fix=fix, rule="H413")
