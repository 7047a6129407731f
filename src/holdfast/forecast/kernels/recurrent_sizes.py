"""What cuDNN's recurrent layers keep for the backward pass (the reserve) and need while they run (the workspace).

cuDNN does not publish either formula, and torch's meta kernel says 0 bytes. The constants were solved from the one
measurement that is public with both figures: pytorch issue 2895 (Tesla P100; 4 layers, hidden size 320, input size
123, fp32), where cuDNN asked

- LSTM: reserve 736 000 000, workspace 17 730 560 bytes
- GRU: reserve 864 000 000, workspace 13 169 920 bytes

With T*B = 25 000 rows the reserves are exactly (5 L + L - 1) and (6 L + L - 1) times rows x hidden size x 4 bytes:
4 gates and the cell of an LSTM, 6 values of a GRU, and the outputs of all layers but the last. With B = 100 the
workspaces are exactly the weights without biases plus (3 gates - 1) L values for each of batch x hidden size. T and B
are inferred from that, and newer versions of cuDNN may differ: hence the upper bounds; nothing here is calibrated.

Does not: run anything (`recurrent`).
"""

from __future__ import annotations

from dataclasses import dataclass

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Values kept for each row, unit and layer; see above. A plain RNN only needs its output.
_KEPT = {"lstm": 5, "gru": 6, "rnn": 1}
# All that the formulas of a step compute: gates, cell, tanh of the cell, output; a GRU also the product with the
# hidden state before the reset gate. Nothing beyond that could be of use in the backward pass.
_KEPT_AT_MOST = {"lstm": 7, "gru": 8, "rnn": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """The sizes of a fused recurrent layer.

    Args:
        mode: ``"lstm"``, ``"gru"`` or ``"rnn"``.
        hidden: Hidden size.
        projection: Size of an LSTM's projected hidden state; 0 if there is none.
        layers: Number of layers.
        directions: 1, or 2 if bidirectional.
        batch: Sequences.
        rows: Time steps of all sequences together.
        weights: Elements of all weights and biases.
        biases: How many of those are biases.
        element_bytes: Of one value.
        dropout: Probability between the layers.
    """

    mode: str
    hidden: int
    projection: int
    layers: int
    directions: int
    batch: int
    rows: int
    weights: int
    biases: int
    element_bytes: int
    dropout: float


def reserve_bytes(size: RecurrentSize) -> int:
    """Bytes that cuDNN keeps from the forward to the backward pass."""
    return _reserve(size, _KEPT[size.mode])


def reserve_upper_bytes(size: RecurrentSize) -> int:
    """The most that it could have a use for."""
    outputs = 1 if size.dropout else 0  # dropped outputs beside those before the dropout
    return _reserve(size, _KEPT_AT_MOST[size.mode], extra_outputs=outputs)


def _reserve(size: RecurrentSize, kept: int, *, extra_outputs: int = 0) -> int:
    unit = size.rows * size.directions * size.element_bytes
    output = size.projection or size.hidden
    before_projection = size.hidden if size.projection else 0
    between = (size.layers - 1) * output * (1 + extra_outputs)
    return unit * (size.layers * (kept * size.hidden + before_projection) + between)


def workspace_bytes(size: RecurrentSize) -> int:
    """Bytes that a pass of the layers needs while it runs."""
    values = (3 * _GATES[size.mode] - 1) * size.layers * size.directions * size.batch * size.hidden
    return (size.weights - size.biases + values) * size.element_bytes


def workspace_upper_bytes(size: RecurrentSize) -> int:
    """As `workspace_bytes`, with the input's products for all steps at once, if an algorithm makes them ahead."""
    products = _GATES[size.mode] * size.rows * size.directions * size.hidden
    return workspace_bytes(size) + products * size.element_bytes
