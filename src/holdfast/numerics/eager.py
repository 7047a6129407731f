"""Detect code that has been compiled or is being traced, and run compiled modules eagerly."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from holdfast.core.warned import ignore_warnings

_Module = TypeVar("_Module", bound=nn.Module)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Return a context manager in whose body compiled modules run eagerly."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # torch warns that global module hooks also run for the wrapper of a compiled module, which is
    # harmless in a replay.
    with ignore_warnings(Warning, "Using `torch.compile"), torch.compiler.set_stance("force_eager"):
        yield


def as_written(models: Mapping[str, _Module]) -> tuple[dict[str, Any], bool]:
    """Return the original modules of compiled models, and whether any part of them is compiled.

    Scripted modules count as compiled.
    """
    originals = {name: getattr(model, "_orig_mod", model) for name, model in models.items()}
    parts = (part for model in models.values() for part in model.modules())
    return originals, any(_is_compiled(part) for part in parts)


def _is_compiled(module: nn.Module) -> bool:
    if hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule):
        return True
    return bool(module.__dict__.get("_compiled_call_impl"))


def anything_compiled() -> bool:
    """Return whether ``torch.compile`` has traced anything in this process.

    After ``torch.compiler.reset()``, the result is False again.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen_ids)


def is_symbolic() -> bool:
    """Return whether the running code is being traced or transformed.

    The values of tensors then cannot be read. Code is traced or transformed under a compiler,
    ``torch.jit.trace``, any dispatch mode (such as those of ``make_fx`` and fake tensors) or a
    ``torch.func`` transform, and during CUDA graph capture.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and torch.cuda.is_current_stream_capturing()
        )
    )


def in_forward_mode() -> bool:
    """Return whether forward-mode AD is active, for example within ``torch.func.jvp``."""
    return bool(forward_ad._current_level >= 0)
