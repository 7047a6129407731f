"""Switch oneDNN off after a refused allocation, from which it never recovers.

If the kernel refuses memory while oneDNN compiles a kernel, the thread can never compile one again,
even when there is memory: every convolution of a new shape fails with "could not create a
primitive". (Seen with torch 2.13. Its oneDNN keeps the error of its assembler in a thread-local
variable and never clears it.) torch's own kernels still work.

Strided convolutions do not even notice: oneDNN calls the kernel that it failed to compile, at
address 0, and the process dies with SIGSEGV. So oneDNN must be off before such kernels are compiled
while memory is short.
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
# oneDNN caches kernels by shape: each probe needs a shape that was not used before.
_unused_widths = itertools.count(5)


def is_onednn_failure(text: str) -> bool:
    """Return whether oneDNN raises this error text when it is refused something, such as memory."""
    return _FAILURE.search(text) is not None


def is_on() -> bool:
    """Return whether torch uses oneDNN in this process."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch._C._get_mkldnn_enabled())


def switch_off() -> None:
    """Switch oneDNN off for the rest of this process. Afterwards, results differ by rounding."""
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def switch_off_if_broken() -> bool:
    """Compile a kernel of a new shape, and switch oneDNN off if that fails.

    Call it after memory was freed, in the training thread.

    Returns:
        Whether oneDNN was broken.
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
    """Switch oneDNN off if a model has strided convolutions, in which it may crash.

    Call it after memory ran short, before kernels of new shapes are compiled. Functional
    convolutions are not detected.

    Returns:
        Whether oneDNN was switched off.
    """
    if not is_on() or not any(_has_strided_convolution(model) for model in models):
        return False
    switch_off()
    return True


def _has_strided_convolution(model: torch.nn.Module) -> bool:
    return any(isinstance(module, _ConvNd) and max(module.stride) > 1 for module in model.modules())
