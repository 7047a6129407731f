"""CUDA's autocast on the fake device: the casts of each operator, and the cache of cast weights.

The classes and their members are torch's own, see ``operators.yaml``. A rule is installed for each
operator that the running torch registers for CUDA, because the lists differ between versions. An
operator of unknown class is not cast, and this is reported as an assumption.

The rules cannot be unregistered, so they are registered once per process.
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

# The classes of operators: sections of operators.yaml.
_CLASSES = ("lower_precision", "fp32", "fp32_set_opt_dtype", "promote", "banned", "left_alone")
# Overloads for named dimensions, which fake tensors do not have. torch 2.13 has dropped most of
# them.
_NAMED_DIMENSIONS = re.compile(r"\.(\w*dimname|names_)", re.IGNORECASE)

_CUDA_KEY = "AutocastCUDA"
_FAKE_KEY = "AutocastPrivateUse1"


class WeightCache:
    """Casts of leaf weights, which torch keeps until the outermost autocast ends.

    A recomputation in a backward pass enters autocast again, so the cache is filled and cleared
    again.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, lower: torch.dtype) -> torch.Tensor:
        """Return a tensor in another dtype, from the cache if it is a weight.

        Args:
            tensor: The tensor.
            dtype: The dtype to cast to.
            lower: The lower precision of autocast. Only casts to it are cached.
        """
        if tensor.dtype is dtype:
            return tensor
        # The condition is that of cached_cast in autocast_mode.cpp.
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
        """Drop all casts."""
        self._casts.clear()


@contextlib.contextmanager
def installed(device_name: str, assume: Assume) -> Iterator[None]:
    """Give the fake device CUDA's autocast within the context.

    Args:
        device_name: The device type.
        assume: Called with each assumption.
    """
    autocast = _register(device_name)
    previous_dtype = torch.get_autocast_dtype(device_name)
    clear_original = torch.clear_autocast_cache

    def clear() -> None:
        clear_original()
        autocast.cache.clear()

    autocast.assume = assume
    # CUDA's default.
    torch.set_autocast_dtype(device_name, torch.float16)
    # autocast calls it when the outermost region ends.
    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        autocast.assume = None
        torch.clear_autocast_cache = clear_original
        torch.set_autocast_dtype(device_name, previous_dtype)
        autocast.cache.clear()


def registered_for_cuda() -> frozenset[str]:
    """Return the aten operators that have an autocast kernel for CUDA in this torch.

    A build without CUDA registers them too.
    """
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key(_CUDA_KEY)
    names = {name.removeprefix("aten::") for name in registrations if name.startswith("aten::")}
    return frozenset(name for name in names if not _NAMED_DIMENSIONS.search(name))


def classified() -> dict[str, str]:
    """Return the class of each operator that has one."""
    return {name: policy for policy in _CLASSES for name in LISTS[policy]}


@functools.cache
def _register(device_name: str) -> _CudaAutocast:
    """Register a kernel for each operator that CUDA's autocast treats, once per process."""
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
    """Return a kernel that dispatches below autocast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _FAKE_KEY))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(*args, **kwargs)

    return run


class _CudaAutocast:
    """CUDA's autocast for one device. For each class of operators a method creates the kernels.

    Args:
        device_name: The device type.
        libraries: The registrations, which last as long as these objects.
    """

    def __init__(self, device_name: str, libraries: tuple[torch.library.Library, ...]) -> None:
        self.cache = WeightCache()
        # Receives the assumptions of the current forecast.
        self.assume: Assume | None = None
        self._device_name = device_name
        self._libraries = libraries

    def lower_precision(self, operator: Any, _: str) -> Kernel:
        """Cast to the lower precision."""
        return lambda *args, **kwargs: self._call(operator, args, kwargs, self._lower())

    def fp32(self, operator: Any, _: str) -> Kernel:
        """Cast to fp32."""
        return lambda *args, **kwargs: self._call(operator, args, kwargs, torch.float32)

    def fp32_set_opt_dtype(self, operator: Any, _: str) -> Kernel:
        """Request an fp32 result through the operator's dtype argument, without a cast copy."""
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
        """Cast to the widest type of the arguments."""

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
        """Refuse the operator."""

        def kernel(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(
                f"{name} (nn.BCELoss) is refused by autocast on CUDA: half precision cannot"
                " represent its gradients. Use binary_cross_entropy_with_logits"
                " (nn.BCEWithLogitsLoss), or leave autocast for it."
            )

        return kernel

    def unknown(self, operator: Any, name: str) -> Kernel:
        """Run an operator of unknown class without casts, and record the assumption."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self.assume is not None:
                self.assume(
                    f"autocast was assumed not to cast {name}: its class in torch"
                    f" {torch.__version__} is unknown"
                )
            return operator(*args, **kwargs)

        return kernel

    def _lower(self) -> torch.dtype:
        return torch.get_autocast_dtype(self._device_name)

    def _is_eligible(self, value: Any) -> bool:
        """Return whether autocast casts a value (is_eligible in autocast_mode.h)."""
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
