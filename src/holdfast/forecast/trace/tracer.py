"""Watch what a training step does to the memory of a device, tensor by tensor, as torch dispatches
it.

Works on tensors without data and on real ones. A storage is alive from the operation that returns
it until the last reference to it is gone, which is when the device's allocator would get it back.
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
from holdfast.forecast.trace.attribution import Places
from holdfast.forecast.trace.events import Assumption, Trace
from holdfast.forecast.trace.operations import Operations
from holdfast.forecast.trace.recording import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    Ran,
    Recording,
    as_trace,
)
from holdfast.forecast.trace.storages import Owners, Storages
from holdfast.memory.tensors import tensors_of

_DEVICE = torch.ops.prim.device.default
_DROPOUT = torch.ops.aten.native_dropout.default
ScratchOf = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Scratch | None]


class Tracer(TorchDispatchMode):
    """Watch a device while the context lasts; record one step of it by `recording`.

    It must be the innermost mode, entered before the tensors of the job are made; those that are
    already there are found if Python knows them. `scratch` returns what an operation allocates for
    itself, of its overload, arguments and result; `uncalibrated` takes down what those figures
    leave open.
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
        self._places = Places()
        self._storages = Storages(device.type, self._running_phase)
        self._owners = Owners(self._storages, self._places)
        self._operations = Operations()
        self._recorded: Recording | None = None
        self._outside = FORWARD  # the phase when autograd's engine is not running
        self._in_backward = False
        self._engine_ran = False  # whether the last operation was one of the engine's own
        self._steps_begun: list[int] = []  # events before each optimizer step that runs
        self._cleanup = contextlib.ExitStack()
        self._scratch = scratch
        self._uncalibrated = uncalibrated or Uncalibrated()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that it would put around each dispatch costs more than what is done here
        return False

    def __enter__(self) -> Self:
        gc.collect()
        # What is there need not be looked at again, which makes the later collections short
        gc.freeze()
        self._cleanup.callback(gc.unfreeze)
        super().__enter__()  # type: ignore[no-untyped-call]
        for handle in (
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(
                lambda module, *_: self._places.leave(module), always_call=True
            ),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
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
        """Note what owns memory.

        Models by the names that begin their modules' paths, and optimizers.
        """
        self._owners.watch(models or {}, optimizers)
        self._owners.find_all()

    def claim(self, tensors: Any, owner: str = "batch") -> None:
        """Note who owns tensors, in nested lists, tuples and mappings.

        Those on other devices are passed over.
        """
        self._owners.claim(tensors, owner)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens in the context as the template of a step.

        No garbage is collected within: a reference cycle is kept to the end, wherever the collector
            would have come.
        """
        gc.collect()
        self._places.forget()
        self._steps_begun.clear()
        self._owners.find_all()  # in the order in which Module.to moves them to a device
        self._storages.hold_unknown()
        self._outside, self._in_backward, self._engine_ran = FORWARD, False, False
        self._operations = Operations()
        self._uncalibrated.clear()
        record = self._storages.record = Recording(resident=self._storages.living())
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
            gc.collect()
            self._owners.find_all()
            record.survivors = frozenset(self._storages.living())
            record.uncalibrated_bytes = self._uncalibrated.excess_bytes
            if calls := self._uncalibrated.calls:
                names = ", ".join(sorted(calls))
                what = (
                    f"what {names} allocate for themselves is not calibrated ({calls.total()}"
                    " calls)"
                )
                record.assumptions.append(Assumption(what=what))
            self._recorded = record
        finally:
            self._storages.record = None
            if collects:
                gc.enable()

    def trace(self, **described: Any) -> Trace:
        """Return the step that was recorded last; `described` are fields of `Trace`."""
        assert self._recorded is not None, "nothing was recorded"
        names = {
            "modules": tuple(self._places.modules),
            "lines": tuple(self._places.lines.texts),
            "names": tuple(self._operations.names),
        }
        plain = {"blocks": (), "precision": "fp32", "route": "cpu", "assumptions": ()}
        return as_trace(self._recorded, self._storages.ledger, **names, **{**plain, **described})

    # What torch calls.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func is _DEVICE
            and isinstance(args[0], FakeTensor)
            and not args[0].fake_mode.in_kernel_invocation
        ):
            # As the fake mode would say; torch asks before most operations
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out, sys._getframe().f_back)
        return out

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        frame: FrameType | None,
    ) -> None:
        phase = self._phase()
        records = torch.is_grad_enabled()
        in_backward = phase == BACKWARD
        self._storages.place = self._places.here(frame, in_backward=in_backward, records=records)
        by_engine = in_backward and not records
        record = self._storages.record
        begun = 0 if record is None else len(record.events)
        if record is not None and by_engine and not self._engine_ran:
            record.backward_starts.append(begun)
        self._engine_ran = by_engine
        made = out[::-1] if func is _DROPOUT else out  # Dropout.cu makes the mask first
        here = self._storages.hold_all(made, FORWARD if in_backward and records else phase)
        if here is None:
            here = any(map(self._storages.is_here, tensors_of((args, kwargs))))
        if here and record is not None:
            scratch = self._scratch(func, args, kwargs, out)
            if scratch is not None:  # noted though it be 0 bytes: other batches may need some
                self._storages.use(scratch.bytes, phase)  # on top of what the operation returns
                self._uncalibrated.note(str(getattr(func, "overloadpacket", func)), scratch)
            cost = self._operations.measure(func, args, kwargs, out)
            if cost is not None:
                record.operations.append(Ran(cost.name, begun, phase, *cost[1:]))
        if here and phase == FORWARD and not self._places.in_module:
            source = args[0] if args else None
            if isinstance(source, torch.Tensor) and not self._storages.is_here(source):
                # What comes from another device outside of all modules
                self._owners.claim(out, "batch")

    def _phase(self) -> int:
        if torch._C._current_graph_task_id() != -1:
            self._in_backward = True
            return BACKWARD
        if self._in_backward:
            self._in_backward = False
            self._outside = OPTIMIZER if self._steps_begun else OTHER
            self._owners.find_gradients()
        return self._outside

    def _running_phase(self) -> int:
        """Return the phase, without a look at what has changed with it."""
        return BACKWARD if torch._C._current_graph_task_id() != -1 else self._outside

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self._phase() != BACKWARD and not self._places.in_module:
            self._outside = FORWARD
        self._places.enter(module)

    def _before_step(self, _: torch.optim.Optimizer, __: Any, ___: Any) -> None:
        self._phase()
        self._owners.find_gradients()
        self._outside = OPTIMIZER
        record = self._storages.record
        self._steps_begun.append(0 if record is None else len(record.events))

    def _after_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        if not self._steps_begun:
            return
        begun = self._steps_begun.pop()
        if self._steps_begun:
            return  # an optimizer within an optimizer
        self._owners.watch({}, [optimizer])
        self._owners.find_state(optimizer)
        record = self._storages.record
        if record is not None:
            record.optimizer_steps.append((begun, len(record.events)))
        self._outside = OTHER
