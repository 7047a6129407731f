"""CUDA's autocast on the fake device: which operator casts to what, and the cache of cast weights.

The classes and their members are torch's own (``ATen/autocast_mode.h``, ``AT_FORALL_*``, and
https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior). What is installed is what the running torch
registers for CUDA, so lists that grow or shrink between versions are followed; a member without a class is said
where it is used.

Does not: decide where autocast is on, or emulate the cuDNN recurrent layers' casts (``recurrent``).
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from holdfast.forecast.fake.guesses import Guesses, asking_line


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    cudnn_convolution cudnn_convolution_transpose
""")
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
FP32_SET_OPT_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
FP32_APPEND_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
BANNED = ("binary_cross_entropy",)
# Registered for CUDA by another file of torch: cuDNN's recurrent layers (``recurrent`` stands for them).
ELSEWHERE = frozenset({"_cudnn_rnn"})
# Overloads for named dimensions, which fake tensors do not have; torch 2.13 has dropped most of them.
_NAMED = re.compile(r"\.(\w*dimname|names_)", re.IGNORECASE)

_CUDA_KEY = "AutocastCUDA"
_FAKE_KEY = "AutocastPrivateUse1"
_installed: list[torch.library.Library] = []
_told: Guesses | None = None
"""Of the forecast that is under way."""


class WeightCache:
    """Casts of leaf weights, kept until the outermost autocast ends, as torch keeps them.

    A weight is cast once for all its uses. In a backward pass that recomputes, autocast is entered anew: the cache is
    filled once more and dropped once more.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, lower: torch.dtype) -> torch.Tensor:
        """Return the tensor in another dtype, from the cache where it is a weight."""
        kept = (
            dtype is lower
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not kept:
            return tensor.to(dtype)
        entry = self._casts.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            entry = (weakref.ref(tensor), tensor.to(dtype))
            self._casts[id(tensor)] = entry
        return entry[1]

    def clear(self) -> None:
        """Drop all casts."""
        self._casts.clear()


_cache = WeightCache()


@contextlib.contextmanager
def installed(device_name: str, guesses: Guesses) -> Iterator[None]:
    """Give the fake device CUDA's autocast policy; the registrations stay for good, the cache's scope does not.

    Args:
        device_name: Of the PrivateUse1 backend.
        guesses: Where operators are written down whose class is unknown.
    """
    global _told
    if not _installed:
        _register(device_name)
    _told, told_before = guesses, _told
    previous_dtype = torch.get_autocast_dtype(device_name)
    torch.set_autocast_dtype(device_name, torch.float16)  # CUDA's default
    clear_original = torch.clear_autocast_cache

    def clear() -> None:
        clear_original()
        _cache.clear()

    torch.clear_autocast_cache = clear  # autocast calls it when the outermost region ends
    try:
        yield
    finally:
        _told = told_before
        torch.clear_autocast_cache = clear_original
        torch.set_autocast_dtype(device_name, previous_dtype)
        _cache.clear()


def registered_for_cuda() -> frozenset[str]:
    """Return the aten operators for which the running torch has an autocast kernel on CUDA, such as ``"mm"``.

    They are registered in builds without CUDA too. Empty if this torch cannot tell.
    """
    listing = getattr(torch._C, "_dispatch_get_registrations_for_dispatch_key", None)
    if listing is None:
        return frozenset()
    names = {name.removeprefix("aten::") for name in listing(_CUDA_KEY) if name.startswith("aten::")}
    return frozenset(name for name in names if not _NAMED.search(name))


def _classified() -> frozenset[str]:
    return frozenset(
        [*LOWER_PRECISION, *FP32, *FP32_SET_OPT_DTYPE, *FP32_APPEND_DTYPE, *PROMOTE, *BANNED, *sorted(ELSEWHERE)]
    )


def _register(device_name: str) -> None:
    make: Any = torch.library.Library
    fallthrough = make("_", "IMPL", _FAKE_KEY)
    fallthrough.fallback(torch.library.fallthrough_kernel)
    library = make("aten", "IMPL", _FAKE_KEY)
    _installed.extend((fallthrough, library))
    on_cuda = registered_for_cuda()
    policies: list[tuple[Iterable[str], Callable[[Any, str, str], Callable[..., Any]]]] = [
        (LOWER_PRECISION, _lower_precision),
        (FP32, _fp32),
        (FP32_SET_OPT_DTYPE, _fp32_set_opt_dtype),
        (FP32_APPEND_DTYPE, _fp32_append_dtype),
        (PROMOTE, _promote),
        (BANNED, _banned),
        (sorted(on_cuda - _classified()), _left_alone),
    ]
    for names, policy in policies:
        for name in names:
            if on_cuda and name not in on_cuda:
                continue  # another version's
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if operator is not None:
                library.impl(name, policy(operator, name, device_name))


def _autocast_off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _FAKE_KEY)))


def _eligible(value: Any, device_name: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device_name
    )


def _cast(value: Any, dtype: torch.dtype, device_name: str) -> Any:
    if isinstance(value, torch.Tensor):
        if not _eligible(value, device_name) or value.dtype is dtype:
            return value
        return _cache.cast(value, dtype, torch.get_autocast_dtype(device_name))
    if isinstance(value, (list, tuple)):
        return [_cast(element, dtype, device_name) for element in value]
    return value


def _call(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype, device_name: str) -> Any:
    cast_args = [_cast(arg, dtype, device_name) for arg in args]
    return operator(*cast_args, **{name: _cast(arg, dtype, device_name) for name, arg in kwargs.items()})


def _lower_precision(operator: Any, _: str, device_name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            return _call(operator, args, kwargs, torch.get_autocast_dtype(device_name), device_name)

    return kernel


def _fp32(operator: Any, _: str, device_name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            return _call(operator, args, kwargs, torch.float32, device_name)

    return kernel


def _fp32_set_opt_dtype(operator: Any, _: str, device_name: str) -> Callable[..., Any]:
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            if not _eligible(args[0], device_name):
                return operator(*args, **kwargs)
            if len(args) > position:
                dtype = args[position] or torch.float32
                return operator(*args[:position], dtype, *args[position + 1 :], **kwargs)
            return operator(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})

    return kernel


def _fp32_append_dtype(_: Any, name: str, device_name: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    plain, with_dtype = getattr(packet, name.partition(".")[2]), getattr(packet, FP32_APPEND_DTYPE[name])
    names = [argument.name for argument in plain._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in plain._schema.arguments[1:]}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            if not _eligible(args[0], device_name):
                return plain(*args, **kwargs)
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            return with_dtype(*(given[each] for each in names), dtype=torch.float32)

    return kernel


def _promote(operator: Any, name: str, device_name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            lower = torch.get_autocast_dtype(device_name)
            dtypes = {lower}
            for value in (*args, *kwargs.values()):
                group = value if isinstance(value, (list, tuple)) else (value,)
                dtypes |= {tensor.dtype for tensor in group if _eligible(tensor, device_name)}
            if not dtypes <= {lower, torch.float32}:
                raise RuntimeError(f"Unexpected floating ScalarType in autocast of {name}: {dtypes}")
            return _call(operator, args, kwargs, torch.float32 if torch.float32 in dtypes else lower, device_name)

    return kernel


def _banned(_: Any, name: str, __: str) -> Callable[..., Any]:
    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} (nn.BCELoss) is refused by autocast on CUDA: half precision cannot represent its gradients. "
            "Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), or leave autocast for it."
        )

    return kernel


def _left_alone(operator: Any, name: str, _: str) -> Callable[..., Any]:
    what = f"autocast was taken to leave {name} alone: its class in torch {torch.__version__} is unknown"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _told is not None:
            _told.assume(what, asking_line())
        with _autocast_off():
            return operator(*args, **kwargs)

    return kernel
