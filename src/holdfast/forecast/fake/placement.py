"""Moving modules to the fake device in place.

Each parameter stays the same object, so ties and optimizers hold.

Torch refuses to change the device of a fake parameter in place, and would make a real one's copy
anew for each use.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.core.errors import PolicyError

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor keeps the hooks of `register_hook` and `register_post_accumulate_grad_hook`."""
_LEFT_BEHIND = "_holdfast_left_behind"  # marks what a parameter was before it was moved


def place(module: nn.Module, device: torch.device) -> None:
    """Bring a module's parameters, gradients and buffers to a device.

    The fake mode must be active.
    """
    module._apply(lambda tensor: tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def conversion_in_place() -> Iterator[None]:
    """Let ``Module.to``, ``.cuda()``, ``.half()`` and their like work on fake parameters while
    the context lasts.
    """
    original = nn.Module._apply

    def apply(
        module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> nn.Module:
        recurse = args[0] if args else kwargs.get("recurse", True)
        if recurse:
            for child in module.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for parameter in module._parameters.values():
            if parameter is not None:
                _convert(parameter, fn)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _convert(parameter: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        converted = fn(parameter)
        gradient = None if parameter.grad is None else fn(parameter.grad)
    if converted is not parameter:
        if not isinstance(converted, FakeTensor):
            parameter.data = converted
        else:
            parameter.grad = None
            _become(parameter, nn.Parameter(converted, requires_grad=parameter.requires_grad))
    if gradient is not None:
        parameter.grad = gradient


def _become(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give an object another tensor's content: class, attributes and storage.

    ``source`` takes what it had.

    Torch's ``swap_tensors`` does the same but refuses while anything refers weakly to the tensor,
    as trackers do.
    Hooks stay with the object, as they do where a device is changed for real: autograd keeps them
        with the content.
    """
    hooks = {name: getattr(target, name) for name in _HOOKS}
    kept = {name: value for name, value in vars(target).items() if name not in vars(source)}
    target_class, source_class = type(target), type(source)
    source_attributes, target_attributes = dict(vars(source)), dict(vars(target))
    torch._C._swap_tensor_impl(target, source)
    target.__class__, source.__class__ = source_class, target_class
    for tensor, attributes in ((target, source_attributes | kept), (source, target_attributes)):
        vars(tensor).clear()
        vars(tensor).update(attributes)
    for name, registered in hooks.items():
        if registered is not None:
            setattr(target, name, registered)
    vars(source)[_LEFT_BEHIND] = True


def check_hooks_on_nodes() -> None:
    """Refuse (H426) autograd nodes of moved parameters that user code holds.

    Hooks on them never run.

    A real parameter keeps its node when it is moved; a fake one cannot.
    """
    for node in gc.get_objects():
        if type(node).__name__ == "AccumulateGrad" and _LEFT_BEHIND in vars(node.variable):
            raise PolicyError(
                "build() holds autograd's AccumulateGrad node of a parameter that was moved to the"
                " device afterwards",
                limit=(
                    "a forecast moves a parameter by replacing it, so that hooks on that node would"
                    " not run"
                ),
                fix=(
                    "use parameter.register_post_accumulate_grad_hook(hook), or make the model on"
                    " the device: `with torch.device('cuda'): model = ...`."
                ),
                rule="H426",
            )
