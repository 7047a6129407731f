"""An accelerator without hardware, on which every wait of the host is recorded.

Its tensors have shapes but no values (torch's `FakeTensorMode`), and it is registered as torch's
``PrivateUse1`` backend, so that autograd, fused optimizers and BatchNorm treat it like a GPU. torch
without CUDA has no device guard for ``"cuda"``, so a fake tensor on that device has no backward
pass. A backend stays registered: use it in a process of its own.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import holdfast

NAME = "fakegpu"
DEVICE = f"{NAME}:0"

_PACKAGE = str(Path(holdfast.__file__).parent)
_aten = torch.ops.aten


def _number(tensor: torch.Tensor) -> Any:
    """Return the number that a read of a tensor gives: 1 on the accelerator, and 0 on the CPU."""
    value = 1 if tensor.device.type == NAME else 0
    return torch.full((), value, dtype=tensor.dtype, device="cpu").item()


# Operators that return a value to the host, and what they return here.
_READS: Mapping[Any, Callable[[torch.Tensor], Any]] = {
    _aten._local_scalar_dense.default: _number,
    _aten.equal.default: lambda _: True,
    _aten.allclose.default: lambda _: True,
    _aten.is_nonzero.default: lambda _: True,
}


class FakeAccelerator(FakeTensorMode):
    """Runs the code in the ``with`` block without values, and records waits.

    The host waits for the device if it reads a value there, copies a tensor from one to the other
    with ``non_blocking=False`` or through memory that is not pinned, or synchronizes with an event
    after which the device was not given a backward pass to run.

    Numbers that are read on the device are 1, those in copies on the host are 0, and tensors that
    are compared are equal. Operators whose output has a shape that depends on values raise an
    error.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        # Where the host has waited: the operator, and the innermost lines of holdfast.
        self.waits: list[str] = []
        # How many operators of backward passes the device was given.
        self.backward_operators = 0
        # The storages in pinned memory.
        self._pinned: list[StorageWeakRef] = []
        # The storage of the tensor that was read last.
        self._read_last: StorageWeakRef | None = None

    @property
    def avoid_device_init(self) -> bool:
        """Always True, so that torch creates constants on the CPU and copies them."""
        return True

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Return False: no tensor has a value that torch knows."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {} if kwargs is None else kwargs
        read = _READS.get(func)
        if read is not None:
            self._note_read(func, args[0])
            return read(args[0])
        try:
            out = FakeTensorMode.dispatch(self, func, types, args, given)
        except fake_tensor.UnsupportedOperatorException:
            if func._schema.returns:
                raise
            # The operator only writes to its arguments, as fused optimizers do.
            return None
        if func.__name__.partition(".")[0].endswith("_backward"):
            self.backward_operators += 1
        if given.get("pin_memory"):
            self._pinned = [storage for storage in self._pinned if not storage.expired()]
            self._pinned.append(StorageWeakRef(out.untyped_storage()))
        if func is _aten.copy_.default:
            is_async = args[2] if len(args) > 2 else given.get("non_blocking", False)
            self._note_copy(args[1], out, is_async=is_async)
        elif func is _aten._to_copy.default:
            self._note_copy(args[0], out, is_async=given.get("non_blocking", False))
        return out

    def _note_read(self, func: Any, tensor: torch.Tensor) -> None:
        if tensor.device.type != NAME:
            return
        # ``tolist`` reads the elements one by one here, but at once on a real device.
        storage = StorageWeakRef(tensor.untyped_storage())
        if self._read_last is None or storage != self._read_last:
            self.note_wait(str(func))
        self._read_last = storage

    def _note_copy(self, source: torch.Tensor, target: torch.Tensor, *, is_async: bool) -> None:
        if source.device == target.device:
            return
        on_host = source if source.device.type == "cpu" else target
        if not is_async or StorageWeakRef(on_host.untyped_storage()) not in self._pinned:
            self.note_wait(f"copy from {source.device} to {target.device}")

    def note_wait(self, what: str) -> None:
        """Record that the host has waited.

        Args:
            what: The operator or the function.
        """
        frames = [
            f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(_PACKAGE)
        ]
        self.waits.append(f"{what} in {' < '.join(frames[:-4:-1])}")


class _Event:
    """An event in the only stream of the accelerator.

    Args:
        mode: Records waits.
    """

    def __init__(self, mode: FakeAccelerator) -> None:
        self._mode = mode
        self._before = 0

    def record(self, stream: object = None) -> None:
        """Put the event behind everything that the device was given."""
        self._before = self._mode.backward_operators

    def synchronize(self) -> None:
        """Wait for the event, which is over if a backward pass was launched since."""
        if self._mode.backward_operators == self._before:
            self._mode.note_wait("synchronize with an event")


def register(mode: FakeAccelerator) -> None:
    """Register the accelerator in this process, which can be done once.

    Args:
        mode: Records explicit waits.
    """
    logging.getLogger(fake_tensor.__name__).setLevel(logging.CRITICAL)
    state = torch.zeros(16, dtype=torch.uint8)
    functions = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda _: None,
        get_rng_state=lambda *_: state,
        set_rng_state=lambda *_: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        empty_cache=lambda: None,
        Event=lambda **_: _Event(mode),
        synchronize=lambda *_: mode.note_wait("synchronize"),
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=functions)
