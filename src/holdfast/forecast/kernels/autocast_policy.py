"""Emulate CUDA's autocast on the fake device: which inputs are cast, and the weight cache.

torch groups operators into classes, each of which casts its inputs in its own way;
``operators.yaml`` lists the operators in each class. Because the lists differ between torch
versions, a kernel is registered for each operator for which the installed torch has one on CUDA. If
the class of an operator is not known, its inputs are not cast, which is reported as an assumption.

The kernels cannot be unregistered, so they are registered once per process.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.forecast.kernels.operators import LISTS

Assume = Callable[[str], None]
Kernel = Callable[..., Any]

# The classes of operators, which are also sections of operators.yaml.
_CLASSES = ("lower_precision", "fp32", "fp32_set_opt_dtype", "promote", "banned", "left_alone")
# Matches overloads for named dimensions. Fake tensors do not support dimension names, and torch
# 2.13 dropped most of these overloads.
_NAMED_DIMENSIONS = re.compile(r"\.(\w*dimname|names_)", re.IGNORECASE)

_CUDA_KEY = "AutocastCUDA"
_FAKE_KEY = "AutocastPrivateUse1"


class WeightCache:
    """Keeps casts of weights to the lower precision until the outermost autocast region ends.

    Activation checkpointing enters autocast again in the backward pass, so the cache is then filled
    and cleared once more.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, lower: torch.dtype) -> torch.Tensor:
        """Cast a tensor to `dtype`, using the cache for weights that are cast to `lower`.

        Args:
            tensor: The tensor to cast.
            dtype: The dtype to cast to.
            lower: Autocast's lower-precision dtype. Only casts to this dtype are cached.
        """
        if tensor.dtype is dtype:
            return tensor
        # The same condition as in cached_cast in autocast_mode.cpp.
        is_cached = (
            dtype is lower
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not is_cached:
            return tensor.to(dtype)
        entry = self._casts.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            entry = (weakref.ref(tensor), tensor.to(dtype))
            self._casts[id(tensor)] = entry
        return entry[1]

    def clear(self) -> None:
        """Drop all cached casts."""
        self._casts.clear()


@contextlib.contextmanager
def installed(device_name: str, assume: Assume) -> Iterator[None]:
    """Make autocast behave on the fake device as it does on CUDA during the ``with`` block.

    Args:
        device_name: The type of the fake device.
        assume: Called with the text of each assumption.
    """
    autocast = _register(device_name)
    previous_dtype = torch.get_autocast_dtype(device_name)
    clear_original = torch.clear_autocast_cache

    def clear() -> None:
        clear_original()
        autocast.cache.clear()

    autocast.assume = assume
    # The default dtype of autocast on CUDA.
    torch.set_autocast_dtype(device_name, torch.float16)
    # torch.autocast calls this function when the outermost region ends.
    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        autocast.assume = None
        torch.clear_autocast_cache = clear_original
        torch.set_autocast_dtype(device_name, previous_dtype)
        autocast.cache.clear()


def registered_for_cuda() -> frozenset[str]:
    """Return the names of the aten operators that have a CUDA autocast kernel.

    torch registers these kernels even in builds without CUDA.
    """
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key(_CUDA_KEY)
    names = {name.removeprefix("aten::") for name in registrations if name.startswith("aten::")}
    return frozenset(name for name in names if not _NAMED_DIMENSIONS.search(name))


def classified() -> dict[str, str]:
    """Return the autocast class of each operator in ``operators.yaml``, keyed by operator name."""
    return {name: policy for policy in _CLASSES for name in LISTS[policy]}


@functools.cache
def _register(device_name: str) -> _CudaAutocast:
    """Register an autocast kernel for each operator that has one on CUDA.

    The result is cached, because kernels can be registered only once per process.
    """
    make_library: Any = torch.library.Library
    fallthrough = make_library("_", "IMPL", _FAKE_KEY)
    fallthrough.fallback(torch.library.fallthrough_kernel)
    library = make_library("aten", "IMPL", _FAKE_KEY)
    autocast = _CudaAutocast(device_name, libraries=(fallthrough, library))
    make_kernel = {
        "lower_precision": autocast.lower_precision,
        "fp32": autocast.fp32,
        "fp32_set_opt_dtype": autocast.fp32_set_opt_dtype,
        "promote": autocast.promote,
        "banned": autocast.banned,
    }
    classes = classified()
    for name in sorted(registered_for_cuda()):
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        policy = classes.get(name)
        if operator is None or policy == "left_alone":
            continue
        make = autocast.unknown if policy is None else make_kernel[policy]
        library.impl(name, _without_autocast(make(operator, name)))
    return autocast


def _without_autocast(kernel: Kernel) -> Kernel:
    """Wrap a kernel so that operators called inside it do not dispatch to autocast again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _FAKE_KEY))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(*args, **kwargs)

    return run


class _CudaAutocast:
    """Creates kernels that emulate CUDA's autocast, with one method for each class of operators.

    Args:
        device_name: The type of the fake device.
        libraries: The libraries that hold the registered kernels. They must be kept alive.
    """

    def __init__(self, device_name: str, libraries: tuple[torch.library.Library, ...]) -> None:
        self.cache = WeightCache()
        # Called with the text of each assumption while `installed` is active; None otherwise.
        self.assume: Assume | None = None
        self._device_name = device_name
        self._libraries = libraries

    def lower_precision(self, operator: Any, _: str) -> Kernel:
        """Return a kernel that casts its inputs to the lower precision."""
        return lambda *args, **kwargs: self._call(operator, args, kwargs, self._lower())

    def fp32(self, operator: Any, _: str) -> Kernel:
        """Return a kernel that casts its inputs to fp32."""
        return lambda *args, **kwargs: self._call(operator, args, kwargs, torch.float32)

    def fp32_set_opt_dtype(self, operator: Any, _: str) -> Kernel:
        """Return a kernel that requests an fp32 result through the operator's dtype argument.

        Such a kernel does not need a cast copy of its input.
        """
        position = [argument.name for argument in operator._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not self._is_eligible(args[0]):
                return operator(*args, **kwargs)
            if len(args) > position:
                dtype = args[position] or torch.float32
                return operator(*args[:position], dtype, *args[position + 1 :], **kwargs)
            dtype = kwargs.get("dtype") or torch.float32
            return operator(*args, **{**kwargs, "dtype": dtype})

        return kernel

    def promote(self, operator: Any, name: str) -> Kernel:
        """Return a kernel that casts its inputs to the widest dtype among them."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            lower = self._lower()
            dtypes = {lower}
            for value in (*args, *kwargs.values()):
                group = value if isinstance(value, (list, tuple)) else (value,)
                dtypes |= {tensor.dtype for tensor in group if self._is_eligible(tensor)}
            if not dtypes <= {lower, torch.float32}:
                raise RuntimeError(
                    f"Unexpected floating ScalarType in autocast of {name}: {dtypes}"
                )
            widest = torch.float32 if torch.float32 in dtypes else lower
            return self._call(operator, args, kwargs, widest)

        return kernel

    def banned(self, _: Any, name: str) -> Kernel:
        """Return a kernel that raises an error, as the operator does under autocast on CUDA."""

        def kernel(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(
                f"{name} (nn.BCELoss) cannot run under autocast on CUDA, because half precision"
                " cannot represent its gradients. Use binary_cross_entropy_with_logits"
                " (nn.BCEWithLogitsLoss), or disable autocast around the call."
            )

        return kernel

    def unknown(self, operator: Any, name: str) -> Kernel:
        """Return a kernel that casts nothing and reports this as an assumption."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self.assume is not None:
                self.assume(
                    f"autocast was assumed not to cast the inputs of {name}: its rule in torch"
                    f" {torch.__version__} is unknown"
                )
            return operator(*args, **kwargs)

        return kernel

    def _lower(self) -> torch.dtype:
        return torch.get_autocast_dtype(self._device_name)

    def _is_eligible(self, value: Any) -> bool:
        """Return whether autocast may cast a value (is_eligible in autocast_mode.h)."""
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == self._device_name
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._cast(element, dtype) for element in value]
        if self._is_eligible(value):
            return self.cache.cast(value, dtype, self._lower())
        return value

    def _call(self, operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        cast_args = [self._cast(arg, dtype) for arg in args]
        cast_kwargs = {name: self._cast(arg, dtype) for name, arg in kwargs.items()}
        return operator(*cast_args, **cast_kwargs)
