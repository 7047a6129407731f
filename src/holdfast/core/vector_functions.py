"""Call torch's CPU vector functions once, before several threads call them concurrently."""

from __future__ import annotations

from typing import Any

# The functions that torch takes from the vector library of MKL.
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
    """Make MKL choose its kernels, which it does in the first call of each function.

    Each of torch's threads calls a function for its part of a tensor. If the first calls coincide,
    oneMKL 2024 may give one thread a kernel with only 4 correct digits for that call
    (pytorch#188792). On a busy machine, this happened in about one of sixty resumed processes: half
    of a matrix was wrong, in the square roots of Adam's first step.

    Args:
        torch: The module, which core never imports itself.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(value)
