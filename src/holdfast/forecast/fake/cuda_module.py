"""Make ``torch.cuda`` look like a single idle GPU while code runs on the fake device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from holdfast.forecast.fake.guesses import Guesses

# The properties of an A100 with 80 GB (NVIDIA A100 whitepaper, table 4). Code that reads them is
# recorded as an assumption with its line.
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
# Commands, which do nothing.
_COMMANDS = (
    "init _lazy_init set_device synchronize empty_cache ipc_collect set_stream"
    " reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached"
    " reset_accumulated_memory_stats set_per_process_memory_fraction _record_memory_history"
    " manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all set_sync_debug_mode"
)
# The answers of commands and plain queries of ``torch.cuda``.
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
# Answered with 0.
_MEMORY_IN_USE = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
    " max_memory_cached utilization"
)
# Memory may depend on these answers, so each is recorded as an assumption.
_ASSUMED_ANSWERS = {
    **dict.fromkeys(_MEMORY_IN_USE.split(), 0),
    "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
    "get_device_name": _PROPERTIES.name,
    "get_device_capability": _CAPABILITY,
    "get_device_properties": _PROPERTIES,
}


class Patches(contextlib.ExitStack):
    """Replaces attributes of modules and classes until the context ends."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it."""
        self.enter_context(mock.patch.object(owner, name, value, create=True))

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a callable with ``wrapper(callable)``, if this torch has it."""
        original = getattr(owner, name, None)
        if original is not None:
            self.replace(owner, name, wrapper(original))


class _IdleStream:
    """A stream on which nothing runs, and equally an event that has happened.

    User code calls these methods: a training loop that copies ahead or measures its own time.
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
        patches: Undoes the replacements when it ends.
        guesses: Collects assumptions about answers on which memory may depend.
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
    """Return the replacements for functions and classes of ``torch.cuda``, by name."""
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
        guesses.assume(f"torch.cuda.{name}() was answered with {answer}")
        return answer

    return ask
