"""Disable oneDNN after a refused allocation, because oneDNN never recovers from one.

oneDNN compiles kernels at run time. If an allocation fails during compilation, the thread can never
compile a kernel again, even once memory is available: every convolution with a new shape fails with
"could not create a primitive". (This happens with torch 2.13, whose oneDNN keeps the assembler's
error in a thread-local variable and never clears it.) torch's own kernels still work.

For strided convolutions, oneDNN does not even report the failure. It calls the missing kernel at
address 0, and the process dies with SIGSEGV. Therefore, disable oneDNN before a strided convolution
has to be compiled while memory is short.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import torch
from torch.nn.modules.conv import _ConvNd

_FAILURE = re.compile(
    r"could not (create|execute|initialize) an? [\w ]*(primitive|memory|descriptor)", re.IGNORECASE
)
# oneDNN caches kernels by shape, so each compilation test needs a new shape.
_unused_widths = itertools.count(5)


def is_onednn_failure(text: str) -> bool:
    """Return whether an error message reports a failure in oneDNN, such as a lack of memory."""
    return _FAILURE.search(text) is not None


def is_on() -> bool:
    """Return whether oneDNN is enabled in this process."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch._C._get_mkldnn_enabled())


def switch_off() -> None:
    """Disable oneDNN for the rest of this process. Later results differ by rounding errors."""
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def switch_off_if_broken() -> bool:
    """Let oneDNN compile a kernel for a new shape, and disable oneDNN if that fails.

    Call this function in the training thread, after memory has been freed.

    Returns:
        Whether compilation failed, so that oneDNN is now disabled.
    """
    if not is_on():
        return False
    width = next(_unused_widths)
    try:
        with torch.no_grad():
            torch.nn.functional.conv2d(torch.zeros(16, 3, 5, width), torch.zeros(width, 3, 3, 3))
    except RuntimeError as error:
        if not is_onednn_failure(str(error)):
            raise
    else:
        return False
    switch_off()
    return True


def switch_off_if_unsafe(models: Iterable[torch.nn.Module]) -> bool:
    """Disable oneDNN if a model contains a strided convolution, because oneDNN may crash in it.

    Call this function after memory has run out, before any convolution with a new shape runs. Only
    convolution modules are detected, not calls such as ``torch.nn.functional.conv2d``.

    Returns:
        Whether oneDNN was disabled.
    """
    if not is_on() or not any(_has_strided_convolution(model) for model in models):
        return False
    switch_off()
    return True


def _has_strided_convolution(model: torch.nn.Module) -> bool:
    return any(isinstance(module, _ConvNd) and max(module.stride) > 1 for module in model.modules())
