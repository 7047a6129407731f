"""Explain in words how an operation produced NaN or Inf, based on the ranges of its operands.

A mechanism, such as a division by 0, is reported only if the operands are consistent with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Literal

import torch
import yaml

from holdfast.numerics.operands import Operand
from holdfast.numerics.tracer import Suspect

Confidence = Literal["certain", "likely", "unknown"]

# Prefixes and suffixes that distinguish variants of the same operation.
_VARIANT = re.compile(
    r"^(?:native|cudnn|mkldnn|thnn_fused|fused|safe|linalg_vector)_"
    r"|_(?:forward|backward_data|legit|legit_no_training|with_update)$"
    r"|(?<=nll_loss)2d|(?<=rnn)_layer$|(?<=^to)_copy$"
)
# For each operation, a description of the points where its derivative is infinite or undefined.
_SINGULAR: dict[str, str] = yaml.safe_load(
    resources.files(__package__).joinpath("singular.yaml").read_text(encoding="utf-8")
)
_FP16_MAX = "65,504"


def readable(name: str) -> str:
    """Return the name by which users know an operation or an autograd node.

    Example:
        >>> readable("add_"), readable("AddBackward0")
        ('add', 'add')
    """
    name = name.removeprefix("torch::autograd::")
    node = re.fullmatch(r"(.*?)Backward\d*s?", name)
    if node is not None:
        name = _snake_case(node[1])
    elif name[:1].isupper():
        name = _snake_case(name)
    name = name.strip("_")
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    return _VARIANT.sub("", name)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def explain(suspect: Suspect) -> tuple[str, Confidence]:
    """Return a short explanation of why an operation produced NaN or Inf, and its confidence."""
    # No node is known in a forward pass, nor in the backward method of a custom Function.
    operation = readable(suspect.location.node or suspect.name)
    mechanism = None
    if suspect.location.node:
        mechanism = _singular_derivative(operation, suspect)
    elif suspect.operands and operation in _FORWARD_RULES:
        mechanism = _FORWARD_RULES[operation](operation, suspect, suspect.operands[0])
    if mechanism is not None:
        return mechanism, "certain"
    mechanism = _by_arithmetic(operation, suspect)
    if mechanism is not None:
        return mechanism, "likely"
    return "unknown cause", "unknown"


# --- Rules of the forward pass. Each covers operands for which an operation has no finite result.
# A rule receives the readable name of the operation, the suspect, and the suspect's first operand.
# It returns an explanation, or None if the operands do not fit.

_ForwardRule = Callable[[str, Suspect, Operand], str | None]


def _logarithm(operation: str, _suspect: Suspect, operand: Operand) -> str | None:
    edge = -1.0 if operation == "log1p" else 0.0
    if operand.least is None or operand.least > edge:
        return None
    if operand.least == edge:
        return f"{operation} of {edge:g}"
    return f"{operation} of a number below {edge:g}"


def _square_root(operation: str, _suspect: Suspect, operand: Operand) -> str | None:
    if _has_negative(operand):
        return "square root of a negative number"
    if operation == "rsqrt" and operand.zeros:
        return "1/sqrt of 0"
    return None


def _division(operation: str, suspect: Suspect, operand: Operand) -> str | None:
    is_by_number = operation == "div" and len(suspect.operands) == 1
    if is_by_number:
        has_zero_divisor = 0.0 in suspect.scalars
    else:
        has_zero_divisor = suspect.operands[-1].zeros > 0
    if not has_zero_divisor:
        return None
    return "division 0/0" if suspect.produced.nan and operand.zeros else "division by 0"


def _exponential(operation: str, suspect: Suspect, operand: Operand) -> str | None:
    if operand.most is None or operand.nan or not suspect.produced.inf:
        return None
    return f"{operation} overflow (largest operand {operand.most:.4g})"


def _power(_operation: str, suspect: Suspect, operand: Operand) -> str | None:
    if suspect.produced.nan and _has_negative(operand):
        return "pow of a negative number and a fractional exponent"
    return None


def _reduction_of_row(operation: str, _suspect: Suspect, operand: Operand) -> str | None:
    if not operand.inf:
        return None
    if operand.negative_inf == operand.inf:
        return f"{operation} over a row that is masked entirely (all -Inf)"
    return f"{operation} of +Inf"


def _variance(operation: str, suspect: Suspect, operand: Operand) -> str | None:
    if suspect.produced.nan and not (operand.inf or operand.nan):
        return f"{operation} of a single element"
    return None


def _negative_log_likelihood(operation: str, _suspect: Suspect, operand: Operand) -> str | None:
    if not operand.negative_inf:
        return None
    return (
        f"{operation} with a target whose log-probability is -Inf (its class is masked, or has"
        " probability 0)"
    )


def _has_negative(operand: Operand) -> bool:
    return operand.least is not None and operand.least < 0


_FORWARD_RULES: Mapping[str, _ForwardRule] = {
    "log": _logarithm,
    "log2": _logarithm,
    "log10": _logarithm,
    "log1p": _logarithm,
    "sqrt": _square_root,
    "rsqrt": _square_root,
    "div": _division,
    "reciprocal": _division,
    "exp": _exponential,
    "expm1": _exponential,
    "cosh": _exponential,
    "sinh": _exponential,
    "pow": _power,
    "softmax": _reduction_of_row,
    "log_softmax": _reduction_of_row,
    "logsumexp": _reduction_of_row,
    "max": _reduction_of_row,
    "amax": _reduction_of_row,
    "std": _variance,
    "var": _variance,
    "nll_loss": _negative_log_likelihood,
}


# --- Rules of the backward pass, and rules of arithmetic that apply to every operation.


def _singular_derivative(operation: str, suspect: Suspect) -> str | None:
    """Explain NaN or Inf in a backward pass by a derivative that is infinite or undefined.

    If an operand of the backward operation contains 0 or Inf, we assume that the forward operation
    was evaluated where its derivative is infinite or undefined. Returns None if no operand does.
    """
    mechanism = _SINGULAR.get(operation)
    at_singular_point = any(operand.zeros or operand.inf for operand in suspect.operands)
    if mechanism is None or not at_singular_point:
        return None
    if suspect.produced.nan and suspect.operands[0].zeros:
        mechanism += " (0/0, as in a branch that a where discards)"
    return mechanism


def _by_arithmetic(operation: str, suspect: Suspect) -> str | None:
    """Explain NaN or Inf by a rule that holds for any operation: inf-inf, 0*inf or an overflow."""
    has_infinity = any(math.isinf(number) for number in suspect.scalars)
    has_infinity = has_infinity or any(operand.inf for operand in suspect.operands)
    if not has_infinity:
        return _overflow(suspect)
    if not suspect.produced.nan:
        return "Inf in an operand, perhaps on purpose (a mask value in a sum or mean?)"
    if operation in ("add", "sub", "sum", "mean", "cumsum"):
        return "inf-inf"
    return "NaN from Inf (inf-inf, 0*inf or inf/inf)"


def _overflow(suspect: Suspect) -> str | None:
    """Explain Inf or NaN by an overflow of the dtype, if the operands are large enough for one."""
    produced = suspect.produced
    if not (produced.inf or produced.nan):
        return None
    # Leave NaN out, because comparisons with NaN would make the result of `max` meaningless.
    magnitudes = [abs(number) for number in suspect.scalars if not math.isnan(number)]
    magnitudes += [operand.largest for operand in suspect.operands]
    largest = max(magnitudes, default=0.0)
    # We assume that an operation computes at most a sum of products of two operands.
    terms = max((operand.count for operand in suspect.operands), default=1)
    limit = torch.finfo(getattr(torch, produced.dtype)).max
    if max(largest, largest * largest) * terms <= limit:
        return None
    bound = _FP16_MAX if produced.dtype == "float16" else f"{limit:.4g}"
    return f"{produced.dtype} range exceeded ({bound}; largest operand {largest:.4g})"
