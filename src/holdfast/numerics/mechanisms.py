"""How an operation came to return NaN or Inf, in words, from the ranges of what it was given.

A rule names a mechanism only if the operands bear it out; what no rule explains is said to be unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.numerics.operands import Operand

Confidence = Literal["certain", "likely", "unknown"]

_READABLE = {
    "softmax": "softmax",
    "safe_softmax": "softmax",
    "log_softmax": "log_softmax",
    "softmax_backward_data": "softmax",
    "log_softmax_backward_data": "log_softmax",
    "native_layer_norm": "layer_norm",
    "fused_rms_norm": "rms_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_legit": "batch_norm",
    "native_batch_norm_legit_no_training": "batch_norm",
    "batch_norm_with_update": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "linalg_vector_norm": "norm",
    "to_copy": "to",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "nll_loss2d": "nll_loss",
    "thnn_fused_lstm_cell": "lstm_cell",
    "thnn_fused_gru_cell": "gru_cell",
    "mkldnn_rnn_layer": "rnn",
    "cudnn_rnn": "rnn",
    "embedding_bag": "embedding_bag",
    "ctc_loss": "ctc_loss",
    "cdist_forward": "cdist",
}
_LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7977e308}
_INSIDE = {"asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "atanh": (-1.0, 1.0), "logit": (0.0, 1.0)}
_REDUCTIONS = {"softmax", "log_softmax", "logsumexp", "max", "amax"}


def readable(name: str) -> str:
    """Return an operation's name as users know it.

    Args:
        name: Of an operation (``"_log_softmax"``, ``"add_"``) or of an autograd node (``"LogSoftmaxBackward0"``).
    """
    name = name.removeprefix("torch::autograd::")
    node = re.fullmatch(r"(.*?)Backward\d*s?", name)
    if node is not None or name[:1].isupper():
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name if node is None else node[1]).lower()
    name = name.strip("_")
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    return _READABLE.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a rule may look at.

    Args:
        op: Readable name.
        backward: Whether the operation belongs to the derivative of `op`.
        operands: What it was given, in order.
        scalars: Its numbers.
        produced: Its output.
    """

    op: str
    backward: bool
    operands: Sequence[Operand]
    scalars: Sequence[float]
    produced: Operand

    @property
    def first(self) -> Operand | None:
        """The first operand."""
        return self.operands[0] if self.operands else None

    def below(self, limit: float) -> bool:
        """Return whether the first operand goes below a limit."""
        return self.first is not None and self.first.least is not None and self.first.least < limit


def explain(facts: Facts) -> tuple[str, Confidence]:
    """Return the mechanism in one clause, and how sure it is."""
    if facts.backward:
        found = _in_backward(facts)
    else:
        rule = _RULES.get(facts.op)
        found = rule(facts) if rule is not None else None
    if found is not None:
        return found, "certain"
    found = _by_arithmetic(facts)
    if found is not None:
        return found, "likely"
    return "no rule explains it", "unknown"


def _logarithm(facts: Facts) -> str | None:
    edge = -1.0 if facts.op == "log1p" else 0.0
    if facts.below(edge):
        return f"{facts.op} of a number below {edge:g}"
    at_edge = facts.first is not None and facts.first.least == edge
    return f"{facts.op} of {edge:g}" if at_edge else None


def _root(facts: Facts) -> str | None:
    if facts.below(0.0):
        return "square root of a negative number"
    zero = facts.op == "rsqrt" and facts.first is not None and facts.first.zeros
    return "1/sqrt of 0" if zero else None


def _division(facts: Facts) -> str | None:
    divisor = facts.operands[-1] if facts.operands else None
    by_number = facts.op != "reciprocal" and len(facts.operands) == 1  # tensor / number
    zero = 0.0 in facts.scalars if by_number else divisor is not None and divisor.zeros > 0
    if zero:
        return (
            "division 0/0"
            if facts.produced.nan and facts.first is not None and facts.first.zeros
            else "division by 0"
        )
    if len(facts.operands) == 2 and all(operand.inf for operand in facts.operands):
        return "division inf/inf"
    return None


def _exponential(facts: Facts) -> str | None:
    if facts.first is None or facts.first.most is None or facts.first.nan or not facts.produced.inf:
        return None
    return f"{facts.op} overflow (largest operand {facts.first.most:.4g})"


def _power(facts: Facts) -> str | None:
    if facts.produced.nan and facts.below(0.0):
        return "pow: a negative number to a fractional power"
    negative = any(number < 0 for number in facts.scalars) or (
        len(facts.operands) > 1 and (facts.operands[1].least or 0.0) < 0
    )
    if facts.first is not None and facts.first.zeros and negative:
        return "pow: 0 to a negative power"
    return None


def _bounded(facts: Facts) -> str | None:
    low, high = _INSIDE[facts.op]
    first = facts.first
    if first is None or first.least is None or first.most is None:
        return None
    if first.least < low or first.most > high:
        return f"{facts.op} outside its range [{low:g}, {high:g}]"
    return f"{facts.op} at the edge of its range [{low:g}, {high:g}]" if facts.produced.inf else None


def _over_masked_row(facts: Facts) -> str | None:
    first = facts.first
    if first is None or not first.inf:
        return None
    if first.negative_inf == first.inf:
        return f"{facts.op} over a row that is masked entirely (all -Inf)"
    return f"{facts.op} of +Inf"


def _spread(facts: Facts) -> str | None:
    if not facts.produced.nan or facts.first is None or facts.first.inf or facts.first.nan:
        return None
    return "mean of no elements" if facts.op == "mean" else f"{facts.op}: variance of one element"


def _mean(facts: Facts) -> str | None:
    return "mean of no elements" if facts.first is not None and facts.first.count == 0 else None


def _normalisation(facts: Facts) -> str | None:
    # The numbers of every normalising operation end in eps; batch_norm's also hold the momentum.
    if facts.op == "batch_norm" and len(facts.operands) >= 5 and (facts.operands[4].least or 0.0) < 0:
        return "batch_norm: negative running variance"
    if facts.scalars and facts.scalars[-1] == 0.0 and not any(operand.inf for operand in facts.operands):
        return f"{facts.op}: a row without variance, and eps is 0"
    return None


def _likelihood(facts: Facts) -> str | None:
    if facts.first is not None and facts.first.negative_inf:
        return f"{facts.op}: the log-probability of a target is -Inf (its class is masked, or has probability 0)"
    return None


_RULES: dict[str, Callable[[Facts], str | None]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _logarithm),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    **dict.fromkeys(("div", "reciprocal", "true_divide", "fmod", "remainder"), _division),
    **dict.fromkeys(("exp", "exp2", "expm1", "cosh", "sinh"), _exponential),
    **dict.fromkeys(("asin", "acos", "atanh", "logit"), _bounded),
    **dict.fromkeys(_REDUCTIONS, _over_masked_row),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm", "rms_norm"), _normalisation),
    "pow": _power,
    "mean": _mean,
    "nll_loss": _likelihood,
}
_STEEP = {
    "sqrt": "sqrt has an infinite derivative at 0",
    "rsqrt": "1/sqrt has an infinite derivative at 0",
    "log": "log has an infinite derivative at 0",
    "log2": "log2 has an infinite derivative at 0",
    "log10": "log10 has an infinite derivative at 0",
    "log1p": "log1p has an infinite derivative at -1",
    "div": "the derivative of a division by 0",
    "reciprocal": "the derivative of 1/0",
    "pow": "x**p with p < 1 has an infinite derivative at 0",
    "acos": "acos has an infinite derivative at -1 and 1, the edge of its range",
    "asin": "asin has an infinite derivative at -1 and 1, the edge of its range",
    "atanh": "atanh has an infinite derivative at -1 and 1, the edge of its range",
    "acosh": "acosh has an infinite derivative at 1, the edge of its range",
    "norm": "a norm has no derivative at 0",
    "std": "a standard deviation has an infinite derivative where its input is constant",
    "cdist": "a distance of 0 has no derivative",
    "prod": "the derivative of a product that holds 0",
    "atan2": "atan2 has no derivative at (0, 0)",
}


def _in_backward(facts: Facts) -> str | None:
    """Explain by the forward operation whose derivative ran; 0 among the operands means its singular point."""
    steep = _STEEP.get(facts.op)
    if steep is None or not any(operand.zeros or operand.inf for operand in facts.operands):
        return None
    masked = facts.produced.nan and facts.first is not None and facts.first.zeros
    return steep + " (0/0, as behind a where)" * bool(masked)


def _by_arithmetic(facts: Facts) -> str | None:
    """Explain by what any arithmetic can do: inf-inf, 0*inf, and leaving the range of the type."""
    taken = [operand for operand in facts.operands if operand.inf]
    infinite_number = any(number in (float("inf"), float("-inf")) for number in facts.scalars)
    if facts.produced.nan and (taken or infinite_number):
        if facts.op in ("add", "sub", "sum", "mean", "cumsum"):
            return "inf-inf"
        return (
            "0*inf"
            if any(operand.zeros for operand in facts.operands)
            else "NaN made of Inf (inf-inf, 0*inf or inf/inf)"
        )
    if taken:
        return "Inf reached it, on purpose or not (a mask value in a sum or mean?)"
    if infinite_number:
        return "one of its numbers is Inf"
    kind = facts.produced.dtype
    largest = max((operand.largest for operand in facts.operands), default=0.0)
    largest = max([largest, *map(abs, facts.scalars)])
    # A product of two such values, summed as often as there are elements, is the most that one operation can make.
    count = max((operand.count for operand in facts.operands), default=1)
    within = max(largest, largest * largest) * count <= _LIMITS.get(kind, 0.0)
    if within or not (facts.produced.inf or facts.produced.nan):
        return None
    if kind == "float16":
        return f"fp16 range exceeded (65 504; largest operand {largest:.4g})"
    if facts.produced.inf and kind in _LIMITS:
        return f"{kind} range exceeded ({_LIMITS[kind]:.4g}; largest operand {largest:.4g})"
    return f"overflow inside the operation (largest operand {largest:.4g})"
