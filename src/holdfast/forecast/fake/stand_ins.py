"""What user code sees of CUDA while it runs on the fake device.

``torch.cuda``, ``"cuda"``, values of tensors.

Code that asks for ``"cuda"`` gets the fake device, and a tensor there says to code outside torch
and holdfast that it is on ``cuda:0``, so that ``if x.device.type == "cuda"`` goes the way that it
goes on a GPU. All of it is put back after.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.core.errors import PolicyError
from holdfast.core.importing import ImportWatch
from holdfast.forecast.fake.cuda_module import Patches, install_cuda_module
from holdfast.forecast.fake.guesses import Guesses


def redirected(device: Any, fake: torch.device) -> Any:
    """Return the fake device for ``"cuda"``, ``"cuda:1"`` or the like, and everything else as it
    is.
    """
    if isinstance(device, torch.device):
        return fake if device.type == "cuda" else device
    if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")):
        return fake
    return device


@contextlib.contextmanager
def installed(fake: torch.device, guesses: Guesses, *, as_cuda: bool) -> Iterator[None]:
    """Put the stand-ins in place while the context lasts: ``"cuda"`` leads to the fake device.

    Without `as_cuda` CUDA is not there at all; values of fake tensors can be read in any case.
    """
    with Patches() as patches:
        _values_of_fake_tensors(patches)
        _compile_as_eager(patches, guesses)
        _nothing_is_saved(patches, guesses)
        _one_device_only(patches)
        # Its branch for traced tensors repeats heads and builds masks that no real run has.
        transformers = "transformers.utils.import_utils"
        seen = partial(patches.replace, name="is_fake_tensor", value=lambda _: False)
        _when_imported(patches, transformers, seen)
        # It draws again until all numbers suit, which fake ones never do.
        patches.replace(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        if as_cuda:
            _tensors(patches, fake)
            _devices_as_seen(patches, fake)
            install_cuda_module(patches, guesses)
            _autocast(patches, fake.type)
        yield


def _values_of_fake_tensors(patches: Patches) -> None:
    def values(tensor: Any) -> list[Any]:
        if tensor.numel() > 0 and tensor.fake_mode.facts.of(tensor).value is None:
            # One question for all elements: each takes 80 microseconds.
            return [tensor.reshape(-1)[0].item()] * tensor.numel()
        return [element.item() for element in tensor.reshape(-1).unbind()]

    def as_array(tensor: torch.Tensor) -> Any:
        return np.array(values(tensor), dtype=str(tensor.dtype).removeprefix("torch.")).reshape(
            tuple(tensor.shape)
        )

    def around_numpy(original: Any) -> Any:
        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (
                as_array(tensor)
                if isinstance(tensor, FakeTensor)
                else original(tensor, *args, **kwargs)
            )

        return numpy

    def around_format(original: Any) -> Any:
        def form(tensor: torch.Tensor, spec: str) -> str:
            if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
                return format(tensor.item(), spec)
            text: str = original(tensor, spec)
            return text

        return form

    patches.wrap(torch.Tensor, "numpy", around_numpy)
    patches.wrap(torch.Tensor, "__format__", around_format)
    patches.replace(FakeTensor, "tolist", lambda tensor: as_array(tensor).tolist())


def _compile_as_eager(patches: Patches, guesses: Guesses) -> None:
    def compiled(model: Any = None, **_: Any) -> Any:
        guesses.assume("torch.compile is forecast as eager: a compiled step needs less, mostly")
        return model if model is not None else lambda function: function

    patches.replace(torch, "compile", compiled)
    patches.replace(nn.Module, "compile", lambda module, *_, **__: compiled(module) and None)


def _tensors(patches: Patches, fake: torch.device) -> None:
    def around_to(original: Any) -> Any:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            args = tuple(redirected(arg, fake) for arg in args)
            return original(
                tensor, *args, **{name: redirected(arg, fake) for name, arg in kwargs.items()}
            )

        return to

    def cuda(tensor: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        return torch.Tensor.to(tensor, fake, **kwargs)

    patches.wrap(torch.Tensor, "to", around_to)
    patches.replace(torch.Tensor, "cuda", cuda)
    patches.replace(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
    patches.replace(torch.Tensor, "is_pinned", lambda *_, **__: False)
    patches.replace(torch.Tensor, "record_stream", lambda *_: None)


def _devices_as_seen(patches: Patches, fake: torch.device) -> None:
    """Say ``cuda:0`` to code outside torch and holdfast."""
    shown = torch.device("cuda", 0)
    device_of: Any = vars(FakeTensor)["device"]

    def device(tensor: Any) -> torch.device:
        actual: torch.device = device_of.fget(tensor)
        return (
            shown
            if actual.type == fake.type and not _asked_by_torch(sys._getframe().f_back)
            else actual
        )

    def is_cuda(tensor: torch.Tensor) -> bool:
        return tensor.device.type == fake.type and not _asked_by_torch(sys._getframe().f_back)

    patches.replace(FakeTensor, "device", property(device, device_of.fset))
    patches.replace(torch.Tensor, "is_cuda", property(is_cuda))


def _asked_by_torch(frame: FrameType | None) -> bool:
    if frame is None:  # autograd's thread has no Python frames of its own
        return True
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith(("torch.", "holdfast.")) or name == "torch"


def _autocast(patches: Patches, kind: str) -> None:
    """Lead autocast on ``"cuda"`` to the type of the fake device."""

    def there(device_type: Any) -> Any:
        return kind if device_type == "cuda" else device_type

    def around_init(original: Any) -> Any:
        def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda" and dtype is None:
                dtype = torch.float16  # CUDA's default, whatever the fake device's is
            original(self, there(device_type), dtype, *args, **kwargs)

        return init

    def around_query(original: Any) -> Any:
        return lambda device_type="cuda": original(there(device_type))

    def around_set(original: Any) -> Any:
        return lambda *args: (
            original(there(args[0]), args[1]) if len(args) > 1 else original(kind, *args)
        )

    def around_cast(original: Any) -> Any:
        return lambda value, device_type, dtype: original(value, there(device_type), dtype)

    patches.wrap(torch.autocast, "__init__", around_init)
    patches.wrap(torch.amp.autocast_mode, "_cast", around_cast)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        patches.wrap(torch, name, around_query)
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        patches.wrap(torch, name, around_set)
    patches.replace(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(kind))
    patches.replace(
        torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype(kind, dtype)
    )


def _nothing_is_saved(patches: Patches, guesses: Guesses) -> None:
    """Leave out what a step saves.

    Its tensors have no values, and the file may be that of a real run.
    """

    def around(name: str) -> Callable[[Any], Any]:
        def with_original(original: Any) -> Any:
            def save(*args: Any, **kwargs: Any) -> Any:
                if isinstance(kwargs.get("f", args[1] if len(args) > 1 else None), io.BytesIO):
                    return original(*args, **kwargs)  # a copy in memory
                guesses.assume(f"{name} was left out: nothing was written")
                return None

            return save

        return with_original

    for module in (torch, torch.serialization):
        patches.wrap(module, "save", around("torch.save"))
    patches.wrap(torch.jit, "save", around("torch.jit.save"))


def _one_device_only(patches: Patches) -> None:
    """Refuse to wrap a model for several processes or devices.

    One process on one device is what is traced.
    """

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise for_several_devices(f"build() or the step calls {name}")

        return refuse

    for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        patches.replace(wrapper, "__init__", refusing(wrapper.__name__))

    def change(module: Any) -> None:
        patches.replace(
            module.FullyShardedDataParallel, "__init__", refusing("FullyShardedDataParallel")
        )
        patches.replace(module, "fully_shard", refusing("fully_shard"))

    _when_imported(patches, "torch.distributed.fsdp", change)


def for_several_devices(what: str) -> PolicyError:
    """Return the error for a model that is spread over processes or devices."""
    return PolicyError(
        what,
        limit=(
            "a forecast is of one process on one device: shards, gradient buckets and communication"
            " buffers of several are not counted"
        ),
        fix=(
            "return the bare model from build(), as for one GPU. DistributedDataParallel needs"
            " another copy of the gradients on each device: keep that free with --margin. What"
            " sharding saves is not forecast."
        ),
        rule="H427",
    )


def _when_imported(patches: Patches, name: str, change: Callable[[Any], None]) -> None:
    """Change a module now, or when it is imported while the stand-ins are there."""
    watch = ImportWatch(_raised)
    watch.when_imported(name, change)
    if watch in sys.meta_path:
        patches.callback(sys.meta_path.remove, watch)


def _raised(error: BaseException) -> None:
    raise error
