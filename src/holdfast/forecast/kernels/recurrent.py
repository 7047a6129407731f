"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on the fake device as cuDNN runs them, and torch's fused GRU cell.

The sequence of allocations follows aten/src/ATen/native/cudnn/RNN.cpp and, under autocast, cudnn/AutocastRNN.cpp: it
casts to fp16 whatever the autocast type is, into one flat copy of the weights that is kept until the backward pass.
The gradients of the weights are views of one buffer. Where cuDNN is switched off, torch's own steps run instead.

cuDNN publishes neither what it keeps for the backward pass (the reserve) nor what it needs while it runs (the
workspace), and torch's meta kernel says 0 bytes. The constants were solved from the one measurement that is public
with both figures: pytorch issue 2895 (Tesla P100; 4 layers, hidden size 320, input size 123, fp32), where cuDNN asked

- LSTM: reserve 736 000 000, workspace 17 730 560 bytes
- GRU: reserve 864 000 000, workspace 13 169 920 bytes

With T*B = 25 000 rows the reserves are exactly (5 L + L - 1) and (6 L + L - 1) times rows x hidden size x 4 bytes:
4 gates and the cell of an LSTM, 6 values of a GRU, and the outputs of all layers but the last. With B = 100 the
workspaces are exactly the weights without biases plus (3 gates - 1) L values for each of batch x hidden size. T and B
are inferred from that, and newer versions of cuDNN may differ: hence the upper bounds; nothing here is calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# "Each state is slightly over 2MB" (get_dropout_state in RNN.cpp); one for each device, kept for good.
_DROPOUT_STATE_BYTES = 2 * 2**20 + 2**18
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Values kept for each row, unit and layer; see above. A plain RNN only needs its output.
_KEPT = {"lstm": 5, "gru": 6, "rnn": 1}
# All that the formulas of a step compute: gates, cell, tanh of the cell, output; a GRU also the product with the
# hidden state before the reset gate. Nothing beyond that could be of use in the backward pass.
_KEPT_AT_MOST = {"lstm": 7, "gru": 8, "rnn": 2}

Uncertain = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """The sizes of a fused recurrent layer, in elements: `weights` with biases, `biases` of those alone.

    `mode` is ``"lstm"``, ``"gru"`` or ``"rnn"``; `projection` 0 if there is none; `rows` the time steps of all
    sequences together; `dropout` the probability between the layers.
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

    @property
    def reserve_bytes(self) -> int:
        """Bytes that cuDNN keeps from the forward to the backward pass."""
        return self._reserve(_KEPT[self.mode], copies=1)

    @property
    def reserve_upper_bytes(self) -> int:
        """The most that it could have a use for: dropped outputs beside those before the dropout, too."""
        return self._reserve(_KEPT_AT_MOST[self.mode], copies=2 if self.dropout else 1)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a pass of the layers needs while it runs."""
        values = (3 * _GATES[self.mode] - 1) * self.layers * self.directions * self.batch * self.hidden
        return (self.weights - self.biases + values) * self.element_bytes

    @property
    def workspace_upper_bytes(self) -> int:
        """As `workspace_bytes`, with the input's products for all steps at once, if an algorithm makes them ahead."""
        products = _GATES[self.mode] * self.rows * self.directions * self.hidden
        return self.workspace_bytes + products * self.element_bytes

    def _reserve(self, kept: int, *, copies: int) -> int:
        unit = self.rows * self.directions * self.element_bytes
        before_projection = self.hidden if self.projection else 0
        between = (self.layers - 1) * (self.projection or self.hidden) * copies
        return unit * (self.layers * (kept * self.hidden + before_projection) + between)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one call is laid out: `batch_first` input is ``(batch, time, features)``; `training` keeps a reserve."""

    size: RecurrentSize
    batch_first: bool
    training: bool

    def time_major(self, data: torch.Tensor) -> torch.Tensor:
        return data.transpose(0, 1) if self.batch_first else data


class _FlatHalf(torch.autograd.Function):
    """fp16 copies of all weights as views of one buffer (copy_weights_to_flat_buf_views)."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _flat_views(weights, torch.float16)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return tuple(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs)


class _Layers(torch.autograd.Function):
    """One call of cuDNN: allocates what it allocates, in its order."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: _Layout,
        data: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = layout.size
        x = layout.time_major(data).contiguous()  # a copy where the batch comes first
        width = (size.projection or size.hidden) * size.directions
        y = data.new_empty((*x.shape[:-1], width))
        last = hidden.new_empty((size.layers * size.directions, size.batch, size.projection or size.hidden))
        last_cell = hidden.new_empty((0,)) if cell is None else torch.empty_like(cell)
        workspace = _bytes_like(data, size.workspace_bytes)
        reserve = _bytes_like(data, size.reserve_bytes if layout.training else 0)
        del workspace, x
        ctx.layout = layout
        ctx.save_for_backward(data, hidden, cell, y, reserve, *weights)
        ctx.set_materialize_grads(False)
        return (y.transpose(0, 1) if layout.batch_first else y), last, last_cell

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: torch.Tensor | None,
        grad_last: torch.Tensor | None,
        grad_cell: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        layout: _Layout = ctx.layout
        if not layout.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        data, hidden, cell, y, _reserve, *weights = ctx.saved_tensors
        grad_y = torch.zeros_like(y) if grad_y is None else layout.time_major(grad_y)
        grad_last = torch.zeros_like(hidden) if grad_last is None else grad_last
        grad_cell = torch.zeros_like(cell) if grad_cell is None and cell is not None else grad_cell
        del grad_last, grad_cell
        wanted = _backward_of_input(layout, data, hidden, cell, grad_y)
        grad_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[4:]):  # _cudnn_rnn_backward_weight: all gradients are views of one buffer
            x = layout.time_major(data).contiguous()
            grad_weights = _flat_views(weights, weights[0].dtype)
            workspace = _bytes_like(data, layout.size.workspace_bytes)
            del workspace, x
        needed = zip(wanted, ctx.needs_input_grad[1:4], strict=True)
        return (None, *(gradient if need else None for gradient, need in needed), *grad_weights)


def _backward_of_input(
    layout: _Layout, data: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """_cudnn_rnn_backward_input: copies of input and gradient if they are not contiguous, gradients, workspace."""
    x = layout.time_major(data).contiguous()
    dy = grad_y.contiguous()
    dx = torch.empty_like(x)
    dhx = torch.empty_like(hidden)
    dcx = None if cell is None else torch.empty_like(cell)
    workspace = _bytes_like(data, layout.size.workspace_bytes)
    del workspace, x, dy
    return layout.time_major(dx), dhx, dcx


def _flat_views(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
    parts = flat.split(sizes)  # type: ignore[no-untyped-call]
    return tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))


def _bytes_like(data: torch.Tensor, count: int) -> torch.Tensor:
    return data.new_empty((count,), dtype=torch.uint8)


class _FusedGruCell(torch.autograd.Function):
    """torch's own fused cell, which has no meta kernel: aten/src/ATen/native/cuda/RNN.cu, derivatives.yaml."""

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: torch.Tensor,
        hidden_gates: torch.Tensor,
        hidden: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        _hidden_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        workspace = hidden.new_empty((hidden.shape[0], hidden.shape[1] * 5))
        ctx.save_for_backward(input_gates, hidden_gates, hidden, workspace)
        ctx.biases = input_bias is not None
        ctx.mark_non_differentiable(workspace)
        return torch.empty_like(hidden), workspace

    @staticmethod
    def backward(
        ctx: Any, _gradient: torch.Tensor, _workspace_gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        input_gates, hidden_gates, hidden, _workspace = ctx.saved_tensors
        grad_input, grad_hidden_gates = torch.empty_like(input_gates), torch.empty_like(hidden_gates)
        grad_hidden = torch.empty_like(hidden)
        biases = (grad_input.sum(0), grad_hidden_gates.sum(0)) if ctx.biases else (None, None)
        return grad_input, grad_hidden_gates, grad_hidden, *biases


class _RecurrentLayers:
    """The fused recurrent layers of one fake device."""

    def __init__(self, uncertain: Uncertain) -> None:
        self._uncertain = uncertain
        self._dropout_state: torch.Tensor | None = None

    def kernel(self, operator: str, *, packed: bool) -> Callable[..., Any]:
        """Return the stand-in for ``aten.lstm`` or the like; of a packed sequence the batch sizes come second."""
        overloads = getattr(torch.ops.aten, operator)
        native = overloads.data if packed else overloads.input
        mode = operator.partition("_")[0]

        def layers(*given: Any) -> Any:
            data, *rest = given
            if not torch.backends.cudnn.enabled or data.numel() == 0:  # use_cudnn in RNN.cpp
                return native.decompose(*given)
            if packed:
                rest = rest[1:]
            states, weights, _has_biases, *options = rest
            states = (states,) if isinstance(states, torch.Tensor) else states
            out = self._run(mode, data, states, weights, (*options, False)[:5], packed=packed)
            return out if mode == "lstm" else out[:2]

        return layers

    def _run(
        self,
        mode: str,
        data: torch.Tensor,
        states: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        options: Sequence[Any],
        *,
        packed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers, dropout, training, bidirectional, batch_first = options
        hidden, cell = states[0], states[1] if len(states) > 1 else None
        if torch.is_autocast_enabled(data.device.type) and data.dtype is not torch.float64:
            data, hidden = data.to(torch.float16), hidden.to(torch.float16)
            cell = None if cell is None else cell.to(torch.float16)
            if weights[0].dtype is not torch.float16:
                weights = _FlatHalf.apply(*weights)  # type: ignore[no-untyped-call]
        width = (hidden if cell is None else cell).shape[-1]
        size = RecurrentSize(
            mode=mode,
            hidden=width,
            projection=hidden.shape[-1] if hidden.shape[-1] != width else 0,
            layers=layers,
            directions=2 if bidirectional else 1,
            batch=hidden.shape[1],
            rows=data.shape[0] if packed else data.shape[0] * data.shape[1],
            weights=sum(weight.numel() for weight in weights),
            biases=sum(weight.numel() for weight in weights if weight.dim() == 1),
            element_bytes=data.element_size(),
            dropout=dropout if training else 0.0,
        )
        if size.dropout and self._dropout_state is None:
            self._dropout_state = torch.empty(_DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device)
        kept = size.reserve_upper_bytes - size.reserve_bytes if training else 0
        self._uncertain(f"cuDNN {mode}", size.workspace_upper_bytes - size.workspace_bytes + kept)
        layout = _Layout(size=size, batch_first=batch_first, training=training)
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Layers.apply(  # type: ignore[no-untyped-call]
            layout, data, hidden, cell, *weights
        )
        return out


def install_recurrent(library: torch.library.Library, uncertain: Uncertain) -> None:
    """Have recurrent layers on the fake device run as cuDNN does; `uncertain` takes a name and an excess in bytes."""
    layers = _RecurrentLayers(uncertain)
    for operator in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{operator}.input", layers.kernel(operator, packed=False))  # type: ignore[no-untyped-call]
        library.impl(f"{operator}.data", layers.kernel(operator, packed=True))  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", lambda *given: _FusedGruCell.apply(*given))  # type: ignore[no-untyped-call]
