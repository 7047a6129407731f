"""CUDA's autocast on the fake device: which operator casts to what, and the cache of cast weights.

The classes and their members are torch's own, see ``operators.yaml``. What is installed is what the
running torch registers for CUDA, so lists that grow or shrink between versions are followed; a
member without a class is said where it is used.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.forecast.kernels.operators import LISTS

Assume = Callable[[str], None]


_CLASSES = ("lower_precision", "fp32", "fp32_set_opt_dtype", "promote", "banned", "left_alone")
# Overloads for named dimensions, which fake tensors do not have; torch 2.13 has dropped most of
# them.
_NAMED = re.compile(r"\.(\w*dimname|names_)", re.IGNORECASE)

_CUDA_KEY = "AutocastCUDA"
_FAKE_KEY = "AutocastPrivateUse1"


class WeightCache:
    """Casts of leaf weights, kept until the outermost autocast ends, as torch keeps them.

    In a backward pass that recomputes, autocast is entered anew: the cache is filled and dropped
        once more.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, lower: torch.dtype) -> torch.Tensor:
        """Return the tensor in another dtype, from the cache where it is a weight."""
        if tensor.dtype is dtype:
            return tensor
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
_installed: list[torch.library.Library] = []
_assume: Assume = lambda _: None  # noqa: E731 - of the forecast that is under way


@contextlib.contextmanager
def installed(device_name: str, assume: Assume) -> Iterator[None]:
    """Give the fake device CUDA's autocast policy.

    The registrations stay for good, the cache's scope does not.
    """
    global _assume
    if not _installed:
        _register(device_name)
    _assume, assume_before = assume, _assume
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
        _assume = assume_before
        torch.clear_autocast_cache = clear_original
        torch.set_autocast_dtype(device_name, previous_dtype)
        _cache.clear()


def registered_for_cuda() -> frozenset[str]:
    """Return the aten operators that have an autocast kernel on CUDA in this torch, with or
    without CUDA.
    """
    listing = torch._C._dispatch_get_registrations_for_dispatch_key
    names = {
        name.removeprefix("aten::") for name in listing(_CUDA_KEY) if name.startswith("aten::")
    }
    return frozenset(name for name in names if not _NAMED.search(name))


def classified() -> dict[str, str]:
    """Return the class of each operator: the name of its method of `_Policies`."""
    return {name: policy for policy in _CLASSES for name in LISTS[policy]}


def _register(device_name: str) -> None:
    make: Any = torch.library.Library
    fallthrough = make("_", "IMPL", _FAKE_KEY)
    fallthrough.fallback(torch.library.fallthrough_kernel)
    library = make("aten", "IMPL", _FAKE_KEY)
    _installed.extend((fallthrough, library))
    on_cuda = registered_for_cuda()
    policies = _Policies(device_name)
    known = classified()
    for name in sorted(on_cuda):
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None and name not in LISTS["left_alone"]:
            policy = getattr(policies, known.get(name, "left_alone"))
            library.impl(name, _without_autocast(policy(operator, name)))


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _FAKE_KEY))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(*args, **kwargs)

    return run


class _Policies:
    """The kernels of the classes, for one device."""

    def __init__(self, device_name: str) -> None:
        self._device_name = device_name

    def lower_precision(self, operator: Any, _: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(operator, args, kwargs, self._lower())

    def fp32(self, operator: Any, _: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(operator, args, kwargs, torch.float32)

    def fp32_set_opt_dtype(self, operator: Any, _: str) -> Callable[..., Any]:
        position = [argument.name for argument in operator._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not self._eligible(args[0]):
                return operator(*args, **kwargs)
            if len(args) > position:
                dtype = args[position] or torch.float32
                return operator(*args[:position], dtype, *args[position + 1 :], **kwargs)
            return operator(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})

        return kernel

    def promote(self, operator: Any, name: str) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            lower = self._lower()
            dtypes = {lower}
            for value in (*args, *kwargs.values()):
                group = value if isinstance(value, (list, tuple)) else (value,)
                dtypes |= {tensor.dtype for tensor in group if self._eligible(tensor)}
            if not dtypes <= {lower, torch.float32}:
                raise RuntimeError(
                    f"Unexpected floating ScalarType in autocast of {name}: {dtypes}"
                )
            return self._call(
                operator, args, kwargs, torch.float32 if torch.float32 in dtypes else lower
            )

        return kernel

    def banned(self, _: Any, name: str) -> Callable[..., Any]:
        def kernel(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(
                f"{name} (nn.BCELoss) is refused by autocast on CUDA: half precision cannot"
                " represent its gradients. Use binary_cross_entropy_with_logits"
                " (nn.BCEWithLogitsLoss), or leave autocast for it."
            )

        return kernel

    def left_alone(self, operator: Any, name: str) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            _assume(
                f"autocast was taken to leave {name} alone: its class in torch {torch.__version__}"
                " is unknown"
            )
            return operator(*args, **kwargs)

        return kernel

    def _lower(self) -> torch.dtype:
        return torch.get_autocast_dtype(self._device_name)

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == self._device_name
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return _cache.cast(value, dtype, self._lower()) if self._eligible(value) else value
        if isinstance(value, (list, tuple)):
            return [self._cast(element, dtype) for element in value]
        return value

    def _call(self, operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        cast_args = [self._cast(arg, dtype) for arg in args]
        return operator(
            *cast_args, **{name: self._cast(arg, dtype) for name, arg in kwargs.items()}
        )
