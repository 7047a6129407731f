"""Call torch's vector functions on the CPU once, before several threads call them at a time."""

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
    """Let MKL choose its kernels, which it does in the first call of each function.

    torch's threads each call a function for their part of a tensor. If their first calls coincide,
    one thread may get a kernel of oneMKL 2024 that is exact to 4 digits only, for that call
    (pytorch#188792). On a busy machine this happened in one of about sixty resumed processes: half
    of a matrix was wrong, in the square roots of Adam's first step.

    Args:
        torch: The module, which core never imports itself.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(value)
