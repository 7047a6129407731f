"""Torch's functions of vectors on the CPU, called once before several threads call them at a
time.
"""

from __future__ import annotations

from typing import Any

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

    Of calls that meet, one may err.

    Torch's threads each call it for their part of a tensor. In oneMKL 2024 one of them may then
    take a kernel that is exact to 4 digits, for that call only (pytorch issue 188792). On a busy
    machine this was seen in one of some sixty
    resumed processes: half of a matrix, in the square roots of the first step of Adam.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
