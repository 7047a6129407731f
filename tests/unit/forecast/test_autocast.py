"""CUDA's autocast on the fake device.

The class of every operator, and how long cast weights live.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels import autocast_policy as policy
from holdfast.forecast.kernels.operators import LISTS

RUNS_IN_CHILD = True
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)


def _full(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda")


# What is computed, and in which type CUDA's autocast to bf16 has it; the lists are compared with
# torch's own below.
ROWS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "linear": (lambda: F.linear(_full(2, 4), _full(3, 4), _full(3)), "bfloat16"),
    "layer_norm": (lambda: F.layer_norm(_half(2, 4), (4,), _half(4), _half(4)), "float32"),
    "softmax": (lambda: torch.softmax(_half(2, 4), -1), "float32"),
    "sum": (lambda: _half(2, 4).sum(1), "float32"),
    "addcmul of two types": (lambda: torch.addcmul(_half(4), _full(4), _half(4)), "float32"),
    "relu": (lambda: torch.relu(_half(4)), "bfloat16"),
    "mm of doubles": (lambda: torch.mm(_full(4, 4).double(), _full(4, 4).double()), "float64"),
    "mm on the host": (lambda: torch.mm(torch.empty(4, 4), torch.empty(4, 4)), "float32"),
}


@pytest.mark.parametrize(("compute", "dtype"), ROWS.values(), ids=ROWS)
def test_each_class_of_operators_computes_in_its_type(
    compute: Callable[[], torch.Tensor], dtype: str
) -> None:
    """Products run in bf16, sums and losses in fp32, mixed inputs are promoted, everything else
    is left alone.
    """
    with forecast_device(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert compute().dtype is getattr(torch, dtype)


def test_regions_and_the_refused_loss() -> None:
    """Casting happens in enabled regions only, fp16 is the default there, and BCELoss is refused
    as on CUDA.
    """
    with forecast_device():
        assert torch.mm(_full(4, 4), _full(4, 4)).dtype is torch.float32
        with torch.autocast("cuda"):
            assert torch.mm(_full(4, 4), _full(4, 4)).dtype is torch.float16
            with torch.autocast("cuda", enabled=False):
                assert torch.mm(_full(4, 4), _full(4, 4)).dtype is torch.float32
            with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
                F.binary_cross_entropy(_full(4), _full(4))


def test_every_operator_that_torch_registers_for_cuda_has_a_class() -> None:
    """The lists are complete for this torch.

    All that is registered for CUDA is installed, and nothing is assumed.
    """
    registered = policy.registered_for_cuda()
    assert registered <= set(policy.classified())
    assert len(registered) > 100
    with forecast_device() as device:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        installed = {
            name for name in registered if has_kernel(f"aten::{name}", "AutocastPrivateUse1")
        }
        assert installed == registered - set(LISTS["left_alone"])
        assert not any("autocast" in one.what for one in device.assumptions)


class _Casts(TorchDispatchMode):
    """Counts the copies to bf16 of tensors with so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.numel() == self.elements
            and out.dtype is torch.bfloat16
        ):
            self.results.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(result() is not None for result in self.results)


@pytest.mark.skipif(not _HEADER.exists(), reason="this torch comes without its headers")
@pytest.mark.parametrize(
    ("macro", "section"),
    [
        ("LOWER_PRECISION_FP", "lower_precision"),
        ("FP32", "fp32"),
        ("FP32_SET_OPT_DTYPE", "fp32_set_opt_dtype"),
        ("PROMOTE", "promote"),
    ],
)
def test_the_classes_are_those_of_torch(macro: str, section: str) -> None:
    """Each list is, name by name, that of the header that torch's own CUDA policy is compiled
    from.
    """
    text = _HEADER.read_text(encoding="utf-8")
    found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*\n)", text)
    assert found is not None
    names = re.findall(r"_\((\w+)(?:, (\w+))?\)", found.group(1))
    listed = {f"{name}.{overload}" if overload else name for name, overload in names}
    listed = {name for name in listed if not policy._NAMED_DIMENSIONS.search(name)}
    # autocast_mode.cpp adds them to what the macro lists
    beside = {
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "linalg_matrix_sqrth",
        "norm.Scalar",
        "norm.ScalarOpt_dim",
    }
    # Others are of another version
    assert listed == (set(LISTS[section]) & policy.registered_for_cuda()) - beside


def test_a_weight_is_cast_once_until_the_outermost_region_ends() -> None:
    """The cache holds one cast for all uses in nested regions, and is dropped at the outermost
    end; frozen: none.
    """
    with forecast_device():
        layer, x = nn.Linear(7, 7, bias=False).cuda(), _full(2, 7)
        with _Casts(49) as casts, torch.no_grad():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    layer(layer(x))
                layer(x)
                assert (len(casts.results), casts.alive()) == (1, 1)
            assert casts.alive() == 0
            with torch.autocast("cuda", dtype=torch.bfloat16):
                layer(x)
            assert len(casts.results) == 2
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                layer(layer(x))
            assert len(casts.results) == 4
            layer.requires_grad_(requires_grad=False)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                layer(layer(x))
                assert (len(casts.results), casts.alive()) == (6, 0)


def test_recomputation_casts_weights_anew() -> None:
    """Two recomputed regions of two uses each cast the weight once together forward and once
    each in backward.
    """
    with forecast_device():
        layer, x = nn.Linear(7, 7, bias=False).cuda(), _full(2, 7).requires_grad_()
        with _Casts(49) as casts:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = checkpoint(lambda z: layer(layer(z)), x, use_reentrant=False)
                loss = checkpoint(lambda z: layer(layer(z)), y, use_reentrant=False).sum()
            assert len(casts.results) == 1
            loss.backward()
            assert len(casts.results) == 3
            assert casts.alive() == 0
            assert layer.weight.grad.dtype is torch.float32
