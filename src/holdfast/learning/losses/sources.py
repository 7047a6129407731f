"""Find the operation that computed a tensor, from its autograd graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Operations that only move values. The search continues with the operation before them.
MOVES = frozenset(
    {
        "View",
        "UnsafeView",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "ToCopy",
        "Clone",
        "Alias",
        "Select",
        "Slice",
    }
)
# Operations that reorder axes, which changes the meaning of a dimension index.
TURNS = frozenset({"Transpose", "Permute", "T"})
# Operations that select or clamp values.
PICKS = frozenset({"Index", "Gather", "Clamp", "ClampMin"})
# All operations that the search passes through.
PASSED = MOVES | TURNS | PICKS
SOFTMAXES = ("Softmax", "LogSoftmax")
# Maximum number of operations that the search passes through.
MAX_NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOperation:
    """The operation that computed a tensor.

    Args:
        name: Name of the operation, such as ``"Softmax"`` or ``"Relu"``. Empty for a tensor without
            an autograd graph.
        dim: Dimension of a softmax. None if the axes were reordered afterwards.
        shape: Shape of the softmax's output.
        clamped: Whether the operation's result was clamped afterwards.
    """

    name: str = ""
    dim: int | None = None
    shape: tuple[int, ...] = ()
    clamped: bool = False

    @property
    def is_softmax_over_batch(self) -> bool:
        """Whether this is a softmax over the samples of a ``(samples, classes)`` tensor.

        A square tensor is not counted, because it may contain the scores of pairs, as in CLIP,
        where both axes are valid.
        """
        if self.name not in SOFTMAXES or self.dim not in (0, -2) or len(self.shape) != 2:
            return False
        samples, classes = self.shape
        return samples > 1 and samples != classes


def source_of(tensor: Tensor, *, behind_sums: bool = False) -> SourceOperation:
    """Return the operation that computed a tensor, skipping views, selections and clamps.

    Args:
        tensor: Any tensor.
        behind_sums: Whether to also skip the addition of a constant, such as an epsilon that keeps
            a logarithm finite.
    """
    node: Any = tensor.grad_fn
    turned = False
    clamped = False
    for _ in range(MAX_NODES):
        if node is None:
            break
        operation = _operation_of(node)
        is_sum = operation == "Add" and behind_sums and _adds_a_number(node)
        if not is_sum and operation not in PASSED:
            return SourceOperation(
                name=operation,
                dim=None if turned else _softmax_dim(node, operation),
                shape=_softmax_shape(node, operation),
                clamped=clamped,
            )
        turned = turned or operation in TURNS
        clamped = clamped or operation == "Clamp"
        node = node.next_functions[0][0] if node.next_functions else None
    return SourceOperation(clamped=clamped)


def _operation_of(node: Any) -> str:
    """Return an autograd node's operation, such as ``"Softmax"`` for ``SoftmaxBackward0``."""
    name: str = node.name()
    return name.removesuffix("0").removesuffix("1").removesuffix("Backward")


def _adds_a_number(node: Any) -> bool:
    """Return whether an addition has only one operand with an autograd graph."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    return len(parents) == 1


def _softmax_dim(node: Any, operation: str) -> int | None:
    if operation not in SOFTMAXES:
        return None
    dim: int | None = getattr(node, "_saved_dim", None)
    # Autograd saves a negative dimension as an unsigned 64-bit number.
    if dim is not None and dim >= 2**63:
        return dim - 2**64
    return dim


def _softmax_shape(node: Any, operation: str) -> tuple[int, ...]:
    if operation not in SOFTMAXES:
        return ()
    # The input of a backward node is the gradient of the operation's result, so it has the shape of
    # the result.
    return tuple(node._input_metadata[0].shape)


def unscaled(loss: Tensor) -> float:
    """Return a one-element loss, divided by the gradient scaler's factor. Synchronizes once."""
    value = float(loss.detach())
    node = loss.grad_fn
    if node is None or node.name() != "MulBackward0":
        return value
    factor = getattr(node, "_saved_other", None)
    if not isinstance(factor, Tensor) or factor.numel() != 1 or factor.requires_grad:
        return value
    # The scales of torch.amp.GradScaler are powers of two.
    scale = float(factor)
    if scale > 1 and math.log2(scale).is_integer():
        return value / scale
    return value
