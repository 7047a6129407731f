"""``torch.cuda`` as it answers while code runs on the fake device: one idle GPU, on which nothing takes time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from holdfast.forecast.fake.guesses import Guesses

# An A100's. Whoever reads it gets an assumption with the line.
_TOTAL_BYTES = 80 * 2**30
_CAPABILITY = (8, 0)
_PROPERTIES = SimpleNamespace(
    name="holdfast forecast",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    total_memory=_TOTAL_BYTES,
    multi_processor_count=108,  # A100 (NVIDIA A100 whitepaper, table 4)
    warp_size=32,
    is_integrated=False,
    is_multi_gpu_board=False,
)
_WITHOUT_EFFECT = """
    init _lazy_init set_device synchronize empty_cache ipc_collect set_stream reset_peak_memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats
    set_per_process_memory_fraction _record_memory_history manual_seed manual_seed_all seed seed_all set_rng_state
    set_rng_state_all set_sync_debug_mode
"""
_MEMORY_IN_USE = """
    memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
"""


class Patches(contextlib.ExitStack):
    """Attributes of modules and classes that are replaced; leaving the context puts them back."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it."""
        self.enter_context(mock.patch.object(owner, name, value, create=True))

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace a callable, if this torch has it, by one made around it."""
        original = getattr(owner, name, None)
        if original is not None:
            self.replace(owner, name, around(original))


class _Idle:
    """A stream on which nothing runs, or an event that has happened."""

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

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def elapsed_time(self, *_: Any) -> float:
        return 1.0

    def _wait(self, *_: Any) -> None:
        """Do nothing: nothing runs."""

    record = wait = synchronize = wait_stream = wait_event = _wait


class _Stream(_Idle):
    pass


class _Event(_Idle):
    pass


def _nothing(*_: Any, **__: Any) -> None:
    return None


def install_cuda_module(patches: Patches, guesses: Guesses) -> None:
    """Have ``torch.cuda`` answer as with one idle GPU."""
    answers = _answers(guesses)
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, answer in answers.items():
            if name in vars(owner):
                patches.replace(owner, name, answer)
    patches.replace(torch.backends.cuda, "is_built", lambda: True)
    for name in ("range_push", "range_pop", "mark"):
        patches.replace(torch.cuda.nvtx, name, _nothing)
    for name in ("synchronize", "empty_cache"):
        if hasattr(torch.accelerator, name):
            patches.replace(torch.accelerator, name, _nothing)


def _answers(guesses: Guesses) -> dict[str, Callable[..., Any]]:
    def always(names: str, answer: Any) -> dict[str, Callable[..., Any]]:
        return dict.fromkeys(names.split(), lambda *_, **__: answer)

    def noted(name: str, answer: Any) -> Callable[..., Any]:
        def ask(*_: Any, **__: Any) -> Any:
            guesses.assume(f"torch.cuda.{name}() was answered with {answer}")
            return answer

        return ask

    known = {
        **dict.fromkeys(_MEMORY_IN_USE.split(), 0),
        "utilization": 0,
        "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
        "get_device_name": _PROPERTIES.name,
        "get_device_capability": _CAPABILITY,
        "get_device_properties": _PROPERTIES,
    }
    return {
        **{name: noted(name, answer) for name, answer in known.items()},
        **dict.fromkeys(_WITHOUT_EFFECT.split(), _nothing),
        **always("is_available is_initialized is_bf16_supported is_tf32_supported can_device_access_peer", True),  # noqa: FBT003
        **always("current_device _exchange_device _maybe_exchange_device initial_seed", 0),
        **always("current_stream default_stream", _Stream()),
        **always("device_count", 1),
        **always("is_current_stream_capturing", False),  # noqa: FBT003
        **always("get_arch_list", [f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}"]),
        **always("memory_stats", {}),
        **always("memory_summary", ""),
        **always("memory_snapshot", []),
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda *_, **__: torch.empty(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
        "Stream": _Stream,
        "Event": _Event,
    }
