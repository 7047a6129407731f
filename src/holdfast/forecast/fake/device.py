"""Create the fake device, on which a training step runs as on CUDA, but with shapes only.

The device is registered as a custom backend (torch's ``PrivateUse1``), so that autograd, autocast
and C++ composite operators treat its tensors like those on a GPU. A backend cannot be unregistered,
so use the device only in a separate process.

`data_dependent` runs operators whose results depend on tensor values. `stand_ins` makes the device
look like CUDA to user code. The kernels that CUDA would choose are in `forecast.kernels`.
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
from holdfast.forecast.fake.guesses import Guesses
from holdfast.forecast.fake.known_values import KnownValues
from holdfast.forecast.kernels import autocast_policy
from holdfast.forecast.kernels.emulation import emulated_kernels
from holdfast.forecast.kernels.scratch import Uncalibrated
from holdfast.forecast.trace.events import Assumption

DEVICE_NAME = "forecast"
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Part of the message of the RuntimeError that torch.library.custom_op raises for an operator
# without a fake implementation. The error does not have its own class.
_NO_FAKE_IMPLEMENTATION = "no fake impl registered"

_registered = False
# FakeTensorMode's __torch_dispatch__, without its check for torch.compile, which takes as long as
# the dispatch itself.
_dispatch = getattr(FakeTensorMode, "dispatch", FakeTensorMode.__torch_dispatch__)


class ForecastMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode that replaces CUDA with a fake device and supports reading values.

    Args:
        device: The device that replaces ``"cuda"``.
        guesses: Provides answers where code reads unknown values.
    """

    def __init__(self, device: torch.device, guesses: Guesses) -> None:
        super().__init__(allow_non_fake_inputs=False, allow_fallback_kernels=False)
        self.fake_device = device
        self.guesses = guesses
        self.known_values = KnownValues()
        # Fake kernels, keyed by operator overload. They take precedence over torch's own fake
        # kernels.
        self.kernels: Mapping[Any, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skip the check for torch.compile: no compiled code runs in this mode.
        return False

    @property
    def avoid_device_init(self) -> bool:
        """Always True, so that torch creates no real constants on the "available" device."""
        return True

    def may_turn_const(self, t: torch.Tensor) -> bool:  # noqa: ARG002 - torch names it
        """Return False, because `KnownValues` tracks values in place of torch's constants."""
        return False

    def __copy__(self) -> ForecastMode:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ForecastMode:
        # Copies of fake parameters must share this mode. If the mode were copied too, each use of a
        # copied parameter would create a new storage.
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator on fake tensors.

        The result comes from the first of the following sources that supports the operator:
        `data_dependent`, for operators that depend on values; `kernels`, which emulate the kernels
        that CUDA would choose; and torch's own fake kernels.
        """
        # Lift operators receive a real tensor, such as a constant that user code creates with
        # `torch.tensor`.
        is_lift = func in self.lift_fns
        args = tuple(self._make_local(arg, is_lift=is_lift) for arg in args)
        kwargs = {
            name: self._make_local(arg, is_lift=is_lift) for name, arg in (kwargs or {}).items()
        }
        if not isinstance(func, torch._ops.OpOverload):
            return _dispatch(self, func, types, args, kwargs)
        answer = data_dependent.answer(self, func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        kernel = self.kernels.get(func)
        if kernel is not None:
            return kernel(self, func, *args, **kwargs)
        out = self._run_fake(func, types, args, kwargs)
        if is_lift and type(args[0]) is torch.Tensor:
            self.known_values.learn(out, args[0])
        else:
            self.known_values.follow(func, args, kwargs, out)
        return out

    def _run_fake(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run torch's own fake kernel of an operator.

        Raises:
            PolicyError: H422 if the operator has no fake kernel, H424 if its result depends on
                values that are unknown.
        """
        try:
            return _dispatch(self, func, types, args, kwargs)
        except fake_tensor.UnsupportedOperatorException as error:
            if func._schema.returns or not func._schema.is_mutable:
                raise data_dependent.missing_rule(func) from error
            # The operator only writes to its arguments, as fused optimizers do.
            return None
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ) as error:
            raise data_dependent.undecidable(func) from error
        except RuntimeError as error:
            if _NO_FAKE_IMPLEMENTATION not in str(error):
                raise
            raise data_dependent.missing_rule(func) from error

    def _make_local(self, arg: Any, *, is_lift: bool) -> Any:
        """Replace CUDA devices and real tensors in an argument with their fake counterparts.

        Args:
            arg: An argument of an operator.
            is_lift: Whether the operator is a lift operator, whose argument stays real.
        """
        if isinstance(arg, torch.device):
            return stand_ins.redirected(arg, self.fake_device)
        if isinstance(arg, torch.Tensor):
            return arg if is_lift or isinstance(arg, FakeTensor) else self._fake_twin(arg)
        if isinstance(arg, (list, tuple)) and any(_is_real_tensor(item) for item in arg):
            return type(arg)(self._make_local(item, is_lift=is_lift) for item in arg)
        return arg

    def _fake_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of a real tensor, and record the tensor's values as known.

        Tensors of other classes are returned unchanged.
        """
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        twin: torch.Tensor = self.from_tensor(tensor)
        self.known_values.learn(twin, tensor.detach())
        return twin


def _is_real_tensor(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor)


class AddedAutocast(torch.autocast):
    """The autocast context that a forecast adds, as opposed to those in the job's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastDevice:
    """An active fake device, as yielded by `forecast_device`.

    Args:
        device: ``forecast:0``, which user code sees as ``cuda:0``; on the route ``"cpu"``, ``cpu``.
        mode: The active fake tensor mode.
        route: ``"privateuse1"`` or ``"cpu"``; see `forecast_device`.
        precision: A key of `PRECISIONS`.
        guesses: Provides answers where code reads unknown values, and collects the assumptions.
        uncalibrated: Collects by how much kernels may exceed the forecast of their memory.
    """

    device: torch.device
    mode: ForecastMode
    route: str
    precision: str
    guesses: Guesses
    uncalibrated: Uncalibrated

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """All assumptions made so far."""
        return self.guesses.assumptions

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context for this device's precision. For fp32, it does nothing."""
        dtype = PRECISIONS[self.precision]
        if dtype is None:
            return contextlib.nullcontext()
        return AddedAutocast(self.device.type, dtype=dtype)

    def place(self, *modules: nn.Module) -> None:
        """Move modules to this device in place. Their parameters may be real or fake.

        Parameters stay the same objects, so tied parameters stay tied.

        Raises:
            PolicyError: H426 if user code holds autograd nodes of moved parameters.
        """
        for module in modules:
            placement.place(module, self.device)
        placement.check_hooks_on_nodes()


@contextlib.contextmanager
def forecast_device(
    route: str = "privateuse1", precision: str = "fp32"
) -> Iterator[ForecastDevice]:
    """Run the code in the ``with`` block with fake tensors, which have only shapes.

    Args:
        route: ``"privateuse1"`` for a fake device that represents a GPU, or ``"cpu"`` for a host
            without CUDA, whose forecasts can be compared with real runs on the CPU.
        precision: A key of `PRECISIONS`.

    Raises:
        PolicyError: H423 if the installed version of torch does not support the fake device.
    """
    stands_for_gpu = route == "privateuse1"
    guesses = Guesses()
    uncalibrated = Uncalibrated()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_and_without_gpus())
        if stands_for_gpu:
            _register()
        device = torch.device(DEVICE_NAME, 0) if stands_for_gpu else torch.device("cpu")
        mode = ForecastMode(device, guesses)
        stack.enter_context(_foreach_for_fake_tensors())
        stack.enter_context(placement.conversion_in_place())
        if stands_for_gpu:
            stack.enter_context(autocast_policy.installed(DEVICE_NAME, guesses.assume))
        mode.kernels = stack.enter_context(
            emulated_kernels(
                route,
                value_of=lambda tensor: mode.known_values.of(tensor).value,
                assume=guesses.assume,
                uncalibrated=uncalibrated,
            )
        )
        stack.enter_context(stand_ins.installed(device, guesses, as_cuda=stands_for_gpu))
        stack.enter_context(mode)
        if stands_for_gpu:
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
    """Hide real GPUs from the ``with`` block, and silence torch's log of errors in fake kernels."""
    log = logging.getLogger(fake_tensor.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""):
            # copy.deepcopy accesses the data pointer of fake tensors, which causes this warning.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _foreach_for_fake_tensors() -> Iterator[None]:
    """Let optimizers and gradient clipping use their foreach kernels for fake tensors.

    By default, torch uses these kernels only for certain tensor classes.
    """
    with contextlib.ExitStack() as stack:
        for module in (optimizer_module, _foreach_utils):
            types = getattr(module, "_foreach_supported_types", None)
            if isinstance(types, list) and FakeTensor not in types:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)
        yield


# --- registering the device with torch ------------------------------------------------------------

# The functions that torch expects in a backend's module. They are stubs: user code does not call
# them, and the device draws no random numbers.
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
    """Register the device, once per process."""
    global _registered
    if _registered:
        return
    try:
        from torch.utils.backend_registration import (
            _setup_privateuseone_for_python_backend as setup,
        )

        setup(DEVICE_NAME, backend_module=_BACKEND)
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        raise _unsupported_torch(error) from error
    _registered = True


def _probe(device: torch.device) -> None:
    """Run a minimal step to check that the installed version of torch supports the device.

    The step also starts autograd's engine, which must be started after the device was registered.
    """
    try:
        weight = torch.empty(2, 2, device=device, requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise _unsupported_torch(error) from error


def _unsupported_torch(error: Exception) -> PolicyError:
    reason = str(error).splitlines()[0]
    return PolicyError(
        f"torch {torch.__version__} does not support the fake device of a forecast: {reason}",
        limit="a forecast registers its fake device as torch's PrivateUse1 backend",
        fix="use torch 2.11 to 2.15, and do not register another PrivateUse1 backend.",
        rule="H423",
    )
