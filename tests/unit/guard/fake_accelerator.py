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
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import holdfast

NAME = "accelerator"
DEVICE = f"{NAME}:0"

_PACKAGE = str(Path(holdfast.__file__).parent)
_aten = torch.ops.aten
# Operators that return a value to the host, and the values that they return here.
_READS: Mapping[Any, Callable[[torch.Tensor], Any]] = {
    _aten._local_scalar_dense.default: lambda tensor: torch.ones((), dtype=tensor.dtype).item(),
    _aten.equal.default: lambda _: True,
    _aten.allclose.default: lambda _: True,
    _aten.is_nonzero.default: lambda _: True,
}


class FakeAccelerator(FakeTensorMode):
    """Runs the code in the ``with`` block without values, and records waits.

    The host waits for the device if it reads a value or copies a tensor from one to the other with
    ``non_blocking=False``. Numbers that are read are 1, and tensors that are compared are equal.
    Operators whose output has a shape that depends on values raise an error.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Where the host has waited: the operator, and the innermost lines of holdfast.
        self.waits: list[str] = []

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
            tensor = args[0]
            if tensor.device.type == NAME:
                self._note_wait(str(func))
            return read(tensor)
        try:
            out = FakeTensorMode.dispatch(self, func, types, args, given)
        except fake_tensor.UnsupportedOperatorException:
            if func._schema.returns:
                raise
            # The operator only writes to its arguments, as fused optimizers do.
            return None
        if func in (_aten._to_copy.default, _aten.copy_.default):
            self._note_blocking_copy(func, args, given, out)
        return out

    def _note_blocking_copy(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: torch.Tensor
    ) -> None:
        if func is _aten.copy_.default:
            source = args[1]
            does_not_block = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source = args[0]
            does_not_block = kwargs.get("non_blocking", False)
        if source.device != out.device and not does_not_block:
            self._note_wait(f"{func} from {source.device} to {out.device}")

    def _note_wait(self, what: str) -> None:
        frames = [
            f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(_PACKAGE)
        ]
        self.waits.append(f"{what} in {' < '.join(frames[:-4:-1])}")


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
        synchronize=lambda *_: mode._note_wait("synchronize"),
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=functions)
