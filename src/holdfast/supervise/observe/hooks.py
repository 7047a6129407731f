"""Install hooks in torch and other packages once the script has imported them.

The hooks are torch's own global hooks where these exist, and thin wrappers elsewhere. A wrapper
preserves the name, signature, result and exceptions of its function. It does nothing while torch
traces a function for compilation, so it never causes a graph break. No random state is read, and no
torch mode is changed.

``step_tracker`` decides what counts as a step.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from holdfast.recorder.progress import ProcessPhase
from holdfast.supervise.observe.observed_process import ObservedProcess
from holdfast.supervise.observe.step_tracker import StepTracker

Function = Callable[..., Any]
# Functions that save a checkpoint in the training thread, keyed by module. `torch.save` is handled
# separately.
_SAVERS = {
    "holdfast.checkpoint.saver": ("snapshot", "write"),
    "safetensors.torch": ("save_file",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
}


def install(torch: ModuleType, observer: ObservedProcess) -> StepTracker:
    """Start tracking the training steps of this process, and return the tracker."""
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
    # Install each hook separately, so that a function missing in this torch version disables only
    # its own hook.
    for module_name, installer in installers.items():
        observer.watch.when_imported(module_name, installer)
    return tracker


def _was_any_made(optimizer_type: Any) -> bool:
    """Return whether an instance of this optimizer class or of a subclass has been created.

    torch marks the class's `step` method when the first instance is created.
    """
    if getattr(vars(optimizer_type).get("step"), "hooked", False):
        return True
    return any(_was_any_made(derived) for derived in optimizer_type.__subclasses__())


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace a function with the wrapper that `make` returns, keeping its name and signature."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


class _Hooks:
    """Installs the hooks, with one method for each module of torch or another package."""

    def __init__(self, torch: ModuleType, observer: ObservedProcess, tracker: StepTracker) -> None:
        self._torch: Any = torch
        self._observer = observer
        self._tracker = tracker

    def _is_training_thread(self) -> bool:
        return get_ident() == self._tracker.thread.identifier

    def _call_after(self, owner: Any, name: str, notice: Callable[..., None]) -> None:
        """Wrap a function so that `notice` is called with the result and arguments of each call.

        While torch traces the function for compilation, `notice` is not called.
        """
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
        """Report the start and the end of every outermost backward call."""
        tracker = self._tracker
        is_compiling = tracker.is_compiling
        tensor_type = self._torch.Tensor

        def make(original: Function) -> Function:
            def backward(*args: Any, **kwargs: Any) -> Any:
                thread = tracker.thread
                # Do not report a nested call, which comes from activation checkpointing or a hook.
                if is_compiling() or thread.in_backward:
                    return original(*args, **kwargs)
                root = args[0] if args else kwargs.get("tensors")
                if isinstance(root, (tuple, list)) and len(root) == 1:
                    root = root[0]
                thread.in_backward = True
                try:
                    tracker.backward_begins(root if isinstance(root, tensor_type) else None)
                    result = original(*args, **kwargs)
                    tracker.backward_ends()
                finally:
                    thread.in_backward = False
                return result

            return backward

        _wrap(module, "backward", make)

    def install_in_clipping(self, module: Any) -> None:
        self._call_after(module, "clip_grad_norm_", self._tracker.norm_computed)
        # Both names must refer to the same object; otherwise, the function cannot be pickled.
        self._torch.nn.utils.clip_grad_norm_ = module.clip_grad_norm_

    def install_in_scaler(self, module: Any) -> None:
        def notice(result: Any, _scaler: Any, outputs: Any) -> None:
            # A disabled scaler returns its argument unchanged. A list of tensors is not a loss.
            if result is not outputs and type(result) is self._torch.Tensor:
                self._tracker.loss_scaled(outputs.detach(), weakref.ref(result))

        self._call_after(module.GradScaler, "scale", notice)

    def install_in_compiler(self, module: Any) -> None:
        handler = module.callback_handler
        handler.register_start_callback(lambda _: self._tracker.phases.compile_begins())
        handler.register_end_callback(lambda _: self._tracker.phases.compile_ends())

    # --- data ---

    def install_in_loader(self, module: Any) -> None:
        _wrap(module._BaseDataLoaderIter, "__next__", self._as_wait)
        _wrap(module.DataLoader, "__iter__", self._as_loader_start)

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

    def _as_loader_start(self, original: Function) -> Function:
        """Wrap a loader's `__iter__`, which starts the worker processes and may take a while."""
        interruption = self._as_interruption(ProcessPhase.DATA_WAIT, original)
        is_grad_enabled = self._torch.is_grad_enabled

        def __iter__(loader: Any) -> Any:  # noqa: N807
            if not is_grad_enabled() and self._is_training_thread():
                self._tracker.phases.loader_without_gradients_begins()
            return interruption(loader)

        return __iter__

    def _as_wait(self, original: Function) -> Function:
        """Wrap a loader's `__next__` so that the progress board shows the wait for a batch."""
        tracker = self._tracker
        is_grad_enabled = self._torch.is_grad_enabled

        def __next__(iterator: Any) -> Any:  # noqa: N807
            thread = tracker.thread
            # Ignore a loader nested in another loader, and a loader from which another thread
            # prefetches.
            if thread.is_waiting or get_ident() != thread.identifier:
                return original(iterator)
            thread.is_waiting = True
            try:
                tracker.wait_begins(grad_enabled=is_grad_enabled())
                batch = original(iterator)
                tracker.wait_ends(None if is_grad_enabled() else ProcessPhase.EVALUATION)
            except StopIteration:
                tracker.wait_ends(ProcessPhase.END_OF_EPOCH)
                raise
            finally:
                thread.is_waiting = False
            return batch

        return __next__

    # --- evaluation and saving ---

    def install_in_modules(self, module: Any) -> None:
        def notice(*_: Any) -> None:
            if self._is_training_thread():
                self._tracker.phases.evaluation_begins()

        def notice_train(_result: Any, _module: Any, *mode: bool) -> None:
            # Without an argument, the mode is True.
            if all(mode) and self._is_training_thread():
                self._tracker.phases.evaluation_ends()

        self._call_after(module.Module, "eval", notice)
        self._call_after(module.Module, "train", notice_train)

    def install_in_serialization(self, module: Any) -> None:
        self.install_in_savers(("save",), module)
        self._torch.save = module.save

    def install_in_savers(self, functions: tuple[str, ...], module: ModuleType) -> None:
        for name in functions:
            _wrap(module, name, partial(self._as_interruption, ProcessPhase.SAVING))

    def _as_interruption(self, phase: ProcessPhase, original: Function) -> Function:
        """Wrap a function so that the board shows `phase` while the training thread runs it.

        Afterward, the board returns to the previous phase. Nested calls are ignored.
        """
        tracker = self._tracker

        def interruption(*args: Any, **kwargs: Any) -> Any:
            thread = tracker.thread
            is_within_another = thread.is_interrupted or thread.is_waiting
            if is_within_another or get_ident() != thread.identifier:
                return original(*args, **kwargs)
            thread.is_interrupted = True
            tracker.phases.interruption_begins(phase)
            try:
                return original(*args, **kwargs)
            finally:
                thread.is_interrupted = False
                tracker.phases.interruption_ends()

        return interruption
