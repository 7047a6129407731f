"""Emulate cuDNN's recurrent layers and torch's fused GRU cell on the fake device.

The sequence of allocations follows aten/src/ATen/native/cudnn/RNN.cpp. Under autocast, it follows
cudnn/AutocastRNN.cpp: data and weights are always cast to fp16, even if autocast uses bf16. The
cast weights are views of one flat buffer that is kept until the backward pass. The gradients of the
weights are also views of one buffer. If cuDNN is disabled, torch's decomposition into single time
steps runs instead.

cuDNN needs memory that is saved for the backward pass (the reserve) and memory that is needed only
while cuDNN runs (the workspace). It documents the size of neither, and torch's meta kernel reports
0 bytes. The formulas in this module were fitted to the memory that 117 layers requested on an H100
(torch 2.11, cuDNN 9.19). The layers vary in size, dtype, number of layers, direction and dropout;
the tests contain some of them. The accuracy of the formulas is:

- The reserve is exact in all 117 cases. It is also exact in the cases reported in pytorch issue
  2895 (Tesla P100, 2017), apart from the dropout bits and the fixed 256 bytes.
- The workspace is within 4 % for LSTMs, and at most 9 % too large for GRUs and plain RNNs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The size of the random state for dropout: "Each state is slightly over 2MB" (get_dropout_state in
# RNN.cpp). Each device has one such state, which is never freed.
_DROPOUT_STATE_BYTES = 2 * 2**20 + 2**18


# All figures below come from the measurements described above, unless a source is given. A row is
# one time step of one sequence. "Values" are elements per row and hidden unit, unless stated
# otherwise.
#
# The values that each layer stores in the reserve: 4 gates and the cell for an LSTM, 6 values for a
# GRU, and the output for a plain RNN.
_KEPT_VALUES = {"lstm": 5, "gru": 6, "rnn": 1}
# The values in the workspace of the standard algorithm.
_WORK_VALUES = {"lstm": 5.0, "gru": 4.5, "rnn": 3.75}
# The values in the workspace of the algorithm for small hidden sizes.
_SMALL_WORK_VALUES = {"lstm": 21.0, "gru": 19.5, "rnn": 14.5}
# The largest hidden sizes for which torch chooses the algorithm for small hidden sizes. Source:
# get_algo in RNN.cpp.
_LARGEST_SMALL_FORWARD = {"lstm": 192, "gru": 192, "rnn": 384}
_LARGEST_SMALL_BACKWARD = {"lstm": 128, "gru": 128, "rnn": 256}
# The constant part of the reserve, in bytes.
_FIXED_RESERVE_BYTES = 256
# Additional values in the workspace of a bidirectional layer.
_SECOND_DIRECTION_VALUES = 9.0
# Additional values in the workspace of a unidirectional layer with dropout.
_DROPOUT_VALUES = 1
# Additional elements in the workspace per row, for each input feature by which the number of
# features exceeds the hidden size.
_WIDE_INPUT_VALUES = 2.5
# Elements in the workspace per sequence, hidden unit, layer and direction.
_STATE_VALUES = 8
# Bytes in the workspace per layer and direction.
_LAYER_BYTES = 8 * 2**20
# By what fraction the workspace may be larger with another cuDNN version or GPU. This is a guess,
# based on the error of at most 9 % with the measured cuDNN version and GPU.
_OTHER_VERSIONS = 0.1

# A function that receives the name of a layer, and by how many bytes it may exceed the forecast.
NoteUncertain = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """The sizes of one call of a cuDNN recurrent module, and the memory that they imply.

    Args:
        mode: ``"lstm"``, ``"gru"`` or ``"rnn"``.
        features: The number of input features.
        hidden: The number of hidden units.
        projection: The size of an LSTM's projection; 0 without a projection.
        layers: The number of layers.
        directions: 2 for a bidirectional module, otherwise 1.
        batch: The number of sequences.
        rows: The total number of time steps in all sequences.
        weights: The number of elements in all weights and biases.
        biases: The number of elements in all biases.
        element_bytes: The number of bytes per element.
        dropout: The probability of dropout between the layers; 0 in evaluation mode.
        may_be_small: Whether the dtype and the layout allow the algorithm for small hidden sizes.
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
        """The number of bytes that cuDNN saves for the backward pass.

        The reserve holds `_KEPT_VALUES` per row and hidden unit of each layer, the outputs of all
        layers but the last and, with dropout, a mask of bits for these outputs.
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
        """Return how many bytes cuDNN needs only while it runs a forward or backward pass.

        The workspace consists of a fixed number of bytes per layer and direction, a copy of the
        weights without biases, values for each row, which do not depend on the number of layers,
        and the hidden states.
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
        """Return whether torch uses the algorithm for small hidden sizes (get_algo in RNN.cpp)."""
        if not self.may_be_small or self.projection:
            return False
        largest = _LARGEST_SMALL_BACKWARD if backward else _LARGEST_SMALL_FORWARD
        return self.hidden <= largest[self.mode]

    def _work_values(self, *, is_small: bool) -> float:
        """Return the number of elements in the workspace per row and hidden unit."""
        values = _SMALL_WORK_VALUES[self.mode] if is_small else _WORK_VALUES[self.mode]
        values += _SECOND_DIRECTION_VALUES * (self.directions - 1)
        if self.dropout and self.directions == 1:
            values += _DROPOUT_VALUES
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerLayout:
    """The sizes and options of one call of a cuDNN recurrent module.

    Args:
        size: The sizes of the call.
        batch_first: Whether the input has shape ``(batch, time, features)`` instead of ``(time,
            batch, features)``.
        training: Whether the module is in training mode, so that the reserve is saved.
    """

    size: RecurrentSize
    batch_first: bool
    training: bool

    def time_major(self, data: torch.Tensor) -> torch.Tensor:
        return data.transpose(0, 1) if self.batch_first else data


class _FlatHalf(torch.autograd.Function):
    """Casts all weights to fp16, as views of one flat buffer (copy_weights_to_flat_buf_views)."""

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
    """Emulates the allocations that cuDNN and torch make in one call of a recurrent module.

    Nothing is computed. Only the order of allocations and frees matters, because it determines the
    peak. Each `del` statement is placed where cuDNN or torch would free the tensors.
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
        # If the batch is the first dimension, `contiguous` copies the data.
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
        # If the states have no gradients, torch creates zeros, which cuDNN needs only while it
        # runs.
        grad_last = torch.zeros_like(hidden) if grad_last is None else grad_last
        grad_cell = torch.zeros_like(cell) if grad_cell is None and cell is not None else grad_cell
        del grad_last, grad_cell
        input_gradients = _backward_of_input(layout, data, hidden, cell, grad_y)
        weight_gradients: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[4:]):
            # These allocations follow _cudnn_rnn_backward_weight.
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
    """Return the gradients of the input, the hidden state and the cell.

    The allocations follow _cudnn_rnn_backward_input, which copies the input and the output's
    gradient if they are not contiguous, and needs a workspace.
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
    """Return new tensors with the shapes of the weights, all of them views of one buffer."""
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
    parts = flat.split(sizes)  # type: ignore[no-untyped-call]
    return tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))


def _bytes_like(data: torch.Tensor, count: int) -> torch.Tensor:
    return data.new_empty((count,), dtype=torch.uint8)


class _FusedGruCell(torch.autograd.Function):
    """Emulates the allocations of torch's fused GRU cell, for which torch has no meta kernel.

    The allocations follow aten/src/ATen/native/cuda/RNN.cu and derivatives.yaml.
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
    """The arguments that follow the data in ``aten.lstm``, ``aten.gru`` and ``aten.rnn_*``.

    `states` is the hidden state or, for an LSTM, the pair of hidden state and cell. The overloads
    for packed sequences have no `batch_first`.
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
    """Creates kernels that replace torch's recurrent operators on one fake device.

    Args:
        note_uncertain: Called with the name of a layer and the number of bytes by which it may
            exceed the forecast.
    """

    def __init__(self, note_uncertain: NoteUncertain) -> None:
        self._note_uncertain = note_uncertain
        self._dropout_state: torch.Tensor | None = None

    def kernel(self, operator: str, *, is_packed: bool) -> Callable[..., Any]:
        """Return the replacement for a recurrent operator.

        Args:
            operator: ``"lstm"``, ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``.
            is_packed: Whether the kernel replaces the overload for packed sequences.
        """
        overloads = getattr(torch.ops.aten, operator)
        native = overloads.data if is_packed else overloads.input
        mode = operator.partition("_")[0]

        def run_layers(data: torch.Tensor, *rest: Any) -> Any:
            # This is the negation of the condition use_cudnn in RNN.cpp.
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
        """Cast the tensors if autocast is enabled, and then allocate as cuDNN does."""
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
    """Return the sizes of a call, derived from its tensors."""
    # With a projection, the last dimension of the hidden state is the projected size, and only the
    # last dimension of the cell is the hidden size.
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
    """Make recurrent layers on the fake device allocate as they do with cuDNN.

    Args:
        library: The library in which the kernels are registered.
        note_uncertain: Called with the name of a layer and the number of bytes by which it may
            exceed the forecast.
    """
    layers = _RecurrentLayers(note_uncertain)
    for operator in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        of_tensors = layers.kernel(operator, is_packed=False)
        of_packed = layers.kernel(operator, is_packed=True)
        library.impl(f"{operator}.input", of_tensors)  # type: ignore[no-untyped-call]
        library.impl(f"{operator}.data", of_packed)  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", lambda *args: _FusedGruCell.apply(*args))  # type: ignore[no-untyped-call]
