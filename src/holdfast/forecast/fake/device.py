"""A device without memory of its own, on which a training step runs in shapes only, and runs as
CUDA would run it.

It stands on torch's slot for foreign backends (PrivateUse1): autograd, autocast and every C++
composite treat its tensors as a GPU's. Registering the slot cannot be undone: do it in a process of
its own.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake import data_dependent, placement, stand_ins
from holdfast.forecast.fake.facts import Facts
from holdfast.forecast.fake.guesses import Guesses
from holdfast.forecast.kernels import autocast_policy
from holdfast.forecast.kernels.emulation import emulated_kernels
from holdfast.forecast.kernels.scratch import Uncalibrated
from holdfast.forecast.trace.events import Assumption

DEVICE_NAME = "forecast"
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# What torch.library.custom_op raises in place of a class of its own
_NO_RULE = "no fake impl registered"

_registered = False
# FakeTensorMode's __torch_dispatch__ without the guard against torch.compile around it, which costs
# as much again.
_dispatch = getattr(FakeTensorMode, "dispatch", FakeTensorMode.__torch_dispatch__)


class ForecastMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors; those that are asked for on CUDA go to `device`, and questions for values
    get answers.
    """

    def __init__(self, device: torch.device, guesses: Guesses) -> None:
        super().__init__(allow_non_fake_inputs=False, allow_fallback_kernels=False)
        self.fake_device = device
        self.guesses = guesses
        self.facts = Facts()
        self.kernels: Mapping[Any, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no guard against torch.compile: nothing is compiled here

    @property
    def avoid_device_init(self) -> bool:
        """True: torch would put constants onto the "available" device for real otherwise."""
        return True

    def may_turn_const(self, t: torch.Tensor) -> bool:  # noqa: ARG002 - torch names it
        """No: `Facts` follow values, of more than single elements and to the device.

        Two accounts would differ.
        """
        return False

    def __copy__(self) -> ForecastMode:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ForecastMode:
        # A copied fake parameter would bring a copied mode, and each of its uses would make a new
        # storage.
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        lifted = func in self.lift_fns
        args = tuple(self._at_home(arg, lifted=lifted) for arg in args)
        kwargs = {name: self._at_home(arg, lifted=lifted) for name, arg in (kwargs or {}).items()}
        if not isinstance(func, torch._ops.OpOverload):
            return _dispatch(self, func, types, args, kwargs)
        out: Any = data_dependent.answer(self, func, args, kwargs)
        if out is not NotImplemented:
            return out
        kernel = self.kernels.get(func)
        if kernel is not None:
            return kernel(self, func, *args, **kwargs)
        try:
            out = _dispatch(self, func, types, args, kwargs)
        except fake_tensor.UnsupportedOperatorException as error:
            if func._schema.returns or not func._schema.is_mutable:
                raise data_dependent.missing_rule(func) from error
            out = None  # it only writes to its arguments, as fused optimizers do
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ) as error:
            raise data_dependent.undecidable(func) from error
        except RuntimeError as error:
            if _NO_RULE not in str(error):
                raise
            raise data_dependent.missing_rule(func) from error
        if lifted and type(args[0]) is torch.Tensor:
            self.facts.know(out, args[0])
        else:
            self.facts.follow(func, args, kwargs, out)
        return out

    def _at_home(self, arg: Any, *, lifted: bool) -> Any:
        """Put CUDA's place and real tensors right.

        The fake device, and fake tensors with known values.
        """
        if isinstance(arg, torch.device):
            return stand_ins.redirected(arg, self.fake_device)
        if isinstance(arg, torch.Tensor):
            return arg if lifted or isinstance(arg, FakeTensor) else self.adopted(arg)
        if isinstance(arg, (list, tuple)) and any(_is_real(element) for element in arg):
            return type(arg)(self._at_home(element, lifted=lifted) for element in arg)
        return arg

    def adopted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake twin of a real tensor."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        twin: torch.Tensor = self.from_tensor(tensor)
        self.facts.know(twin, tensor.detach())
        return twin


def _is_real(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor)


class AddedAutocast(torch.autocast):
    """The autocast of a forecast's precision, to be known from a job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastDevice:
    """The fake device while it is there.

    ``forecast:0`` (``cuda:0`` to user code) or, on its route, ``cpu``.
    """

    device: torch.device
    mode: ForecastMode
    route: str
    precision: str
    guesses: Guesses
    uncalibrated: Uncalibrated

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was taken for granted so far."""
        return self.guesses.assumptions

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the precision on this device, or nothing for fp32."""
        dtype = PRECISIONS[self.precision]
        return (
            contextlib.nullcontext()
            if dtype is None
            else AddedAutocast(self.device.type, dtype=dtype)
        )

    def place(self, *modules: nn.Module) -> None:
        """Bring modules here in place, real or fake.

        Parameters stay the same objects, tied ones stay tied (H426).
        """
        for module in modules:
            placement.place(module, self.device)
        placement.check_hooks_on_nodes()


@contextlib.contextmanager
def forecast_device(
    route: str = "privateuse1", precision: str = "fp32"
) -> Iterator[ForecastDevice]:
    """Run code in shapes only, on a device that stands for CUDA's (H423 if this torch has no slot
    for it).

    On route ``"cpu"`` it is the host, to be compared with real runs, and code finds there what the
    host has.
    """
    on_slot = route == "privateuse1"
    guesses, uncalibrated = Guesses(), Uncalibrated()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_and_without_gpus())
        if on_slot:
            _register()
        device = torch.device(DEVICE_NAME, 0) if on_slot else torch.device("cpu")
        mode = ForecastMode(device, guesses)
        stack.enter_context(_foreach_for_fake_tensors())
        stack.enter_context(placement.conversion_in_place())
        if on_slot:
            stack.enter_context(autocast_policy.installed(DEVICE_NAME, guesses.assume))
        mode.kernels = stack.enter_context(
            emulated_kernels(
                route,
                known=lambda tensor: mode.facts.of(tensor).value,
                assume=guesses.assume,
                uncalibrated=uncalibrated,
            )
        )
        stack.enter_context(stand_ins.installed(device, guesses, as_cuda=on_slot))
        stack.enter_context(mode)
        if on_slot:
            _probe(device)
        yield ForecastDevice(
            device=device,
            mode=mode,
            route=route,
            precision=precision,
            guesses=guesses,
            uncalibrated=uncalibrated,
        )


@contextlib.contextmanager
def _quiet_and_without_gpus() -> Iterator[None]:
    """Hide GPUs, where there are any.

    And keep torch from writing down each error that fake tensors raise.
    """
    log = logging.getLogger(fake_tensor.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""):
            # Deepcopy does
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _foreach_for_fake_tensors() -> Iterator[None]:
    """Let optimizers and clipping choose foreach for fake parameters.

    The choice looks at the exact type.
    """
    with contextlib.ExitStack() as stack:
        for module in (optimizer_module, _foreach_utils):
            types = getattr(module, "_foreach_supported_types", None)
            if isinstance(types, list) and FakeTensor not in types:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)
        yield


# What torch asks a backend's module for; user code does not see it. No number is drawn.
_BACKEND = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda _: None,
    get_rng_state=lambda *_: torch.empty(16, dtype=torch.uint8),
    set_rng_state=lambda *_: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
)


def _register() -> None:
    global _registered
    if _registered:
        return
    try:
        from torch.utils.backend_registration import (
            _setup_privateuseone_for_python_backend as setup,
        )

        setup(DEVICE_NAME, backend_module=_BACKEND)
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        raise _no_slot(str(error).splitlines()[0]) from error
    _registered = True


def _probe(device: torch.device) -> None:
    """Run the smallest step.

    Autograd's engine must start with the device, and whether this torch has it is known.
    """
    try:
        weight = torch.empty(2, 2, device=device, requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise _no_slot(str(error).splitlines()[0]) from error


def _no_slot(why: str) -> PolicyError:
    return PolicyError(
        f"torch {torch.__version__} gives no slot for a forecast's device: {why}",
        limit="a step can be traced only on a device that stands for a GPU",
        fix="use torch 2.11 to 2.15, and no other backend in Python",
        rule="H423",
    )
