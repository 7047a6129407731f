"""``torch.cuda`` as it answers while code runs on the fake device: one idle GPU, on which nothing takes time.

Does not: move tensors (``stand_ins``), or touch a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import torch

from holdfast.forecast.fake.guesses import Guesses, asking_line
from holdfast.forecast.fake.patches import Patches

# An A100's. Whoever reads it gets an assumption with the line.
_TOTAL_BYTES = 80 * 2**30
_NAME = "holdfast forecast"


class _Stream:
    """A stream on which nothing runs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        """Do nothing: nothing runs."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: nothing runs."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: nothing runs."""


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 1.0

    def record(self, stream: Any = None) -> None:
        """Do nothing: nothing runs."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: nothing runs."""

    def synchronize(self) -> None:
        """Do nothing: nothing runs."""


def _nothing(*_: Any, **__: Any) -> None:
    return None


def install_cuda_module(patches: Patches, guesses: Guesses, capability: tuple[int, int]) -> None:
    """Have ``torch.cuda`` answer as with one idle GPU.

    Args:
        patches: What is replaced.
        guesses: Where answers are written down that memory may depend on.
        capability: Compute capability.
    """
    answers = _answers(guesses, capability)
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


def _answers(guesses: Guesses, capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    def noted(name: str, answer: Any) -> Callable[..., Any]:
        def ask(*_: Any, **__: Any) -> Any:
            guesses.assume(f"torch.cuda.{name}() was answered with {answer}", asking_line())
            return answer

        return ask

    properties = SimpleNamespace(
        name=_NAME,
        major=capability[0],
        minor=capability[1],
        total_memory=_TOTAL_BYTES,
        multi_processor_count=108,  # A100 (NVIDIA A100 whitepaper, table 4)
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
    )
    return {
        **{name: lambda *_, **__: True for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: lambda *_, **__: True for name in ("is_tf32_supported", "can_device_access_peer")},
        **{name: lambda *_, **__: 0 for name in ("current_device", "_exchange_device", "_maybe_exchange_device")},
        **{name: lambda *_, **__: _Stream() for name in ("current_stream", "default_stream")},
        **dict.fromkeys(_WITHOUT_EFFECT, _nothing),
        **{name: noted(name, 0) for name in _MEMORY_IN_USE},
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "stream": contextlib.nullcontext,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "memory_stats": lambda *_, **__: {},
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "get_rng_state": lambda *_, **__: torch.empty(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
        "initial_seed": lambda: 0,
        "utilization": noted("utilization", 0),
        "mem_get_info": noted("mem_get_info", (_TOTAL_BYTES, _TOTAL_BYTES)),
        "get_device_name": noted("get_device_name", _NAME),
        "get_device_capability": noted("get_device_capability", capability),
        "get_device_properties": noted("get_device_properties", properties),
        "Stream": _Stream,
        "Event": _Event,
    }


_WITHOUT_EFFECT = (
    *("init", "_lazy_init", "set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction", "_record_memory_history"),
    *(
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_rng_state",
        "set_rng_state_all",
        "set_sync_debug_mode",
    ),
)
_MEMORY_IN_USE = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached"),
)
