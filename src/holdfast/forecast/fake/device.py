"""A device without memory, on which a training step runs with shapes only, as it would on CUDA.

The device uses torch's slot for foreign backends (PrivateUse1): autograd, autocast and every C++
composite treat its tensors like a GPU's. The slot cannot be unregistered, so use it in a separate
process.

The answers to questions about values are in `data_dependent`; how CUDA looks to user code is
defined in `stand_ins`; the kernels that CUDA would choose are in `forecast.kernels`.
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
# Part of the RuntimeError that torch.library.custom_op raises for an operator without a fake
# implementation. The error has no class of its own.
_NO_FAKE_IMPLEMENTATION = "no fake impl registered"

_registered = False
# FakeTensorMode's __torch_dispatch__ without its guard against torch.compile, which takes as long
# as the dispatch itself.
_dispatch = getattr(FakeTensorMode, "dispatch", FakeTensorMode.__torch_dispatch__)


class ForecastMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode with a fake device instead of CUDA, which answers questions about values.

    Args:
        device: The device that replaces ``"cuda"``.
        guesses: Answers questions about unknown values.
    """

    def __init__(self, device: torch.device, guesses: Guesses) -> None:
        super().__init__(allow_non_fake_inputs=False, allow_fallback_kernels=False)
        self.fake_device = device
        self.guesses = guesses
        self.known_values = KnownValues()
        # Fake kernels that are preferred to torch's own, by overload.
        self.kernels: Mapping[Any, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, so the guard against torch.compile is not needed.
        return False

    @property
    def avoid_device_init(self) -> bool:
        """Return True: otherwise torch would create real constants on the "available" device."""
        return True

    def may_turn_const(self, t: torch.Tensor) -> bool:  # noqa: ARG002 - torch names it
        """Return False: `KnownValues` tracks values, so torch must not track constants as well."""
        return False

    def __copy__(self) -> ForecastMode:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ForecastMode:
        # A copied fake parameter would come with a copied mode, and each use would create a new
        # storage.
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator on fake tensors.

        The first of these that has an answer is used: an answer to a question about values
        (`data_dependent`), the kernel that CUDA would choose (`kernels`), torch's fake kernel.
        """
        # These operators receive a real tensor, a constant in the user's code.
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
        """Run torch's fake kernel of an operator.

        Raises:
            PolicyError: H422 if there is none, H424 if its result depends on values.
        """
        try:
            return _dispatch(self, func, types, args, kwargs)
        except fake_tensor.UnsupportedOperatorException as error:
            if func._schema.returns or not func._schema.is_mutable:
                raise data_dependent.missing_rule(func) from error
            # It only writes to its arguments, like fused optimizers.
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
        """Return an argument with the fake device for CUDA, and fake tensors for real ones."""
        if isinstance(arg, torch.device):
            return stand_ins.redirected(arg, self.fake_device)
        if isinstance(arg, torch.Tensor):
            return arg if is_lift or isinstance(arg, FakeTensor) else self._fake_twin(arg)
        if isinstance(arg, (list, tuple)) and any(_is_real_tensor(item) for item in arg):
            return type(arg)(self._make_local(item, is_lift=is_lift) for item in arg)
        return arg

    def _fake_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a real one, whose values are known."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        twin: torch.Tensor = self.from_tensor(tensor)
        self.known_values.learn(twin, tensor.detach())
        return twin


def _is_real_tensor(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor)


class AddedAutocast(torch.autocast):
    """The autocast of a forecast's precision. Its class distinguishes it from the job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastDevice:
    """The fake device within its context.

    Args:
        device: ``forecast:0``, which is ``cuda:0`` to user code, or ``cpu``.
        mode: The fake mode, which is active.
        route: ``"privateuse1"`` or ``"cpu"``; see `forecast_device`.
        precision: A key of `PRECISIONS`.
        guesses: The answers to questions about values.
        uncalibrated: Collects by how much figures about kernels may be too low.
    """

    device: torch.device
    mode: ForecastMode
    route: str
    precision: str
    guesses: Guesses
    uncalibrated: Uncalibrated

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions so far."""
        return self.guesses.assumptions

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the precision on this device, which does nothing for fp32."""
        dtype = PRECISIONS[self.precision]
        if dtype is None:
            return contextlib.nullcontext()
        return AddedAutocast(self.device.type, dtype=dtype)

    def place(self, *modules: nn.Module) -> None:
        """Move modules, real or fake, to this device in place.

        Parameters stay the same objects, so tied ones stay tied.

        Raises:
            PolicyError: H426, if user code holds autograd nodes of moved parameters.
        """
        for module in modules:
            placement.place(module, self.device)
        placement.check_hooks_on_nodes()


@contextlib.contextmanager
def forecast_device(
    route: str = "privateuse1", precision: str = "fp32"
) -> Iterator[ForecastDevice]:
    """Run code with shapes only within the context.

    Args:
        route: ``"privateuse1"`` for a device that represents a GPU; ``"cpu"`` for the host without
            CUDA, for comparison with real runs.
        precision: A key of `PRECISIONS`.

    Raises:
        PolicyError: H423, if this torch has no slot for the device.
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
    """Hide GPUs, and keep torch from logging every error raised by fake tensors."""
    log = logging.getLogger(fake_tensor.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""):
            # copy.deepcopy accesses it.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _foreach_for_fake_tensors() -> Iterator[None]:
    """Let optimizers and clipping choose their foreach kernels, which depends on the exact type."""
    with contextlib.ExitStack() as stack:
        for module in (optimizer_module, _foreach_utils):
            types = getattr(module, "_foreach_supported_types", None)
            if isinstance(types, list) and FakeTensor not in types:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)
        yield


# --- torch's slot for the device ------------------------------------------------------------------

# The functions that torch expects in a backend's module. User code does not see them, and no random
# number is drawn.
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
        raise _no_slot(error) from error
    _registered = True


def _probe(device: torch.device) -> None:
    """Run a minimal step to find out whether this torch supports the device.

    This also starts autograd's engine, which must happen while the device exists.
    """
    try:
        weight = torch.empty(2, 2, device=device, requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise _no_slot(error) from error


def _no_slot(error: Exception) -> PolicyError:
    reason = str(error).splitlines()[0]
    return PolicyError(
        f"torch {torch.__version__} has no slot for a forecast's device: {reason}",
        limit="a step can be traced only on a device that represents a GPU",
        fix="use torch 2.11 to 2.15, and no other backend in Python",
        rule="H423",
    )
