"""Move modules to the fake device in place.

Each parameter stays the same object, so that ties, optimizers and hooks stay valid. torch refuses
to change the device of a fake parameter in place, and would create a new copy of a real parameter
for each use.
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

# The attributes with the hooks of `register_hook` and `register_post_accumulate_grad_hook`.
_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Marks the tensor that holds the former content of a moved parameter.
_LEFT_BEHIND = "_holdfast_left_behind"


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters, gradients and buffers to a device.

    The fake mode must be active.
    """
    module._apply(lambda tensor: tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def conversion_in_place() -> Iterator[None]:
    """Make ``Module.to``, ``.cuda()``, ``.half()`` and the like work on fake parameters."""
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
    """Replace the content of a parameter and its gradient with the results of a function."""
    with torch.no_grad():
        converted = fn(parameter)
        gradient = None if parameter.grad is None else fn(parameter.grad)
    if converted is not parameter:
        if isinstance(converted, FakeTensor):
            parameter.grad = None
            _become(parameter, nn.Parameter(converted, requires_grad=parameter.requires_grad))
        else:
            parameter.data = converted
    if gradient is not None:
        parameter.grad = gradient


def _become(target: torch.Tensor, source: torch.Tensor) -> None:
    """Swap the class, attributes and storage of two tensors.

    torch's ``swap_tensors`` does the same, but refuses a tensor with weak references, which
    trackers hold. Hooks stay with the object, as they do when a real parameter changes its device;
    autograd keeps them with the content.
    """
    hooks = {name: getattr(target, name) for name in _HOOK_ATTRIBUTES}
    target_attributes = dict(vars(target))
    source_attributes = dict(vars(source))
    # Attributes that only the target has also stay with it.
    own_attributes = {
        name: value for name, value in target_attributes.items() if name not in source_attributes
    }
    target_class = type(target)
    source_class = type(source)

    torch._C._swap_tensor_impl(target, source)
    target.__class__ = source_class
    source.__class__ = target_class
    vars(target).clear()
    vars(target).update(source_attributes | own_attributes)
    vars(source).clear()
    vars(source).update(target_attributes)
    for name, registered in hooks.items():
        if registered is not None:
            setattr(target, name, registered)
    vars(source)[_LEFT_BEHIND] = True


def check_hooks_on_nodes() -> None:
    """Raise H426 if user code holds autograd nodes of moved parameters.

    A real parameter keeps its node when it is moved. A fake one cannot, so hooks on the node would
    never run.

    Raises:
        PolicyError: H426.
    """
    for node in gc.get_objects():
        if type(node).__name__ == "AccumulateGrad" and _LEFT_BEHIND in vars(node.variable):
            raise PolicyError(
                "build() holds autograd's AccumulateGrad node of a parameter that was moved to the"
                " device afterwards",
                limit=(
                    "a forecast moves a parameter by replacing it, so hooks on that node would not"
                    " run"
                ),
                fix=(
                    "use parameter.register_post_accumulate_grad_hook(hook), or create the model on"
                    " the device: `with torch.device('cuda'): model = ...`."
                ),
                rule="H426",
            )
