"""Hooks in torch, set when the script has imported it.

Its own global ones where it has them, thin wrappers else.

Every wrapper keeps name, signature, result and exception of what it wraps, and steps aside where
torch traces a
function to compile it: a hook that is traced becomes nothing, and no graph breaks because of us.

Does not: decide what a step is (``steps`` does). Reads no random state and changes no mode of
    torch.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from holdfast.recorder.progress import Phase
from holdfast.supervise.observe.steps import Observed, Steps

Function = Callable[..., Any]
# Who saves in the thread that trains; `torch.save` besides. Each is wrapped when the script imports
# its module.
_SAVERS = {
    "holdfast.checkpoint.saver": ("snapshot", "write"),
    "safetensors.torch": ("save_file",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
}


def install(torch: ModuleType, observer: Observed) -> Steps:
    """Begin to observe a training of this process with the module of torch."""
    steps = Steps(observer, torch, partial(_was_made, torch.optim.Optimizer))
    hooks = _Hooks(torch, observer, steps)
    acts: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": hooks.optimizers,
        "torch.autograd": hooks.autograd,
        "torch.nn.utils.clip_grad": hooks.clipping,
        "torch.nn.modules.module": hooks.modules,
        "torch.amp.grad_scaler": hooks.scaler,
        "torch.serialization": hooks.serialization,
        "torch.utils.data.dataloader": hooks.loader,
        "torch.utils.data._utils.worker": hooks.workers,
        "torch._dynamo.callback": hooks.compiler,
        "holdfast.loader.loader": hooks.own_loader,
        **{name: partial(hooks.savers, functions) for name, functions in _SAVERS.items()},
    }
    # Each by itself: what another version of torch has not is not observed
    for name, act in acts.items():
        observer.watch.when_imported(name, act)
    return steps


def _was_made(kind: Any) -> bool:
    """Return whether an optimizer of this class or one below was made.

    Torch then marks the method of its class.
    """
    below: Iterable[Any] = kind.__subclasses__()
    return getattr(vars(kind).get("step"), "hooked", False) or any(map(_was_made, below))


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


class _Hooks:
    """Each method hooks into one module of torch, or of another package."""

    def __init__(self, torch: ModuleType, observer: Observed, steps: Steps) -> None:
        self._torch: Any = torch
        self._observer, self._steps = observer, steps

    def _after(self, owner: Any, name: str, act: Callable[..., None]) -> None:
        """Call a function with the result and the arguments of another, after each call of that."""
        is_compiling = self._steps.is_compiling

        def make(original: Function) -> Function:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if not is_compiling():
                    act(result, *args)
                return result

            return wrapped

        _wrap(owner, name, make)

    def optimizers(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._steps.optimizer_begins)
        module.register_optimizer_step_post_hook(self._steps.optimizer_ends)

    def autograd(self, module: Any) -> None:
        steps, is_compiling, tensor = self._steps, self._steps.is_compiling, self._torch.Tensor

        def make(original: Function) -> Function:
            def backward(*args: Any, **kwargs: Any) -> Any:
                # Of a checkpointed segment, or of a hook: a part of the one that is counted.
                if is_compiling() or steps.in_backward:
                    return original(*args, **kwargs)
                root = args[0] if args else kwargs.get("tensors")
                if isinstance(root, (tuple, list)) and len(root) == 1:
                    root = root[0]
                steps.in_backward = True
                try:
                    steps.backward_begins(root if isinstance(root, tensor) else None)
                    result = original(*args, **kwargs)
                    steps.backward_ends()
                finally:
                    steps.in_backward = False
                return result

            return backward

        _wrap(module, "backward", make)

    def clipping(self, module: Any) -> None:
        self._after(module, "clip_grad_norm_", self._steps.clipped)
        # One object under both names, or it could not be pickled.
        self._torch.nn.utils.clip_grad_norm_ = module.clip_grad_norm_

    def scaler(self, module: Any) -> None:
        def scaled(result: Any, _scaler: Any, outputs: Any) -> None:
            if result is not outputs and type(result) is self._torch.Tensor:
                self._steps.scales(outputs.detach(), weakref.ref(result))

        self._after(module.GradScaler, "scale", scaled)

    def loader(self, module: Any) -> None:
        _wrap(module._BaseDataLoaderIter, "__next__", self._waiting)
        # Workers are started
        _wrap(module.DataLoader, "__iter__", partial(self._aside, Phase.DATA_WAIT))

        def begins(_iterator: Any, loader: Any) -> None:
            if self._torch.is_grad_enabled() and get_ident() == self._steps.thread:
                self._steps.loads(loader)

        self._after(module.DataLoader, "__iter__", begins)

    def own_loader(self, module: Any) -> None:
        _wrap(module.Epoch, "__next__", self._waiting)

    def _waiting(self, original: Function) -> Function:
        steps, trains = self._steps, self._torch.is_grad_enabled

        def __next__(iterator: Any) -> Any:  # noqa: N807
            # A loader within a loader, or one that is read ahead
            if steps.waits or get_ident() != steps.thread:
                return original(iterator)
            steps.waits = True
            try:
                steps.wait_begins()
                batch = original(iterator)
                steps.wait_ends(None if trains() else Phase.EVALUATION)
            except StopIteration:
                steps.wait_ends(Phase.END_OF_EPOCH)
                raise
            finally:
                steps.waits = False
            return batch

        return __next__

    def workers(self, module: Any) -> None:
        def make(original: Function) -> Function:
            def _worker_loop(*args: Any, **kwargs: Any) -> Any:
                self._observer.becomes("loader worker")
                return original(*args, **kwargs)

            return _worker_loop

        _wrap(module, "_worker_loop", make)

    def modules(self, module: Any) -> None:
        def evaluates(*_: Any) -> None:
            if get_ident() == self._steps.thread:
                self._steps.evaluates()

        self._after(module.Module, "eval", evaluates)

    def serialization(self, module: Any) -> None:
        self.savers(("save",), module)
        self._torch.save = module.save

    def savers(self, functions: tuple[str, ...], module: ModuleType) -> None:
        for name in functions:
            _wrap(module, name, partial(self._aside, Phase.SAVING))

    def _aside(self, phase: Phase, original: Function) -> Function:
        steps = self._steps

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

    def compiler(self, module: Any) -> None:
        module.callback_handler.register_start_callback(lambda _: self._steps.compile_begins())
        module.callback_handler.register_end_callback(lambda _: self._steps.compile_ends())
