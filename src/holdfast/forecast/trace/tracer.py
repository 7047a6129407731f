"""Record all allocations and frees in a training step with a torch dispatch mode.

The tracer works with both fake and real tensors. A storage counts as allocated by the operation
that returns it. It counts as freed when the last reference to it is gone, which is also when torch
returns the memory to the device's allocator.

The tracer only observes. The `fake` package implements the fake device, and `kernels.scratch`
computes the scratch memory of kernels.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.forecast.kernels.scratch import Scratch, Uncalibrated
from holdfast.forecast.trace.attribution import Locator
from holdfast.forecast.trace.events import Assumption, Trace
from holdfast.forecast.trace.operations import Operations
from holdfast.forecast.trace.recording import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    OperationRecord,
    RawStep,
    as_trace,
)
from holdfast.forecast.trace.storages import Owners, Storages
from holdfast.memory.tensors import tensors_of

_DEVICE_QUERY = torch.ops.prim.device.default
_DROPOUT = torch.ops.aten.native_dropout.default
# A function that returns an operation's scratch memory, given its overload, positional arguments,
# keyword arguments and result. None means that the operation needs no scratch memory.
ScratchOf = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Scratch | None]


class Tracer(TorchDispatchMode):
    """Dispatch mode that watches the allocations on a device. Use `recording` to record one step.

    Enter the tracer after all other dispatch modes, so that it is the innermost one, and before the
    job creates its tensors. Tensors that already exist are watched if Python's garbage collector
    can find them.

    Args:
        device: The device to watch.
        scratch: A function that returns an operation's scratch memory.
        uncalibrated: Collects by how much the scratch memory may exceed its estimates.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        *,
        scratch: ScratchOf = lambda *_: None,
        uncalibrated: Uncalibrated | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._locator = Locator()
        self._storages = Storages(device.type, self._current_phase)
        self._owners = Owners(self._storages, self._locator)
        self._operations = Operations()
        self._scratch = scratch
        self._uncalibrated = uncalibrated or Uncalibrated()
        self._recorded: RawStep | None = None
        self._cleanup = contextlib.ExitStack()
        # The current phase while autograd's engine is not running.
        self._outer_phase = FORWARD
        # Whether autograd's engine was running at the last operation.
        self._backward_was_running = False
        # Whether the last operation computed gradients, which means that it ran in a backward pass,
        # but not in a recomputation within that pass.
        self._gradients_were_running = False
        # For each running optimizer step, the number of events recorded before it began. Optimizer
        # steps may be nested.
        self._begun_steps: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this returned True, torch would wrap each dispatch, which takes longer than the
        # tracer's own work.
        return False

    def __enter__(self) -> Self:
        gc.collect()
        # Exclude existing objects from later collections, so that those are fast.
        gc.freeze()
        self._cleanup.callback(gc.unfreeze)
        super().__enter__()  # type: ignore[no-untyped-call]
        for handle in (
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(self._after_optimizer_step),
        ):
            self._cleanup.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def watch(
        self,
        *,
        models: Mapping[str, nn.Module] | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Attribute memory to the modules of models and to optimizer state.

        Args:
            models: The models, keyed by name. The paths of a model's modules begin with the name.
            optimizers: The optimizers whose state is attributed.
        """
        self._owners.add_models(models or {})
        for optimizer in optimizers:
            self._owners.add_optimizer(optimizer)
        self._owners.find_all()

    def claim(self, tensors: Any, owner: str = "batch") -> None:
        """Record who owns the given tensors. Tensors on other devices are ignored.

        Args:
            tensors: A tensor, or a nested container of tensors.
            owner: One of `OWNERS`.
        """
        self._owners.claim(tensors, owner)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record all allocations and frees inside the ``with`` block as one step.

        Automatic garbage collection is disabled during the step, because a collection at an
        unpredictable time would make the record nondeterministic. Tensors in reference cycles are
        therefore freed at the end of the step.
        """
        gc.collect()
        self._reset()
        step = RawStep(resident=self._storages.living())
        self._storages.record = step
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
            gc.collect()
            self._owners.find_all()
            self._finish(step)
            self._recorded = step
        finally:
            self._storages.record = None
            if was_enabled:
                gc.enable()

    def trace(
        self,
        *,
        micro_batch_size: int,
        precision: str = "fp32",
        route: str = "cpu",
        blocks: tuple[str, ...] = (),
        assumptions: tuple[Assumption, ...] = (),
    ) -> Trace:
        """Return the trace of the last recorded step. The arguments are fields of `Trace`."""
        assert self._recorded is not None, "no step was recorded"
        return as_trace(
            self._recorded,
            self._storages.table,
            modules=tuple(self._locator.modules),
            lines=tuple(self._locator.lines.texts),
            names=tuple(self._operations.names),
            micro_batch_size=micro_batch_size,
            precision=precision,
            route=route,
            blocks=blocks,
            assumptions=assumptions,
        )

    def _reset(self) -> None:
        """Discard the records of the last step before a new step is recorded."""
        self._locator.forget()
        self._begun_steps.clear()
        self._owners.find_all()
        self._storages.watch_existing()
        self._outer_phase = FORWARD
        self._backward_was_running = False
        self._gradients_were_running = False
        self._operations = Operations()
        self._uncalibrated.clear()

    def _finish(self, step: RawStep) -> None:
        """Add the surviving storages and the scratch memory's uncertainty to a step's record."""
        step.survivors = frozenset(self._storages.living())
        step.uncalibrated_bytes = self._uncalibrated.excess_bytes
        calls = self._uncalibrated.calls
        if calls:
            names = ", ".join(sorted(calls))
            what = (
                f"the scratch memory of {names} ({calls.total()} calls) is an estimate, which may"
                " be too low"
            )
            step.assumptions.append(Assumption(what=what))

    # Operations.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func is _DEVICE_QUERY
            and isinstance(args[0], FakeTensor)
            and not args[0].fake_mode.in_kernel_invocation
        ):
            # torch queries the device before most operations. The fake mode would return the same
            # result, but it would take longer.
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._observe(func, args, kwargs, out, sys._getframe().f_back)
        return out

    def _observe(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        frame: FrameType | None,
    ) -> None:
        """Record an operation that has just run, and watch the tensors that it returned."""
        phase = self._update_phase()
        in_backward = phase == BACKWARD
        # In a backward pass, grad mode is enabled only during recomputation.
        records = torch.is_grad_enabled()
        is_recomputation = in_backward and records
        self._storages.location = self._locator.locate(
            frame, in_backward=in_backward, records=records
        )
        self._note_backward_start(computes_gradients=in_backward and not records)
        step = self._storages.record
        events_before = 0 if step is None else len(step.events)
        # native_dropout returns (output, mask), but its kernel allocates the mask first
        # (Dropout.cu).
        results = out[::-1] if func is _DROPOUT else out
        # Recomputed activations count as activations of the forward pass.
        born = FORWARD if is_recomputation else phase
        is_here = self._storages.watch_result(results, born)
        if is_here is None:
            is_here = any(map(self._storages.is_here, tensors_of((args, kwargs))))
        if not is_here:
            return
        if step is not None:
            scratch = self._scratch(func, args, kwargs, out)
            if scratch is not None:
                # Record even 0 bytes of scratch memory: the operation may need more at other batch
                # sizes, and the traces of all sizes must have the same events.
                self._storages.use_scratch(scratch.bytes, phase)
                self._uncalibrated.note(str(getattr(func, "overloadpacket", func)), scratch)
            cost = self._operations.measure(func, args, kwargs, out)
            if cost is not None:
                step.operations.append(OperationRecord(cost, phase, events_before))
        if phase == FORWARD and not self._locator.in_module:
            self._claim_moved_batch(args, out)

    def _note_backward_start(self, *, computes_gradients: bool) -> None:
        """Record where the computation of gradients begins, or resumes after a recomputation."""
        step = self._storages.record
        if step is not None and computes_gradients and not self._gradients_were_running:
            step.backward_starts.append(len(step.events))
        self._gradients_were_running = computes_gradients

    def _claim_moved_batch(self, args: tuple[Any, ...], out: Any) -> None:
        """Attribute a tensor to the batch if it was copied from another device.

        The tracer calls this method only for operations outside all modules.
        """
        source = args[0] if args else None
        if isinstance(source, torch.Tensor) and not self._storages.is_here(source):
            self._owners.claim(out, "batch")

    # The phase of the step.

    def _update_phase(self) -> int:
        """Return the current phase. Once a backward pass has ended, also record its gradients."""
        if torch._C._current_graph_task_id() != -1:
            self._backward_was_running = True
            return BACKWARD
        if self._backward_was_running:
            self._backward_was_running = False
            self._outer_phase = OPTIMIZER if self._begun_steps else OTHER
            self._owners.find_gradients()
        return self._outer_phase

    def _current_phase(self) -> int:
        """Return the current phase without side effects, unlike `_update_phase`."""
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return self._outer_phase

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self._update_phase() != BACKWARD and not self._locator.in_module:
            self._outer_phase = FORWARD
        self._locator.enter(module)

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        self._locator.leave(module)

    def _before_optimizer_step(self, *_: Any) -> None:
        self._update_phase()
        self._owners.find_gradients()
        self._outer_phase = OPTIMIZER
        record = self._storages.record
        self._begun_steps.append(0 if record is None else len(record.events))

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._begun_steps:
            return
        begin = self._begun_steps.pop()
        if self._begun_steps:
            # This optimizer is stepped by another optimizer, whose own step has not ended yet.
            return
        self._owners.add_optimizer(optimizer)
        self._owners.find_state(optimizer)
        record = self._storages.record
        if record is not None:
            record.optimizer_steps.append((begin, len(record.events)))
        self._outer_phase = OTHER
