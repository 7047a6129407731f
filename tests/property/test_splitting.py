"""Splitting: for any batch, any size and any micro-batch size, the parts are the batch in order."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loader.splitting import batch_size, copied, fresh, micro_batches, tensors_in

_FAST = settings(deadline=None, max_examples=60)
_KEYS = st.text("abc", min_size=1, max_size=2)


def _leaf(size: int, dimension: int) -> st.SearchStrategy[Any]:
    """Return leaves with so many samples along a dimension, and leaves that are shared."""

    def shape(others: list[int]) -> tuple[int, ...]:
        others = others + [2] * max(0, dimension - len(others))
        return (*others[:dimension], size, *others[dimension:])

    shapes = st.lists(st.integers(0, 3), max_size=2).map(shape)
    return st.one_of(
        shapes.map(lambda found: torch.arange(float(np.prod(found))).reshape(found)),
        shapes.map(lambda found: np.arange(np.prod(found)).reshape(found)),
        st.just([f"sample {number}" for number in range(size)]),
        st.sampled_from([torch.tensor(2.0), None, "text", 3, ["a"] * (size + 1)]),
    )


def _batches(size: int, dimension: int) -> st.SearchStrategy[Any]:
    nested = st.recursive(
        _leaf(size, dimension),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(_KEYS, inner, min_size=1, max_size=3),
        ),
        max_leaves=6,
    )
    return nested.map(lambda tree: {"first": torch.zeros((1,) * dimension + (size,)), "tree": tree})


def _glued(parts: list[Any], whole: Any, dimension: int, size: int) -> bool:
    """Say whether the parts, put together along a dimension, are the whole, or all share it."""
    if isinstance(whole, torch.Tensor) and whole.ndim:
        return torch.equal(torch.cat(parts, dimension), whole)
    if isinstance(whole, np.ndarray):
        return bool(np.array_equal(np.concatenate(parts, dimension), whole))
    if isinstance(whole, dict):
        return all(
            _glued([part[key] for part in parts], item, dimension, size)
            for key, item in whole.items()
        )
    kinds = (
        {str if isinstance(item, str) else float for item in whole}
        if type(whole) in (list, tuple)
        else set()
    )
    if len(kinds) == 1 and all(isinstance(item, (str, int, float)) for item in whole):
        return (
            list(itertools.chain(*parts)) == list(whole)
            if len(whole) == size
            else all(part is whole for part in parts)
        )
    if isinstance(whole, (list, tuple)):
        assert all(type(part) is type(whole) and len(part) == len(whole) for part in parts)
        columns = zip(*parts, strict=True)
        return all(
            _glued(list(column), item, dimension, size)
            for column, item in zip(columns, whole, strict=True)
        )
    return all(part is whole for part in parts)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Any, int, int, int]:
    size, dimension = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    return draw(_batches(size, dimension)), size, dimension, draw(st.integers(1, 11))


@_FAST
@given(_cases())
def test_the_parts_are_the_batch_in_order(case: tuple[Any, int, int, int]) -> None:
    """Every sample of every leaf is in exactly one part, in order, and shared leaves are in all
    of them.
    """
    batch, size, dimension, micro_batch_size = case
    assert batch_size(batch, dimension) == size
    pairs = micro_batches(batch, size, micro_batch_size, dimension)
    lengths = [length for _, length in pairs]
    assert sum(lengths) == size
    assert all(length == micro_batch_size for length in lengths[:-1])
    assert 1 <= lengths[-1] <= micro_batch_size
    assert [batch_size(part["first"], dimension) for part, _ in pairs] == lengths
    assert _glued([part for part, _ in pairs], batch, dimension, size)


@_FAST
@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 45))
def test_no_part_is_smaller_than_it_may_be(size: int, micro_batch_size: int, smallest: int) -> None:
    """A short rest joins the part before it.

    Where that cannot help there is one part, and order is kept.
    """
    smallest = min(smallest, micro_batch_size)
    pairs = micro_batches(torch.arange(size), size, micro_batch_size, smallest=smallest)
    lengths = [length for _, length in pairs]
    assert torch.equal(torch.cat([part for part, _ in pairs]), torch.arange(size))
    assert [len(part) for part, _ in pairs] == lengths
    assert all(length == micro_batch_size for length in lengths[:-1])
    assert lengths[-1] < micro_batch_size + smallest
    assert min(lengths) >= min(smallest, size)


@_FAST
@given(st.integers(1, 9), st.integers(1, 11), st.data())
def test_every_way_to_name_the_cut_gives_the_same_parts(
    size: int, micro_batch_size: int, data: st.DataObject
) -> None:
    """A dimension, a prefix of dimensions and a function that cuts alike agree on sizes and
    parts.
    """
    features = torch.arange(2.0 * size).reshape(2, size)
    items = [torch.zeros(data.draw(st.integers(0, 3))) for _ in range(size)]
    batch = {"features": features, "items": items, "shared": torch.ones(size + 1)}
    prefix = {"features": data.draw(st.sampled_from([1, -1])), "items": "items", "shared": None}

    def cut(given: Any, most: int) -> list[Any]:
        return [
            {
                **given,
                "features": features[:, start : start + most],
                "items": items[start : start + most],
            }
            for start in range(0, size, most)
        ]

    assert batch_size(batch, prefix) == batch_size(batch, cut) == size
    by_prefix = micro_batches(batch, size, micro_batch_size, prefix)
    by_function = micro_batches(batch, size, micro_batch_size, cut)
    assert [length for _, length in by_prefix] == [length for _, length in by_function]
    for (first, _), (second, _) in zip(by_prefix, by_function, strict=True):
        assert torch.equal(first["features"], second["features"])
        assert [id(item) for item in first["items"]] == [id(item) for item in second["items"]]
        assert first["shared"] is second["shared"] is batch["shared"]


@_FAST
@given(_cases())
def test_copies_and_fresh_containers_hold_the_same(case: tuple[Any, int, int, int]) -> None:
    """A copy shares no memory with the batch, a fresh one shares all of it, and both hold equal
    values.
    """
    batch = case[0]
    twin, given_batch = copied(batch), fresh(batch)
    originals, copies, shared = tensors_in(batch), tensors_in(twin), tensors_in(given_batch)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(originals, copies, strict=True))
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(originals, copies, strict=True) if a.numel()
    )
    assert all(a is b for a, b in zip(originals, shared, strict=True))
