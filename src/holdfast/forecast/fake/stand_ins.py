"""Make the fake device look like CUDA to user code.

Code that asks for ``"cuda"`` gets the fake device. To code outside torch and holdfast, a tensor on
the fake device appears to be on ``cuda:0``, so that ``if x.device.type == "cuda"`` takes the same
branch as on a GPU. Code can read the values of fake tensors, calls that save files are skipped, and
wrappers for several devices are refused. All patches are undone when `installed` exits.

The functions of ``torch.cuda`` are replaced in `cuda_module`.
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
    """Return the fake device for ``"cuda"`` or ``"cuda:1"``, and anything else unchanged."""
    if isinstance(device, torch.device):
        return fake if device.type == "cuda" else device
    if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")):
        return fake
    return device


@contextlib.contextmanager
def installed(fake: torch.device, guesses: Guesses, *, as_cuda: bool) -> Iterator[None]:
    """Patch torch during the ``with`` block, so that the fake device looks like CUDA.

    Args:
        fake: The fake device.
        guesses: Collects the assumptions that the patches make.
        as_cuda: Whether ``"cuda"`` means the fake device. If False, CUDA is unavailable.
    """
    with Patches() as patches:
        _read_fake_values(patches)
        _compile_as_eager(patches, guesses)
        _skip_saving(patches, guesses)
        _refuse_several_devices(patches)
        _hide_fake_tensors_from_transformers(patches)
        # In its original form, this function redraws out-of-range numbers until none is left, which
        # never happens with fake numbers.
        patches.replace(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        if as_cuda:
            _redirect_tensors(patches, fake)
            _show_cuda_as_device(patches, fake)
            install_cuda_module(patches, guesses)
            _redirect_autocast(patches, fake.type)
        yield


# --- values ---------------------------------------------------------------------------------------


def _read_fake_values(patches: Patches) -> None:
    """Make fake tensors support ``.numpy()``, ``.tolist()`` and formats such as ``{loss:.3f}``."""

    def numpy(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return _as_array(tensor)
        return original(tensor, *args, **kwargs)

    def format_tensor(original: Any, tensor: torch.Tensor, spec: str) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return format(tensor.item(), spec)
        return original(tensor, spec)

    patches.wrap(torch.Tensor, "numpy", numpy)
    patches.wrap(torch.Tensor, "__format__", format_tensor)
    patches.replace(FakeTensor, "tolist", lambda tensor: _as_array(tensor).tolist())


def _as_array(tensor: FakeTensor) -> Any:
    """Return the values of a fake tensor, known or guessed, as a numpy array."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return np.array(_values(tensor), dtype=dtype).reshape(tuple(tensor.shape))


def _values(tensor: Any) -> list[Any]:
    flat = tensor.reshape(-1)
    if tensor.numel() > 0 and tensor.fake_mode.known_values.of(tensor).value is None:
        # Read only the first element and use its value for all elements, because each read takes 80
        # microseconds.
        return [flat[0].item()] * tensor.numel()
    return [element.item() for element in flat.unbind()]


def _hide_fake_tensors_from_transformers(patches: Patches) -> None:
    """Keep the transformers library from taking special branches for fake tensors.

    In these branches, the library repeats attention heads and builds masks, which it does not do in
    a real run.
    """
    _when_imported(
        patches,
        "transformers.utils.import_utils",
        partial(patches.replace, name="is_fake_tensor", value=lambda _: False),
    )


# --- calls that are skipped or refused ------------------------------------------------------------


def _compile_as_eager(patches: Patches, guesses: Guesses) -> None:
    def compile_as_eager(model: Any = None, **_: Any) -> Any:
        guesses.assume(
            "torch.compile was ignored and the step ran eagerly; a compiled step usually needs"
            " less memory"
        )
        return model if model is not None else lambda function: function

    def compile_module(module: nn.Module, *_: Any, **__: Any) -> None:
        compile_as_eager(module)

    patches.replace(torch, "compile", compile_as_eager)
    patches.replace(nn.Module, "compile", compile_module)


def _skip_saving(patches: Patches, guesses: Guesses) -> None:
    """Skip calls of ``torch.save`` that write to files.

    The tensors have no values, and the file may belong to a real run. Saving to a ``BytesIO``,
    which some code uses to copy objects, still works.
    """

    def save(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        # The arguments are (object, f, ...).
        target = args[1] if len(args) > 1 else kwargs.get("f")
        if isinstance(target, io.BytesIO):
            return original(*args, **kwargs)
        guesses.assume(f"{name} was skipped, so no file was written")
        return None

    for module in (torch, torch.serialization):
        patches.wrap(module, "save", partial(save, "torch.save"))
    patches.wrap(torch.jit, "save", partial(save, "torch.jit.save"))


def _refuse_several_devices(patches: Patches) -> None:
    """Refuse wrappers for multiple processes or devices, because a trace covers only one device."""

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise several_devices(f"build() or the step calls {name}")

        return refuse

    def refuse_sharding(module: Any) -> None:
        wrapper = module.FullyShardedDataParallel
        patches.replace(wrapper, "__init__", refusing("FullyShardedDataParallel"))
        patches.replace(module, "fully_shard", refusing("fully_shard"))

    for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        patches.replace(wrapper, "__init__", refusing(wrapper.__name__))
    _when_imported(patches, "torch.distributed.fsdp", refuse_sharding)


def several_devices(what: str) -> PolicyError:
    """Return the error for a model that is distributed over processes or devices (H427)."""
    return PolicyError(
        what,
        limit=(
            "a forecast traces one process on one device, and computes the shards and the buffers"
            " for communication from that trace"
        ),
        fix=(
            "return the unwrapped model from build(), as for training on one GPU, and pass --gpus N"
            " with --shard ddp, zero1, zero2 or full to `holdfast plan`."
        ),
        rule="H427",
    )


# --- the device of tensors ------------------------------------------------------------------------


def _redirect_tensors(patches: Patches, fake: torch.device) -> None:
    """Redirect ``.to("cuda")`` and ``.cuda()`` to the fake device."""

    def to(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        redirected_args = [redirected(arg, fake) for arg in args]
        redirected_kwargs = {name: redirected(arg, fake) for name, arg in kwargs.items()}
        return original(tensor, *redirected_args, **redirected_kwargs)

    def cuda(tensor: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        return torch.Tensor.to(tensor, fake, **kwargs)

    patches.wrap(torch.Tensor, "to", to)
    patches.replace(torch.Tensor, "cuda", cuda)
    patches.replace(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
    patches.replace(torch.Tensor, "is_pinned", lambda *_, **__: False)
    patches.replace(torch.Tensor, "record_stream", lambda *_: None)


def _show_cuda_as_device(patches: Patches, fake: torch.device) -> None:
    """Make fake tensors report ``cuda:0`` to code outside torch and holdfast."""
    shown = torch.device("cuda", 0)
    original: Any = vars(FakeTensor)["device"]

    def device(tensor: Any) -> torch.device:
        actual: torch.device = original.fget(tensor)
        if actual.type == fake.type and not _asked_by_torch(sys._getframe().f_back):
            return shown
        return actual

    def is_cuda(tensor: torch.Tensor) -> bool:
        return tensor.device.type == fake.type and not _asked_by_torch(sys._getframe().f_back)

    patches.replace(FakeTensor, "device", property(device, original.fset))
    patches.replace(torch.Tensor, "is_cuda", property(is_cuda))


def _asked_by_torch(frame: FrameType | None) -> bool:
    if frame is None:
        # Autograd's worker thread has no Python frames, so the caller is torch.
        return True
    name = str(frame.f_globals.get("__name__", ""))
    return name == "torch" or name.startswith(("torch.", "holdfast."))


def _redirect_autocast(patches: Patches, fake_type: str) -> None:
    """Make autocast functions treat ``"cuda"`` as the type of the fake device."""

    def redirect(device_type: Any) -> Any:
        return fake_type if device_type == "cuda" else device_type

    def init(
        original: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda" and dtype is None:
            # Use CUDA's default dtype rather than that of the fake device.
            dtype = torch.float16
        original(self, redirect(device_type), dtype, *args, **kwargs)

    def query(original: Any, device_type: Any = "cuda") -> Any:
        return original(redirect(device_type))

    def set_value(original: Any, *args: Any) -> Any:
        # Older code calls set_autocast_enabled(enabled) without a device type, which means CUDA.
        if len(args) == 1:
            return original(fake_type, *args)
        return original(redirect(args[0]), args[1])

    def cast(original: Any, value: Any, device_type: Any, dtype: Any) -> Any:
        return original(value, redirect(device_type), dtype)

    patches.wrap(torch.autocast, "__init__", init)
    patches.wrap(torch.amp.autocast_mode, "_cast", cast)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        patches.wrap(torch, name, query)
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        patches.wrap(torch, name, set_value)
    patches.replace(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(fake_type))
    patches.replace(
        torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype(fake_type, dtype)
    )


def _when_imported(patches: Patches, name: str, change: Callable[[Any], None]) -> None:
    """Patch a module now or, if it is not imported yet, as soon as user code imports it.

    Args:
        patches: Stops waiting for the import when it exits.
        name: The name of the module.
        change: Called with the module to patch it.
    """
    watch = ImportWatch(_raise)
    watch.when_imported(name, change)
    if watch in sys.meta_path:
        patches.callback(sys.meta_path.remove, watch)


def _raise(error: BaseException) -> None:
    raise error
