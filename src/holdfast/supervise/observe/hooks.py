"""Hooks in torch, set when the script has imported it: its own global ones where it has them, thin wrappers else.

Every wrapper keeps name, signature, result and exception of what it wraps, and steps aside where torch traces a
function to compile it: a hook that is traced becomes nothing, and no graph breaks because of us.

Does not: decide what a step is (``steps`` does). Reads no random state and changes no mode of torch.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from holdfast.recorder.progress import Phase
from holdfast.supervise.observe.memory_readings import MemoryReadings
from holdfast.supervise.observe.observer import Observer
from holdfast.supervise.observe.steps import Steps
from holdfast.supervise.observe.values import ValueReader

Function = Callable[..., Any]
# Who saves in the thread that trains; `torch.save` besides. Each is wrapped when the script imports its module.
_SAVERS = {
    "holdfast.checkpoint.saver": ("snapshot", "write"),
    "safetensors.torch": ("save_file",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
}


def install(torch: ModuleType, observer: Observer) -> Steps:
    """Begin to observe a training.

    Args:
        torch: The module.
        observer: Of this process.
    """
    compiling, trains = torch.compiler.is_compiling, torch.is_grad_enabled
    steps = Steps(observer, ValueReader(torch), MemoryReadings(torch), partial(_was_made, torch.optim.Optimizer))
    acts: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": partial(_hook_optimizers, steps, compiling),
        "torch.autograd": partial(_wrap, name="backward", make=partial(_backward, steps, compiling, torch.Tensor)),
        "torch.nn.utils.clip_grad": partial(_hook_clipping, steps, compiling, torch.nn.utils),
        "torch.nn.modules.module": partial(_hook_modules, steps, compiling),
        "torch.amp.grad_scaler": partial(_hook_scaler, steps, torch),
        "torch.serialization": partial(_hook_saving, steps, torch),
        "torch.utils.data.dataloader": partial(_hook_loader, steps, trains),
        "torch.utils.data._utils.worker": partial(_hook_workers, observer),
        "torch._dynamo.callback": partial(_hook_compiler, steps),
        "holdfast.loader.loader": partial(_hook_own_loader, steps, trains),
        **{name: partial(_hook_saver, steps, functions) for name, functions in _SAVERS.items()},
    }
    for name, act in acts.items():  # each by itself: what another version of torch has not is not observed
        observer.watch.when_imported(name, act)
    return steps


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


# --- optimizers ---------------------------------------------------------------------------------------------------


def _hook_optimizers(steps: Steps, is_compiling: Callable[[], bool], module: Any) -> None:
    def before(_optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            return
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            steps.closure_begins()
        else:
            steps.optimizer_begins()

    def after(optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            steps.optimizer_ends(optimizer)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _was_made(kind: Any) -> bool:
    """Return whether an optimizer of this class or one below was made: torch then marks the method of its class."""
    below: Iterable[Any] = kind.__subclasses__()
    return getattr(vars(kind).get("step"), "hooked", False) or any(map(_was_made, below))


# --- loss and gradients -------------------------------------------------------------------------------------------


def _backward(steps: Steps, is_compiling: Callable[[], bool], tensor: type, original: Function) -> Function:
    def backward(*args: Any, **kwargs: Any) -> Any:
        # Of a checkpointed segment, or of a hook: a part of the one that is counted.
        if is_compiling() or steps.in_backward:
            return original(*args, **kwargs)
        steps.in_backward = True
        try:
            steps.backward_begins(_root(args, kwargs, tensor))
            result = original(*args, **kwargs)
            steps.backward_ends()
        finally:
            steps.in_backward = False
        return result

    return backward


def _root(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: type) -> Any:
    found = args[0] if args else kwargs.get("tensors")
    if isinstance(found, (tuple, list)) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, tensor) else None


def _hook_clipping(steps: Steps, is_compiling: Callable[[], bool], exported: Any, module: Any) -> None:
    def clipping(original: Function) -> Function:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            if not is_compiling():
                steps.clipped(norm)
            return norm

        return clip_grad_norm_

    _wrap(module, "clip_grad_norm_", clipping)
    exported.clip_grad_norm_ = module.clip_grad_norm_  # one object under both names, or it could not be pickled


def _hook_scaler(steps: Steps, torch: ModuleType, module: Any) -> None:
    def scaling(original: Function) -> Function:
        def scale(self: Any, outputs: Any) -> Any:
            scaled = original(self, outputs)
            if scaled is not outputs and type(scaled) is torch.Tensor and not torch.compiler.is_compiling():
                steps.scales(outputs.detach(), weakref.ref(scaled))
            return scaled

        return scale

    _wrap(module.GradScaler, "scale", scaling)


# --- loaders ------------------------------------------------------------------------------------------------------


def _waiting(steps: Steps, trains: Callable[[], bool], original: Function) -> Function:
    def __next__(self: Any) -> Any:  # noqa: N807
        if steps.waits or get_ident() != steps.thread:  # a loader within a loader, or one that is read ahead
            return original(self)
        steps.waits = True
        try:
            steps.wait_begins()
            batch = original(self)
            if trains():
                steps.gets_batch()
            else:
                steps.gets_batch_without_gradients()
        except StopIteration:
            steps.epoch_ends()
            raise
        finally:
            steps.waits = False
        return batch

    return __next__


def _hook_loader(steps: Steps, trains: Callable[[], bool], module: Any) -> None:
    _wrap(module._BaseDataLoaderIter, "__next__", partial(_waiting, steps, trains))
    _wrap(module.DataLoader, "__iter__", partial(_aside, steps, Phase.DATA_WAIT))  # workers are started


def _hook_own_loader(steps: Steps, trains: Callable[[], bool], module: Any) -> None:
    _wrap(module.Epoch, "__next__", partial(_waiting, steps, trains))


def _hook_workers(observer: Observer, module: Any) -> None:
    def working(original: Function) -> Function:
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            observer.becomes("loader worker")
            return original(*args, **kwargs)

        return _worker_loop

    _wrap(module, "_worker_loop", working)


# --- evaluating, saving, compiling --------------------------------------------------------------------------------


def _hook_modules(steps: Steps, is_compiling: Callable[[], bool], module: Any) -> None:
    def evaluating(original: Function) -> Function:
        def eval(self: Any) -> Any:  # noqa: A001 - its name
            if not is_compiling() and get_ident() == steps.thread:
                steps.evaluates()
            return original(self)

        return eval

    _wrap(module.Module, "eval", evaluating)


def _aside(steps: Steps, phase: Phase, original: Function) -> Function:
    def aside(*args: Any, **kwargs: Any) -> Any:
        if steps.aside or steps.waits or get_ident() != steps.thread:
            return original(*args, **kwargs)
        steps.aside = True
        steps.aside_begins(phase)
        try:
            return original(*args, **kwargs)
        finally:
            steps.aside = False
            steps.aside_ends()

    return aside


def _hook_saving(steps: Steps, exported: Any, module: Any) -> None:
    _hook_saver(steps, ("save",), module)
    exported.save = module.save


def _hook_saver(steps: Steps, functions: tuple[str, ...], module: ModuleType) -> None:
    for name in functions:
        _wrap(module, name, partial(_aside, steps, Phase.SAVING))


def _hook_compiler(steps: Steps, module: Any) -> None:
    module.callback_handler.register_start_callback(lambda _: steps.compile_begins())
    module.callback_handler.register_end_callback(lambda _: steps.compile_ends())
