"""What is compiled in this process, and how to run it as it is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from holdfast.core.warned import ignoring

_Module = TypeVar("_Module", bound=nn.Module)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules as they are written, if anything was compiled at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # A compiled module warns that global hooks fire once more for its wrapper; that changes no path
    # here.
    with ignoring(Warning, "Using `torch.compile"), torch.compiler.set_stance("force_eager"):
        yield


def as_written(models: Mapping[str, _Module]) -> tuple[dict[str, Any], bool]:
    """Return the modules that ``torch.compile`` was given, and whether a part of any is compiled
    or scripted.
    """
    compiled = any(
        hasattr(part, "_orig_mod")
        or part.__dict__.get("_compiled_call_impl")
        or isinstance(part, torch.jit.ScriptModule)
        for model in models.values()
        for part in model.modules()
    )
    return {name: getattr(model, "_orig_mod", model) for name, model in models.items()}, compiled


def anything_compiled() -> bool:
    """Return whether ``torch.compile`` has traced anything in this process.

    ``torch.compiler.reset()`` forgets it.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen_ids)


def is_symbolic() -> bool:
    """Return whether code is traced, transformed or captured just now, so that values cannot be
    read.

    By a compiler, ``torch.jit.trace``, a dispatch mode such as that of ``make_fx`` or of fake
    tensors, a transform of ``torch.func``, or a CUDA graph that is being captured.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and torch.cuda.is_current_stream_capturing()
        )
    )


def in_forward_mode() -> bool:
    """Return whether a level of forward-mode AD is active, as in ``torch.func.jvp``."""
    return bool(forward_ad._current_level >= 0)
