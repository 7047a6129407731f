"""Tests of holdfast.forecast.trace.extrapolation.

Sizes at any micro-batch and length, and what is not aligned.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.forecast.made_steps import LINE, SAVES, Block, Layer, make_step

from holdfast.forecast.trace.events import OWNERS, Trace, live_peak
from holdfast.forecast.trace.extrapolation import (
    NotAlignedError,
    extrapolate,
    extrapolate_parameter,
)

layers = st.builds(
    Layer,
    st.sampled_from(sorted(SAVES)),
    st.integers(1, 500).map(lambda width: 4 * width),
    st.integers(0, 300),
    st.integers(0, 20_000),
)
programs = st.lists(st.lists(layers, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


def one_storage_each(count: int) -> Trace:
    """Return a step that makes and frees storages one by one."""
    base = make_step([(Layer("relu", 4),)], 2)
    events = np.array(
        [event for storage in range(1, count + 1) for event in (storage, -storage)], dtype=np.int32
    )
    return replace(
        base,
        events=events,
        event_phase=np.zeros(len(events), dtype=np.int8),
        size_bytes=np.zeros(count, dtype=np.int64),
        owner=np.full(count, 5, dtype=np.int8),
        module=np.zeros(count, dtype=np.int32),
        line=np.zeros(count, dtype=np.int32),
        resident=(),
        carried=(),
    )


@settings(max_examples=60, deadline=None)
@given(
    programs, st.sampled_from([(2, 4), (2, 3), (3, 5)]), st.integers(1, 4000), st.integers(0, 9999)
)
def test_a_step_that_grows_by_whole_bytes_is_reproduced_exactly(
    program: list[Block], sizes: tuple[int, int], wanted: int, scratch: int
) -> None:
    """A step whose storages are affine in the batch is reproduced to the byte and the operation
    at any size.
    """
    scaled = extrapolate([make_step(program, size, optimizer_bytes=scratch) for size in sizes])
    expected, got = make_step(program, wanted, optimizer_bytes=scratch), scaled.at(wanted)
    for name in ("events", "size_bytes", "flops", "moved_bytes", "operation_event"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    assert got.micro_batch_size == wanted
    assert live_peak(got) == live_peak(expected)


def test_sizes_that_grow_unevenly_are_rounded_up_and_said() -> None:
    """A storage that grows by a fraction of a byte per sample is rounded up, and the share of
    such is said.
    """
    base = one_storage_each(2)
    two = replace(base, size_bytes=np.array([100, 1000]), micro_batch_size=2)
    four = replace(base, size_bytes=np.array([101, 2000]), micro_batch_size=4)
    got = extrapolate([two, four]).at(5)
    assert got.size_bytes.tolist() == [102, 2500]  # 101.5 before
    assert any("1 storages (3.9 % of all bytes)" in one.what for one in got.assumptions)
    assert extrapolate([two, four]).at(4).size_bytes.tolist() == [101, 2000]


@pytest.mark.parametrize("batch", [10**12, 10**18, 10**30])
def test_a_batch_beyond_all_memory_stays_above_any_device(batch: int) -> None:
    """A size that no 64-bit integer holds is bounded, and so is the sum of all of them."""
    base = one_storage_each(3)
    sizes = {size: np.array([1000 * size, 7 * size, 8], dtype=np.int64) for size in (2, 4)}
    got = extrapolate(
        [replace(base, size_bytes=sizes[size], micro_batch_size=size) for size in (2, 4)]
    ).at(batch)
    assert 1 << 42 < int(got.size_bytes.sum()) < 1 << 60
    assert got.size_bytes[2] == 8


def test_an_operation_that_only_one_batch_has_is_named_with_its_line() -> None:
    """A branch on the batch is found at its first operation, with the line of the user's."""
    program: list[Block] = [(Layer("linear", 40), Layer("relu", 40)), (Layer("gelu", 40),)]
    with pytest.raises(NotAlignedError) as raised:
        extrapolate([make_step(program, 2), make_step(program, 4, branch_at=0)])
    message = str(raised.value)
    assert raised.value.rule == "H425"
    assert "with 4 samples than with 2 samples" in message
    assert "operation 2 is aten.index_put" in message
    assert "instead of aten.gelu" in message
    assert LINE in message


def test_scratch_that_only_some_batches_take_is_taken_to_grow_with_the_batch() -> None:
    """Where an operation takes scratch in one trace only, the other gets its share."""
    small, large = (
        make_step([(Layer("linear", 40, scratch=30), Layer("gelu", 40))], size) for size in (2, 4)
    )
    scratch = small.owner == OWNERS.index("scratch")
    lacking = replace(small, size_bytes=np.where(scratch, 0, small.size_bytes))
    assert scratch.any()
    assert np.array_equal(
        extrapolate([lacking, large]).at(9).size_bytes, extrapolate([small, large]).at(9).size_bytes
    )


def traces_of_values(size_bytes: dict[int, list[int]]) -> dict[int, Trace]:
    """Return traces of the same step, with the sizes of its storages at each value."""
    base = one_storage_each(len(next(iter(size_bytes.values()))))
    return {
        value: replace(base, size_bytes=np.array(sizes, dtype=np.int64))
        for value, sizes in size_bytes.items()
    }


@given(st.tuples(*[st.integers(0, 1000)] * 3), st.integers(1, 8192))
def test_storages_may_grow_with_the_square_of_a_parameter(
    coefficients: tuple[int, int, int], count: int
) -> None:
    """Any quadratic function is continued exactly, and the batch keeps its size."""
    constant, linear, square = coefficients
    value = 128 * count

    def size_at(value: int) -> int:
        return constant + linear * value + square * value**2

    traces = traces_of_values({value: [size_at(value)] for value in (128, 256, 512)})
    extrapolated = extrapolate_parameter("seq_len", traces).at(value)

    assert extrapolated.size_bytes.tolist() == [size_at(value)]
    assert extrapolated.micro_batch_size == 2
    assert any(f"seq_len={value}" in each.what for each in extrapolated.assumptions)


def test_a_storage_that_stops_growing_does_not_shrink() -> None:
    """A window of 300 positions is continued as a line, not as a parabola that falls."""
    traces = traces_of_values({128: [128, 128], 256: [256, 256], 512: [300, 512]})
    sizes = extrapolate_parameter("seq_len", traces).at(4096).size_bytes.tolist()
    assert sizes[0] >= 300
    assert sizes[1] == 4096


def test_a_parameter_that_changes_the_operations_is_named() -> None:
    """The error names the parameter and both values."""
    program: list[Block] = [(Layer("linear", 40), Layer("relu", 40)), (Layer("gelu", 40),)]
    traces = {
        value: make_step(program, 2, branch_at=0 if value == 4 else None) for value in (1, 2, 4)
    }
    with pytest.raises(NotAlignedError) as raised:
        extrapolate_parameter("depth", traces)
    assert raised.value.rule == "H425"
    assert "depth=4" in raised.value.what
    assert "depth=1" in raised.value.what
