"""Which attention kernel the forecast takes for CUDA's, row by row, and what that kernel keeps on the fake device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.forecast.running import run_emulation
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.forecast.kernels import attention
from holdfast.forecast.kernels.attention_choice import (
    AttentionCall,
    Backend,
    Hardware,
    choose_backend,
    describe,
    prefers_cudnn,
)

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
T4, V100, A100, RTX3090, RTX4090 = (7, 5), (7, 0), (8, 0), (8, 6), (8, 9)
H100, B200, RTX5090 = (9, 0), (10, 0), (12, 0)


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
ROWS: list[tuple[str, AttentionCall, tuple[int, int], Backend]] = [
    ("half precision on Ampere", call(), A100, Backend.FLASH),
    ("fp16 on Ampere", call(HALF), A100, Backend.FLASH),
    ("single precision has no flash kernel", call(FP32), A100, Backend.EFFICIENT),
    ("double precision has only the math path", call(FP64), A100, Backend.MATH),
    ("flash needs compute capability 8", call(HALF), T4, Backend.EFFICIENT),
    ("bf16 before compute capability 8", call(BF16), V100, Backend.MATH),
    ("fp32 before compute capability 8", call(FP32), V100, Backend.EFFICIENT),
    ("a mask excludes flash", call(mask=MASK), A100, Backend.EFFICIENT),
    ("a learned bias excludes flash", call(mask=MASK, mask_requires_grad=True), A100, Backend.EFFICIENT),
    ("dropout", call(dropout=0.1), A100, Backend.FLASH),
    ("causal and square", call(causal=True), A100, Backend.FLASH),
    ("causal and not square", call(causal=True, key_length=256), A100, Backend.EFFICIENT),
    ("head size 256 trains on A100", call(head=256), A100, Backend.FLASH),
    ("head size above 256", call(head=264), A100, Backend.EFFICIENT),
    ("head size 224 cannot train on consumer cards", call(head=224), RTX3090, Backend.EFFICIENT),
    ("head size 256 with dropout neither", call(head=256, dropout=0.1), RTX4090, Backend.EFFICIENT),
    ("head size 256 without dropout can", call(head=256), RTX4090, Backend.FLASH),
    ("head size 224 can be inferred there", call(head=224, training=False), RTX5090, Backend.FLASH),
    ("head size 60 is padded for flash", call(head=60), A100, Backend.FLASH),
    ("head size 60 is not aligned for efficient", call(head=60, mask=MASK), A100, Backend.MATH),
    ("head size 60 is aligned in fp32", call(FP32, head=60), A100, Backend.EFFICIENT),
    ("head size 62 is not", call(FP32, head=62), A100, Backend.MATH),
    ("head size 62 in fp32 is free before tensor cores for it", call(FP32, head=62), V100, Backend.EFFICIENT),
    ("another head size of the values excludes flash", call(value_head=128), A100, Backend.EFFICIENT),
    ("grouped queries in flash", call(key_heads=2, grouped=True), A100, Backend.FLASH),
    ("grouped queries without the flag", call(key_heads=2), A100, Backend.MATH),
    ("heads that do not divide", call(key_heads=3, grouped=True), A100, Backend.MATH),
    ("a last dimension with strides", call(unit_strides=False), A100, Backend.MATH),
    ("three dimensions", replace(call(), query=(8, 128, 64)), A100, Backend.MATH),
    ("types that differ", replace(call(), dtypes=(BF16, BF16, FP32)), A100, Backend.MATH),
    ("an empty sequence", call(length=0), A100, Backend.MATH),
    ("nested and training", call(nested=True), A100, Backend.FLASH),
    ("nested, single precision, training", call(FP32, nested=True), A100, Backend.MATH),
    ("nested, single precision, inference", call(FP32, nested=True, training=False), A100, Backend.EFFICIENT),
    ("Hopper asks cuDNN first", call(), H100, Backend.CUDNN),
    ("so does Blackwell for servers", call(), B200, Backend.CUDNN),
    ("but not Blackwell for desktops", call(), RTX5090, Backend.FLASH),
    ("cuDNN takes masks", call(mask=MASK), H100, Backend.CUDNN),
    ("cuDNN has no gradient for a mask", call(mask=MASK, mask_requires_grad=True), H100, Backend.EFFICIENT),
    ("cuDNN takes masks of two or four dimensions", call(mask=(8, 128, 128)), H100, Backend.EFFICIENT),
    ("cuDNN's dropout comes in sixteenths", call(dropout=0.1), H100, Backend.FLASH),
    ("a quarter is four of them", call(dropout=0.25), H100, Backend.CUDNN),
    ("cuDNN takes no single precision", call(FP32), H100, Backend.EFFICIENT),
    ("cuDNN's head size ends at 128", call(head=160), H100, Backend.FLASH),
    ("except for 192 with values of 128", call(head=192, value_head=128), H100, Backend.CUDNN),
    ("cuDNN takes grouped queries", call(key_heads=2, grouped=True), H100, Backend.CUDNN),
    ("cuDNN takes no single key", call(key_length=1), H100, Backend.FLASH),
]


@pytest.mark.parametrize(("one", "capability", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_row(one: AttentionCall, capability: tuple[int, int], expected: Backend) -> None:
    """Each row of the table comes out as torch's own conditions in sdp_utils.cpp say."""
    assert choose_backend(one, Hardware(capability=capability)) is expected


def test_grouped_queries_with_a_mask_depend_on_the_version() -> None:
    """A mask excludes flash, and before torch 2.14 the efficient kernel takes no groups, so the scores are kept."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = Backend.EFFICIENT if version >= (2, 14) else Backend.MATH
    assert choose_backend(call(key_heads=2, grouped=True, mask=MASK), Hardware()) is expected


def test_what_the_user_forbids_is_not_taken() -> None:
    """The next kernel in the order is taken if one is forbidden, and torch's error comes if none is left."""
    allowed = frozenset({Backend.EFFICIENT, Backend.MATH})
    assert choose_backend(call(), Hardware(), enabled=allowed) is Backend.EFFICIENT
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose_backend(call(FP32), Hardware(), enabled=frozenset({Backend.FLASH}))


def test_an_order_of_the_users_is_followed() -> None:
    """An order that the user set is followed, on Hopper too."""
    order = (Backend.EFFICIENT, Backend.FLASH, Backend.MATH, Backend.CUDNN)
    assert choose_backend(call(), Hardware(capability=H100), order=order) is Backend.EFFICIENT


def test_determinism_excludes_cudnn() -> None:
    """Deterministic algorithms exclude cuDNN's kernel."""
    assert choose_backend(call(), Hardware(capability=H100), deterministic=True) is Backend.FLASH


def test_an_old_cudnn_or_the_environment_puts_cudnn_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuDNN is not tried first if it is old, or if the environment variable says so."""
    assert not prefers_cudnn(Hardware(capability=H100, cudnn_version=91002))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not prefers_cudnn(Hardware(capability=H100))


def test_the_flags_of_torch_are_read() -> None:
    """The context manager of torch.nn.attention decides what is allowed, and its order is read back."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert attention._enabled() == {Backend.EFFICIENT, Backend.MATH}
        assert attention._order()[:2] == (Backend.EFFICIENT, Backend.MATH)
    assert Backend.FLASH in attention._enabled()


def test_a_call_is_described_from_its_tensors() -> None:
    """Shapes, types, strides and whether gradients are wanted are read off the tensors."""
    query = torch.zeros(2, 4, 8, 16, requires_grad=True)
    mask = torch.zeros(8, 1).expand(8, 8)
    seen = describe(query, query, query, mask)
    assert seen.training
    assert seen.query == (2, 4, 8, 16)
    assert not seen.unit_strides  # the mask's last dimension is expanded
    with torch.no_grad():
        assert not describe(query, query, query).training


@pytest.fixture(scope="module")
def emulated() -> dict[str, Any]:
    """What the program of the emulation saw on a fake device in a process of its own."""
    return run_emulation()


OUT_BF16, OUT_FP32, ROW_SUMS = 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 64 * 4, 2 * 4 * 128 * 4


@pytest.mark.slow
def test_kernels_keep_what_cudas_keep(emulated: dict[str, Any]) -> None:
    """A fused kernel keeps its output and one number for each row; only the math path keeps the scores."""
    seen = {name: emulated[name] for name in ("flash", "masked", "grouped", "padded", "single", "bias", "math")}
    assert seen["flash"]["node"].startswith("ScaledDotProductFlash")
    assert seen["grouped"]["node"].startswith("ScaledDotProductFlash")
    assert seen["masked"]["node"].startswith("ScaledDotProductEfficient")
    assert seen["single"]["node"].startswith("ScaledDotProductEfficient")
    for name, out in (("flash", OUT_BF16), ("grouped", OUT_BF16), ("single", OUT_FP32)):
        assert out + ROW_SUMS <= seen[name]["kept"] < out + ROW_SUMS + 64  # and the generator's state
    scores = 2 * 4 * 128 * 128 * 4
    assert seen["math"]["forward"].count(scores) == 2
    assert scores not in seen["single"]["forward"]


@pytest.mark.slow
def test_masks_and_head_sizes_are_prepared_as_torch_does(emulated: dict[str, Any]) -> None:
    """A boolean mask becomes one of the query's type that is kept; a head size of 60 is padded to 64."""
    assert 2 * 128 * 128 * 2 in emulated["masked"]["forward"]
    assert emulated["masked"]["kept"] >= OUT_BF16 + ROW_SUMS + 2 * 128 * 128 * 2
    assert emulated["padded"]["forward"].count(OUT_BF16) == 4  # query, key, value, output
    assert emulated["padded"]["shape"] == [2, 4, 128, 60]
    assert emulated["bias gradient"] == [2, 4, 128, 128]


@pytest.mark.slow
def test_every_caller_gets_the_kernel(emulated: dict[str, Any]) -> None:
    """nn.MultiheadAttention and the recomputation of a checkpoint get it too."""
    assert emulated["largest in nn.MultiheadAttention"] < 2 * 4 * 128 * 128 * 4
    assert emulated["row sums with recomputation"] == 2
