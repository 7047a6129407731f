"""What operators need while they run: CUDA's table against its sources."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.forecast.kernels.scratch import Scratch, Uncalibrated, scratch_of

aten = torch.ops.aten
META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def cuda(op: Any, *args: Any, out: Any = None, **kwargs: Any) -> Scratch:
    found = scratch_of(op, args, kwargs, out)
    assert found is not None
    return found


def flash_backward(heads: int, key_heads: int, length: int, size: int, *, by_rows: bool) -> Scratch:
    def tensor(count: int) -> torch.Tensor:
        if by_rows:
            return meta(2, length, count, size, dtype=torch.bfloat16).transpose(1, 2)
        return meta(2, count, length, size, dtype=torch.bfloat16)

    query, key = tensor(heads), tensor(key_heads)
    sums, state = meta(2, heads, length), meta(2, dtype=torch.uint64)
    given = (
        query,
        query,
        key,
        key,
        query,
        sums,
        None,
        None,
        length,
        length,
        0.0,
        False,
        state,
        state,
    )
    return cuda(aten._scaled_dot_product_flash_attention_backward.default, *given)


def test_flash_attention_sums_gradients_in_single_precision() -> None:
    """Flash attention's backward pass sums in fp32 over rounded lengths and head sizes, and
    expands grouped keys.
    """
    plain = flash_backward(8, 8, 200, 60, by_rows=True)
    assert plain.at_most == plain.bytes
    assert plain.bytes == 2 * 256 * 8 * (64 + 1) * 4
    grouped = flash_backward(8, 2, 200, 60, by_rows=True)
    assert grouped.bytes == plain.bytes + 2 * (2 * 200 * 8 * 60 * 2)
    copied = flash_backward(8, 8, 200, 60, by_rows=False)
    # The output and its gradient, by rows
    assert copied.bytes == plain.bytes + 2 * (2 * 200 * 8 * 60 * 2)


def test_embedding_gradient_sorts_and_sums_pieces() -> None:
    """An embedding's gradient keeps a row of sums for each piece of a segment, counted for small
    batches too.
    """
    many = meta(40, 100, dtype=torch.int64)
    out = meta(3000, 64)
    need = cuda(
        aten.embedding_dense_backward.default, meta(40, 100, 64), many, 3000, -1, False, out=out
    )
    pieces = 4000 // 10 + 3000
    assert need.bytes == 2 * 4000 * 8 + (4000 + 2 * 3000 + pieces) * 8 + pieces * 64 * 4
    few = meta(3, 100, dtype=torch.int64)
    small = cuda(
        aten.embedding_dense_backward.default, meta(3, 100, 64), few, 3000, -1, False, out=out
    )
    assert small.bytes == 2 * 300 * 8 + (300 + 2 * 300 + 330) * 8 + 330 * 64 * 4


def test_closed_libraries_are_not_calibrated() -> None:
    """What cuDNN needs for a convolution is an assumption with an upper bound.

    Channels last spares the copies.
    """
    x, w, out = meta(4, 16, 32, 32), meta(32, 16, 3, 3), meta(4, 32, 32, 32)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    need = cuda(aten.convolution.default, x, w, *rest, out=out)
    assert need.bytes == x.nbytes + w.nbytes + out.nbytes
    assert need.at_most > need.bytes
    last = x.to(memory_format=torch.channels_last)
    assert cuda(aten.convolution.default, last, w, *rest, out=out).bytes == 0


@torch.library.custom_op("forecast_test::unheard_of", mutates_args=())
def unheard_of(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_an_unknown_operator_counts_as_nothing_and_widens_the_margin() -> None:
    """An operator that no table knows needs 0 bytes, is counted, and its tensors' sizes are the
    upper bound.
    """
    x = meta(100)
    op = torch.ops.forecast_test.unheard_of.default
    need = cuda(op, x, out=x)
    assert need == Scratch(0, 800)
    step = Uncalibrated()
    step.note("forecast_test.unheard_of", need)
    step.note("forecast_test.unheard_of", need)
    step.note_kept("cuDNN lstm", 50)
    assert step.excess_bytes == 800 + 50  # one operator runs at a time, what is kept adds up
    assert step.calls == {"forecast_test.unheard_of": 2, "cuDNN lstm": 1}
    step.clear()
    assert step.excess_bytes == 0


def test_common_operators_need_nothing() -> None:
    """Pointwise functions and their gradients, views and products cost one look-up."""
    x = meta(4, 4)
    for op, args in (
        (aten.relu.default, (x,)),
        (aten.gelu_backward.default, (x, x)),
        (aten.t.default, (x,)),
    ):
        assert scratch_of(op, args, {}, x) is None
    assert scratch_of(aten.mm.default, (x, x), {}, x) is None
