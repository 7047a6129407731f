"""Which attention kernel the forecast takes for CUDA's, row by row, and what that kernel keeps on the fake device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.forecast.emulated import leaf, seen
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels.attention import (
    AttentionCall,
    Backend,
    choose_backend,
)

RUNS_IN_CHILD = True

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def call(
    dtype: torch.dtype = BF16,
    *,
    head: int = 64,
    value_head: int | None = None,
    heads: int = 8,
    key_heads: int | None = None,
    length: int = 128,
    key_length: int | None = None,
    **others: Any,
) -> AttentionCall:
    keys = (2, key_heads or heads, key_length or length)
    return AttentionCall(
        dtypes=(dtype, dtype, dtype),
        query=(2, heads, length, head),
        key=(*keys, head),
        value=(*keys, head if value_head is None else value_head),
        **others,
    )


MASK = (2, 1, 128, 128)
ROWS: list[tuple[str, AttentionCall, Backend]] = [
    ("half precision on Ampere", call(), Backend.FLASH),
    ("fp16 on Ampere", call(HALF), Backend.FLASH),
    ("single precision has no flash kernel", call(FP32), Backend.EFFICIENT),
    ("double precision has only the math path", call(FP64), Backend.MATH),
    ("a mask excludes flash", call(mask=MASK), Backend.EFFICIENT),
    ("causal and square", call(causal=True), Backend.FLASH),
    ("causal and not square", call(causal=True, key_length=256), Backend.EFFICIENT),
    ("head size 256 trains on A100", call(head=256), Backend.FLASH),
    ("head size above 256", call(head=264), Backend.EFFICIENT),
    ("head size 60 is padded for flash", call(head=60), Backend.FLASH),
    ("head size 60 is not aligned for efficient", call(head=60, mask=MASK), Backend.MATH),
    ("head size 60 is aligned in fp32", call(FP32, head=60), Backend.EFFICIENT),
    ("head size 62 is not", call(FP32, head=62), Backend.MATH),
    ("another head size of the values excludes flash", call(value_head=128), Backend.EFFICIENT),
    ("grouped queries in flash", call(key_heads=2, grouped=True), Backend.FLASH),
    ("grouped queries without the flag", call(key_heads=2), Backend.MATH),
    ("heads that do not divide", call(key_heads=3, grouped=True), Backend.MATH),
    ("a last dimension with strides", call(unit_strides=False), Backend.MATH),
    ("three dimensions", replace(call(), query=(8, 128, 64)), Backend.MATH),
    ("types that differ", replace(call(), dtypes=(BF16, BF16, FP32)), Backend.MATH),
    ("an empty sequence", call(length=0), Backend.MATH),
]


@pytest.mark.parametrize(("one", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_row(one: AttentionCall, expected: Backend) -> None:
    """Each row of the table comes out as torch's own conditions in sdp_utils.cpp say."""
    assert choose_backend(one) is expected


def test_grouped_queries_with_a_mask_depend_on_the_version() -> None:
    """A mask excludes flash, and before torch 2.14 the efficient kernel takes no groups, so the scores are kept."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = Backend.EFFICIENT if version >= (2, 14) else Backend.MATH
    assert choose_backend(call(key_heads=2, grouped=True, mask=MASK)) is expected


def test_what_the_user_forbids_is_not_taken() -> None:
    """The next kernel in the order is taken if one is forbidden, and torch's error comes if none is left."""
    allowed = frozenset({Backend.EFFICIENT, Backend.MATH})
    assert choose_backend(call(), allowed) is Backend.EFFICIENT
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose_backend(call(FP32), frozenset({Backend.FLASH}))


SHAPE = (2, 4, 128, 64)
OUT_BF16, OUT_FP32, ROW_SUMS = 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 64 * 4, 2 * 4 * 128 * 4
attend = functional.scaled_dot_product_attention


def test_kernels_keep_what_cudas_keep() -> None:
    """A fused kernel keeps its output and one number for each row; only the math path keeps the scores."""
    with forecast_device():
        q, narrow, single = leaf(*SHAPE, dtype=BF16), leaf(2, 2, 128, 64, dtype=BF16), leaf(*SHAPE)
        kernels = {
            "Flash": [(OUT_BF16, seen(lambda: attend(q, q, q)))],
            "Efficient": [(OUT_FP32, efficient := seen(lambda: attend(single, single, single)))],
        }
        kernels["Flash"].append((OUT_BF16, seen(lambda: attend(q, narrow, narrow, enable_gqa=True))))
        with sdpa_kernel(SDPBackend.MATH):
            math = seen(lambda: attend(single, single, single))
    for kernel, runs in kernels.items():
        for out, run in runs:
            assert run.node.startswith(f"ScaledDotProduct{kernel}")
            assert out + ROW_SUMS <= run.kept < out + ROW_SUMS + 64  # and the generator's state
    scores = 2 * 4 * 128 * 128 * 4
    assert math.forward.count(scores) == 2
    assert scores not in efficient.forward


def test_masks_and_head_sizes_are_prepared_as_torch_does() -> None:
    """A boolean mask becomes one of the query's type that is kept; a head size of 60 is padded to 64."""
    with forecast_device():
        q, single, bias = leaf(*SHAPE, dtype=BF16), leaf(*SHAPE), leaf(2, 4, 128, 128)
        mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device="cuda")
        masked = seen(lambda: attend(q, q, q, attn_mask=mask))
        padded = seen(lambda: attend(*[leaf(2, 4, 128, 60, dtype=BF16)] * 3))
        seen(lambda: attend(single, single, single, attn_mask=bias))
    assert masked.node.startswith("ScaledDotProductEfficient")
    assert 2 * 128 * 128 * 2 in masked.forward
    assert masked.kept >= OUT_BF16 + ROW_SUMS + 2 * 128 * 128 * 2
    assert padded.forward.count(OUT_BF16) == 4  # query, key, value, output
    assert padded.shape == (2, 4, 128, 60)
    assert bias.grad.shape == (2, 4, 128, 128)
