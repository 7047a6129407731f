"""CUDA's autocast on the fake device: the class of every operator, and how long cast weights live."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepared import run_prepared
from tests.unit.forecast.in_child import answer, case, results_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels import autocast_policy as policy

_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)


def _full(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda")


def _image() -> torch.Tensor:
    return _full(2, 4, 8, 8)


LOWER_ROWS = {
    "mm": lambda: torch.mm(_full(4, 4), _full(4, 4)),
    "matmul": lambda: _full(4, 4) @ _half(4, 4),
    "linear": lambda: F.linear(_full(2, 4), _full(3, 4), _full(3)),
    "conv1d": lambda: F.conv1d(_full(2, 4, 8), _full(4, 4, 3)),
    "conv2d": lambda: F.conv2d(_image(), _full(4, 4, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(_image(), _full(4, 4, 3, 3)),
    "bmm": lambda: torch.bmm(_full(2, 3, 4), _full(2, 4, 3)),
    "baddbmm": lambda: torch.baddbmm(_full(2, 3, 3), _full(2, 3, 4), _full(2, 4, 3)),
    "addmm": lambda: torch.addmm(_full(3), _full(2, 4), _full(4, 3)),
    "einsum": lambda: torch.einsum("ij,jk->ik", _full(2, 3), _full(3, 4)),
    "multi_dot": lambda: torch.linalg.multi_dot([_full(2, 3), _full(3, 4), _full(4, 5)]),
    "prelu": lambda: F.prelu(_image(), _full(4)),
    "lstm_cell": lambda: nn.LSTMCell(4, 4).cuda()(_full(2, 4))[0],
    "attention": lambda: F.scaled_dot_product_attention(_full(2, 2, 8, 8), _full(2, 2, 8, 8), _full(2, 2, 8, 8)),
}
FP32_ROWS = {
    "exp": lambda: torch.exp(_half(4)),
    "log": lambda: torch.log(_half(4)),
    "pow": lambda: _half(4) ** 2,
    "pow_of_scalar": lambda: torch.pow(2.0, _half(4)),
    "rsqrt": lambda: torch.rsqrt(_half(4)),
    "reciprocal": lambda: torch.reciprocal(_half(4)),
    "softplus": lambda: F.softplus(_half(4)),
    "layer_norm": lambda: F.layer_norm(_half(2, 4), (4,), _half(4), _half(4)),
    "rms_norm": lambda: F.rms_norm(_half(2, 4), (4,)),
    "group_norm": lambda: F.group_norm(_half(2, 4, 8), 2),
    "nll_loss": lambda: F.nll_loss(_half(2, 4), torch.zeros(2, dtype=torch.long, device="cuda")),
    "cross_entropy": lambda: F.cross_entropy(_half(2, 4), torch.zeros(2, dtype=torch.long, device="cuda")),
    "mse_loss": lambda: F.mse_loss(_half(4), _half(4)),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(_half(4), _half(4)),
    "kl_div": lambda: F.kl_div(_half(4), _half(4), reduction="batchmean"),
    "bce_with_logits": lambda: F.binary_cross_entropy_with_logits(_half(4), _half(4)),
    "cosine_similarity": lambda: F.cosine_similarity(_half(2, 4), _half(2, 4)),
    "cdist": lambda: torch.cdist(_half(2, 4), _half(3, 4)),
    "logsumexp": lambda: torch.logsumexp(_half(2, 4), 1),
    "interpolate": lambda: F.interpolate(_half(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
}
SET_OPT_ROWS = {
    "softmax": lambda: torch.softmax(_half(2, 4), -1),
    "log_softmax": lambda: F.log_softmax(_half(2, 4), -1),
    "sum": lambda: _half(2, 4).sum(),
    "sum_over": lambda: _half(2, 4).sum(1),
    "prod": lambda: _half(2, 4).prod(),
    "cumsum": lambda: _half(2, 4).cumsum(1),
    "vector_norm": lambda: torch.linalg.vector_norm(_half(4)),
    "norm": lambda: _half(4).norm(),
}
APPEND_ROWS = {
    "norm.Scalar": lambda: torch.ops.aten.norm.Scalar(_half(4)),
    "norm.ScalarOpt_dim": lambda: torch.ops.aten.norm.ScalarOpt_dim(_half(2, 4), 2, [1]),
}
PROMOTE_ROWS = {
    "addcmul": lambda: torch.addcmul(_half(4), _full(4), _half(4)),
    "addcdiv": lambda: torch.addcdiv(_half(4), _full(4), _half(4)),
    "dot": lambda: torch.dot(_half(4), _full(4)),
    "atan2": lambda: torch.atan2(_half(4), _full(4)),
    "bilinear": lambda: F.bilinear(_half(2, 3), _half(2, 4), _full(5, 3, 4)),
    "grid_sample": lambda: F.grid_sample(_half(1, 1, 4, 4), _full(1, 4, 4, 2), align_corners=False),
    "scatter_add": lambda: _half(4).scatter_add(0, torch.zeros(4, dtype=torch.long, device="cuda"), _full(4)),
    "index_put": lambda: _half(4).index_put((torch.zeros(2, dtype=torch.long, device="cuda"),), _full(2)),
}
LEFT_ALONE = {
    "relu": (lambda: torch.relu(_half(4)), "bfloat16"),
    "add": (lambda: _half(4) + _full(4), "float32"),
    "softmax_with_dtype": (lambda: torch.softmax(_half(2, 4), -1, dtype=torch.bfloat16), "bfloat16"),
    "mm_of_doubles": (lambda: torch.mm(_full(4, 4).double(), _full(4, 4).double()), "float64"),
    "sum_of_integers": (lambda: torch.zeros(4, dtype=torch.int32, device="cuda").sum(), "int64"),
    "mm_on_the_host": (lambda: torch.mm(torch.empty(4, 4), torch.empty(4, 4)), "float32"),
    "dot_of_halves": (lambda: torch.dot(_half(4), _half(4)), "bfloat16"),
}


@case
def dtypes() -> Any:
    found: dict[str, str] = {}
    with forecast_device(), torch.autocast("cuda", dtype=torch.bfloat16):
        for rows in (LOWER_ROWS, FP32_ROWS, SET_OPT_ROWS, APPEND_ROWS, PROMOTE_ROWS):
            found |= {name: str(row().dtype).removeprefix("torch.") for name, row in rows.items()}
        found |= {name: str(row().dtype).removeprefix("torch.") for name, (row, _) in LEFT_ALONE.items()}
    return found


@case
def outside_and_banned() -> Any:
    with forecast_device():
        outside = str(torch.mm(_full(4, 4), _full(4, 4)).dtype)
        with torch.autocast("cuda"):
            default = str(torch.mm(_full(4, 4), _full(4, 4)).dtype)
            with torch.autocast("cuda", enabled=False):
                switched_off = str(torch.mm(_full(4, 4), _full(4, 4)).dtype)
            try:
                F.binary_cross_entropy(_full(4), _full(4))
            except RuntimeError as error:
                return [outside, default, switched_off, str(error)]
    return None


@case
def lists() -> Any:
    with forecast_device() as device:
        return {
            "unknown": sorted(policy.registered_for_cuda() - set(policy.classified())),
            "assumed": [a.what for a in device.assumptions if "autocast" in a.what],
            "installed": sorted(
                name
                for name in policy.registered_for_cuda()
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastPrivateUse1")
            ),
            "registered": sorted(policy.registered_for_cuda() - policy.ELSEWHERE),
        }


class _Casts(TorchDispatchMode):
    """Counts the copies to bf16 of tensors with so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.numel() == self.elements and out.dtype is torch.bfloat16:
            self.results.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(result() is not None for result in self.results)


@case
def weight_cache() -> Any:
    found: dict[str, Any] = {}
    with forecast_device():
        layer = nn.Linear(7, 7, bias=False).cuda()
        x = _full(2, 7)
        with _Casts(49) as casts, torch.no_grad():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    layer(layer(x))
                layer(x)
                found["three uses"] = [len(casts.results), casts.alive()]
            found["after the outermost"] = casts.alive()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                layer(x)
            found["next region"] = len(casts.results)
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                layer(layer(x))
            found["cache switched off"] = len(casts.results)
            layer.requires_grad_(requires_grad=False)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                layer(layer(x))
                found["frozen"] = [len(casts.results), casts.alive()]
    return found


@case
def weight_cache_in_recomputation() -> Any:
    with forecast_device():
        layer, x = nn.Linear(7, 7, bias=False).cuda(), _full(2, 7).requires_grad_()
        with _Casts(49) as casts:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = checkpoint(lambda z: layer(layer(z)), x, use_reentrant=False)
                y = checkpoint(lambda z: layer(layer(z)), y, use_reentrant=False)
                in_forward = len(casts.results)
                loss = y.sum()
            loss.backward()
            return [in_forward, len(casts.results) - in_forward, casts.alive(), str(layer.weight.grad.dtype)]


@case
def a_function_of_the_user() -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.seen = (str(x.dtype), torch.is_autocast_enabled("cuda"))
            Double.seen = ctx.seen
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    with forecast_device():
        x = _half(4).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            Double.apply(x).sum().backward()
    return [*Double.seen, str(x.grad.dtype)]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the cases gave."""
    return results_of(__file__)


@pytest.mark.parametrize("name", LOWER_ROWS)
def test_products_run_in_the_lower_precision(results: dict[str, Any], name: str) -> None:
    """An operator of CUDA's list "can autocast to float16" gives the autocast type for fp32 and mixed inputs."""
    assert results["dtypes"][name] == "bfloat16"


@pytest.mark.parametrize("name", [*FP32_ROWS, *SET_OPT_ROWS, *APPEND_ROWS])
def test_sums_and_losses_run_in_fp32(results: dict[str, Any], name: str) -> None:
    """An operator of CUDA's list "can autocast to float32" gives fp32 for inputs in half precision."""
    if name == "rms_norm" and name not in policy.registered_for_cuda():  # as in torch 2.11
        assert results["dtypes"][name] == "bfloat16"
    else:
        assert results["dtypes"][name] == "float32"


@pytest.mark.parametrize("name", PROMOTE_ROWS)
def test_mixed_inputs_are_promoted(results: dict[str, Any], name: str) -> None:
    """An operator of CUDA's list "can promote to the widest input type" gives fp32 where one input is fp32."""
    assert results["dtypes"][name] == "float32"


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_everything_else_is_left_alone(results: dict[str, Any], name: str) -> None:
    """Other operators, a dtype that is asked for, doubles, integers and host tensors are not cast."""
    assert results["dtypes"][name] == LEFT_ALONE[name][1]


def test_regions_and_the_refused_loss(results: dict[str, Any]) -> None:
    """Casting happens in enabled regions only, fp16 is the default there, and BCELoss is refused as on CUDA."""
    outside, default, switched_off, refusal = results["outside_and_banned"]
    assert (outside, default, switched_off) == ("torch.float32", "torch.float16", "torch.float32")
    assert "binary_cross_entropy_with_logits" in refusal


def test_every_operator_that_torch_registers_for_cuda_has_a_class(results: dict[str, Any]) -> None:
    """The lists are complete for this torch: all that is registered for CUDA is installed, and nothing is assumed."""
    lists = results["lists"]
    assert lists["unknown"] == lists["assumed"] == []
    assert lists["installed"] == lists["registered"]
    assert len(lists["installed"]) > 100


def test_an_operator_of_a_newer_torch_is_left_alone_and_told_where_it_is_used() -> None:
    """One that is registered for CUDA and in no list of ours keeps its dtype; a forecast without it says nothing."""
    program = """if True:
        from holdfast.forecast.kernels import autocast_policy as policy
        policy.FP32 = tuple(name for name in policy.FP32 if name != "cosh")
        import torch
        from holdfast.forecast.fake.device import forecast_device
        for function in torch.cosh, torch.tan:
            with forecast_device() as device, torch.autocast("cuda", dtype=torch.bfloat16):
                half = torch.empty(4, device="cuda", dtype=torch.bfloat16)
                print(function(half).dtype, [each.what[:40] for each in device.assumptions])
        """
    done = run_prepared(["-c", program], timeout=120)
    assert done.stdout.splitlines() == [
        "torch.bfloat16 ['autocast was taken to leave cosh alone: ']",
        "torch.float32 []",
    ], done.stderr


@pytest.mark.skipif(not _HEADER.exists(), reason="this torch comes without its headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("LOWER_PRECISION_FP", policy.LOWER_PRECISION),
        ("FP32", policy.FP32),
        ("FP32_SET_OPT_DTYPE", policy.FP32_SET_OPT_DTYPE),
        ("PROMOTE", policy.PROMOTE),
    ],
)
def test_the_classes_are_those_of_torch(macro: str, ours: tuple[str, ...]) -> None:
    """Each list is, name by name, that of the header that torch's own CUDA policy is compiled from."""
    text = _HEADER.read_text(encoding="utf-8")
    found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*\n)", text)
    assert found is not None
    names = re.findall(r"_\((\w+)(?:, (\w+))?\)", found.group(1))
    listed = {f"{name}.{overload}" if overload else name for name, overload in names}
    listed = {name for name in listed if not policy._NAMED.search(name)}
    # autocast_mode.cpp adds them to what the macro lists
    beside = {"cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth"}
    assert listed == (set(ours) & policy.registered_for_cuda()) - beside  # others are of another version


def test_a_weight_is_cast_once_until_the_outermost_region_ends(results: dict[str, Any]) -> None:
    """The cache holds one cast for all uses in nested regions, and is dropped at the outermost end; frozen: none."""
    assert results["weight_cache"] == {
        "three uses": [1, 1],
        "after the outermost": 0,
        "next region": 2,
        "cache switched off": 4,
        "frozen": [6, 0],
    }


def test_recomputation_casts_weights_anew(results: dict[str, Any]) -> None:
    """Two recomputed regions of two uses each cast the weight once together forward and once each in backward."""
    assert results["weight_cache_in_recomputation"] == [1, 2, 0, "torch.float32"]


def test_a_user_function_sees_autocast_for_cuda(results: dict[str, Any]) -> None:
    """custom_fwd with cast_inputs casts and switches autocast off inside, as on CUDA."""
    assert results["a_function_of_the_user"] == ["torch.float32", False, "torch.bfloat16"]


if __name__ == "__main__":
    answer()
