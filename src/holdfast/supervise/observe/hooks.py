"""Hooks into torch and other packages, installed when the script has imported them.

Where torch has global hooks, these are used; otherwise thin wrappers. Every wrapper keeps the name,
signature, result and exceptions of what it wraps, and steps aside while torch traces a function to
compile it: a hook that is traced becomes nothing, and no graph breaks because of us. No random
state is read, and no mode of torch is changed.

Does not: decide what a step is (``step_tracker`` does).
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from holdfast.recorder.progress import Phase
from holdfast.supervise.observe.step_tracker import ObservedProcess, StepTracker

Function = Callable[..., Any]
# Functions that save in the thread that trains, besides `torch.save`, by their module.
_SAVERS = {
    "holdfast.checkpoint.saver": ("snapshot", "write"),
    "safetensors.torch": ("save_file",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
}


def install(torch: ModuleType, observer: ObservedProcess) -> StepTracker:
    """Begin to observe the training of this process.

    Args:
        torch: The module.
        observer: The process.
    """
    tracker = StepTracker(observer, torch, partial(_was_any_made, torch.optim.Optimizer))
    hooks = _Hooks(torch, observer, tracker)
    installers: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": hooks.install_in_optimizers,
        "torch.autograd": hooks.install_in_autograd,
        "torch.nn.utils.clip_grad": hooks.install_in_clipping,
        "torch.nn.modules.module": hooks.install_in_modules,
        "torch.amp.grad_scaler": hooks.install_in_scaler,
        "torch.serialization": hooks.install_in_serialization,
        "torch.utils.data.dataloader": hooks.install_in_loader,
        "torch.utils.data._utils.worker": hooks.install_in_workers,
        "torch._dynamo.callback": hooks.install_in_compiler,
        "holdfast.loader.loader": hooks.install_in_own_loader,
    }
    for module_name, functions in _SAVERS.items():
        installers[module_name] = partial(hooks.install_in_savers, functions)
    # Each on its own: what another version of torch does not have is not observed.
    for module_name, installer in installers.items():
        observer.watch.when_imported(module_name, installer)
    return tracker


def _was_any_made(optimizer_type: Any) -> bool:
    """Return whether an optimizer of this class, or of one derived from it, was made.

    torch then marks the method `step` of its class.
    """
    if getattr(vars(optimizer_type).get("step"), "hooked", False):
        return True
    return any(_was_any_made(derived) for derived in optimizer_type.__subclasses__())


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace an attribute by what `make` makes of it, under the same name and signature."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


class _Hooks:
    """Each method installs hooks in one module of torch, or of another package."""

    def __init__(self, torch: ModuleType, observer: ObservedProcess, tracker: StepTracker) -> None:
        self._torch: Any = torch
        self._observer = observer
        self._tracker = tracker

    def _is_training_thread(self) -> bool:
        return get_ident() == self._tracker.thread

    def _call_after(self, owner: Any, name: str, notice: Callable[..., None]) -> None:
        """Call `notice` after each call of a function, with its result and its arguments."""
        is_compiling = self._tracker.is_compiling

        def make(original: Function) -> Function:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if not is_compiling():
                    notice(result, *args)
                return result

            return wrapped

        _wrap(owner, name, make)

    # --- training ---

    def install_in_optimizers(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._tracker.optimizer_begins)
        module.register_optimizer_step_post_hook(self._tracker.optimizer_ends)

    def install_in_autograd(self, module: Any) -> None:
        tracker = self._tracker
        is_compiling = tracker.is_compiling
        tensor_type = self._torch.Tensor

        def make(original: Function) -> Function:
            def backward(*args: Any, **kwargs: Any) -> Any:
                # A call within another one is that of a recomputed segment, or of a hook.
                if is_compiling() or tracker.in_backward:
                    return original(*args, **kwargs)
                root = args[0] if args else kwargs.get("tensors")
                if isinstance(root, (tuple, list)) and len(root) == 1:
                    root = root[0]
                tracker.in_backward = True
                try:
                    tracker.backward_begins(root if isinstance(root, tensor_type) else None)
                    result = original(*args, **kwargs)
                    tracker.backward_ends()
                finally:
                    tracker.in_backward = False
                return result

            return backward

        _wrap(module, "backward", make)

    def install_in_clipping(self, module: Any) -> None:
        self._call_after(module, "clip_grad_norm_", self._tracker.norm_computed)
        # Both names must be one object, or the function could not be pickled.
        self._torch.nn.utils.clip_grad_norm_ = module.clip_grad_norm_

    def install_in_scaler(self, module: Any) -> None:
        def notice(result: Any, _scaler: Any, outputs: Any) -> None:
            # A disabled scaler returns what it was given; lists are not losses.
            if result is not outputs and type(result) is self._torch.Tensor:
                self._tracker.loss_scaled(outputs.detach(), weakref.ref(result))

        self._call_after(module.GradScaler, "scale", notice)

    def install_in_compiler(self, module: Any) -> None:
        handler = module.callback_handler
        handler.register_start_callback(lambda _: self._tracker.compile_begins())
        handler.register_end_callback(lambda _: self._tracker.compile_ends())

    # --- data ---

    def install_in_loader(self, module: Any) -> None:
        _wrap(module._BaseDataLoaderIter, "__next__", self._as_wait)
        # The workers are started in `__iter__`.
        _wrap(module.DataLoader, "__iter__", partial(self._as_aside, Phase.DATA_WAIT))

        def notice(_iterator: Any, loader: Any) -> None:
            if self._torch.is_grad_enabled() and self._is_training_thread():
                self._tracker.loader_begins(loader)

        self._call_after(module.DataLoader, "__iter__", notice)

    def install_in_own_loader(self, module: Any) -> None:
        _wrap(module.Epoch, "__next__", self._as_wait)

    def install_in_workers(self, module: Any) -> None:
        def make(original: Function) -> Function:
            def _worker_loop(*args: Any, **kwargs: Any) -> Any:
                self._observer.set_role("loader worker")
                return original(*args, **kwargs)

            return _worker_loop

        _wrap(module, "_worker_loop", make)

    def _as_wait(self, original: Function) -> Function:
        """Return `__next__` of a loader, shown as waiting for a batch."""
        tracker = self._tracker
        is_grad_enabled = self._torch.is_grad_enabled

        def __next__(iterator: Any) -> Any:  # noqa: N807
            # A loader within a loader, or one that another thread reads ahead.
            if tracker.is_waiting or get_ident() != tracker.thread:
                return original(iterator)
            tracker.is_waiting = True
            try:
                tracker.wait_begins()
                batch = original(iterator)
                tracker.wait_ends(None if is_grad_enabled() else Phase.EVALUATION)
            except StopIteration:
                tracker.wait_ends(Phase.END_OF_EPOCH)
                raise
            finally:
                tracker.is_waiting = False
            return batch

        return __next__

    # --- beside training ---

    def install_in_modules(self, module: Any) -> None:
        def notice(*_: Any) -> None:
            if self._is_training_thread():
                self._tracker.evaluation_begins()

        self._call_after(module.Module, "eval", notice)

    def install_in_serialization(self, module: Any) -> None:
        self.install_in_savers(("save",), module)
        self._torch.save = module.save

    def install_in_savers(self, functions: tuple[str, ...], module: ModuleType) -> None:
        for name in functions:
            _wrap(module, name, partial(self._as_aside, Phase.SAVING))

    def _as_aside(self, phase: Phase, original: Function) -> Function:
        """Return a function whose call by the training thread is shown as a phase of its own."""
        tracker = self._tracker

        def aside(*args: Any, **kwargs: Any) -> Any:
            is_within_another = tracker.is_aside or tracker.is_waiting
            if is_within_another or get_ident() != tracker.thread:
                return original(*args, **kwargs)
            tracker.is_aside = True
            tracker.aside_begins(phase)
            try:
                return original(*args, **kwargs)
            finally:
                tracker.is_aside = False
                tracker.aside_ends()

        return aside
