"""``torch.cuda`` as it answers while code runs on the fake device.

One idle GPU, on which nothing takes time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import resources
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
import yaml

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
    def noted(name: str, answer: Any) -> Callable[..., Any]:
        def ask(*_: Any, **__: Any) -> Any:
            guesses.assume(f"torch.cuda.{name}() was answered with {answer}")
            return answer

        return ask

    answers = yaml.safe_load(
        resources.files(__package__).joinpath("cuda_answers.yaml").read_text(encoding="utf-8")
    )
    known = {
        **dict.fromkeys(answers["memory in use"].split(), 0),
        "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
        "get_device_name": _PROPERTIES.name,
        "get_device_capability": _CAPABILITY,
        "get_device_properties": _PROPERTIES,
    }
    plain = {name: each["answer"] for each in answers["plain"] for name in each["names"].split()}
    return {
        **{name: noted(name, answer) for name, answer in known.items()},
        **{name: lambda *_, answer=answer, **__: answer for name, answer in plain.items()},
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda *_, **__: torch.empty(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
        "Stream": _Stream,
        "Event": _Event,
    }
