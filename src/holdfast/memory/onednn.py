"""oneDNN remembers a refused allocation for ever, and what helps.

If the kernel refuses memory while oneDNN compiles a kernel, that thread can compile none any more,
also when there is memory again: every convolution of a new shape fails with "could not create a
primitive" (seen with torch 2.13, whose oneDNN keeps the error of its assembler in a thread-local
variable and never clears it). torch's own kernels still work, so oneDNN is switched off for the
rest of the process.

Its strided convolution does not even notice: it goes on without the kernels that were refused,
calls address 0, and the process ends with SIGSEGV. So oneDNN must be off before such kernels are
made where memory is short.
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
_fresh_widths = itertools.count(5)


def is_onednn_failure(text: str) -> bool:
    """Say whether an error is oneDNN's way to say that something, maybe memory, was refused."""
    return _FAILURE.search(text) is not None


def is_on() -> bool:
    """Say whether torch uses oneDNN in this process."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch._C._get_mkldnn_enabled())


def switch_off() -> None:
    """Switch oneDNN off for the rest of this process: results then differ by rounding."""
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def switch_off_if_broken() -> bool:
    """Try to compile a kernel of a new shape, and switch oneDNN off if that fails.

    Return whether it was broken.

    Call it after memory was freed, in the thread that trains.
    """
    if not is_on():
        return False
    width = next(_fresh_widths)
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
    """Switch oneDNN off if a model has a strided convolution, also a transposed one, that it might
    crash in.

    Call it where memory was short and kernels of new shapes are about to be made. A convolution
    that is called as a function is not seen.
    """
    modules = (module for model in models for module in model.modules())
    if not is_on() or not any(
        isinstance(module, _ConvNd) and max(module.stride) > 1 for module in modules
    ):
        return False
    switch_off()
    return True
