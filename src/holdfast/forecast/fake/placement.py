"""Move modules to the fake device in place.

Each parameter stays the same object, so that tied weights, optimizers and hooks stay valid. torch's
own ``Module.to`` cannot do this, because it refuses to change the device of a fake parameter in
place. Real parameters must be moved as well: otherwise, each use of a real parameter would create a
new fake tensor.
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

# The tensor attributes in which `register_hook` and `register_post_accumulate_grad_hook` keep their
# hooks.
_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
# When a parameter is moved, this attribute marks the other tensor, which receives the parameter's
# previous content.
_LEFT_BEHIND = "_holdfast_left_behind"


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters, gradients and buffers to a device, in place.

    The fake mode and `conversion_in_place` must be active.
    """
    module._apply(lambda tensor: tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def conversion_in_place() -> Iterator[None]:
    """Make ``Module.to``, ``.cuda()``, ``.half()`` and similar methods work on fake parameters.

    The methods work this way until the ``with`` block ends.
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
    """Replace the contents of a parameter and its gradient with the results of a function."""
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
    """Give `target` the content of `source` by swapping their classes, attributes and storages.

    `torch.utils.swap_tensors` does the same, but refuses tensors that have weak references, which
    the tracer holds. The hooks of `target` stay with the object `target`, as they do when a real
    parameter is moved. A plain swap would move the hooks along with the content.
    """
    hooks = {name: getattr(target, name) for name in _HOOK_ATTRIBUTES}
    target_attributes = dict(vars(target))
    source_attributes = dict(vars(source))
    # Attributes that only the target has stay on the target.
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
    """Raise an error if user code holds autograd nodes of moved parameters.

    A real parameter keeps its AccumulateGrad node when it is moved. A fake parameter gets a new
    node, so hooks on the old node would never run.

    Raises:
        PolicyError: H426 if such a node exists.
    """
    for node in gc.get_objects():
        if type(node).__name__ == "AccumulateGrad" and _LEFT_BEHIND in vars(node.variable):
            raise PolicyError(
                "build() holds autograd's AccumulateGrad node of a parameter that was moved to the"
                " device afterwards",
                limit=(
                    "a forecast moves a parameter by replacing its content, so hooks on that node"
                    " would never run"
                ),
                fix=(
                    "use parameter.register_post_accumulate_grad_hook(hook), or create the model on"
                    " the device: `with torch.device('cuda'): model = ...`."
                ),
                rule="H426",
            )
