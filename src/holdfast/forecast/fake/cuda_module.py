"""Make ``torch.cuda`` look like a single idle GPU while code runs on the fake device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from holdfast.forecast.fake.guesses import Guesses

# The properties of an A100 with 80 GB (NVIDIA A100 whitepaper, table 4). If user code reads them,
# an assumption is recorded with the line of code.
_TOTAL_BYTES = 80 * 2**30
_CAPABILITY = (8, 0)
_PROPERTIES = SimpleNamespace(
    name="holdfast forecast",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    total_memory=_TOTAL_BYTES,
    multi_processor_count=108,
    warp_size=32,
    is_integrated=False,
    is_multi_gpu_board=False,
)
# Functions that do nothing and return None.
_COMMANDS = (
    "init _lazy_init set_device synchronize empty_cache ipc_collect set_stream"
    " reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached"
    " reset_accumulated_memory_stats set_per_process_memory_fraction _record_memory_history"
    " manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all set_sync_debug_mode"
)
# Functions in ``torch.cuda`` that return a constant, as pairs of the constant and their names.
_PLAIN_ANSWERS: tuple[tuple[Any, str], ...] = (
    (None, _COMMANDS),
    (
        True,
        "is_available is_initialized is_bf16_supported is_tf32_supported can_device_access_peer",
    ),
    (False, "is_current_stream_capturing"),
    (0, "current_device _exchange_device _maybe_exchange_device initial_seed"),
    (1, "device_count"),
    (["sm_80"], "get_arch_list"),
    ({}, "memory_stats"),
    ("", "memory_summary"),
    ([], "memory_snapshot"),
)
# Names of functions that return memory statistics, which are all 0.
_MEMORY_IN_USE = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
    " max_memory_cached utilization"
)
# Functions that return constants on which user code may base its memory use, for example to choose
# a batch size. Each call is therefore recorded as an assumption.
_ASSUMED_ANSWERS = {
    **dict.fromkeys(_MEMORY_IN_USE.split(), 0),
    "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
    "get_device_name": _PROPERTIES.name,
    "get_device_capability": _CAPABILITY,
    "get_device_properties": _PROPERTIES,
}


class Patches(contextlib.ExitStack):
    """Context manager that replaces attributes of modules and classes until it exits."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it if it does not exist."""
        self.enter_context(mock.patch.object(owner, name, value, create=True))

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a function or method, or do nothing if the installed torch does not have it.

        Args:
            owner: The module or class that has the function.
            name: The function's name.
            wrapper: Called instead of the function, with the original function as an additional
                first argument.
        """
        original = getattr(owner, name, None)
        if original is None:
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.replace(owner, name, wrapped)


class _IdleStream:
    """Replaces both ``torch.cuda.Stream`` and ``torch.cuda.Event``.

    Every stream is idle, and every event has completed. User code uses streams and events to
    prefetch batches and to measure time.
    """

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _IdleStream()

    def _do_nothing(self, *_: Any) -> None:
        pass

    record = _do_nothing
    wait = _do_nothing
    synchronize = _do_nothing
    wait_stream = _do_nothing
    wait_event = _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def install_cuda_module(patches: Patches, guesses: Guesses) -> None:
    """Make ``torch.cuda`` look like a single idle GPU.

    Args:
        patches: Makes the replacements, and undoes them when it exits.
        guesses: Records an assumption for each call of a function in `_ASSUMED_ANSWERS`.
    """
    answers = _answers(guesses)
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, answer in answers.items():
            if name in vars(owner):
                patches.replace(owner, name, answer)
    patches.replace(torch.backends.cuda, "is_built", lambda: True)
    for name in ("range_push", "range_pop", "mark"):
        patches.replace(torch.cuda.nvtx, name, _do_nothing)
    for name in ("synchronize", "empty_cache"):
        if hasattr(torch.accelerator, name):
            patches.replace(torch.accelerator, name, _do_nothing)


def _answers(guesses: Guesses) -> dict[str, Callable[..., Any]]:
    """Return the replacements for functions and classes in ``torch.cuda``, keyed by name."""
    answers: dict[str, Callable[..., Any]] = {}
    for name, answer in _ASSUMED_ANSWERS.items():
        answers[name] = _assuming(name, answer, guesses)
    for answer, names in _PLAIN_ANSWERS:
        for name in names.split():
            answers[name] = _constant(answer)
    return {
        **answers,
        "current_stream": lambda *_, **__: _IdleStream(),
        "default_stream": lambda *_, **__: _IdleStream(),
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda *_, **__: torch.empty(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
        "Stream": _IdleStream,
        "Event": _IdleStream,
    }


def _constant(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _assuming(name: str, answer: Any, guesses: Guesses) -> Callable[..., Any]:
    def ask(*_: Any, **__: Any) -> Any:
        guesses.assume(f"torch.cuda.{name}() was assumed to return {answer}")
        return answer

    return ask
