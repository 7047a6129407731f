"""How an operation came to return NaN or Inf, in words, from the ranges of what it was given.

A mechanism is named only if the operands bear it out; what none explains is said to be unexplained.
"""

from __future__ import annotations

import math
import re
from importlib import resources
from typing import Literal

import torch
import yaml

from holdfast.numerics.operands import Operand
from holdfast.numerics.tracer import Suspect

Confidence = Literal["certain", "likely", "unknown"]

_VARIANT = re.compile(
    r"^(?:native|cudnn|mkldnn|thnn_fused|fused|safe|linalg_vector)_"
    r"|_(?:forward|backward_data|legit|legit_no_training|with_update)$"
    r"|(?<=nll_loss)2d|(?<=rnn)_layer$|(?<=^to)_copy$"
)
_SINGULAR: dict[str, str] = yaml.safe_load(
    resources.files(__package__).joinpath("singular.yaml").read_text(encoding="utf-8")
)


def readable(name: str) -> str:
    """Return the name that users know of an operation (``"add_"``) or an autograd node
    (``"AddBackward0"``).
    """
    name = name.removeprefix("torch::autograd::")
    node = re.fullmatch(r"(.*?)Backward\d*s?", name)
    if node is not None or name[:1].isupper():
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name if node is None else node[1]).lower()
    name = name.strip("_")
    return (
        "scaled_dot_product_attention" if "scaled_dot_product" in name else _VARIANT.sub("", name)
    )


def explain(suspect: Suspect) -> tuple[str, Confidence]:
    """Return how an operation came to be bad, in one clause, and how sure that is."""
    op = readable(suspect.name if suspect.function else suspect.node or suspect.name)
    if suspect.node:
        found = _in_backward(op, suspect)
    else:
        found = _in_forward(op, suspect, suspect.operands[0]) if suspect.operands else None
    if found is not None:
        return found, "certain"
    found = _by_arithmetic(op, suspect)
    return (found, "likely") if found is not None else ("no rule explains it", "unknown")


def _in_forward(op: str, suspect: Suspect, first: Operand) -> str | None:
    produced = suspect.produced
    negative = first.least is not None and first.least < 0
    match op:
        case "log" | "log2" | "log10" | "log1p":
            edge = -1.0 if op == "log1p" else 0.0
            if first.least is not None and first.least < edge:
                return f"{op} of a number below {edge:g}"
            return f"{op} of {edge:g}" if first.least == edge else None
        case "sqrt" | "rsqrt":
            if negative:
                return "square root of a negative number"
            return "1/sqrt of 0" if op == "rsqrt" and first.zeros else None
        case "div" | "reciprocal":
            by_number = op == "div" and len(suspect.operands) == 1  # tensor / number
            if 0.0 in suspect.scalars if by_number else suspect.operands[-1].zeros > 0:
                return "division 0/0" if produced.nan and first.zeros else "division by 0"
        case "exp" | "expm1" | "cosh" | "sinh" if (
            first.most is not None and not first.nan and produced.inf
        ):
            return f"{op} overflow (largest operand {first.most:.4g})"
        case "pow" if produced.nan and negative:
            return "pow: a negative number to a fractional power"
        case "softmax" | "log_softmax" | "logsumexp" | "max" | "amax" if first.inf:
            masked = first.negative_inf == first.inf
            return (
                f"{op} over a row that is masked entirely (all -Inf)" if masked else f"{op} of +Inf"
            )
        case "std" | "var" if produced.nan and not (first.inf or first.nan):
            return f"{op}: variance of one element"
        case "nll_loss" if first.negative_inf:
            return (
                f"{op}: the log-probability of a target is -Inf (its class is masked, or has"
                " probability 0)"
            )
    return None


def _in_backward(op: str, suspect: Suspect) -> str | None:
    """Explain by the forward operation whose derivative ran.

    0 among the operands means its singular point.
    """
    singular = _SINGULAR.get(op)
    if singular is None or not any(operand.zeros or operand.inf for operand in suspect.operands):
        return None
    return singular + " (0/0, as behind a where)" * bool(
        suspect.produced.nan and suspect.operands[0].zeros
    )


def _by_arithmetic(op: str, suspect: Suspect) -> str | None:
    """Explain by what any arithmetic can do: inf-inf, 0*inf, and leaving the range of the type."""
    infinite_number = any(map(math.isinf, suspect.scalars))
    infinite_operand = any(operand.inf for operand in suspect.operands)
    if suspect.produced.nan and (infinite_operand or infinite_number):
        if op in ("add", "sub", "sum", "mean", "cumsum"):
            return "inf-inf"
        return "NaN made of Inf (inf-inf, 0*inf or inf/inf)"
    if infinite_operand or infinite_number:
        return "Inf reached it, on purpose or not (a mask value in a sum or mean?)"
    largest = max(
        [0.0, *(operand.largest for operand in suspect.operands), *map(abs, suspect.scalars)]
    )
    # A product of two such values, summed as often as there are elements, is the most that one
    # operation can make.
    count = max((operand.count for operand in suspect.operands), default=1)
    limit = torch.finfo(getattr(torch, suspect.produced.dtype)).max
    if max(largest, largest * largest) * count <= limit or not (
        suspect.produced.inf or suspect.produced.nan
    ):
        return None
    bound = "65 504" if suspect.produced.dtype == "float16" else f"{limit:.4g}"
    return f"{suspect.produced.dtype} range exceeded ({bound}; largest operand {largest:.4g})"
