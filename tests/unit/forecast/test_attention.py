"""Which attention kernel the forecast takes for CUDA's, row by row, and what that kernel keeps
on the fake device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.unit.forecast.emulated import leaf, seen
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels.attention import choose_backend

RUNS_IN_CHILD = True

BF16 = torch.bfloat16


def call(dtype: str = "bfloat16", **given: Any) -> dict[str, Any]:
    """Return the arguments of `choose_backend` for a call; `given` are sizes of it, and flags."""
    head, heads, length = given.pop("head", 64), given.pop("heads", 8), given.pop("length", 128)
    keys = (2, given.pop("key_heads", heads), given.pop("key_length", length))
    shapes = [
        given.pop("query", (2, heads, length, head)),
        (*keys, head),
        (*keys, given.pop("value_head", head)),
    ]
    dtypes = [getattr(torch, name) for name in (dtype, dtype, given.pop("value_dtype", dtype))]
    tensors = [
        torch.empty(*shape, dtype=kind, device="meta")
        for shape, kind in zip(shapes, dtypes, strict=True)
    ]
    if not given.pop("unit_strides", True):
        tensors[0] = torch.empty(*shapes[0], 2, dtype=dtypes[0], device="meta")[..., 0]
    mask = given.pop("mask", None)
    return {
        "tensors": tensors,
        "mask": None if mask is None else torch.empty(*mask, device="meta"),
        **given,
    }


CALLS = yaml.safe_load(Path(__file__).with_name("attention.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("_", "given", "expected"), CALLS, ids=[call[0] for call in CALLS])
def test_a_call_gets_the_kernel_that_cuda_takes(
    _: str, given: dict[str, Any], expected: str
) -> None:
    """Each call of the table comes out as torch's own conditions in sdp_utils.cpp say."""
    assert choose_backend(**call(**given)) is getattr(SDPBackend, expected)


def test_grouped_queries_with_a_mask_depend_on_the_version() -> None:
    """A mask excludes flash, and before torch 2.14 the efficient kernel takes no groups, so the
    scores are kept.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = SDPBackend.EFFICIENT_ATTENTION if version >= (2, 14) else SDPBackend.MATH
    assert choose_backend(**call(key_heads=2, grouped=True, mask=(2, 1, 128, 128))) is expected


def test_what_the_user_forbids_is_not_taken() -> None:
    """The next kernel in the order is taken if one is forbidden, and torch's error comes if none
    is left.
    """
    allowed = frozenset({SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH})
    assert choose_backend(**call(), enabled=allowed) is SDPBackend.EFFICIENT_ATTENTION
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose_backend(**call("float32"), enabled=frozenset({SDPBackend.FLASH_ATTENTION}))


SHAPE = (2, 4, 128, 64)
OUT_BF16, OUT_FP32, ROW_SUMS = 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 64 * 4, 2 * 4 * 128 * 4
attend = functional.scaled_dot_product_attention


def test_kernels_keep_what_cudas_keep() -> None:
    """A fused kernel keeps its output and one number for each row.

    Only the math path keeps the scores.
    """
    with forecast_device():
        q, narrow, single = leaf(*SHAPE, dtype=BF16), leaf(2, 2, 128, 64, dtype=BF16), leaf(*SHAPE)
        kernels = {
            "Flash": [(OUT_BF16, seen(lambda: attend(q, q, q)))],
            "Efficient": [(OUT_FP32, efficient := seen(lambda: attend(single, single, single)))],
        }
        kernels["Flash"].append(
            (OUT_BF16, seen(lambda: attend(q, narrow, narrow, enable_gqa=True)))
        )
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
    """A boolean mask becomes one of the query's type that is kept.

    A head size of 60 is padded to 64.
    """
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
