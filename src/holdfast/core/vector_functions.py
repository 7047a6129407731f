"""Call each of torch's CPU vector functions once, before several threads call it concurrently."""

from __future__ import annotations

from typing import Any

# The functions that torch implements with MKL's vector library.
_FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "expm1",
    "floor",
    "log",
    "log10",
    "log1p",
    "log2",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)


def settle_vector_functions(torch: Any) -> None:
    """Call each of torch's MKL functions once in one thread, so that MKL chooses the right kernels.

    MKL chooses a function's kernel in the first call. Because torch divides a tensor among its
    threads, several threads may make the first call at the same time. One of these threads may then
    get a kernel with only four correct digits (oneMKL 2024, pytorch#188792). On a busy machine,
    this happened in about one in sixty resumed processes: in Adam's first step, the square roots of
    half a matrix were wrong.

    Args:
        torch: The torch module, because ``core`` never imports torch itself.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(value)
