"""Observe a training run through hooks in torch, without any change to the script.

The hooks record steps, saves and evaluations in the trace, and call the injector at each moment for
which a fault may be planned. This module never imports torch: the hooks are installed when the
script imports torch.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from holdfast.chaos.injection.injector import Injector, read_rank
from holdfast.chaos.injection.plan import Moment
from holdfast.chaos.observation.digests import DigestMaker, reseed
from holdfast.chaos.observation.file_audit import FileAudit
from holdfast.chaos.observation.shield import ScriptShield
from holdfast.chaos.observation.step_recorder import StepRecorder
from holdfast.chaos.observation.trace_writer import TraceWriter
from holdfast.chaos.observation.trained_models import TrainedModels
from holdfast.chaos.trace import ModelState
from holdfast.core.importing import ImportWatch
from holdfast.core.vector_functions import settle_vector_functions

# The functions that save a checkpoint, by module.
SAVERS = {
    "torch.serialization": "save",
    "safetensors.torch": "save_file",
    "torch.distributed.checkpoint.state_dict_saver": "save",
    "holdfast.checkpoint.saver": "write",
}
# The parameter-group settings that are compared with the undisturbed run.
COMPARED_SETTINGS = ("lr", "momentum", "betas", "weight_decay")

# The observer of this process. The hooks of models are functions at module level, rather than
# methods of the observer, so that the models can still be copied and pickled.
_observer: TorchObserver | None = None


def _before_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """The forward pre-hook that is registered on every root module."""
    if _observer is None:
        return None
    return _observer.before_forward(module, args, kwargs)


def _after_forward(module: Any, _args: Any, output: Any) -> None:
    """The forward hook that is registered on every root module."""
    if _observer is not None:
        _observer.after_forward(module, output)


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """The data recorded at the beginning of a step; `trace.RecordedStep` documents the fields."""

    settings: str
    before: ModelState | None = None
    weights_at_begin: str | None = None


@dataclass(slots=True, kw_only=True)
class ProcessProgress:
    """Counters and flags for this process. A forked process starts with a new instance."""

    saves: int = 0
    evaluations: int = 0
    has_workers: bool = False
    is_saving: bool = False
    is_in_backward: bool = False
    has_saved_since_step: bool = False
    # The loss scale at the gradient scaler's last step; None without a gradient scaler.
    loss_scale: float | None = None
    # The step that has begun; None if no step has begun, or if the step will not be recorded.
    pending_step: PendingStep | None = None


class TorchObserver:
    """Observes the script's use of torch, in this process and in those forked from it.

    Args:
        torch: The torch module that the script has imported.
        trace: The trace of this process.
        files: Receives the paths to which checkpoints are saved.
        injector: Injects the fault of this attempt.
        shield: Runs the observer's code without disturbing the script.
        imports: Runs actions when the script imports a module.
    """

    def __init__(
        self,
        torch: Any,
        *,
        trace: TraceWriter,
        files: FileAudit,
        injector: Injector,
        shield: ScriptShield,
        imports: ImportWatch,
    ) -> None:
        global _observer
        self._torch = torch
        self._trace = trace
        self._files = files
        self._injector = injector
        self._shield = shield
        self._imports = imports
        digests = DigestMaker(torch)
        self._digests = digests
        self._recorder = StepRecorder(torch, digests)
        self._models = TrainedModels(torch, digests)
        self._progress = ProcessProgress()
        # The handles of the two hooks of each root module.
        self._hook_handles: Any = weakref.WeakKeyDictionary()
        _observer = self

    def restart(self) -> None:
        """Forget all observations. This method is called in a newly forked process."""
        self._recorder.restart()
        self._models.restart()
        self._progress = ProcessProgress()

    def install(self) -> None:
        """Install the hooks in torch, and in some other modules once they are imported."""
        # Without this call, MKL might compute slightly different values in one of the runs.
        self._shield.run(settle_vector_functions, self._torch)
        self._imports.when_imported("torch.optim.optimizer", self._hook_optimizers)
        # By module, the names of the functions to replace and the methods that wrap them.
        replacements: dict[str, dict[str, Callable[..., Any]]] = {
            "torch.autograd": {"backward": self._backward, "grad": self._grad},
            "torch.jit": {"script": self._call_without_hooks},
            "torch.amp.grad_scaler": {"GradScaler.step": self._step_scaler},
            "torch.nn.modules.module": {"Module.eval": self._evaluate},
            "torch.utils.data.dataloader": {"_BaseDataLoaderIter.__next__": self._load_batch},
            "holdfast.loader.loader": {"Epoch.__next__": self._load_batch},
        }
        for module_name, function_name in SAVERS.items():
            replacements[module_name] = {function_name: self._save}
        for module_name, wrappers in replacements.items():
            self._imports.when_imported(module_name, partial(self._replace_functions, wrappers))

    # --- installing hooks -----------------------------------------------------------------------

    def _replace_functions(self, wrappers: dict[str, Callable[..., Any]], module: Any) -> None:
        """Replace functions of a module, and methods of its classes, with their wrappers.

        Args:
            wrappers: The wrappers by name. The name of a method is ``Class.method``.
            module: The module that was imported.
        """
        for path, wrapper in wrappers.items():
            class_name, _, name = path.rpartition(".")
            owner = getattr(module, class_name) if class_name else module
            setattr(owner, name, self._wrapped(getattr(owner, name), wrapper))
        if module.__name__ == "torch.serialization":
            self._torch.save = module.save

    def _wrapped(
        self, original: Callable[..., Any], wrapper: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that calls `wrapper` with the original function as first argument.

        While torch compiles, the returned function calls the original function directly.
        """
        is_compiling = self._torch.compiler.is_dynamo_compiling

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        return wrapped

    def _hook_optimizers(self, module: Any) -> None:
        optimizer_class = module.Optimizer
        optimizer_class.__init__ = self._wrapped(optimizer_class.__init__, self._make_optimizer)
        run = self._shield.run
        module.register_optimizer_step_pre_hook(partial(run, self._begin_step))
        module.register_optimizer_step_post_hook(partial(run, self._end_step))

    def _hook_model(self, root: Any) -> None:
        # Prepending makes these hooks run before the script's hooks, so that they record the inputs
        # as the script passed them.
        before = root.register_forward_pre_hook(_before_forward, with_kwargs=True, prepend=True)
        after = root.register_forward_hook(_after_forward, prepend=True)
        self._hook_handles[root] = (before, after)

    # --- model calls, batches and losses --------------------------------------------------------

    def _make_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Wraps `Optimizer.__init__`.
        original(optimizer, *args, **kwargs)
        self._shield.run(self._hook_models_of, optimizer)

    def _hook_models_of(self, optimizer: Any) -> None:
        for root in self._models.add_optimizer(optimizer):
            if root not in self._hook_handles:
                self._hook_model(root)

    def _load_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        # Wraps the `__next__` method of loader iterators.
        batch = original(iterator)
        # A batch that is loaded while gradients are disabled is for an evaluation.
        if not self._torch.is_grad_enabled():
            return batch
        steps = self._trace.steps_made
        batch = self._injector.disturb_batch(self._torch, batch, steps, Moment.LOADER)
        self._shield.run(self._recorder.note_batch, batch)
        if steps > 0 and not self._progress.has_workers and self._injector.loader_workers():
            self._progress.has_workers = True
            self._trace.write("workers")
        return batch

    def before_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a model that is being trained, and inject a fault that is due now.

        Returns:
            The positional and keyword arguments to pass to the model, or None to leave them
                unchanged.
        """
        torch = self._torch
        is_training = module.training and torch.is_grad_enabled()
        # A copy of a model also has these hooks, but it is not the model that is trained.
        if not is_training or module not in self._hook_handles:
            return None
        if torch.compiler.is_dynamo_compiling():
            return None
        steps = self._trace.steps_made
        args, kwargs = self._injector.disturb_batch(torch, (args, kwargs), steps, Moment.FORWARD)
        self._shield.run(self._begin_call, module, (args, kwargs))
        return args, kwargs

    def _begin_call(self, module: Any, inputs: Any) -> None:
        self._models.note_call(module)
        self._recorder.begin_call(module, inputs)

    def after_forward(self, module: Any, output: Any) -> None:
        """Store the number of a model call on the autograd nodes of its output."""
        if not self._torch.compiler.is_dynamo_compiling():
            self._recorder.end_call(module, output)

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap `torch.autograd.grad`: inject a fault that is due now, but do not record a loss."""
        if not self._progress.is_in_backward:
            self._injector.meet(Moment.BACKWARD, self._trace.steps_made)
        return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap `torch.autograd.backward`: record the loss, and inject a fault that is due now."""
        # Activation checkpointing may call backward within backward. Observe only the outer call.
        if self._progress.is_in_backward:
            return original(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors")
        roots = list(tensors) if isinstance(tensors, (tuple, list)) else [tensors]
        backward = self._shield.run(self._recorder.begin_backward, roots)
        self._progress.is_in_backward = True
        try:
            self._injector.meet(Moment.BACKWARD, self._trace.steps_made)
            result = original(*args, **kwargs)
        finally:
            self._progress.is_in_backward = False
        if backward is not None:
            self._recorder.end_backward(backward)
        return result

    def _step_scaler(
        self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Wraps `GradScaler.step`.
        self._progress.loss_scale = self._shield.run(scaler.get_scale)
        return original(scaler, *args, **kwargs)

    # --- steps ----------------------------------------------------------------------------------

    def _begin_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the state before an optimizer step, and inject a fault that is due now."""
        self._progress.pending_step = None
        has_closure = any(callable(value) for value in (*args, *kwargs.values()))
        # With a closure, the gradients do not exist yet, because the step calls the closure to
        # compute them.
        if not has_closure and self._only_creates_state(optimizer):
            return
        step = PendingStep(settings=describe_settings(optimizer))
        self._progress.pending_step = step
        self._injector.meet(Moment.BEFORE_STEP, self._trace.steps_made)
        if not self._models.has_stepped(optimizer):
            step.before = self._models.state_before_first_step(optimizer)
        if self._progress.has_saved_since_step:
            # A restart may resume at this step, and the script may have changed weights since the
            # last step.
            step.weights_at_begin = self._models.weights(optimizer)

    def _end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Record the pending step from `_begin_step`, and inject a fault that is due now."""
        step = self._progress.pending_step
        if step is None:
            return
        self._trace.steps_made += 1
        rank, world_size = read_rank()
        self._trace.write(
            "step",
            rank=rank,
            world_size=world_size,
            optimizer_index=self._models.index(optimizer),
            before=step.before,
            after=self._models.state(optimizer),
            weights_at_begin=step.weights_at_begin,
            settings=step.settings,
            scale=self._progress.loss_scale,
            **self._recorder.facts(),
        )
        self._recorder.begin_step()
        self._progress.has_saved_since_step = False
        self._injector.meet(Moment.AFTER_STEP, self._trace.steps_made)
        reseeded = self._injector.plan.injection.reseeded
        if self._trace.steps_made == 1 and reseeded is not None:
            reseed(self._torch, reseeded)

    def _only_creates_state(self, optimizer: Any) -> bool:
        """Return whether a step only creates optimizer state, without changing any weights.

        Some libraries perform such a step before they load the optimizer's state.
        """
        if self._recorder.has_backward:
            return False
        learning_rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        if not any(learning_rates):
            return True
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        return not any(bool(gradient.any()) for gradient in gradients)

    # --- evaluations and saves ------------------------------------------------------------------

    def _evaluate(self, original: Callable[..., Any], module: Any) -> Any:
        # Wraps `Module.eval`. A call before the first step does not count as an evaluation.
        if self._trace.steps_made > 0:
            self._progress.evaluations += 1
            self._shield.run(self._trace.write, "eval")
            self._injector.meet(Moment.EVALUATION, self._progress.evaluations)
        return original(module)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap a function that saves a checkpoint: record the save, and inject a fault that is due.

        A fault may be due before the save or after it.
        """
        arguments = [*args, *kwargs.values()]
        # Pickling a tensor calls `torch.save` with the tensor's storage, which is not a checkpoint.
        is_pickling = self._torch.is_storage(arguments[0])
        if self._progress.is_saving or self._trace.steps_made == 0 or is_pickling:
            return original(*args, **kwargs)
        self._progress.is_saving = True
        self._progress.has_saved_since_step = True
        self._progress.saves += 1
        save_number = self._progress.saves
        buffers = [value for value in arguments if isinstance(value, io.BytesIO)]
        self._injector.meet(Moment.SAVE_BEGINS, save_number)
        try:
            result = self._call_without_hooks(original, *args, **kwargs)
        finally:
            self._progress.is_saving = False
            # A save to a buffer is not complete yet: the script writes the buffer to a file later.
            if not buffers:
                self._injector.save_ends()
        # A guard's saver receives no path, but the checkpoint entry that it returns has one.
        arguments.append(getattr(result, "path", None))
        in_thread = threading.current_thread() is not threading.main_thread()
        self._shield.run(self._record_save, arguments, in_thread=in_thread)
        self._injector.meet(Moment.SAVE_ENDS, save_number)
        return result

    def _call_without_hooks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with the observer's hooks temporarily removed from all models.

        The hooks must not become part of a model that is pickled or scripted. In a background
        thread, however, the hooks remain in place, because the training loop continues during the
        call and must be observed.
        """
        if threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        for handles in list(self._hook_handles.values()):
            for handle in handles:
                handle.remove()
        try:
            return original(*args, **kwargs)
        finally:
            for root in list(self._hook_handles):
                self._hook_model(root)

    def _record_save(self, arguments: Sequence[Any], *, in_thread: bool) -> None:
        """Record a save in the trace.

        Args:
            arguments: The arguments of the function that saved. The first argument is usually the
                saved object; a path or file may follow.
            in_thread: Whether the save ran in a background thread while training continued.
        """
        checkpoint = arguments[0]
        entries = {}
        if not _is_destination(checkpoint):
            entries = self._digests.entries(checkpoint)
        path = _find_path(arguments)
        # During a save in a background thread, optimizers may have stepped since the state was
        # copied, so their current states are not the saved ones.
        states = [] if in_thread else self._models.saved_states()
        if path is not None:
            self._files.note_save(path)
        self._trace.write(
            "save",
            path=path,
            in_thread=in_thread,
            entries=entries,
            size_bytes=_saved_bytes(path, arguments),
            states=states,
        )


def describe_settings(optimizer: Any) -> str:
    """Return each parameter group's `COMPARED_SETTINGS`, such as ``"lr=0.1 momentum=0.9"``."""
    groups = []
    for group in optimizer.param_groups:
        settings = [f"{name}={group[name]}" for name in COMPARED_SETTINGS if name in group]
        groups.append(" ".join(settings))
    return "; ".join(groups)


def _is_destination(value: Any) -> bool:
    """Return whether the first argument of a save is its destination, not the saved object."""
    if isinstance(value, (str, os.PathLike)):
        return True
    return type(value).__module__.startswith("holdfast.")


def _find_path(arguments: Sequence[Any]) -> str | None:
    """Return the real path of the first argument that is a path or a named file, or None."""
    for argument in arguments:
        place = argument
        if hasattr(argument, "write"):
            place = getattr(argument, "name", None)
        if isinstance(place, (str, os.PathLike)):
            return os.path.realpath(os.fspath(place))
    return None


def _saved_bytes(path: str | None, arguments: Sequence[Any]) -> int:
    """Return the size of the largest saved file or, without a file, of the buffers saved to."""
    if path is not None:
        files = [file for file in (Path(path), *Path(path).rglob("*")) if file.is_file()]
        if files:
            return max(file.stat().st_size for file in files)
    buffers = [value for value in arguments if isinstance(value, io.BytesIO)]
    return sum(buffer.getbuffer().nbytes for buffer in buffers)
