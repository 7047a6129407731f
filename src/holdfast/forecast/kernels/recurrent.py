"""Emulate cuDNN's recurrent layers and torch's fused GRU cell on the fake device.

The sequence of allocations follows aten/src/ATen/native/cudnn/RNN.cpp and, under autocast,
cudnn/AutocastRNN.cpp: it casts to fp16 whatever the autocast type is, into one flat copy of the
weights that is kept until the backward pass. The gradients of the weights are views of one buffer.
If cuDNN is switched off, torch's own steps run instead.

cuDNN documents neither the memory that it keeps for the backward pass (the reserve) nor the memory
that it needs while it runs (the workspace), and torch's meta kernel reports 0 bytes. Our formulas
for both were fitted to the requests of 117 layers on an H100 (torch 2.11, cuDNN 9.19), with varied
sizes, types, numbers of layers, directions and dropout. The tests contain some of them:

- The reserve is exact in all of these cases. It is also exact in those of pytorch issue 2895 (Tesla
  P100, 2017), except for the dropout bits and the 256 bytes.
- The workspace is within 4 % for an LSTM, and at most 9 % too large for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The random state for dropout, one per device, which is never freed: "Each state is slightly over
# 2MB" (get_dropout_state in RNN.cpp).
_DROPOUT_STATE_BYTES = 2 * 2**20 + 2**18


# The figures below are from our measurements. Values are elements for each row (a time step of a
# sequence) and hidden unit, unless stated otherwise.
#
# Values that each layer keeps in the reserve: an LSTM 4 gates and the cell, a GRU 6 values, a plain
# RNN its output.
_KEPT_VALUES = {"lstm": 5, "gru": 6, "rnn": 1}
# Values of the workspace with the standard algorithm.
_WORK_VALUES = {"lstm": 5.0, "gru": 4.5, "rnn": 3.75}
# Values of the workspace with the algorithm for small hidden sizes.
_SMALL_WORK_VALUES = {"lstm": 21.0, "gru": 19.5, "rnn": 14.5}
# The largest hidden sizes for which torch chooses that algorithm (get_algo in RNN.cpp).
_LARGEST_SMALL_FORWARD = {"lstm": 192, "gru": 192, "rnn": 384}
_LARGEST_SMALL_BACKWARD = {"lstm": 128, "gru": 128, "rnn": 256}
# Bytes of the reserve that do not depend on any size.
_FIXED_RESERVE_BYTES = 256
# Additional values of the workspace if sequences are read in both directions.
_SECOND_DIRECTION_VALUES = 9.0
# The same with dropout in one direction.
_DROPOUT_VALUES = 1
# Values of the workspace per row, for each feature of the input beyond the hidden size.
_WIDE_INPUT_VALUES = 2.5
# Values of the workspace per sequence, unit, layer and direction.
_STATE_VALUES = 8
# Bytes of the workspace per layer and direction.
_LAYER_BYTES = 8 * 2**20
# The additional share of the workspace that another cuDNN or GPU may need. It is a guess: the
# formula is at most 9 % off on one GPU and cuDNN.
_OTHER_VERSIONS = 0.1

# Records a name, and by how many bytes memory kept under it may be larger.
NoteUncertain = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """The sizes of a fused recurrent layer, in elements.

    Args:
        mode: ``"lstm"``, ``"gru"`` or ``"rnn"``.
        features: Features of the input.
        hidden: Hidden units.
        projection: Size of an LSTM's projection, 0 if there is none.
        layers: Number of layers.
        directions: 1 or 2.
        batch: Number of sequences.
        rows: Time steps of all sequences together.
        weights: All weights, including biases.
        biases: The biases alone.
        element_bytes: Bytes of an element.
        dropout: Probability of dropout between the layers, 0 outside training.
        may_be_small: Whether type and layout allow the algorithm for small hidden sizes.
    """

    mode: str
    features: int
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
    may_be_small: bool = True

    @property
    def reserve_bytes(self) -> int:
        """The bytes that cuDNN keeps from the forward to the backward pass.

        These are values per row and unit of each layer, the outputs of all layers but the last, and
        one bit for each of these outputs if there is dropout.
        """
        values_per_layer = _KEPT_VALUES[self.mode] * self.hidden
        if self.projection:
            values_per_layer += self.hidden
        outputs_between = (self.layers - 1) * (self.projection or self.hidden)
        values = self.rows * self.directions * (self.layers * values_per_layer + outputs_between)
        dropout_bytes = 0
        if self.dropout:
            bits = self.rows * self.directions**2 * self.hidden * (self.layers - 1)
            dropout_bytes = bits // 8
        return values * self.element_bytes + dropout_bytes + _FIXED_RESERVE_BYTES

    def workspace_bytes(self, *, backward: bool = False) -> int:
        """Return the bytes that a pass through the layers needs while it runs.

        These are a fixed size per layer, the weights without biases, values per row that do not
        depend on the number of layers, and the states.
        """
        is_small = self._takes_small_algorithm(backward=backward)
        row_values = self._work_values(is_small=is_small) * self.hidden + self.features
        # An LSTM's algorithm for small hidden sizes needs no extra memory for wide inputs.
        if not (is_small and self.mode == "lstm"):
            row_values += _WIDE_INPUT_VALUES * max(0, self.features - self.hidden)
        values = int(self.rows * row_values)
        values += _STATE_VALUES * self.layers * self.directions * self.batch * self.hidden
        values += self.weights - self.biases
        return _LAYER_BYTES * self.layers * self.directions + values * self.element_bytes

    def _takes_small_algorithm(self, *, backward: bool) -> bool:
        """Return whether torch uses the algorithm for small hidden sizes: get_algo in RNN.cpp."""
        if not self.may_be_small or self.projection:
            return False
        largest = _LARGEST_SMALL_BACKWARD if backward else _LARGEST_SMALL_FORWARD
        return self.hidden <= largest[self.mode]

    def _work_values(self, *, is_small: bool) -> float:
        """Return the values of the workspace per row and unit."""
        values = _SMALL_WORK_VALUES[self.mode] if is_small else _WORK_VALUES[self.mode]
        values += _SECOND_DIRECTION_VALUES * (self.directions - 1)
        if self.dropout and self.directions == 1:
            values += _DROPOUT_VALUES
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerLayout:
    """The layout of one call.

    Args:
        size: Its sizes.
        batch_first: Whether the input is ``(batch, time, features)``, not ``(time, batch, ...)``.
        training: Whether a reserve is kept.
    """

    size: RecurrentSize
    batch_first: bool
    training: bool

    def time_major(self, data: torch.Tensor) -> torch.Tensor:
        return data.transpose(0, 1) if self.batch_first else data


class _FlatHalf(torch.autograd.Function):
    """fp16 copies of all weights as views of one buffer: copy_weights_to_flat_buf_views."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _flat_views(weights, torch.float16)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )


class _CudnnLayers(torch.autograd.Function):
    """One call of cuDNN, with the allocations of cuDNN and torch in their order.

    Nothing is computed. The order in which tensors are created and deleted is the point, because it
    decides the peak: a `del` frees what cuDNN and torch free at that moment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layout: _LayerLayout,
        data: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = layout.size
        output_units = size.projection or size.hidden
        # It is a copy if the batch comes first.
        x = layout.time_major(data).contiguous()
        y = data.new_empty((*x.shape[:-1], output_units * size.directions))
        last = hidden.new_empty((size.layers * size.directions, size.batch, output_units))
        last_cell = hidden.new_empty((0,)) if cell is None else torch.empty_like(cell)
        workspace = _bytes_like(data, size.workspace_bytes())
        reserve_bytes = size.reserve_bytes if layout.training else 0
        reserve = _bytes_like(data, reserve_bytes)
        del workspace, x
        ctx.layout = layout
        ctx.save_for_backward(data, hidden, cell, y, reserve, *weights)
        ctx.set_materialize_grads(False)
        if layout.batch_first:
            return y.transpose(0, 1), last, last_cell
        return y, last, last_cell

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: torch.Tensor | None,
        grad_last: torch.Tensor | None,
        grad_cell: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        layout: _LayerLayout = ctx.layout
        if not layout.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        data, hidden, cell, y, _reserve, *weights = ctx.saved_tensors
        grad_y = torch.zeros_like(y) if grad_y is None else layout.time_major(grad_y)
        # Missing gradients of the states are zeros, which are needed only briefly.
        grad_last = torch.zeros_like(hidden) if grad_last is None else grad_last
        grad_cell = torch.zeros_like(cell) if grad_cell is None and cell is not None else grad_cell
        del grad_last, grad_cell
        input_gradients = _backward_of_input(layout, data, hidden, cell, grad_y)
        weight_gradients: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[4:]):
            # _cudnn_rnn_backward_weight.
            x = layout.time_major(data).contiguous()
            weight_gradients = _flat_views(weights, weights[0].dtype)
            workspace = _bytes_like(data, layout.size.workspace_bytes(backward=True))
            del workspace, x
        needed_gradients = [
            gradient if is_needed else None
            for gradient, is_needed in zip(input_gradients, ctx.needs_input_grad[1:4], strict=True)
        ]
        return (None, *needed_gradients, *weight_gradients)


def _backward_of_input(
    layout: _LayerLayout,
    data: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    grad_y: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of input, hidden state and cell: _cudnn_rnn_backward_input.

    It copies input and gradient if they are not contiguous, and needs a workspace.
    """
    x = layout.time_major(data).contiguous()
    dy = grad_y.contiguous()
    dx = torch.empty_like(x)
    dhx = torch.empty_like(hidden)
    dcx = None if cell is None else torch.empty_like(cell)
    workspace = _bytes_like(data, layout.size.workspace_bytes(backward=True))
    del workspace, x, dy
    return layout.time_major(dx), dhx, dcx


def _flat_views(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return tensors with the shapes of weights, as views of one buffer."""
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
    parts = flat.split(sizes)  # type: ignore[no-untyped-call]
    return tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))


def _bytes_like(data: torch.Tensor, count: int) -> torch.Tensor:
    return data.new_empty((count,), dtype=torch.uint8)


class _FusedGruCell(torch.autograd.Function):
    """torch's own fused cell, which has no meta kernel.

    It follows aten/src/ATen/native/cuda/RNN.cu and derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: torch.Tensor,
        hidden_gates: torch.Tensor,
        hidden: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        _hidden_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # GRU_WORKSPACE_MULTIPLIER in RNN.cu is 5.
        workspace = hidden.new_empty((hidden.shape[0], hidden.shape[1] * 5))
        ctx.save_for_backward(input_gates, hidden_gates, hidden, workspace)
        ctx.has_biases = input_bias is not None
        ctx.mark_non_differentiable(workspace)
        return torch.empty_like(hidden), workspace

    @staticmethod
    def backward(
        ctx: Any, _gradient: torch.Tensor, _workspace_gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        input_gates, hidden_gates, hidden, _workspace = ctx.saved_tensors
        grad_input_gates = torch.empty_like(input_gates)
        grad_hidden_gates = torch.empty_like(hidden_gates)
        grad_hidden = torch.empty_like(hidden)
        if not ctx.has_biases:
            return grad_input_gates, grad_hidden_gates, grad_hidden, None, None
        return (
            grad_input_gates,
            grad_hidden_gates,
            grad_hidden,
            grad_input_gates.sum(0),
            grad_hidden_gates.sum(0),
        )


@dataclass(frozen=True, slots=True)
class _RecurrentArguments:
    """The arguments of ``aten.lstm`` and the like that follow the data, in their order.

    `states` is one tensor, or an LSTM's hidden state and cell. A packed sequence has no
    `batch_first`.
    """

    states: Any
    weights: Sequence[torch.Tensor]
    has_biases: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool = False


class _RecurrentLayers:
    """The fused recurrent layers of one fake device."""

    def __init__(self, note_uncertain: NoteUncertain) -> None:
        self._note_uncertain = note_uncertain
        self._dropout_state: torch.Tensor | None = None

    def kernel(self, operator: str, *, is_packed: bool) -> Callable[..., Any]:
        """Return the replacement of ``aten.lstm`` or the like, for tensors or packed sequences."""
        overloads = getattr(torch.ops.aten, operator)
        native = overloads.data if is_packed else overloads.input
        mode = operator.partition("_")[0]

        def run_layers(data: torch.Tensor, *rest: Any) -> Any:
            # use_cudnn in RNN.cpp.
            if not torch.backends.cudnn.enabled or data.numel() == 0:
                return native.decompose(data, *rest)
            if is_packed:
                _batch_sizes, *rest_of_packed = rest
                arguments = _RecurrentArguments(*rest_of_packed)
            else:
                arguments = _RecurrentArguments(*rest)
            out = self._run(mode, data, arguments, is_packed=is_packed)
            return out if mode == "lstm" else out[:2]

        return run_layers

    def _run(
        self, mode: str, data: torch.Tensor, arguments: _RecurrentArguments, *, is_packed: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run a layer as cuDNN does: cast for autocast, then allocate in cuDNN's order."""
        weights = arguments.weights
        if isinstance(arguments.states, torch.Tensor):
            hidden = arguments.states
            cell = None
        else:
            hidden, cell = arguments.states
        if torch.is_autocast_enabled(data.device.type) and data.dtype is not torch.float64:
            data = data.to(torch.float16)
            hidden = hidden.to(torch.float16)
            cell = None if cell is None else cell.to(torch.float16)
            if weights[0].dtype is not torch.float16:
                weights = _FlatHalf.apply(*weights)  # type: ignore[no-untyped-call]
        size = _size_of_call(mode, data, hidden, cell, arguments, is_packed=is_packed)
        if size.dropout and self._dropout_state is None:
            self._dropout_state = torch.empty(
                _DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device
            )
        self._note_uncertain(f"cuDNN {mode}", int(_OTHER_VERSIONS * size.workspace_bytes()))
        layout = _LayerLayout(
            size=size, batch_first=arguments.batch_first, training=arguments.training
        )
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _CudnnLayers.apply(  # type: ignore[no-untyped-call]
            layout, data, hidden, cell, *weights
        )
        return out


def _size_of_call(
    mode: str,
    data: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    arguments: _RecurrentArguments,
    *,
    is_packed: bool,
) -> RecurrentSize:
    """Return the sizes of a layer, derived from the tensors of a call."""
    # With a projection, only the cell has the hidden size.
    units = hidden.shape[-1]
    if cell is not None:
        units = cell.shape[-1]
    has_projection = hidden.shape[-1] != units
    weights = arguments.weights
    return RecurrentSize(
        mode=mode,
        features=data.shape[-1],
        hidden=units,
        projection=hidden.shape[-1] if has_projection else 0,
        layers=arguments.layers,
        directions=2 if arguments.bidirectional else 1,
        batch=hidden.shape[1],
        rows=data.shape[0] if is_packed else data.shape[0] * data.shape[1],
        weights=sum(weight.numel() for weight in weights),
        biases=sum(weight.numel() for weight in weights if weight.dim() == 1),
        element_bytes=data.element_size(),
        dropout=arguments.dropout if arguments.training else 0.0,
        may_be_small=not is_packed and data.dtype in (torch.float32, torch.float16),
    )


def install_recurrent(library: torch.library.Library, note_uncertain: NoteUncertain) -> None:
    """Make recurrent layers on the fake device run as in cuDNN.

    Args:
        library: Where the rules are registered.
        note_uncertain: Records a name, and how many more bytes a layer may need.
    """
    layers = _RecurrentLayers(note_uncertain)
    for operator in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        of_tensors = layers.kernel(operator, is_packed=False)
        of_packed = layers.kernel(operator, is_packed=True)
        library.impl(f"{operator}.input", of_tensors)  # type: ignore[no-untyped-call]
        library.impl(f"{operator}.data", of_packed)  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", lambda *args: _FusedGruCell.apply(*args))  # type: ignore[no-untyped-call]
